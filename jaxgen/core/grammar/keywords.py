"""Keywords of JSON schemas: which there are, and which values they may have."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NoReturn

from jaxgen.errors import InputError, bare, shown
from jaxgen.json_file import parse_json

LONGEST = 1_000_000  # maximum length of a schema, in characters
DEEPEST = 64  # maximum nesting depth
MOST_DIGITS = 40  # maximum number of digits in a bound; n digits need about n * n states before merging

TYPES = ("string", "array", "object", "integer", "number", "boolean", "null")
IN_PLACE = ("allOf", "anyOf", "oneOf")
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# The keywords that apply to values of one type only.
OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
               "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
    "number": (*BOUNDS, "multipleOf"),
}  # fmt: skip
COMMON = ("type", "enum", "const", "$ref", *IN_PLACE, "not", "if", "then", "else", "nullable")
# Keywords for internal use, in schemas that `negation.py` makes: excluded values, patterns that must not match, and
# numbers that are not integers, objects with a member that has none of some names and matches none of some patterns.
EXCLUDED, UNLIKE, BROKEN, FURTHER = " excluded", " unlike", " broken", " further"
SUPPORTED = frozenset(
    [*COMMON, *(name for names in OF_TYPE.values() for name in names), EXCLUDED, UNLIKE, BROKEN, FURTHER]
)
REJECTED = frozenset(
    "$dynamicRef $recursiveRef unevaluatedItems unevaluatedProperties minContains maxContains extends disallow "
    "divisibleBy formatMinimum formatMaximum formatExclusiveMinimum formatExclusiveMaximum".split()
)
ANNOTATIONS = frozenset(
    "$schema $comment $id id $anchor $dynamicAnchor $recursiveAnchor $vocabulary $defs definitions title description "
    "default examples example deprecated readOnly writeOnly discriminator contentMediaType contentEncoding "
    "contentSchema xml externalDocs".split()
)
_SINGLE = ("not", "if", "then", "else", "contains", "propertyNames", "items", "additionalProperties", "additionalItems")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
_LISTS = (*IN_PLACE, "prefixItems", "items")
_VENDOR = re.compile(r"[^A-Za-z$]|[xX]-|\$\$")  # beginnings of names that are annotations of some program
_ANCHOR = re.compile("[A-Za-z_][-A-Za-z0-9._]*")


def given(schema: Any) -> dict[str, Any] | str:
    """Return the schema itself, or the schema of a pydantic class or TypeAdapter."""
    for method in ("model_json_schema", "json_schema"):
        if callable(made := getattr(schema, method, None)):
            schema = made()
    if not isinstance(schema, dict | str):
        raise TypeError(f"a JSON schema must be a dict or its text, or a pydantic class, got {type(schema).__name__}")
    return schema


def plain(schema: dict[str, Any] | str) -> Any:
    """Return a copy of a schema (a dict or JSON). In the copy, no object occurs twice, and there are no cycles."""
    text = schema if isinstance(schema, str) else _dumped(schema)
    if len(text) > LONGEST:
        raise InputError(f"the schema has more than {LONGEST} characters, the supported maximum")
    try:
        return parse_json(text)
    except InputError as error:
        hint = "; pass a dict or the JSON itself, not its path" if text.strip() and "{" not in text else ""
        raise InputError(f"the schema is {error}{hint}") from error


def _dumped(schema: dict[str, Any]) -> str:
    """Return the JSON of a dict. Stop early if the JSON is too long, for example because of shared objects."""
    pieces, size = [], 0
    try:
        for piece in json.JSONEncoder().iterencode(schema):
            pieces.append(piece)
            size += len(piece)
            if size > LONGEST:
                break
    except RecursionError as error:
        raise InputError("the schema is not valid JSON: nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise InputError(f"the schema is not valid JSON: {error}") from error
    return "".join(pieces)


def refuse(where: str, reason: str) -> NoReturn:
    """Raise an error about the schema named `where`."""
    raise InputError(f"{where if len(where) < 200 else f'{where[:80]}...{where[-80:]}'}{reason}")


def inside(where: str, *names: str | int) -> str:
    """Return the name of a part of a schema."""
    return where + "".join(f"[{name}]" if isinstance(name, int) else f".{bare(name)}" for name in names)


def is_schema(value: Any) -> bool:
    """Return True for an object or a boolean."""
    return isinstance(value, bool | dict)


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the objects and booleans inside a schema that are schemas, each with the keys that lead there."""
    for name in _SINGLE:
        if is_schema(schema.get(name)):
            yield (name,), schema[name]
    yield from (((name, key), part) for name, key, part in _parts(schema) if is_schema(part))


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, str | int, Any]]:
    """Yield the parts of a schema's maps and lists of schemas, each with the keyword and the key or index."""
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            yield from ((name, key, part) for key, part in value.items())
        elif name in _LISTS and isinstance(value, list):
            yield from ((name, index, part) for index, part in enumerate(value))


