"""Expressions for the objects of a JSON schema."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from jaxgen.core.grammar import keywords
from jaxgen.core.grammar.byte_automaton import TooLargeError
from jaxgen.core.grammar.expression import NOTHING, Expression, Members, choice
from jaxgen.core.grammar.joint import Conversion, Joint, Place
from jaxgen.core.grammar.strings import any_string, literal
from jaxgen.errors import bare

MOST_JOINT = 4  # maximum number of patterns of names for which values that match several of them are generated
MOST_FREE = 1000  # maximum size of an object whose optional members are in any order


def object_(converter: Conversion, schemas: list[dict[str, Any]], place: Place, excluded: list[Any]) -> Expression:
    """Return the expression for the objects that are valid against all schemas."""
    for i, schema in enumerate(schemas):
        if keywords.FURTHER in schema:
            known, patterns = schema[keywords.FURTHER]
            return _with_further(converter, schemas[:i] + schemas[i + 1 :], known, patterns, place, excluded)
    low, high = keywords.bounds(schemas, "Properties")
    if excluded == [{}]:
        low = max(low, 1)
    elif excluded:
        converter.leave_out(place.name, f" has a not with objects, {bare(str(excluded))}")
    if high is not None and low > high:
        return NOTHING
    schemas = [_readable(converter, schema, place) for schema in schemas]
    needed = dict.fromkeys(name for schema in schemas for name in schema.get("required", []))
    listed = dict.fromkeys(name for schema in schemas for name in schema.get("properties", {})) | needed
    allowed = tuple(schema["propertyNames"] for schema in schemas if "propertyNames" in schema)
    given = any("properties" in schema for schema in schemas)
    names = _listed_names(converter, allowed)
    if names is not None:  # only these names are possible
        listed = listed | dict.fromkeys(names)
    parts = []
    for name in listed:
        value = NOTHING
        if all(converter.evaluation.holds(name, schema) for schema in allowed):
            value = converter.value(_member(converter, schemas, name), place.inside("properties", name))
        if value is NOTHING and name in needed:
            return NOTHING
        if value is not NOTHING:
            parts.append((converter.member(literal(name), value), name in needed))
    further = None if names is not None else _further(converter, schemas, [*listed], allowed, given, place)
    if high is not None and high < len(needed):
        return NOTHING
    if further is not None and low > max(1, len(parts)):
        converter.leave_out(place.name, f" has minProperties {low}, but names of further members might be equal")
        low = 1
    if low > len(parts) + (further is not None):
        return NOTHING
    if high is not None and further is None and high >= len(parts):
        high = None
    if further is not None and low > 1:  # equal names of further members would count twice
        further = None
    low = low if low > len(needed) else 0
    return converter.enclosed("{", _members(converter, parts, further, low, high), "}")


def _members(
    converter: Conversion,
    parts: list[tuple[Expression, bool]],
    further: Expression | None,
    low: int,
    high: int | None,
) -> Expression:
    """Return the expression for the members, of which optional ones are in any order if that is not too large."""
    members = Members(tuple(parts), converter.comma, further, low, high)
    if converter.any_order and len(parts) > 1 and not all(needed for _, needed in parts):
        free = dataclasses.replace(members, free=True)
        if free.size <= MOST_FREE:
            converter.reordered = True
            return free
    return members


def _with_further(
    converter: Conversion,
    schemas: list[dict[str, Any]],
    known: list[str],
    patterns: list[str],
    place: Place,
    excluded: list[Any],
) -> Expression:
    """Return the expression for objects with a listed member that is not `known` and matches none of the patterns."""
    names = dict.fromkeys(
        name for schema in schemas for name in (*schema.get("properties", {}), *schema.get("required", []))
    )
    options = []
    for name in names:
        if name not in known and not any(converter.matches(pattern, name) for pattern in patterns):
            options.append(object_(converter, [*schemas, {"required": [name]}], place, excluded))
    return choice(options)


def _readable(converter: Conversion, schema: dict[str, Any], place: Place) -> dict[str, Any]:
    """Return the schema without the patterns of names that cannot be compiled."""
    patterns = schema.get("patternProperties", {})
    wrong = [pattern for pattern in patterns if not converter.is_pattern(pattern, place.name)]
    if not wrong:
        return schema
    kept = {pattern: part for pattern, part in patterns.items() if pattern not in wrong}
    return schema | {"patternProperties": kept}


def _member(converter: Conversion, schemas: list[dict[str, Any]], name: str) -> tuple[Any, ...]:
    """Return the schemas for the value of the member with a name."""
    converter.spend(len(schemas))
    return tuple(
        part for schema in schemas for part in converter.evaluation.of_member(name, schema) if part is not True
    )


def _listed_names(converter: Conversion, allowed: tuple[Any, ...]) -> list[str] | None:
    """Return the names that a const or an enum of `propertyNames` allows, or None if there is neither."""
    joint = converter.join(Joint(Place("propertyNames")), allowed)
    if joint is None:
        return []
    lists = [values for schema in joint.schemas if (values := keywords.literals(schema)) is not None]
    return [name for name in min(lists, key=len) if isinstance(name, str)] if lists else None


def _further(
    converter: Conversion,
    schemas: list[dict[str, Any]],
    listed: list[str],
    allowed: tuple[Any, ...],
    given: bool,
    place: Place,
) -> Expression | None:
    """Return the expression for a member whose name is not listed, or None if there are no such members.

    If there are properties, further members are only generated if there is a schema for them.
    """
    patterns = [*dict.fromkeys(pattern for schema in schemas for pattern in schema.get("patternProperties", {}))]
    explicit = any(schema.get("additionalProperties") not in (None, True, {}) for schema in schemas)
    sizes = range(len(patterns) + 1 if len(patterns) <= MOST_JOINT else 2)
    members = []
    for size in sizes:
        for chosen in itertools.combinations(patterns, size):
            if not chosen and given and not explicit:
                continue
            values = tuple(part for schema in schemas for part in _of_patterns(schema, chosen) if part is not True)
            value = converter.value(values, place.inside("additionalProperties"))
            if value is NOTHING:
                continue
            name = _name(converter, [*chosen], [one for one in patterns if one not in chosen], listed, allowed, place)
            if name is not NOTHING:
                members.append(converter.member(name, value))
    return choice(members) if members else None


def _of_patterns(schema: dict[str, Any], chosen: tuple[str, ...]) -> list[Any]:
    """Return the schemas for members whose names match exactly the chosen patterns, and are not listed."""
    known = schema.get("patternProperties", {})
    return [known[one] for one in chosen if one in known] or [schema.get("additionalProperties", True)]


def _name(
    converter: Conversion,
    patterns: list[str],
    unlike: list[str],
    listed: list[str],
    allowed: tuple[Any, ...],
    place: Place,
) -> Expression:
    """Return the expression for the names that match all of `patterns` and none of `unlike`, and are not listed."""
    listed = [name for name in listed if all(converter.matches(pattern, name) for pattern in patterns)]
    if not (patterns or unlike or listed or allowed):
        return any_string()
    where = place.inside("propertyNames")
    try:
        if not allowed:
            return converter.text(where, patterns, unlike, listed)
        own: dict[str, Any] = {"type": "string", keywords.UNLIKE: unlike, keywords.EXCLUDED: listed}
        conditions = [own, *({"pattern": pattern} for pattern in patterns)]
        converter.made[id(own)] = conditions  # so that their ids stay unique
        return converter.value((*conditions, *allowed), where)
    except TooLargeError as error:
        if not converter.lenient:
            raise
        converter.leave_out(place.name, f" has names of further members: {error}")
        return NOTHING
