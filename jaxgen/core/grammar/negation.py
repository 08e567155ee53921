"""Negation of JSON schemas: schemas for values that violate a schema, one keyword at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxgen.core.grammar import keywords
from jaxgen.core.grammar.evaluation import dependents
from jaxgen.core.grammar.references import References

_NOT_NEGATED = {"additionalProperties", "patternProperties", "propertyNames", "uniqueItems", "multipleOf", "nullable"}
_COUNTS = {"Length": "string", "Items": "array", "Properties": "object"}


def negated(schema: Any, references: References) -> Any:
    """Return a schema for values that are not valid against `schema`, or None if no such schema is known.

    The result may leave out invalid values that no keyword can describe. It contains negated parts of `schema`.
    """
    if isinstance(schema, bool):
        return not schema
    parts = [references.adopt(part, schema) for part in _violations(schema, references)]
    return {"anyOf": parts} if parts else None if _NOT_NEGATED & schema.keys() else False


def _violations(schema: dict[str, Any], references: References) -> Iterator[dict[str, Any]]:
    """Yield a schema for each way to violate a schema."""
    if "$ref" in schema:
        yield {"not": references.target(schema)}
        if references.old:
            return
    if "type" in schema:
        names = keywords.types(schema)
        numbers = ["integer", "number"] if "number" in names or "integer" in names else []
        if others := [name for name in keywords.TYPES if name not in [*names, *numbers]]:
            yield {"type": others}
        if "integer" in names and "number" not in names:
            yield {"type": "number", keywords.BROKEN: True}
    if (values := keywords.literals(schema)) is not None:
        yield {keywords.EXCLUDED: values}
    if keywords.EXCLUDED in schema:
        yield {"enum": schema[keywords.EXCLUDED]}
    yield from ({"type": "string", "pattern": pattern} for pattern in schema.get(keywords.UNLIKE, []))
    if "pattern" in schema:
        yield {"type": "string", keywords.UNLIKE: [schema["pattern"]]}
    yield from _limits(schema)
    yield from _in_place(schema)
    yield from _members(schema)
    first, others = keywords.items(schema)
    for i, part in enumerate([*first, *([] if others is None else [others])]):
        yield {"type": "array", "prefixItems": [True] * i + [{"not": part}], "minItems": i + 1}
    if "contains" in schema:
        yield {"type": "array", "items": {"not": schema["contains"]}}


def _limits(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for of, kind in _COUNTS.items():
        low, high = keywords.bounds([schema], of)
        if low > 0:
            yield {"type": kind, f"max{of}": low - 1}
        if high is not None:
            yield {"type": kind, f"min{of}": high + 1}
    for name, opposite in (("minimum", "Maximum"), ("maximum", "Minimum")):
        exclusive = schema.get(f"exclusive{name.capitalize()}", False)
        if not isinstance(exclusive, bool):
            yield {"type": "number", opposite.lower(): exclusive}
        if name in schema:
            yield {"type": "number", (opposite.lower() if exclusive is True else f"exclusive{opposite}"): schema[name]}


def _in_place(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from ({"not": part} for part in schema.get("allOf", []))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            yield {"allOf": [{"not": part} for part in schema[keyword]]}
    if "not" in schema:
        yield {"allOf": [schema["not"]]}
    if "if" in schema:
        if "then" in schema:
            yield {"allOf": [schema["if"], {"not": schema["then"]}]}
        if "else" in schema:
            yield {"allOf": [{"not": schema["if"]}, {"not": schema["else"]}]}


def _members(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in schema.get("required", []):
        yield {"type": "object", "properties": {name: False}}
    for name, part in schema.get("properties", {}).items():
        yield {"type": "object", "properties": {name: {"not": part}}, "required": [name]}
    if schema.get("additionalProperties") is False:
        known = [*schema.get("properties", {})], [*schema.get("patternProperties", {})]
        yield {"type": "object", keywords.FURTHER: known}
    for name, parts in dependents(schema).items():
        yield {"type": "object", "required": [name], "allOf": [{"not": {"allOf": parts}}]}