def malformed(schema: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the invalid values, each with the keys that lead there and the reason.

    The reason continues a sentence that begins with the name of the value without its last key.
    """
    for name, value in schema.items():
        if name in _CHECKS and (reason := _fault(name, value, schema)) is not None:
            yield (name,), f": {bare(name)} must be {reason}, got {shown(value)}"
    for name, key, part in _parts(schema):
        if not is_schema(part) and name != "dependencies":
            yield (name, key), f"{inside('', key)} must be an object, or true for any value, got {shown(part)}"


def unsupported(schema: dict[str, Any]) -> Iterator[tuple[tuple[str], str]]:
    """Yield the keywords that are unsupported, or probably misspelled, as `malformed` does."""
    for name in schema:
        if name in REJECTED:
            yield (name,), f" has {name}, which is not supported"
        elif not (name in SUPPORTED or name in ANNOTATIONS or _VENDOR.match(name)) and (near := _misspelled(name)):
            yield (
                (name,),
                (f" has {bare(name)}, which is not a keyword: write {near}, or begin an annotation's name with x-"),
            )


@functools.lru_cache(10_000)
def _misspelled(name: str) -> str | None:
    """Return the keyword that a name was probably meant to be."""
    known = {keyword.lower(): keyword for keyword in [*sorted(SUPPORTED), *sorted(REJECTED)]}
    near = difflib.get_close_matches(name.lower()[:40], known, 1, 0.85)
    return known[near[0]] if near else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of them"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a non-empty list"),
    **dict.fromkeys(("$ref", "$dynamicRef", "pattern", "format"), (lambda value: isinstance(value, str), "a string")),
    "$id": (lambda value: isinstance(value, str) and "#/" not in value, "a URI without a path after #"),
    "$anchor": (lambda value: isinstance(value, str) and bool(_ANCHOR.fullmatch(value)), "a name"),
    "items": (lambda value: is_schema(value) or isinstance(value, list), "an object, or true for any value"),
    "required": (_are_names, "a list of names"),
    **dict.fromkeys(("uniqueItems", "nullable"), (lambda value: isinstance(value, bool), "true or false")),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number > 0"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_are_names, value.values())),
        "an object of lists of names",
    ),
    "dependencies": (
        lambda value: isinstance(value, dict) and all(is_schema(part) or _are_names(part) for part in value.values()),
        "an object of lists of names or schemas",
    ),
    **dict.fromkeys(
        (*IN_PLACE, "prefixItems"), (lambda value: isinstance(value, list) and bool(value), "a non-empty list")
    ),
    **dict.fromkeys(
        [name for name in _MAPS if name != "dependencies"], (lambda value: isinstance(value, dict), "an object")
    ),
    **dict.fromkeys(
        [name for name in _SINGLE if name != "items"], (is_schema, "a schema or a boolean")
    ),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "a whole number >= 0"),
    ),
    **dict.fromkeys(BOUNDS, (_is_number, "a number")),
}  # fmt: skip


def conflicts(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield an upper limit that is below the lower one, with the reason. The values must be valid."""
    for of in ("Length", "Items", "Properties"):
        low, high = bounds([schema], of)
        if high is not None and low > high:
            yield f"max{of}", f" has min{of} {low} and max{of} {high}: nothing satisfies both"
    low, high = limits([schema])
    if low is not None and high is not None and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        given = " and ".join(f"{name} {shown(schema[name])}" for name in BOUNDS if name in schema)
        yield "exclusiveMaximum" if high[1] else "maximum", f" has {given}: no number satisfies both"


def _fault(name: str, value: Any, schema: dict[str, Any]) -> str | None:
    """Return what the value of a keyword must be, or None if it is valid."""
    if name in ("exclusiveMinimum", "exclusiveMaximum"):
        partner = "minimum" if name == "exclusiveMinimum" else "maximum"
        valid = _is_number(value) or (isinstance(value, bool) and (not value or _is_number(schema.get(partner))))
        return None if valid else f"a number, or true beside {partner}"
    if name == "items" and isinstance(value, list) and "prefixItems" in schema:
        return "a schema or a boolean beside prefixItems"
    check, reason = _CHECKS[name]
    return None if check(value) else reason


def types(schema: dict[str, Any]) -> list[str]:
    """Return the types that a schema names, or all types."""
    names = schema.get("type", [*TYPES])
    return list(dict.fromkeys(names if isinstance(names, list) else [names]))


def key(value: Any) -> str:
    """Return a string that is the same for values that JSON Schema considers equal.

    JSON Schema considers 1 and 1.0 equal, but not 1 and true. Integers are read as floats, as in many programs, so
    different large integers may become equal.
    """
    if isinstance(value, str):
        return json.dumps(value)
    return json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)


