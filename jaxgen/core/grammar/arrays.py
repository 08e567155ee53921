"""Expressions for the arrays of a JSON schema."""

from __future__ import annotations

from typing import Any

from jaxgen.core.grammar import keywords
from jaxgen.core.grammar.expression import EMPTY, NOTHING, Expression, Members, Repeat, sequence
from jaxgen.core.grammar.joint import Conversion, Joint, Place
from jaxgen.core.grammar.keywords import key
from jaxgen.core.grammar.strings import literal
from jaxgen.errors import bare
from jaxgen.json_file import types_of

MOST_COPIES = 2**14  # maximum size of an optional repetition of items


def array(converter: Conversion, schemas: list[dict[str, Any]], place: Place, excluded: list[Any]) -> Expression:
    """Return the expression for the arrays that are valid against all schemas."""
    low, high = keywords.bounds(schemas, "Items")
    if excluded == [[]]:
        low = max(low, 1)
    elif excluded:
        converter.leave_out(place.name, f" has a not with arrays, {bare(str(excluded))}")
    unique = any(schema.get("uniqueItems") for schema in schemas)
    contains = [schema["contains"] for schema in schemas if "contains" in schema]
    first = max(len(keywords.items(schema)[0]) for schema in schemas)
    items = [converter.value(_item(schemas, i), place.inside("items", i)) for i in range(first)]
    others = _item(schemas, first)
    given = any(keywords.items(schema)[1] not in (None, True) for schema in schemas)
    if NOTHING in items:
        cut = items.index(NOTHING)
        high = cut if high is None else min(high, cut)
    if high is not None and low > high:
        return NOTHING
    if unique and (high is None or high > 1):
        values = _values(converter, others, place) if not first else None
        if values is not None:
            return converter.enclosed("[", _subsets(converter, values, low, high), "]")
        converter.leave_out(place.name, " has uniqueItems, which is supported for items with an enum and for one item")
    if contains and (first or len(contains) > 1):
        converter.leave_out(
            place.name, " has contains beside other conditions for single items, which is not supported"
        )
        contains = []
    if first:
        return _tuple(converter, items, others if given or low > first else None, low, high, place)
    item = converter.value(others, place.inside("items"))
    if contains:
        return _containing(converter, item, (*others, *contains), low, high, place)
    return converter.enclosed("[", _repeated(converter, item, low, high), "]")


def _item(schemas: list[dict[str, Any]], index: int) -> tuple[Any, ...]:
    """Return the schemas for the item with an index."""
    found = []
    for schema in schemas:
        first, others = keywords.items(schema)
        if index < len(first):
            found.append(first[index])
        elif others is not None:
            found.append(others)
    return tuple(found)


def _repeated(converter: Conversion, item: Expression, low: int, high: int | None) -> Expression:
    if item is NOTHING:
        return EMPTY if low == 0 else NOTHING
    if high is not None:
        high = min(high, max(low, 1, min(converter.longest, MOST_COPIES // (item.size + 1))))
    return Repeat(item, low, high, converter.comma)


def _tuple(
    converter: Conversion,
    items: list[Expression],
    others: tuple[Any, ...] | None,
    low: int,
    high: int | None,
    place: Place,
) -> Expression:
    """Return the expression for arrays of all first items (as many as may be), then of others."""
    count = len(items) if high is None else min(len(items), high)
    parts = tuple((item, True) for item in items[:count])
    if others is None or count < len(items) or (high is not None and high <= count):
        return NOTHING if low > count else converter.enclosed("[", Members(parts, converter.comma), "]")
    item = converter.value(others, place.inside("items"))
    rest = _repeated(converter, item, max(low - count, 0), None if high is None else high - count)
    if rest is NOTHING:
        return NOTHING
    if rest is EMPTY:
        return converter.enclosed("[", Members(parts, converter.comma), "]")
    assert isinstance(rest, Repeat)
    least = [(item, True)] * max(low - count, 0)
    if high is None:
        inner: Expression = Members((*parts, *least), converter.comma, item)
    else:
        inner = Members((*parts, *least, *[(item, False)] * ((rest.high or 0) - len(least))), converter.comma)
    return converter.enclosed("[", inner, "]")


def _containing(
    converter: Conversion, item: Expression, wanted: tuple[Any, ...], low: int, high: int | None, place: Place
) -> Expression:
    """Return the expression for arrays in which at least one item is valid against `wanted`."""
    match_ = converter.value(wanted, place.inside("contains"))
    if match_ is NOTHING or item is NOTHING or high == 0:
        return NOTHING
    if low <= 1 and high is None:
        before, after = sequence(item, converter.comma), sequence(converter.comma, item)
        return converter.enclosed("[", sequence(Repeat(before), match_, Repeat(after)), "]")
    more = None if high is None else high - 1  # the match comes first
    rest = Repeat(
        sequence(converter.comma, item), max(low - 1, 0), None if more is None else min(more, converter.longest)
    )
    return converter.enclosed("[", sequence(match_, rest), "]")


def _values(converter: Conversion, schemas: tuple[Any, ...], place: Place) -> list[Any] | None:
    """Return the distinct values that items may have, or None if they are not given by a const, an enum or a type."""
    joint = converter.join(Joint(place.inside("items")), schemas)
    if joint is None:
        return []
    lists = [values for schema in joint.schemas if (values := keywords.literals(schema)) is not None]
    if not lists:
        if not any("type" in schema for schema in joint.schemas):
            return None
        names = converter.types(joint.schemas)
        if not {*names} <= {"boolean", "null"}:
            return None
        lists = [[value for value in (True, False, None) if types_of(value)[0] in names]]
    values = {key(value): value for value in min(lists, key=len)}.values()
    return [value for value in values if all(converter.evaluation.holds(value, schema) for schema in schemas)]


def _subsets(converter: Conversion, values: list[Any], low: int, high: int | None) -> Expression:
    """Return the expression for lists of some of the values, in the schema's order."""
    if low > len(values):
        return NOTHING
    high = None if high is None or high >= len(values) else high
    return Members(tuple((literal(value), False) for value in values), converter.comma, None, low, high)
