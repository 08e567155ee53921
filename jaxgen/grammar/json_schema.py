"""Conversion of a JSON schema to an expression that matches only texts valid against the schema.

Schemas that an expression cannot represent are rejected, so every generated text is valid. Not every valid text is
generated: strings have no \\u escapes where another spelling exists, members appear in the schema's order, and patterns
match whole strings. Free-form values nest at most two levels deep. Recursive schemas end after `LEVELS` levels: at that
depth, a reference matches nothing, so optional members and items are left out.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
from typing import Any, NamedTuple, NoReturn

from jaxgen.errors import InputError, shown
from jaxgen.grammar import keywords
from jaxgen.grammar.disjoint import Overlaps
from jaxgen.grammar.expression import (
    EMPTY,
    NOTHING,
    Characters,
    Expression,
    Members,
    Part,
    Repeat,
    Text,
    choice,
    common,
    complement,
    sequence,
    union,
)
from jaxgen.grammar.formats import FORMATS
from jaxgen.grammar.integers import integer_range
from jaxgen.grammar.references import References
from jaxgen.grammar.regex import read_regex
from jaxgen.grammar.utf8 import Ranges

FREE_DEPTH = 2
LEVELS = 3  # maximum number of levels of a recursive schema
MOST_VALUES = 20_000
INTEGER = "-?(?:0|[1-9][0-9]*)"
SCALARS = {
    "boolean": "true|false",
    "null": "null",
    "integer": INTEGER,
    "number": rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
}
ESCAPED = '"\\/bfnrt'  # characters that may follow a backslash
UNPRINTABLE = ((0x7F, 0x9F),)  # control characters valid in JSON, generated only if a pattern or literal includes them
MUST_ESCAPE = union([(0x00, 0x1F), *((ord(sign), ord(sign)) for sign in '"\\')])


def read_schema(
    schema: dict[str, Any] | str, whitespace_pattern: str | None = None, *, name: str = "the schema"
) -> Expression:
    """Return the expression for the texts that are valid against `schema`, which is a dict or a JSON string.

    docs/constrained.md lists the supported keywords. `whitespace_pattern` matches the whitespace between JSON's tokens;
    None means "[ ]?". Error messages name a part of the schema by its path from `name`.

    Raises:
        InputError: the schema is not valid, or uses an unsupported keyword.
        TypeError: `schema` is neither a dict nor a str.
    """
    if not isinstance(schema, dict | str):
        raise TypeError(f"a JSON schema must be a dict or its text, got {type(schema).__name__}")
    root = keywords.plain(schema)
    space = read_regex("[ ]?" if whitespace_pattern is None else whitespace_pattern, "whitespace_pattern", _only_space)
    return _Converter(root, space).value(root, _Place(name, (id(root),)))


class _Place(NamedTuple):
    """Location of a schema: its name in messages, the ids of the referenced parts that lead to it, and its depth."""

    name: str
    refs: tuple[int, ...] = ()
    depth: int = 0

    def inside(self, *names: str | int) -> _Place:
        return _Place(keywords.inside(self.name, *names), self.refs, self.depth + 1)

    def refuse(self, reason: str) -> NoReturn:
        keywords.refuse(self.name, reason)


class _Converter:
    """Converter for the parts of one schema."""

    def __init__(self, root: Any, space: Expression):
        self.root, self.space = root, space
        self.comma = sequence(space, ",", space)
        self.known: dict[Any, Expression] = {}  # keyed by reference, or by depth for free-form values
        self.references, self.overlaps = References(root), Overlaps(root)
        self.values = 0

    def value(self, schema: Any, place: _Place) -> Expression:
        if place.depth > keywords.DEEPEST:
            raise InputError(f"the schema is nested more than {keywords.DEEPEST} levels deep: simplify it")
        self.values += 1
        if self.values > MOST_VALUES:
            raise InputError(f"the schema has more than {MOST_VALUES} parts, counting its recursion: simplify it")
        if schema is True:
            return self.free(FREE_DEPTH)
        if not isinstance(schema, dict):
            place.refuse(f" must be an object, or true for any value, got {shown(schema)}")
        given = [name for name in schema if name not in keywords.ANNOTATIONS]
        if "$id" in given and not place.depth and keywords.is_base(schema["$id"]):  # a nested $id redefines references
            given.remove("$id")
        decisive = next((name for name in keywords.COMPANIONS if name in schema), None)
        if decisive is not None:
            keywords.check(given, f"{decisive} {keywords.COMPANIONS[decisive]}", place.name)
        elif not given:
            return self.free(FREE_DEPTH)
        if decisive == "$ref":
            return self.reference(schema["$ref"], place)
        if decisive in ("const", "enum"):
            return choice(_literal(value) for value in keywords.literals(schema, place.name))
        if decisive is not None:
            return self.alternatives(schema, decisive, place)
        names = keywords.types(schema, place.name)
        keywords.check(given, " ".join(["type", *(keywords.OF_TYPE[name] for name in names)]), place.name)
        return Part(place.name, choice([self.of_type(name, schema, place) for name in names]))

    def reference(self, name: Any, place: _Place) -> Expression:
        target = keywords.target(self.root, name, place.name)
        if place.refs.count(id(target)) >= LEVELS:
            return NOTHING
        cycle = self.references.cycle(target)
        levels = collections.Counter(part for part in place.refs if part in cycle)
        key = id(target), frozenset(levels.items())
        if key not in self.known:
            inner = _Place(keywords.bare(name), (*place.refs, id(target)), place.depth + 1)
            self.known[key] = self.value(target, inner)
        return self.known[key]

    def alternatives(self, schema: dict[str, Any], keyword: str, place: _Place) -> Expression:
        schemas = keywords.items(schema, keyword, place.name)
        if keyword == "allOf" and len(schemas) > 1:
            place.refuse(f" has allOf of {len(schemas)} schemas: merge them into one")
        values = [self.value(part, place.inside(keyword, i)) for i, part in enumerate(schemas)]
        if keyword == "oneOf":
            for (i, one), (j, other) in itertools.permutations(enumerate(schemas), 2):
                if not self.overlaps.excludes(one, other):
                    place.refuse(
                        f" has a oneOf in which a value of schema {i} may also be valid against schema {j}: use anyOf, "
                        "or tell them apart by their types, a const or required properties"
                    )
        return choice(values)

    def of_type(self, name: str, schema: dict[str, Any], place: _Place) -> Expression:
        if name == "string":
            return _string(schema, place)
        if name == "array":
            return self.array(schema, place)
        if name == "object":
            return self.object(schema, place)
        if name in ("integer", "number") and any(bound in schema for bound in keywords.BOUNDS):
            low, high = keywords.integer_bounds(schema, place.name)
            if name == "number":
                place.refuse(
                    " has bounds of numbers, which only the type integer may have: leave them out and check the value"
                )
            return integer_range(low, high)
        return _scalar(name)

    def array(self, schema: dict[str, Any], place: _Place) -> Expression:
        low, high = keywords.bounds(schema, "Items", place.name)
        if "prefixItems" not in schema:
            items = self.value(schema.get("items", True), place.inside("items"))
            return self.enclosed("[", Repeat(items, low, high, self.comma), "]")
        items = keywords.items(schema, "prefixItems", place.name)
        if not isinstance(schema.get("items", True), bool | dict):
            place.refuse(f": items must be a schema or a boolean, got {shown(schema['items'])}")
        if not low <= len(items) <= (len(items) if high is None else high):
            place.refuse(f" has {len(items)} prefixItems: minItems and maxItems must allow that number")
        parts = tuple((self.value(item, place.inside("prefixItems", i)), True) for i, item in enumerate(items))
        return self.enclosed("[", Members(parts, self.comma), "]")

    def object(self, schema: dict[str, Any], place: _Place) -> Expression:
        properties, required = keywords.members(schema, place.name)
        further = schema.get("additionalProperties", True)
        if properties is not None:
            needed = set(required)
            values = {name: self.value(part, place.inside("properties", name)) for name, part in properties.items()}
            parts = tuple((self.member(_literal(name), value), name in needed) for name, value in values.items())
            return self.enclosed("{", Members(parts, self.comma), "}")
        if further is False:
            return self.enclosed("{", EMPTY, "}")
        return self.map(self.value(further, place.inside("additionalProperties")))

    def free(self, depth: int) -> Expression:
        """Return the expression for any JSON value with at most `depth` levels of nesting."""
        if depth in self.known:
            return self.known[depth]
        kinds = [_any_string(), _scalar("number"), _scalar("boolean"), _scalar("null")]
        if depth:
            inner = self.free(depth - 1)
            kinds += [self.enclosed("[", Repeat(inner, separator=self.comma), "]"), self.map(inner)]
        self.known[depth] = choice(kinds)
        return self.known[depth]

    def map(self, value: Expression) -> Expression:
        return self.enclosed("{", Repeat(self.member(_any_string(), value), separator=self.comma), "}")

    def member(self, name: Expression, value: Expression) -> Expression:
        return sequence(name, self.space, ":", self.space, value)

    def enclosed(self, opening: str, inner: Expression, closing: str) -> Expression:
        return sequence(opening, self.space, inner, self.space, closing)


def _string(schema: dict[str, Any], place: _Place) -> Expression:
    given = [name for name in ("pattern", "format", "maxLength", "minLength") if name in schema]
    if len(given) > 1 and given != ["maxLength", "minLength"]:
        place.refuse(f" has {' and '.join(given)}: keep only one of them, or put everything into the pattern")
    if "pattern" in given:
        if not isinstance(schema["pattern"], str):
            place.refuse(f": pattern must be a string, got {shown(schema['pattern'])}")
        return sequence('"', read_regex(schema["pattern"], f"the pattern of {place.name}", _in_string), '"')
    if "format" in given:
        if schema["format"] not in list(FORMATS):
            place.refuse(f": format must be one of {', '.join(FORMATS)}, got {shown(schema['format'])}; or use pattern")
        return sequence('"', read_regex(FORMATS[schema["format"]]), '"')
    low, high = keywords.bounds(schema, "Length", place.name)
    return sequence('"', Repeat(_character(), low, high), '"')


@functools.cache
def _character() -> Expression:
    """Return the expression for one character in a string without a pattern."""
    plain = Characters(complement(union([*MUST_ESCAPE, *UNPRINTABLE])))
    return choice([plain, sequence("\\", choice(ESCAPED))])


@functools.cache
def _any_string() -> Expression:
    return sequence('"', Repeat(_character()), '"')


@functools.cache
def _scalar(name: str) -> Expression:
    return read_regex(SCALARS[name])


@functools.lru_cache(1000)
def _in_string(ranges: Ranges) -> Expression:
    """Return the expression for any one character in `ranges`, escaped where JSON requires it."""
    plain, special = common(ranges, complement(MUST_ESCAPE)), common(ranges, MUST_ESCAPE)
    spelled = [json.dumps(chr(code))[1:-1] for first, last in special for code in range(first, last + 1)]
    return choice([*([Characters(plain)] if plain else []), *spelled])


def _only_space(ranges: Ranges) -> Expression:
    other = common(ranges, complement(union([(0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20)])))
    if other:
        raise InputError(
            f"whitespace_pattern must only match spaces, tabs and newlines; it also matches {chr(other[0][0])!r}"
        )
    return Characters(ranges)


def _literal(value: Any) -> Text:
    return Text(json.dumps(value, ensure_ascii=False).encode())
