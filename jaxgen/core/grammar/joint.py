"""Schemas that must hold together for one value, their place in the whole schema, and how they are collected."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxgen.core.grammar import keywords
from jaxgen.core.grammar.byte_automaton import TooLargeError, Work
from jaxgen.core.grammar.checks import Checks, without
from jaxgen.core.grammar.disjoint import exclude
from jaxgen.core.grammar.evaluation import Evaluation, dependents
from jaxgen.core.grammar.expression import NOTHING, Expression, Part, sequence
from jaxgen.core.grammar.negation import negated
from jaxgen.core.grammar.references import References
from jaxgen.core.grammar.strings import Strings, quoted
from jaxgen.errors import InputError, bare

MOST_VALUES = 20_000
MOST_STEPS = 100_000  # maximum number of schemas that are looked at for one value, over all values
MOST_WORK = 4_000_000  # states and transitions visited while strings and numbers are compiled


class Place(NamedTuple):
    """Location of a schema: its name in messages, the ids of the referenced parts that lead to it, and its depth."""

    name: str
    refs: tuple[int, ...] = ()
    depth: int = 0

    def inside(self, *names: str | int) -> Place:
        """Return the place of a part."""
        return Place(keywords.inside(self.name, *names), self.refs, self.depth + 1)


class Choice(NamedTuple):
    """Alternatives, each of which is a tuple of schemas that must all hold, and the ids of the schemas around them."""

    alternatives: list[tuple[Any, ...]]
    path: frozenset[int] = frozenset()


class Joint:
    """Schemas that must all hold for one value: the parts with keywords of their own, and choices between others."""

    def __init__(self, place: Place):
        self.place = place
        self.schemas: list[dict[str, Any]] = []
        self.choices: list[Choice] = []
        self.seen: set[int] = set()

    def copy(self) -> Joint:
        """Return a copy, to which schemas can be added."""
        other = Joint(self.place)
        other.schemas, other.choices, other.seen = [*self.schemas], [*self.choices], {*self.seen}
        return other


class Conversion(abc.ABC):
    """The conversion of a whole schema: what its parts for arrays, objects and other types share."""

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

    @abc.abstractmethod
    def value(self, schemas: tuple[Any, ...], place: Place) -> Expression:
        """Return the expression for the values that are valid against all schemas."""

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
        return NOTHING if content is NOTHING else Part(place.name, quoted(content))

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
    return {"anyOf": [{"type": "null"}, without(schema, "nullable")]}
