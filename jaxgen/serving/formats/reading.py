"""Read calls from generated text character by character, so that the result does not depend on how the text is split.

A reader is a coroutine that receives one character at each `yield`, and "" at the end of the text. It returns what it
has read, and raises `Broken` as soon as the text cannot be what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator
from typing import Any, NamedTuple, TypeVar

from jaxgen.errors import InputError
from jaxgen.json_file import parse_json

SPACE = frozenset(" \t\n\r")
_JSON = SPACE | frozenset('{}[]",:+-.0123456789E' + "truefalsenull")  # characters that JSON allows outside strings

Result = TypeVar("Result")
Reading = Generator[None, str, Result]


class Broken(Exception):
    """The text is not what the reader reads."""


class Unknown(Broken):
    """The text is a call of a function that is not among the functions."""


class Call(NamedTuple):
    """A function call; `arguments` is the text of a JSON object. `id` is None if the model wrote no id."""

    name: str
    arguments: str
    id: str | None = None


def literal(text: str, first: str | None = None, *, may_end: bool = False) -> Reading[None]:
    """Read `text`. `first` is its first character if that has been received; with `may_end`, the end may cut it off."""
    for number, expected in enumerate(text):
        char = first if number == 0 and first is not None else (yield)
        if not char and may_end:
            return
        if char != expected:
            raise Broken


def after_space() -> Reading[str]:
    """Skip whitespace, and return the character that follows."""
    while (char := (yield)) in SPACE:
        pass
    return char


def one_of(*texts: str, first: str) -> Reading[str]:
    """Read one of several texts, and return it; `first` is its first character, which has been received."""
    text = char = first
    while text not in texts:
        if not char or not any(other.startswith(text) for other in texts):
            raise Broken
        text += (char := (yield))
    return text


Parts = list[Call | str]  # calls, and text that belongs to the content


def until(*ends: str, first: str | None = None, cut: str = "") -> Reading[tuple[str, str]]:
    """Read up to the first of several texts; return the text before it, and which one it is.

    `first` is the first character if it has been received. `cut` is the one of these texts that the end may cut off
    after two or more characters.
    """
    text: list[str] = []
    longest, lasts = max(map(len, ends)), {end[-1] for end in ends}
    while True:
        char = first if first is not None and not text else (yield)
        if not char:
            whole = "".join(text[-longest:])
            if any(whole.endswith(cut[:count]) for count in range(2, len(cut))):
                return "".join(text), cut
            raise Broken
        text.append(char)
        if char in lasts:
            tail = "".join(text[-longest:])
            for end in ends:
                if tail.endswith(end):
                    return "".join(text)[: -len(end)], end


def json_text(first: str) -> Reading[str]:
    """Read a JSON object or list up to its last bracket; `first` is its first character, which has been received.

    Only brackets and strings are checked.
    """
    if first not in ("{", "["):
        raise Broken
    text, depth, in_string, escaped = [first], 1, False, False
    while depth:
        char = yield
        if char not in _JSON if not in_string else char < " ":  # "" is neither
            raise Broken
        text.append(char)
        if escaped:
            escaped = False
        elif char == '"':
            in_string = not in_string
        elif in_string:
            escaped = char == "\\"
        else:
            depth += (char in "{[") - (char in "}]")
    return "".join(text)


def parsed(text: str) -> Any:
    """Return the value of a JSON text."""
    try:
        return parse_json(text)
    except InputError as error:
        raise Broken from error


def call_of(value: Any, functions: Collection[str], key: str = "arguments") -> Call:
    """Return the call in an object with a `name` and arguments, under `key` or "arguments"; missing ones are `{}`.

    The arguments may also be the JSON text of an object.
    """
    fields = value if isinstance(value, dict) else {}
    name, arguments = fields.get("name"), fields.get(key, fields.get("arguments", {}))
    if isinstance(arguments, str):
        arguments = parsed(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Broken
    if name not in functions:
        raise Unknown
    identifier = fields.get("id")
    return Call(name, json.dumps(arguments, ensure_ascii=False), identifier if isinstance(identifier, str) else None)
