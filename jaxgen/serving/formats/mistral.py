"""The two formats of Mistral's models: a list of calls, and calls with their arguments after the name."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

from jaxgen.core.grammar.grammar import Grammar
from jaxgen.serving.formats.format import Format, Functions, arguments
from jaxgen.serving.formats.reading import (
    Broken,
    Call,
    Parts,
    Reading,
    after_space,
    call_of,
    json_text,
    literal,
    parsed,
    until,
)

_OPENING, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_LETTERS = string.ascii_letters + string.digits


class MistralList(Format):
    """Calls such as `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, as Mistral v0.3 and Nemo write them.

    Ids have nine letters and digits, and the chat templates reject all others. A past call with another id gets nine
    digits of a hash of this id.
    """

    openings = (_OPENING,)
    marks = (_OPENING, _ID, _ARGUMENTS)
    shows = (_OPENING,)

    def read(self, functions: Functions) -> Reading[Parts]:
        """Read a list of calls, or a name with its arguments."""
        yield from literal(_OPENING)
        char = yield from after_space()
        if char == "[":
            parts = [_part(value, functions) for value in parsed((yield from json_text(char)))]
            if not any(isinstance(part, Call) for part in parts):
                raise Broken
            return parts
        name, end = yield from until(_ID, _ARGUMENTS, "{", first=char)
        given = None
        if end == _ID:
            given, end = yield from until(_ARGUMENTS)
        text = yield from json_text(end if end == "{" else (yield from after_space()))
        return [call_of({"name": name.strip(), "arguments": parsed(text), "id": given}, functions)]

    def grammar(self, functions: Functions, most: int | None, left_out: list[str] | None = None) -> Grammar:
        """Return the grammar of a list of calls."""
        calls = Grammar.choice(
            f'"{name}", "arguments": ' + grammar for name, grammar in arguments(functions, left_out).items()
        )
        items = ('{"name": ' + calls + "}").repeat(1, most, separator=", ")
        return Grammar.sequence(_OPENING, Grammar.choice(["", " "]), "[", items, "]")

    def write(self, calls: Sequence[Call]) -> str:
        """Return a list of calls."""
        items = ", ".join(f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in calls)
        return f"{_OPENING}[{items}]"

    def call_id(self) -> str:
        """Return nine random letters and digits."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def past_id(self, given: str) -> str:
        """Return `given` if the chat template accepts it, and nine digits of its hash otherwise."""
        if re.fullmatch("[a-zA-Z0-9]{9}", given):
            return given
        return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _part(value: Any, functions: Functions) -> Call | str:
    """Return the call in an entry of a list, or the text of an entry that is not a call of one of the functions."""
    try:
        return call_of(value, functions)
    except Broken:
        return json.dumps(value, ensure_ascii=False)


class MistralNamed(MistralList):
    """Calls such as `[TOOL_CALLS]f[ARGS]{...}`, as newer models write them; an id is read, but never forced."""

    shows = (_OPENING, _ARGUMENTS)

    def grammar(self, functions: Functions, most: int | None, left_out: list[str] | None = None) -> Grammar:
        """Return the grammar of calls, one after another."""
        calls = Grammar.choice(
            f"{name}{_ARGUMENTS}" + grammar for name, grammar in arguments(functions, left_out).items()
        )
        return (_OPENING + calls).repeat(1, most)

    def write(self, calls: Sequence[Call]) -> str:
        """Return calls, one after another."""
        return "".join(f"{_OPENING}{call.name}{_ARGUMENTS}{call.arguments}" for call in calls)


class MistralIdentified(MistralNamed):
    """Calls such as `[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}`, as Mistral Small 3.2 writes them."""

    shows = (_OPENING, _ID, _ARGUMENTS)

    def grammar(self, functions: Functions, most: int | None, left_out: list[str] | None = None) -> Grammar:
        """Return the grammar of calls with ids, one after another."""
        given = Grammar.regex("[a-zA-Z0-9]{9}")
        calls = Grammar.choice(
            f"{name}{_ID}" + given + _ARGUMENTS + grammar for name, grammar in arguments(functions, left_out).items()
        )
        return (_OPENING + calls).repeat(1, most)

    def write(self, calls: Sequence[Call]) -> str:
        """Return calls with their ids, one after another."""
        return "".join(
            f"{_OPENING}{call.name}{_ID}{call.id or self.call_id()}{_ARGUMENTS}{call.arguments}" for call in calls
        )
