"""Detection of disjoint schemas. If no value is valid against two alternatives, oneOf is equivalent to anyOf.

All answers are conservative: if in doubt, schemas are assumed to overlap.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

from jaxgen.errors import InputError
from jaxgen.grammar import keywords

MOST = 200_000  # maximum number of comparisons between two schemas, or between a value and a schema
ALTERNATIVES = ("anyOf", "oneOf", "allOf")  # only an allOf of a single schema is supported


class Overlaps:
    """Comparisons between the parts of one schema. The schema must already have been checked."""

    def __init__(self, root: Any):
        self.root = root
        self.known: dict[tuple[int, int], bool] = {}
        self.keys: dict[int, set[str]] = {}  # the keys of each schema's literals
        self.compared = 0

    def excludes(self, one: Any, other: Any) -> bool:
        """Return True if no text generated for `one` is valid against `other`."""
        one, other = self.resolved(one), self.resolved(other)
        pair = id(one), id(other)
        if pair not in self.known:
            self.known[pair] = False  # the answer if recursion leads back to this pair
            self.known[pair] = self._compare(one, other)
        return self.known[pair]

    def _count(self) -> None:
        self.compared += 1
        if self.compared > MOST:
            raise InputError("the schema's oneOf has too many alternatives to compare: use anyOf")

    def resolved(self, schema: Any) -> Any:
        """Return the schema at the end of a chain of references."""
        while isinstance(schema, dict) and "$ref" in schema:
            self._count()
            schema = keywords.target(self.root, schema["$ref"], "")
        return schema

    def _compare(self, one: Any, other: Any) -> bool:
        self._count()
        if _is_free(one) or _is_free(other):
            return False
        for keyword in ALTERNATIVES:
            if keyword in one:
                return all(self.excludes(part, other) for part in one[keyword])
        for keyword in ALTERNATIVES:
            if keyword in other:
                return all(self.excludes(one, part) for part in other[keyword])
        if _has_literals(one):
            return not any(self.may_be(value, other) for value in keywords.literals(one))
        if _has_literals(other):
            return not any(self.may_be(value, one) for value in keywords.literals(other))
        pairs = itertools.product(keywords.types(one), _valid_types(other))
        return all(self.differ(first, second, one, other) for first, second in pairs)

    def differ(self, first: str, second: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return True if schema `one` generates no value of type `first` that `other` accepts as type `second`."""
        if first != second:
            return {first, second} != {"integer", "number"}
        if first == "integer":
            return _apart(keywords.integer_bounds(one), keywords.integer_bounds(other))
        if first == "string":
            return _apart(keywords.bounds(one, "Length"), keywords.bounds(other, "Length"))
        if first == "array":
            prefix = one.get("prefixItems", [])
            sizes = (len(prefix), len(prefix)) if prefix else keywords.bounds(one, "Items")
            pairs = zip(prefix, other.get("prefixItems", []), strict=False)
            return _apart(sizes, keywords.bounds(other, "Items")) or any(self.excludes(*pair) for pair in pairs)
        return first == "object" and self._objects_differ(one, other)

    def _objects_differ(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        ours, needed = keywords.members(one)
        theirs, required = keywords.members(other)
        if ours is None:
            return one.get("additionalProperties") is False and bool(required)
        if any(name not in ours for name in required):
            return True
        if other.get("additionalProperties") is False and any(name not in (theirs or {}) for name in needed):
            return True
        shared = [name for name in ours if name in (theirs or {}) and (name in needed or name in required)]
        return any(self.excludes(ours[name], (theirs or {})[name]) for name in shared)

    def may_be(self, value: Any, schema: Any, depth: int = 0) -> bool:
        """Return True if a value may be valid against a schema, and False only if the value is certainly not valid."""
        self._count()
        schema = self.resolved(schema)
        if _is_free(schema) or depth > keywords.DEEPEST:
            return True
        for keyword in ALTERNATIVES:
            if keyword in schema:
                return any(self.may_be(value, part, depth + 1) for part in schema[keyword])
        if _has_literals(schema):
            if id(schema) not in self.keys:
                self.keys[id(schema)] = {_key(literal) for literal in keywords.literals(schema)}
            return _key(value) in self.keys[id(schema)]
        if not any(name in _valid_types(schema) for name in keywords.types_of(value)):
            return False
        if isinstance(value, int) and not isinstance(value, bool) and "integer" in _valid_types(schema):
            return not _apart((value, value), keywords.integer_bounds(schema))
        if isinstance(value, str):
            return not _apart((len(value), len(value)), keywords.bounds(schema, "Length"))
        if isinstance(value, list):
            if _apart((len(value), len(value)), keywords.bounds(schema, "Items")):
                return False
            pairs = zip(value, schema.get("prefixItems", []), strict=False)
            return all(self.may_be(*pair, depth + 1) for pair in pairs)
        if isinstance(value, dict):
            properties, required = keywords.members(schema)
            known = properties or {}
            if any(name not in value for name in required):
                return False
            if schema.get("additionalProperties") is False and any(name not in known for name in value):
                return False
            return all(self.may_be(part, known[name], depth + 1) for name, part in value.items() if name in known)
        return True


def _is_free(schema: Any) -> bool:
    return not isinstance(schema, dict) or all(name in keywords.ANNOTATIONS or name == "$id" for name in schema)


def _valid_types(schema: dict[str, Any]) -> list[str]:
    """Return the types of valid values. Without `type`, all types are valid, although only some are generated."""
    return keywords.types(schema) if "type" in schema else list(keywords.OF_TYPE)


def _has_literals(schema: dict[str, Any]) -> bool:
    return "const" in schema or "enum" in schema


def _apart(one: tuple[int | None, int | None], other: tuple[int | None, int | None]) -> bool:
    """Return True if no number is in both ranges; None means no bound. Neither range may be empty."""
    lows = [low for low, _ in (one, other) if low is not None]
    highs = [high for _, high in (one, other) if high is not None]
    return max(lows, default=-math.inf) > min(highs, default=math.inf)


def _key(value: Any) -> str:
    """Return a string that is the same for values that JSON Schema considers equal.

    JSON Schema considers 1 and 1.0 equal, but not 1 and true. Integers are read as floats, as in many programs, so
    different large integers may become equal.
    """
    return json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)
