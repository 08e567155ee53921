"""Schemas that must hold together for one value, and their place in the whole schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from jaxgen.core.grammar import keywords
from jaxgen.core.grammar.evaluation import Evaluation
from jaxgen.core.grammar.expression import Expression


class Place(NamedTuple):
    """Location of a schema: its name in messages, the ids of the referenced parts that lead to it, and its depth."""

    name: str
    refs: tuple[int, ...] = ()
    depth: int = 0

    def inside(self, *names: str | int) -> Place:
        """Return the place of a part."""
        return Place(keywords.inside(self.name, *names), self.refs, self.depth + 1)

    def refuse(self, reason: str) -> NoReturn:
        """Raise an error about the schema at this place."""
        keywords.refuse(self.name, reason)


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

    def given(self, keyword: str) -> list[Any]:
        """Return the values of a keyword."""
        return [schema[keyword] for schema in self.schemas if keyword in schema]


class Conversion(Protocol):
    """The conversion of a whole schema, as arrays and objects use it for their parts; see `json_schema.Converter`."""

    comma: Expression
    evaluation: Evaluation
    made: dict[Any, Any]
    lenient: bool
    longest: int
    any_order: bool
    reordered: bool

    def value(self, schemas: tuple[Any, ...], place: Place) -> Expression:
        """Return the expression for the values that are valid against all schemas."""
        ...

    def join(self, joint: Joint, schemas: Iterable[Any]) -> Joint | None:
        """Add schemas to those that must hold; return None if nothing satisfies them."""
        ...

    def types(self, schemas: Sequence[dict[str, Any]]) -> list[str]:
        """Return the types that all schemas allow."""
        ...

    def text(self, place: Place, patterns: list[str], unlike: list[str], excluded: list[str]) -> Expression:
        """Return the expression for strings that satisfy all conditions and are none of `excluded`."""
        ...

    def is_pattern(self, pattern: str, name: str) -> bool:
        """Return True if a pattern can be compiled; otherwise, leave it out."""
        ...

    def matches(self, pattern: str, text: str) -> bool:
        """Return True if a string contains a match of a pattern."""
        ...

    def member(self, name: Expression, value: Expression) -> Expression:
        """Return the expression for a member of an object."""
        ...

    def enclosed(self, opening: str, inner: Expression, closing: str) -> Expression:
        """Return the expression for an array or object."""
        ...

    def leave_out(self, name: str, reason: str) -> None:
        """Raise an error about a keyword or, if the caller agrees, note that it is left out."""
        ...

    def spend(self, steps: int) -> None:
        """Count steps of the conversion."""
        ...