def literals(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values that const and enum allow; None if the schema has neither."""
    if "const" not in schema:
        return schema.get("enum")
    const = schema["const"]
    return [const] if "enum" not in schema or key(const) in map(key, schema["enum"]) else []


def bounds(schemas: list[dict[str, Any]], of: str) -> tuple[int, int | None]:
    """Return the limits of a length or number of items or properties; the upper one is None if there is none."""
    low = max([0, *(int(schema[f"min{of}"]) for schema in schemas if f"min{of}" in schema)])
    high = [int(schema[f"max{of}"]) for schema in schemas if f"max{of}" in schema]
    return low, min(high, default=None)


def exact(number: int | float) -> Fraction:
    """Return the number that a bound stands for: a float of fewer than 16 digits stands for these digits."""
    return Fraction(repr(number)) if isinstance(number, float) and abs(number) < 2**53 else Fraction(number)


def limits(schemas: list[dict[str, Any]]) -> tuple[tuple[Fraction, bool] | None, tuple[Fraction, bool] | None]:
    """Return the lower and the upper bound of numbers, each with True if it is exclusive; None means no bound."""
    lows: list[tuple[Fraction, bool]] = []
    highs: list[tuple[Fraction, bool]] = []
    for schema in schemas:
        for found, name, exclusive in (
            (lows, "minimum", "exclusiveMinimum"),
            (highs, "maximum", "exclusiveMaximum"),
        ):
            other = schema.get(exclusive, False)
            if name in schema:
                found.append((exact(schema[name]), other is True))
            if not isinstance(other, bool):
                found.append((exact(other), True))
    return max(lows, default=None), min(highs, key=lambda bound: (bound[0], not bound[1]), default=None)


def items(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the schemas of an array's first items, and the schema of the others (None if it is not given)."""
    if isinstance(schema.get("items"), list):
        return schema["items"], schema.get("additionalItems")
    return schema.get("prefixItems", []), schema.get("items")
