"""Detection of disjoint schemas, so that `oneOf` needs no negation of alternatives that exclude each other anyway.

Only what tells the alternatives of a discriminated union apart is detected: their types, and the literals of `const`
and `enum`, in the alternatives themselves, in their parts, or in a required member.
"""

from __future__ import annotations

from typing import Any

from jaxgen.core.grammar import keywords
from jaxgen.core.grammar.evaluation import Evaluation

_DEEPEST = 6  # references, parts and members are followed to this depth


def exclude(evaluation: Evaluation, one: Any, other: Any, depth: int = 0) -> bool:
    """Return True if certainly no value is valid against both schemas."""
    evaluation.spend()
    if isinstance(one, bool) or isinstance(other, bool):
        return one is False or other is False
    one, other = evaluation.sound(one), evaluation.sound(other)
    if depth > _DEEPEST or "nullable" in one or "nullable" in other:
        return False
    old = evaluation.references.old
    if _parts_exclude(evaluation, one, other, depth + 1) or _parts_exclude(evaluation, other, one, depth + 1):
        return True
    if old and ("$ref" in one or "$ref" in other):  # the keywords beside the reference are ignored
        return False
    common = {kind.replace("integer", "number") for kind in keywords.types(one)}
    common.intersection_update(kind.replace("integer", "number") for kind in keywords.types(other))
    if common != {"object"}:
        return not common
    return any(
        exclude(evaluation, mine, theirs, depth + 1)
        for name in dict.fromkeys([*one.get("required", []), *other.get("required", [])])
        for mine in evaluation.of_member(name, one)
        for theirs in evaluation.of_member(name, other)
    )


def _parts_exclude(evaluation: Evaluation, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
    """Return True if the reference, the literals or the parts of `one` exclude `other`."""
    if "$ref" in one:
        if exclude(evaluation, evaluation.references.target(one), other, depth):
            return True
        if evaluation.references.old:
            return False
    values = keywords.literals(one)
    if values is not None and all(evaluation.holds(value, other) is False for value in values):
        return True
    return any(exclude(evaluation, part, other, depth) for part in one.get("allOf", [])) or any(
        all(exclude(evaluation, part, other, depth) for part in one[name]) for name in ("anyOf", "oneOf") if name in one
    )
