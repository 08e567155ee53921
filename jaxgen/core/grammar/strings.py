"""Expressions for the strings of a JSON schema, with their quotation marks."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from jaxgen.core.grammar.byte_automaton import Work
from jaxgen.core.grammar.expression import (
    NOTHING,
    Characters,
    Expression,
    Repeat,
    Text,
    choice,
    common,
    complement,
    sequence,
    union,
)
from jaxgen.core.grammar.formats import FORMATS
from jaxgen.core.grammar.products import accepts, counted, difference
from jaxgen.core.grammar.regex import read_regex
from jaxgen.core.grammar.utf8 import Ranges
from jaxgen.errors import InputError

ESCAPED = '"\\/bfnrt'  # characters that may follow a backslash
UNPRINTABLE = ((0x7F, 0x9F),)  # control characters valid in JSON, generated only if a pattern or literal includes them
MUST_ESCAPE = union([(0x00, 0x1F), *((ord(sign), ord(sign)) for sign in '"\\')])


@functools.cache
def _character() -> Expression:
    """Return the expression for one character in a string without a pattern."""
    plain = Characters(complement(union([*MUST_ESCAPE, *UNPRINTABLE])))
    return choice([plain, sequence("\\", choice(ESCAPED))])


@functools.lru_cache(1000)
def in_string(ranges: Ranges) -> Expression:
    """Return the expression for any one character in `ranges`, escaped where JSON requires it."""
    plain, special = common(ranges, complement(MUST_ESCAPE)), common(ranges, MUST_ESCAPE)
    spelled = [json.dumps(chr(code))[1:-1] for first, last in special for code in range(first, last + 1)]
    return choice([*([Characters(plain)] if plain else []), *spelled])


@functools.cache
def _printable() -> Expression:
    """Return the expression for one character in the only spelling that patterns use."""
    controls = union([(0x00, 0x08), (0x0B, 0x0C), (0x0E, 0x1F)])
    return in_string(complement(union([*controls, *UNPRINTABLE])))


@functools.cache
def any_string() -> Expression:
    """Return the expression for any string, with its quotation marks."""
    return quoted(Repeat(_character()))


def quoted(content: Expression) -> Expression:
    """Return the expression for a string, given that for its contents."""
    return sequence('"', content, '"')


@functools.cache
def _format(name: str) -> Expression:
    return difference([read_regex(FORMATS[name], characters=in_string)], [], name)


class Strings:
    """Strings of one schema; `work` limits what all their automata may cost."""

    def __init__(self, work: Work):
        self.work = work
        self.patterns: dict[tuple[str, bool], Expression] = {}
        self.known: dict[Any, Expression] = {}

    def pattern(self, pattern: str, name: str = "the schema", large: bool = False) -> Expression:
        """Return the expression for the contents of strings that contain a match; `large` is as in `read_regex`."""
        if (pattern, large) not in self.patterns:
            where = f"the pattern of {name}"
            tree = read_regex(pattern, where, in_string, search=True, large=large, work=self.work)
            self.patterns[pattern, large] = difference([tree], [], f"{where}: {pattern}", self.work)
        return self.patterns[pattern, large]

    def matches(self, pattern: str, text: str) -> bool:
        """Return True if a string contains a match of a pattern."""
        found = self.pattern(pattern)
        return found is not NOTHING and accepts(found, _escaped(text))

    def content(
        self,
        name: str,
        patterns: list[str],
        unlike: list[str],
        formats: Sequence[str],
        excluded: list[str],
        limits: tuple[int, int | None],
        longest: int,
    ) -> Expression:
        """Return the expression for the contents of strings that satisfy all conditions.

        Strings without a pattern or format have at most `longest` characters, or as many as they must have.
        """
        low, high = limits
        if high is not None and high < low:
            return NOTHING
        wanted = [self.pattern(pattern, name) for pattern in dict.fromkeys(patterns)]
        wanted += [_format(known) for known in dict.fromkeys(formats) if known in FORMATS]
        without = [self.pattern(pattern, name, large=True) for pattern in dict.fromkeys(unlike)]
        if not wanted and not without and not excluded:
            return Repeat(_character(), low, None if high is None else min(high, max(low, longest)))
        key = frozenset(map(id, wanted)), frozenset(map(id, without)), frozenset(excluded), limits
        if key not in self.known:
            without += [choice(Text(_escaped(text)) for text in dict.fromkeys(excluded))] if excluded else []
            found = difference(wanted or [Repeat(_printable())], without, name, self.work)
            if found is not NOTHING and limits != (0, None):
                found = counted(found, in_string(complement(())), low, high, name, self.work)
            self.known[key] = found
        return self.known[key]


def _escaped(text: str) -> bytes:
    try:
        return json.dumps(text, ensure_ascii=False)[1:-1].encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the schema has half of a surrogate pair: {error}") from error


def literal(value: object) -> Text:
    """Return the expression for one JSON value."""
    return Text(json.dumps(value, ensure_ascii=False).encode())
