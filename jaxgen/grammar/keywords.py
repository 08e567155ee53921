"""Reading and validation of JSON schema keywords. Invalid keywords raise an `InputError` that names the schema."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn
from urllib.parse import unquote

from jaxgen.errors import InputError, shown
from jaxgen.text.json_file import parse_json

LONGEST = 1_000_000  # maximum length of a schema, in characters
DEEPEST = 64  # maximum nesting depth
MOST_DIGITS = 40  # maximum number of digits in a bound; n digits need about n * n states before merging
_INDEX = re.compile("0|[1-9][0-9]{0,8}")  # an index in a JSON pointer

ANNOTATIONS = frozenset(
    "$schema $comment $defs definitions title description default examples deprecated readOnly writeOnly "
    "discriminator".split()
)
# The keywords that decide what a schema matches, in order of precedence, each with the keywords that may accompany it.
COMPANIONS = {"$ref": "", "const": "type", "enum": "type", "anyOf": "", "oneOf": "", "allOf": ""}
# The keywords for bounds on numbers, each with a function for the nearest integer that satisfies the bound.
LOWER = {"minimum": math.ceil, "exclusiveMinimum": lambda bound: math.floor(bound) + 1}
UPPER = {"maximum": math.floor, "exclusiveMaximum": lambda bound: math.ceil(bound) - 1}
BOUNDS = (*LOWER, *UPPER)
OF_TYPE = {
    "string": "minLength maxLength pattern format",
    "array": "items prefixItems minItems maxItems",
    "object": "properties required additionalProperties",
    **dict.fromkeys(("integer", "number"), " ".join(BOUNDS)),  # json_schema.py rejects bounds for the type "number"
    **dict.fromkeys(("boolean", "null"), ""),
}
_TYPES = {str: "string", list: "array", dict: "object", bool: "boolean", type(None): "null"}


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


def bare(name: str) -> str:
    """Return a name as shown in messages: without quotation marks, unless it is empty."""
    return shown(name)[1:-1] or "''"


def is_base(name: Any) -> bool:
    """Return True for an `$id` that names the whole schema: a string without a fragment."""
    return isinstance(name, str) and "#" not in name.removesuffix("#")


def target(root: Any, name: Any, where: str) -> Any:
    """Return the schema that a reference points to."""
    if not isinstance(name, str) or (name != "#" and not name.startswith("#/")):
        refuse(where, f" refers to {shown(name)}: only references inside the schema are supported, such as #/$defs/a")
    found: Any = root
    for part in name.split("/")[1:]:
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and _INDEX.fullmatch(part):
            found = found[int(part)] if int(part) < len(found) else None
        else:
            found = found.get(part) if isinstance(found, dict) else None
        if found is None:
            refuse(where, f" refers to {shown(name)}, which is not in the schema")
    return found


def types(schema: dict[str, Any], where: str = "") -> list[str]:
    """Return the names of a schema's types; without `type`, infer object and array from other keywords."""
    if "type" not in schema:
        if "properties" in schema or "prefixItems" in schema:
            return ["object"] * ("properties" in schema) + ["array"] * ("prefixItems" in schema)
        given = ", ".join(bare(name) for name in schema if name not in ANNOTATIONS)
        refuse(where, f" needs one of type, {', '.join(COMPANIONS)}, properties, prefixItems; it has only {given}")
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not names or not all(isinstance(name, str) and name in OF_TYPE for name in names):
        refuse(where, f": type must be one of {', '.join(OF_TYPE)}, or a list of them, got {shown(schema['type'])}")
    return list(dict.fromkeys(names))


def types_of(value: Any) -> tuple[str, ...]:
    """Return the types of a JSON value; an integer is also a number."""
    if type(value) in _TYPES:
        return (_TYPES[type(value)],)
    return ("integer", "number") if isinstance(value, int) or value.is_integer() else ("number",)


def literals(schema: dict[str, Any], where: str = "") -> list[Any]:
    """Return the values of const or enum that have the schema's type."""
    values = [schema["const"]] if "const" in schema else items(schema, "enum", where)
    if "type" in schema:
        names = types(schema, where)
        values = [value for value in values if any(name in names for name in types_of(value))]
    if not values:
        refuse(where, f" has no value of the type {shown(schema['type'])}")
    return values


def members(schema: dict[str, Any], where: str = "") -> tuple[dict[str, Any] | None, list[str]]:
    """Return an object's properties (None if there are none), and the names of the required ones."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) and "properties" in schema:
        refuse(where, f": properties must be an object, got {shown(properties)}")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        refuse(where, f": required must be a list of names, got {shown(required)}")
    unknown = [name for name in required if name not in (properties or {})]
    if unknown:
        refuse(where, f" requires {shown(unknown)}, which are not in its properties: add them there")
    further = schema.get("additionalProperties", True)
    if not isinstance(further, bool | dict):
        refuse(where, f": additionalProperties must be a schema or a boolean, got {shown(further)}")
    return properties, required


def bounds(schema: dict[str, Any], of: str, where: str = "") -> tuple[int, int | None]:
    """Return the lower limit, and the upper limit or None, for a string's length or an array's number of items."""
    low, high = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    for name, number in ((f"min{of}", low), (f"max{of}", high)):
        if name in schema and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            refuse(where, f": {name} must be a whole number >= 0, got {shown(number)}")
    if high is not None and high < low:
        refuse(where, f": min{of} is {shown(low)} and max{of} is {shown(high)}: nothing satisfies both")
    return low, high


def integer_bounds(schema: dict[str, Any], where: str = "") -> tuple[int | None, int | None]:
    """Return the smallest and the largest integer that the schema's bounds allow; None means no bound."""
    given = {name: schema[name] for name in BOUNDS if name in schema}
    for name, bound in given.items():
        if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) >= 10**MOST_DIGITS:
            refuse(where, f": {name} must be a number of at most {MOST_DIGITS} digits, got {shown(bound)}")
    low = max((nearest(given[name]) for name, nearest in LOWER.items() if name in given), default=None)
    high = min((nearest(given[name]) for name, nearest in UPPER.items() if name in given), default=None)
    if low is not None and high is not None and low > high:
        bounds = " and ".join(f"{name} {shown(bound)}" for name, bound in given.items())
        refuse(where, f" has {bounds}: no integer satisfies both")
    return low, high


def items(schema: dict[str, Any], keyword: str, where: str = "") -> list[Any]:
    """Return a keyword's list, which must not be empty."""
    values = schema[keyword]
    if not isinstance(values, list) or not values:
        refuse(where, f": {keyword} must be a non-empty list, got {shown(values)}")
    return values


def check(keywords: list[str], allowed: str, where: str) -> None:
    """Raise an error for keywords that are not allowed."""
    known = allowed.split()
    other = [bare(name) for name in keywords if name not in known]
    if other:
        refuse(
            where,
            f" has {', '.join(other[:5])}, which is not supported there; the supported keywords are {', '.join(known)} "
            "and annotations. Leave it out and check the value afterwards, or list the values in an enum",
        )
