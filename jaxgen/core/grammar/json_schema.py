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
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from jaxgen.core.grammar import keywords
from jaxgen.core.grammar.arrays import array
from jaxgen.core.grammar.byte_automaton import TooLargeError, Work
from jaxgen.core.grammar.checks import Checks
from jaxgen.core.grammar.disjoint import exclude
from jaxgen.core.grammar.evaluation import Evaluation, dependents
from jaxgen.core.grammar.expression import (
    NOTHING,
    Characters,
    Expression,
    Part,
    Repeat,
    choice,
    common,
    complement,
    sequence,
    union,
)
from jaxgen.core.grammar.joint import Choice, Joint, Place
from jaxgen.core.grammar.negation import negated
from jaxgen.core.grammar.numbers import NUMBER, numbers
from jaxgen.core.grammar.objects import object_
from jaxgen.core.grammar.references import References
from jaxgen.core.grammar.regex import read_regex
from jaxgen.core.grammar.strings import Strings, any_string, literal, named
from jaxgen.core.grammar.utf8 import Ranges
from jaxgen.errors import InputError, bare, shown, warn

FREE_DEPTH = 2
LEVELS = 3  # maximum number of levels of a recursive schema
MOST_VALUES = 20_000
MOST_STEPS = 100_000  # maximum number of schemas that are looked at for one value, over all values
MOST_CHOICES = 64  # maximum number of choices, such as anyOf, for one value
MOST_WORK = 4_000_000  # states and transitions visited while strings and numbers are compiled
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
    """Return the expression for the texts that are valid against `schema`.

    `schema` is a dict, a JSON string, or a pydantic class or TypeAdapter. docs/constrained.md lists the supported
    keywords. `whitespace_pattern` matches the whitespace between JSON's tokens; None means "[ ]?". Error messages name
    a part of the schema by its path from `name`.

    With `unsupported="warn"`, keywords that cannot be enforced are left out. One warning lists them; if `left_out` is
    given, they are added to that list instead. Without `any_order`, all members of an object are in the schema's order;
    otherwise, optional ones are in any order if the expression does not become too large.

    Raises:
        InputError: the schema is not valid, or uses a keyword that cannot be enforced.
        TypeError: `schema` is none of the above.
    """
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


