"""Schemas that must hold together for one value, and their place in the whole schema."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from jaxgen.grammar import keywords


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
