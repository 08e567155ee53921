"""Detection of disjoint schemas, so that `oneOf` needs no negation of alternatives that exclude each other anyway."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from jaxgen.grammar import keywords
from jaxgen.grammar.byte_automaton import TooLargeError
from jaxgen.grammar.evaluation import Evaluation
from jaxgen.grammar.stopping import check_stop

MOST = 60_000  # maximum number of comparisons between two schemas


class Overlaps:
    """Comparisons between the parts of one schema."""

    def __init__(self, evaluation: Evaluation, sound: Callable[[Any], Any]):
        self.evaluation, self.sound = evaluation, sound
        self.known: dict[tuple[int, int], bool] = {}
        self.compared = self.depth = 0

    def excludes(self, one: Any, other: Any) -> bool:
        """Return True if certainly no value is valid against both schemas."""
        check_stop()
        pair = id(one), id(other)
        if pair not in self.known:
            self.compared += 1
            if self.compared > MOST:
                raise TooLargeError("the schema's oneOf has too many alternatives to compare: use anyOf")
            self.known[pair] = False  # the answer if recursion leads back to this pair, or too deep
            if self.depth < keywords.DEEPEST:
                self.depth += 1
                self.known[pair] = self._compare(one, other)
                self.depth -= 1
        return self.known[pair]

    def _compare(self, one: Any, other: Any) -> bool:
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        one, other = self.sound(one), self.sound(other)
        return self._within(one, other) or self._within(other, one) or self._differ(one, other)

    def _within(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return True if the parts or the literals of `one` exclude `other`."""
        if "$ref" in one and self.excludes(self.evaluation.references.target(one), other):
            return True
        if "$ref" in one and self.evaluation.references.old:
            return False
        if any(self.excludes(part, other) for part in one.get("allOf", [])):
            return True
        if any(all(self.excludes(part, other) for part in one[name]) for name in ("anyOf", "oneOf") if name in one):
            return True
        values = keywords.literals(one)
        return values is not None and all(self.evaluation.holds(value, other) is False for value in values)

    def _differ(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        if self.evaluation.references.old and ("$ref" in one or "$ref" in other):
            return False
        if "nullable" in one or "nullable" in other:
            return False
        common = [name for name in keywords.types(one) if _is_type(name, keywords.types(other))]
        return all(self._differ_as(name, one, other) for name in common)

    def _differ_as(self, kind: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return True if no value of a type is valid against both schemas."""
        both = [one, other]
        if kind in ("integer", "number"):
            low, high = keywords.limits(both)
            return (
                low is not None and high is not None and (low[0] > high[0] or (low[0] == high[0] and low[1] | high[1]))
            )
        if kind == "string":
            return _is_empty(keywords.bounds(both, "Length"))
        if kind == "array":
            least = keywords.bounds(both, "Items")[0]
            pairs = zip(keywords.items(one)[0][:least], keywords.items(other)[0][:least], strict=False)
            return _is_empty(keywords.bounds(both, "Items")) or any(self.excludes(*pair) for pair in pairs)
        return kind == "object" and self._objects_differ(one, other)

    def _objects_differ(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        if _is_empty(keywords.bounds([one, other], "Properties")):
            return True
        needed = dict.fromkeys([*one.get("required", []), *other.get("required", [])])
        of_member = self.evaluation.of_member
        return any(
            self.excludes(part, theirs)
            for name in needed
            for part, theirs in itertools.product(of_member(name, one), of_member(name, other))
        )


def _is_type(name: str, names: list[str]) -> bool:
    return name in names or (name == "integer" and "number" in names) or (name == "number" and "integer" in names)


def _is_empty(limits: tuple[int, int | None]) -> bool:
    low, high = limits
    return high is not None and low > high