class Converter:
    """Converter for the parts of one schema."""

    def __init__(
        self, root: Any, name: str, space: Expression, lenient: bool, longest: int, free_depth: int, levels: int
    ):
        self.space, self.lenient = space, lenient
        self.exclusive = True  # False if a oneOf is read as anyOf
        self.any_order = True  # False if all members are in the schema's order
        self.reordered = False  # True if members of some object are in any order
        self.longest, self.free_depth, self.levels = longest, free_depth, levels
        self.comma = sequence(space, ",", space)
        self.work = Work(MOST_WORK)
        self.strings = Strings(self.work)
        self.references = References(root)
        self.checks = Checks(self.references, name, lenient)
        self.sound, self.leave_out = self.checks.sound, self.checks.leave_out
        self.matches = self.strings.matches
        self.evaluation = Evaluation(self.references, self.sound, self.matches)
        self.known: dict[Any, Expression] = {}
        self.made: dict[Any, Any] = {}  # schemas that are not in the given one; stored so that their ids stay unique
        self.values = self.steps = 0

    def spend(self, steps: int) -> None:
        """Count steps of the conversion."""
        self.steps += steps
        if self.steps > MOST_STEPS:
            raise TooLargeError("the schema has too many combinations of alternatives: simplify it")

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

    def join(self, joint: Joint, schemas: Iterable[Any], path: frozenset[int] = frozenset()) -> Joint | None:
        """Add schemas to those that must hold; return None if nothing satisfies them.

        `path` contains the ids of the schemas around them. A schema that leads back to itself holds for nothing.
        """
        rest = [(schema, path) for schema in schemas]
        while rest:
            schema, path = rest.pop(0)
            self.values += 1
            if self.values > MOST_VALUES:
                raise TooLargeError(
                    f"the schema has more than {MOST_VALUES} parts, counting its recursion: simplify it"
                )
            place = joint.place
            if schema is True:
                continue
            if schema is False:
                return None
            if id(schema) in path:
                return None
            if id(schema) in joint.seen:
                continue
            joint.seen.add(id(schema))
            path = path | {id(schema)}
            self.checks.call(schema, place.name)
            schema = self.sound(schema)
            if "$ref" in schema:
                target = self.references.target(schema)
                if place.refs.count(id(target)) >= self.levels:
                    return None
                joint.place = Place(bare(schema["$ref"]), (*place.refs, id(target)), place.depth + 1)
                if joint.place.depth > keywords.DEEPEST:
                    raise InputError(f"the schema is nested more than {keywords.DEEPEST} levels deep: simplify it")
                rest.insert(0, (target, path))
            if self.is_nullable(schema):
                rest.insert(0, (self.make("nullable", schema, lambda given=schema: _nullable(given)), path))
                continue
            joint.schemas.append(schema)
            rest += [(part, path) for part in schema.get("allOf", [])]
            joint.choices += [Choice(alternatives, path) for alternatives in self.choices(schema, place)]
            if "not" in schema:
                rest.append((self.opposite(schema["not"], place.name), path))
        return joint

    def make(self, kind: str, schema: Any, build: Any) -> Any:
        """Return a schema that is derived from another one; it is built once."""
        if (kind, id(schema)) not in self.made:
            self.made[kind, id(schema)] = build(), schema
        return self.made[kind, id(schema)][0]

    def is_nullable(self, schema: dict[str, Any]) -> bool:
        """Return True if a schema also allows null, by OpenAPI's keyword `nullable`."""
        return bool(schema.get("nullable")) and "$schema" not in self.references.root

    def opposite(self, schema: Any, name: str) -> Any:
        """Return a schema for values that are not valid against `schema`."""
        if isinstance(schema, bool):
            return not schema
        self.checks.call(schema, name)
        sound = self.sound(schema)
        sound = _nullable(sound) if self.is_nullable(sound) else sound
        found = self.make("not", schema, lambda: negated(sound, self.references))
        if found is None:
            self.leave_out(name, " has not with keywords that cannot be negated")
            return True
        return found

    def choices(self, schema: dict[str, Any], place: Place) -> list[list[tuple[Any, ...]]]:
        """Return the choices that a schema has between other schemas."""
        found: list[list[tuple[Any, ...]]] = []
        if "anyOf" in schema:
            found.append([(part,) for part in schema["anyOf"]])
        if "oneOf" in schema:
            found.append(self.make("oneOf", schema, lambda: self.one_of(schema["oneOf"], place)))
        if "if" in schema and ("then" in schema or "else" in schema):
            other = self.make("else", schema["if"], lambda: {"not": schema["if"]})
            found.append([(schema["if"], schema.get("then", True)), (other, schema.get("else", True))])
        for name, needed in dependents(schema).items():
            absent = self.make(f"absent {name}", schema, lambda name=name: {"properties": {name: False}})
            present = self.make(f"present {name}", schema, lambda name=name: {"required": [name]})
            inner = self.make(f"with {name}", schema, lambda needed=needed: needed)
            found.append([(absent,), (present, *inner)])
        return found

    def one_of(self, schemas: list[Any], place: Place) -> list[tuple[Any, ...]]:
        """Return alternatives that exclude each other."""
        found: list[tuple[Any, ...]] = []
        for i, schema in enumerate(schemas):
            self.checks.call(schema, f"{place.name}.oneOf[{i}]")
        for i, schema in enumerate(schemas):
            others = [other for j, other in enumerate(schemas) if j != i]
            others = [other for other in others if not exclude(self.evaluation, schema, other)]
            if others and not self.exclusive:
                self.leave_out(place.name, " has oneOf, which is read as anyOf")
                others = []
            found.append((schema, *(self.make("else", other, lambda other=other: {"not": other}) for other in others)))
        return found

    def joint(self, joint: Joint) -> Expression:
        """Return the expression for the values that satisfy all schemas and one alternative of each choice."""
        if any(keywords.literals(schema) is not None for schema in joint.schemas):
            return self.literals(joint)
        if joint.choices:
            self.spend(len(joint.schemas))
            if not self.types(joint.schemas):
                return NOTHING
            if len(joint.choices) > MOST_CHOICES:
                joint.place.refuse(f" has more than {MOST_CHOICES} choices at once, such as anyOf or if: simplify it")
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

    def types(self, schemas: Sequence[dict[str, Any]]) -> list[str]:
        """Return the types that all schemas allow; without `type`, those that keywords are about, or all."""
        found: list[str] | None = None
        for schema in schemas:
            if "type" in schema:
                names = keywords.types(schema)
                names = [name for name in names if name != "integer" or "number" not in names]
                found = names if found is None else _common_types(found, names)
        if found is None:
            given = {name for schema in schemas for name in schema}
            found = [name for name, own in keywords.OF_TYPE.items() if given & {*own}]
            found = found or [name for name in keywords.TYPES if name != "integer"]
        return found

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

    def text(
        self,
        place: Place,
        patterns: list[str],
        unlike: list[str],
        excluded: list[str],
        formats: Sequence[str] = (),
        limits: tuple[int, int | None] = (0, None),
    ) -> Expression:
        """Return the expression for strings that satisfy all conditions and are none of `excluded`."""
        content = self.strings.content(place.name, patterns, unlike, formats, excluded, limits, self.longest)
        return NOTHING if content is NOTHING else named(place.name, content)

    def is_pattern(self, pattern: str, name: str) -> bool:
        """Return True if a pattern can be compiled; otherwise, leave it out."""
        try:
            self.strings.pattern(pattern, name)
        except InputError as error:
            if not self.lenient:
                raise InputError(str(error)) from error  # not a TooLargeError, because smaller limits do not help
            self.leave_out("", str(error))
            return False
        return True

    def number(self, schemas: list[dict[str, Any]], integer: bool, excluded: list[Any], place: Place) -> Expression:
        """Return the expression for numbers that are valid against all schemas."""
        try:
            return numbers(schemas, integer, excluded, place.name, self.work)
        except InputError as error:
            if not self.lenient:
                raise
            self.leave_out(place.name, f" has multipleOf: {error}")
            rest = [_without(schema, "multipleOf") for schema in schemas]
            return numbers(rest, integer, excluded, place.name, self.work)

    def free(self, depth: int) -> Expression:
        """Return the expression for any JSON value with at most `depth` levels of nesting."""
        if depth not in self.known:
            kinds = [any_string(), read_regex(NUMBER), read_regex("true|false"), read_regex("null")]
            if depth:
                inner = self.free(depth - 1)
                kinds += [self.enclosed("[", Repeat(inner, separator=self.comma), "]"), self.map(inner)]
            self.known[depth] = choice(kinds)
        return self.known[depth]

    def map(self, value: Expression) -> Expression:
        """Return the expression for objects with any names."""
        return self.enclosed("{", Repeat(self.member(any_string(), value), separator=self.comma), "}")

    def member(self, name: Expression, value: Expression) -> Expression:
        """Return the expression for a member of an object."""
        return sequence(name, self.space, ":", self.space, value)

    def enclosed(self, opening: str, inner: Expression, closing: str) -> Expression:
        """Return the expression for an array or object."""
        return sequence(opening, self.space, inner, self.space, closing)


def _common_types(one: list[str], other: list[str]) -> list[str]:
    """Return the types in both lists; an integer is also a number."""
    found = [name for name in one if name in other or (name == "integer" and "number" in other)]
    return found + ["integer"] * ("number" in one and "integer" in other)


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [{"type": "null"}, _without(schema, "nullable")]}


def _without(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    return {name: part for name, part in schema.items() if name != keyword}


def _only_space(ranges: Ranges) -> Expression:
    other = common(ranges, complement(union([(0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20)])))
    if other:
        raise InputError(
            f"whitespace_pattern must only match spaces, tabs and newlines; it also matches {chr(other[0][0])!r}"
        )
    return Characters(ranges)
