"""Evaluation of a value against a schema, for the literals of `const` and `enum`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jaxgen.core.grammar import keywords
from jaxgen.core.grammar.byte_automaton import TooLargeError
from jaxgen.core.grammar.keywords import key
from jaxgen.core.grammar.references import References
from jaxgen.core.grammar.stopping import check_stop
from jaxgen.json_file import types_of

MOST = 60_000  # maximum number of evaluations and comparisons for one schema


class Evaluation:
    """Evaluation of values against the parts of one schema.

    `sound` returns a part without the keywords that are left out; `matches` says whether a pattern is in a string.
    """

    def __init__(self, references: References, sound: Callable[[Any], Any], matches: Callable[[str, str], bool]):
        self.references, self.sound, self.matches = references, sound, matches
        self.keys: dict[int, frozenset[str]] = {}  # the keys of each schema's literals
        self.count = 0

    def spend(self) -> None:
        """Count an evaluation or comparison."""
        check_stop()
        self.count += 1
        if self.count > MOST:
            raise TooLargeError(
                "the schema has too many literals and alternatives to compare: simplify it or use anyOf"
            )

    def holds(self, value: Any, schema: Any, depth: int = 0) -> bool | None:
        """Return True if a value is valid against a schema, False if it is not, and None if that is not known."""
        self.spend()
        if isinstance(schema, bool):
            return schema
        if depth > keywords.DEEPEST:
            return None
        schema = self.sound(schema)
        if "$ref" in schema:
            referred = self.holds(value, self.references.target(schema), depth + 1)
            if self.references.old or referred is False:
                return referred
            rest = self.references.adopt({name: part for name, part in schema.items() if name != "$ref"}, schema)
            return _all([referred, self.holds(value, rest, depth + 1)])
        if value is None and schema.get("nullable") and "$schema" not in self.references.root:
            return True
        return _all([self.holds_alone(value, schema, depth), *self._in_place(value, schema, depth + 1)])

    def holds_alone(self, value: Any, schema: dict[str, Any], depth: int = 0) -> bool | None:
        """Evaluate a value as `holds` does, without references and without alternatives and conditions."""
        found = [*self._own(value, schema)]
        if False not in found and isinstance(value, list):
            found += self._array(value, schema, depth + 1)
        elif False not in found and isinstance(value, dict):
            found += self._object(value, schema, depth + 1)
        return _all(found)

    def _own(self, value: Any, schema: dict[str, Any]) -> Iterable[bool | None]:
        kinds = types_of(value)
        yield any(name in keywords.types(schema) for name in kinds)
        if "const" in schema or "enum" in schema:
            yield key(value) in self.literals(schema)
        if keywords.EXCLUDED in schema:
            yield key(value) not in {key(other) for other in schema[keywords.EXCLUDED]}
        if isinstance(value, str):
            yield _within(len(value), keywords.bounds([schema], "Length"))
            yield "pattern" not in schema or self.matches(schema["pattern"], value)
            yield not any(self.matches(pattern, value) for pattern in schema.get(keywords.UNLIKE, []))
        elif "number" in kinds:
            number = keywords.exact(value)
            low, high = keywords.limits([schema])
            yield low is None or number > low[0] or (number == low[0] and not low[1])
            yield high is None or number < high[0] or (number == high[0] and not high[1])
            yield keywords.BROKEN not in schema or "integer" not in kinds
            yield "multipleOf" not in schema or is_multiple(value, schema["multipleOf"])

    def literals(self, schema: dict[str, Any]) -> frozenset[str]:
        """Return the keys of a schema's literals."""
        if id(schema) not in self.keys:
            self.keys[id(schema)] = frozenset(map(key, keywords.literals(schema) or ()))
        return self.keys[id(schema)]

    def _in_place(self, value: Any, schema: dict[str, Any], depth: int) -> Iterable[bool | None]:
        def holds(part: Any) -> bool | None:
            return self.holds(value, part, depth)

        yield _all(map(holds, schema.get("allOf", [])))
        if "anyOf" in schema:
            yield _any(map(holds, schema["anyOf"]))
        if "oneOf" in schema:
            found = [holds(part) for part in schema["oneOf"]]
            yield False if found.count(True) > 1 else None if None in found else found.count(True) == 1
        if "not" in schema:
            yield _negated(holds(schema["not"]))
        if "if" in schema:
            condition = holds(schema["if"])
            then, other = holds(schema.get("then", True)), holds(schema.get("else", True))
            yield then if condition or then == other else other if condition is False else None

    def _array(self, value: list[Any], schema: dict[str, Any], depth: int) -> Iterable[bool | None]:
        first, others = keywords.items(schema)
        yield _within(len(value), keywords.bounds([schema], "Items"))
        for i, item in enumerate(value):
            yield self.holds(item, first[i] if i < len(first) else True if others is None else others, depth)
        if "contains" in schema:
            yield _any(self.holds(item, schema["contains"], depth) for item in value)
        if schema.get("uniqueItems"):
            yield len(set(map(key, value))) == len(value)

    def _object(self, value: dict[str, Any], schema: dict[str, Any], depth: int) -> Iterable[bool | None]:
        yield _within(len(value), keywords.bounds([schema], "Properties"))
        yield all(name in value for name in schema.get("required", []))
        if keywords.FURTHER in schema:
            known, patterns = schema[keywords.FURTHER]
            others = [name for name in value if name not in known]
            yield any(not any(self.matches(pattern, name) for pattern in patterns) for name in others)
        for name, part in value.items():
            yield self.holds(name, schema.get("propertyNames", True), depth)
            for inner in self.of_member(name, schema):
                yield self.holds(part, inner, depth)
        for name, needed in dependents(schema).items():
            if name in value:
                for inner in needed:
                    yield self.holds(value, inner, depth)

    def of_member(self, name: str, schema: dict[str, Any]) -> list[Any]:
        """Return the schemas that a schema has for the member with a name."""
        known = schema.get("properties", {})
        found = [known[name]] if name in known else []
        found += [part for pattern, part in schema.get("patternProperties", {}).items() if self.matches(pattern, name)]
        return found or [schema.get("additionalProperties", True)]


def dependents(schema: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the schemas that apply if a member with a name is present."""
    found: dict[str, list[Any]] = {}
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, part in schema.get(keyword, {}).items():
            found.setdefault(name, []).append({"required": part} if isinstance(part, list) else part)
    return found


def is_multiple(value: int | float, of: int | float) -> bool:
    """Return True if a number is a multiple of another one, both exactly and in floating point."""
    if isinstance(value, int) and isinstance(of, int):
        return value % of == 0
    if (keywords.exact(value) / keywords.exact(of)).denominator != 1:
        return False
    try:
        return (value / of).is_integer() if isinstance(of, float) else value % of == 0
    except OverflowError:
        return False


def _within(count: int, limits: tuple[int, int | None]) -> bool:
    low, high = limits
    return low <= count and (high is None or count <= high)


def _all(found: Iterable[bool | None]) -> bool | None:
    results = set()
    for one in found:
        if one is False:
            return False
        results.add(one)
    return None if None in results else True


def _any(found: Iterable[bool | None]) -> bool | None:
    return _negated(_all(map(_negated, found)))


def _negated(found: bool | None) -> bool | None:
    return None if found is None else not found
