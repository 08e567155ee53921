"""Conversion of a JSON schema to an expression that matches only texts valid against the schema.

A part of the text has to be valid against several schemas at once: those of `allOf`, of a reference and the keywords
beside it, of a chosen alternative. They are collected first, and then converted together, type by type.

What an expression cannot represent is refused or, if the caller agrees, left out; so every generated text is valid
against the rest. Not every valid text is generated: strings have no \\u escapes where another spelling exists, and
required members, or all members of a large object, appear in the schema's order. Free-form values nest at most two
levels deep. Recursive schemas end after `LEVELS` levels: at that depth, a reference matches nothing, so optional
members and items are left out.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, Literal

from jaxgen.core.grammar import keywords
from jaxgen.core.grammar.arrays import array
from jaxgen.core.grammar.byte_automaton import TooLargeError
from jaxgen.core.grammar.checks import without
from jaxgen.core.grammar.expression import (
    NOTHING,
    Characters,
    Expression,
    Part,
    Repeat,
    choice,
    common,
    complement,
    union,
)
from jaxgen.core.grammar.joint import Conversion, Joint, Place
from jaxgen.core.grammar.numbers import NUMBER, numbers
from jaxgen.core.grammar.objects import object_
from jaxgen.core.grammar.regex import read_regex
from jaxgen.core.grammar.strings import any_string, literal
from jaxgen.core.grammar.utf8 import Ranges
from jaxgen.errors import InputError, shown, warn

FREE_DEPTH = 2
LEVELS = 3  # maximum number of levels of a recursive schema
MOST_CHOICES = 64  # maximum number of choices, such as anyOf, for one value
# If an expression is larger than this, longer strings and lists and deeper levels are left out.
COMFORTABLE = 2**15
MOST_FREE = 2**13  # maximum size of an expression in which optional members are in any order
SIZES = ((3000, FREE_DEPTH, LEVELS), (300, FREE_DEPTH, LEVELS), (100, 1, 2), (10, 0, 1))


def read_schema(
    schema: Any,
    whitespace_pattern: str | None = None,
    *,
    name: str = "the schema",
    unsupported: Literal["error", "warn"] = "error",
    left_out: list[str] | None = None,
    any_order: bool = True,
) -> Expression:
    """Return the expression for the texts that are valid against `schema`, as described in `Grammar.json_schema`."""
    if unsupported not in ("error", "warn"):
        raise InputError(f"unsupported must be 'error' or 'warn', got {shown(unsupported)}")
    root = keywords.plain(keywords.given(schema))
    if not isinstance(root, bool | dict):
        keywords.refuse(name, f" must be an object, or true for any value, got {shown(root)}")
    space = read_regex("[ ]?" if whitespace_pattern is None else whitespace_pattern, "whitespace_pattern", _only_space)
    sizes, exclusive = [*SIZES], True
    while sizes:
        converter = Converter(root, name, space, unsupported == "warn", *sizes.pop(0))
        converter.checks.all_parts()
        converter.exclusive, converter.any_order, any_order = exclusive, any_order, False
        expression = None
        try:
            expression = converter.value((root,), Place(name, (id(root),)))
        except TooLargeError:
            if not converter.reordered:
                if not sizes and not (exclusive and unsupported == "warn"):
                    raise
                exclusive = exclusive and bool(sizes)
                sizes = [SIZES[-1]]
        if expression is not None and expression.size <= (MOST_FREE if converter.reordered else COMFORTABLE):
            break
        if converter.reordered:
            sizes = [*SIZES]
    assert expression is not None, "the last attempt raises an error"
    if left_out is not None:
        left_out += converter.checks.left_out
    elif converter.checks.left_out:
        warn(f"left out of the schema, and not enforced: {'; '.join(converter.checks.left_out)}")
    return expression


class Converter(Conversion):
    """Converter for the parts of one schema."""

    def value(self, schemas: tuple[Any, ...], place: Place) -> Expression:
        """Return the expression for the values that are valid against all schemas."""
        if place.depth > keywords.DEEPEST:
            raise InputError(f"the schema is nested more than {keywords.DEEPEST} levels deep: simplify it")
        key = self.key(schemas, place)
        if key not in self.known:
            joint = self.join(Joint(place), schemas)
            self.known[key] = NOTHING if joint is None else self.joint(joint)
        return self.known[key]

    def key(self, schemas: tuple[Any, ...], place: Place) -> Any:
        """Return a key that is the same for values with the same expression."""
        first = schemas[0] if len(schemas) == 1 else None
        refs = place.refs
        if (
            isinstance(first, dict)
            and isinstance(first.get("$ref"), str)
            and not keywords.SUPPORTED & first.keys() - {"$ref"}
        ):
            target = self.references.target(self.sound(first)) if "$ref" in self.sound(first) else None
            if isinstance(target, dict):
                cycle = self.references.cycle(target)
                refs = tuple(part for part in refs if part in cycle)
                schemas = (target, "$ref")
        identities = tuple(part if isinstance(part, bool | str) else id(part) for part in schemas)
        return identities, frozenset(collections.Counter(refs).items())

    def joint(self, joint: Joint) -> Expression:
        """Return the expression for the values that satisfy all schemas and one alternative of each choice."""
        if any(keywords.literals(schema) is not None for schema in joint.schemas):
            return self.literals(joint)
        if joint.choices:
            self.spend(len(joint.schemas))
            if not self.types(joint.schemas):
                return NOTHING
            if len(joint.choices) > MOST_CHOICES:
                reason = f" has more than {MOST_CHOICES} choices at once, such as anyOf or if: simplify it"
                keywords.refuse(joint.place.name, reason)
            first, *others = joint.choices
            options = []
            for alternative in first.alternatives:
                part = joint.copy()
                part.choices = [*others]
                extended = self.join(part, alternative, first.path)
                if extended is not None:
                    options.append(self.joint(extended))
            return choice(options)
        place = joint.place
        own = [schema for schema in joint.schemas if keywords.SUPPORTED & schema.keys()]
        if not any(keywords.SUPPORTED & schema.keys() - {"$ref", "allOf"} for schema in own):
            return self.free(self.free_depth)
        return Part(place.name, choice([self.of_type(name, own, place) for name in self.types(own)]))

    def literals(self, joint: Joint) -> Expression:
        """Return the expression for the values of `const` and `enum` that satisfy all schemas."""
        listing = [schema for schema in joint.schemas if keywords.literals(schema) is not None]
        source = min(listing, key=lambda schema: len(keywords.literals(schema) or ()))
        bare = len(keywords.SUPPORTED & source.keys()) == 1  # nothing else in it has to be checked
        others = [schema for schema in joint.schemas if schema is not source or not bare]
        holds, holds_alone = self.evaluation.holds, self.evaluation.holds_alone
        return choice(
            literal(value)
            for value in keywords.literals(source) or ()
            if all(holds_alone(value, schema) for schema in others)
            and all(
                any(all(holds(value, schema) for schema in schemas) for schemas in alternatives)
                for alternatives, _ in joint.choices
            )
        )

    def of_type(self, name: str, schemas: list[dict[str, Any]], place: Place) -> Expression:
        """Return the expression for values of one type that are valid against all schemas."""
        excluded = [value for schema in schemas for value in schema.get(keywords.EXCLUDED, [])]
        match name:
            case "string":
                return self.string(schemas, place, [value for value in excluded if isinstance(value, str)])
            case "array":
                return array(self, schemas, place, [value for value in excluded if isinstance(value, list)])
            case "object":
                return object_(self, schemas, place, [value for value in excluded if isinstance(value, dict)])
            case "integer" | "number":
                return self.number(schemas, name == "integer", excluded, place)
        words = {"boolean": {"true": True, "false": False}, "null": {"null": None}}[name]
        return choice(word for word, value in words.items() if not any(value is other for other in excluded))

    def string(self, schemas: list[dict[str, Any]], place: Place, excluded: Sequence[str] = ()) -> Expression:
        """Return the expression for strings, with their quotation marks."""
        patterns, unlike = [], []
        for schema in schemas:
            for kind, given in ((patterns, [schema.get("pattern")]), (unlike, schema.get(keywords.UNLIKE, []))):
                for pattern in given:
                    if pattern is not None and self.is_pattern(pattern, place.name):
                        kind.append(pattern)
        formats = [schema["format"] for schema in schemas if "format" in schema]
        return self.text(place, patterns, unlike, [*excluded], formats, keywords.bounds(schemas, "Length"))

    def number(self, schemas: list[dict[str, Any]], integer: bool, excluded: list[Any], place: Place) -> Expression:
        """Return the expression for numbers that are valid against all schemas."""
        try:
            return numbers(schemas, integer, excluded, place.name, self.work)
        except InputError as error:
            if not self.lenient:
                raise
            self.leave_out(place.name, f" has multipleOf: {error}")
            rest = [without(schema, "multipleOf") for schema in schemas]
            return numbers(rest, integer, excluded, place.name, self.work)

    def free(self, depth: int) -> Expression:
        """Return the expression for any JSON value with at most `depth` levels of nesting."""
        if depth not in self.known:
            kinds = [any_string(), read_regex(NUMBER), read_regex("true|false"), read_regex("null")]
            if depth:
                inner = self.free(depth - 1)
                member = self.member(any_string(), inner)
                kinds += [self.enclosed("[", Repeat(inner, separator=self.comma), "]")]
                kinds += [self.enclosed("{", Repeat(member, separator=self.comma), "}")]
            self.known[depth] = choice(kinds)
        return self.known[depth]


def _only_space(ranges: Ranges) -> Expression:
    other = common(ranges, complement(union([(0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20)])))
    if other:
        raise InputError(
            f"whitespace_pattern must only match spaces, tabs and newlines; it also matches {chr(other[0][0])!r}"
        )
    return Characters(ranges)
