"""The two formats of Mistral's models: a list of calls, and calls with their arguments after the name."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import string
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxgen.core.grammar.grammar import Grammar
from jaxgen.serving.formats.format import Format, Functions
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


class MistralNamed(Format):
    """Calls such as `[TOOL_CALLS]f[ARGS]{...}`, as newer models write them; an id is read, but never forced.

    Ids have nine letters and digits, and the chat templates reject all others. A past call with another id gets nine
    digits of a hash of this id.
    """

    openings = (_OPENING,)
    marks = (_OPENING, _ID, _ARGUMENTS)
    shows = (_OPENING, _ARGUMENTS)
    before = _OPENING
    between: ClassVar[str | Grammar] = _ARGUMENTS

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
        identifier = None
        if end == _ID:
            identifier, end = yield from until(_ARGUMENTS)
        text = yield from json_text(end if end == "{" else (yield from after_space()))
        return [call_of({"name": name.strip(), "arguments": parsed(text), "id": identifier}, functions)]

    def call_id(self) -> str:
        """Return nine random letters and digits."""
        return "".join(secrets.choice(_LETTERS) for _ in range(9))

    def past_id(self, identifier: str) -> str:
        """Return `identifier` if the chat template accepts it, and nine digits of its hash otherwise."""
        if re.fullmatch("[a-zA-Z0-9]{9}", identifier):
            return identifier
        return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _part(value: Any, functions: Functions) -> Call | str:
    """Return the call in an entry of a list, or the text of an entry that is not a call of one of the functions."""
    try:
        return call_of(value, functions)
    except Broken:
        return json.dumps(value, ensure_ascii=False)


class MistralIdentified(MistralNamed):
    """Calls such as `[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}`, as Mistral Small 3.2 writes them."""

    shows = (_OPENING, _ID, _ARGUMENTS)
    between = _ID + Grammar.regex("[a-zA-Z0-9]{9}") + _ARGUMENTS

    def write(self, calls: Sequence[Call]) -> str:
        """Return calls with their ids, one after another."""
        return "".join(
            f"{_OPENING}{call.name}{_ID}{call.id or self.call_id()}{_ARGUMENTS}{call.arguments}" for call in calls
        )


class MistralList(MistralNamed):
    """Calls such as `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, as Mistral v0.3 and Nemo write them."""

    shows = (_OPENING,)
    before = '{"name": "'
    between = '", "arguments": '
    after = "}"
    separator = ", "

    def grammar(self, functions: Functions, limit: int | None, left_out: list[str] | None = None) -> Grammar:
        """Return the grammar of a list of calls."""
        calls = super().grammar(functions, limit, left_out)
        return Grammar.sequence(_OPENING, Grammar.choice(["", " "]), "[", calls, "]")

    def write(self, calls: Sequence[Call]) -> str:
        """Return a list of calls."""
        return f"{_OPENING}[{super().write(calls)}]"
