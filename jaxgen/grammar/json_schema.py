"""A JSON schema as a regular expression.

A schema that a regular expression cannot represent is refused, so every text is JSON and valid against the schema. The
converse is not true: strings have no \\u escapes, members come in the schema's order, and free-form values nest at most
two levels deep. Whitespace and strings are written as by outlines-core, whose own conversion ignores keywords that it
does not know.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import numpy as np

from jaxgen.errors import InputError
from jaxgen.grammar.regex import BYTES, compile_regex, unanchored

CHARACTER = r'(?:[^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])'
STRING = f'"{CHARACTER}*"'
INTEGER = "-?(?:0|[1-9][0-9]*)"
SCALARS = {
    "boolean": "(?:true|false)",
    "null": "null",
    "integer": INTEGER,
    "number": rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
}
DATE = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9_%+-]+(?:\.[A-Za-z0-9_%+-]+)*@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+",
}
FREE_DEPTH = 2

ANNOTATIONS = frozenset(
    "$schema $id $comment $defs definitions title description default examples deprecated readOnly writeOnly "
    "discriminator".split()
)
# The keywords that determine a schema, in order of precedence, and the keywords that may accompany each.
COMPANIONS = {
    "$ref": "",
    "const": "type",
    "enum": "type",
    "anyOf": "",
    "oneOf": "",
    "allOf": "",
    "properties": "type required additionalProperties",
    "prefixItems": "type items minItems maxItems",
}
OF_TYPE = {
    "string": "minLength maxLength pattern format",
    "array": "items minItems maxItems",
    "object": "additionalProperties",
    **dict.fromkeys(SCALARS, ""),
}


def regex_of(schema: dict[str, Any] | str, whitespace_pattern: str | None = None) -> str:
    """Return a pattern for `regex.compile_regex` whose texts are valid against the schema, a dict or its JSON.

    The supported keywords are type (one or a list), properties with required, items, prefixItems, minItems, maxItems,
    minLength, maxLength, pattern, format (date, time, date-time, uuid, email, uri), additionalProperties, enum, const,
    anyOf, oneOf (read as anyOf), allOf of one schema, $ref inside the schema without recursion, and annotations. A
    string may have lengths, a pattern or a format; patterns and formats match the whole string. Objects with
    `properties` get no other members. The values of enum and const are used as they are. `whitespace_pattern` matches
    the whitespace between JSON's tokens; "[ ]?" if None.

    Raises:
        InputError: any other keyword, or a pattern that matches characters which a JSON string must escape.
        TypeError: `schema` is neither a dict nor a str.
    """
    if not isinstance(schema, dict | str):
        raise TypeError(f"a JSON schema must be a dict or its text, got {type(schema).__name__}")
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        plain = json.loads(text, parse_constant=_refuse_constant)
    except (TypeError, ValueError) as error:
        raise InputError(f"the schema is not valid JSON: {error}") from error
    space = "[ ]?" if whitespace_pattern is None else unanchored(whitespace_pattern)
    wrong = _written(space, [byte for byte in range(BYTES) if byte not in b" \t\n\r"])
    if wrong is not None:
        raise InputError(
            f"whitespace_pattern must only match spaces, tabs and newlines; {space!r} also matches {wrong!r}"
        )
    return _Converter(plain, f"(?:{space})").value(plain, "the schema", ())


@dataclass(frozen=True)
class _Converter:
    """Converter of the parts of one schema.

    `where` names a part in messages; `refs` are the references that led to it.
    """

    root: Any
    space: str

    def value(self, schema: Any, where: str, refs: tuple[str, ...]) -> str:
        if schema is True:
            return self.free(FREE_DEPTH)
        if not isinstance(schema, dict):
            raise InputError(f"{where} must be an object, or true for any value, got {schema!r}")
        keywords = [name for name in schema if name not in ANNOTATIONS]
        decisive = next((name for name in COMPANIONS if name in schema), None)
        if decisive is not None:
            _check(keywords, f"{decisive} {COMPANIONS[decisive]}", where)
        elif not keywords:
            return self.free(FREE_DEPTH)
        if decisive == "$ref":
            return self.reference(schema["$ref"], where, refs)
        if decisive in ("const", "enum"):
            values = [schema["const"]] if decisive == "const" else _items(schema, "enum", where)
            return _either([_literal(value) for value in values])
        if decisive in ("anyOf", "oneOf", "allOf"):
            return self.alternatives(schema, decisive, where, refs)
        if decisive == "properties":
            return self.record(schema, where, refs)
        if decisive == "prefixItems":
            return self.fixed(schema, where, refs)
        if "type" not in schema:
            raise InputError(f"{where} needs one of type, {', '.join(COMPANIONS)}; it has only {', '.join(keywords)}")
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not types or not all(isinstance(name, str) and name in OF_TYPE for name in types):
            raise InputError(
                f"{where}: type must be one of {', '.join(OF_TYPE)}, or a list of them, got {schema['type']!r}"
            )
        _check(keywords, " ".join(["type", *(OF_TYPE[name] for name in types)]), where)
        return _either([self.of_type(name, schema, where, refs) for name in types])

    def reference(self, name: Any, where: str, refs: tuple[str, ...]) -> str:
        if not isinstance(name, str) or not name.startswith("#"):
            raise InputError(
                f"{where} refers to {name!r}: only references inside the schema are supported, such as #/$defs/a"
            )
        if name in refs or name == "#":
            raise InputError(f"{where} refers back to {name}: a regular expression cannot recurse; write it out")
        target: Any = self.root
        for part in name.split("/")[1:]:
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or part not in target:
                raise InputError(f"{where} refers to {name}, which is not in the schema")
            target = target[part]
        return self.value(target, name, (*refs, name))

    def alternatives(self, schema: dict[str, Any], keyword: str, where: str, refs: tuple[str, ...]) -> str:
        schemas = _items(schema, keyword, where)
        if keyword == "allOf" and len(schemas) > 1:
            raise InputError(f"{where} has allOf of {len(schemas)} schemas: merge them into one")
        return _either([self.value(s, f"{where}.{keyword}[{i}]", refs) for i, s in enumerate(schemas)])

    def record(self, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> str:
        """Return the pattern of an object's members in order.

        Members up to the last required one are followed by a comma, those after it are preceded by one.
        """
        properties, required = schema["properties"], schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise InputError(f"{where}: properties must be an object and required a list")
        unknown = [name for name in required if name not in properties]
        if unknown:
            raise InputError(f"{where} requires {unknown}, which are not in its properties: add them there")
        members = [
            f"{_literal(name)}{self.space}:{self.space}{self.value(part, f'{where}.properties.{name}', refs)}"
            for name, part in properties.items()
        ]
        needed = [name in required for name in properties]
        after = [_optional(self.comma + member, need) for member, need in zip(members, needed, strict=True)]
        if any(needed):
            last = max(i for i, need in enumerate(needed) if need)
            before = [_optional(members[i] + self.comma, needed[i]) for i in range(last)]
            inner = "".join([*before, members[last], *after[last + 1 :]])
        else:
            inner = _either(["", *(member + "".join(after[i + 1 :]) for i, member in enumerate(members))])
        return rf"\{{{self.space}{inner}{self.space}\}}"

    def fixed(self, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> str:
        items = _items(schema, "prefixItems", where)
        low, high = _bounds(schema, "Items", where)
        if not low <= len(items) <= (len(items) if high is None else high):
            raise InputError(f"{where} has {len(items)} prefixItems: minItems and maxItems must allow that number")
        parts = [self.value(item, f"{where}.prefixItems[{i}]", refs) for i, item in enumerate(items)]
        return rf"\[{self.space}{self.comma.join(parts)}{self.space}\]"

    def of_type(self, name: str, schema: dict[str, Any], where: str, refs: tuple[str, ...]) -> str:
        if name == "string":
            return _string(schema, where)
        if name == "array":
            items = self.value(schema.get("items", True), f"{where}.items", refs)
            return self.series("[]", items, *_bounds(schema, "Items", where))
        if name == "object":
            value = self.value(schema.get("additionalProperties", True), f"{where}.additionalProperties", refs)
            return self.series("{}", f"{STRING}{self.space}:{self.space}{value}")
        return SCALARS[name]

    def free(self, depth: int) -> str:
        """Return the pattern of any JSON value with at most `depth` levels of nesting."""
        kinds = [STRING, *SCALARS.values()]
        if depth:
            inner = self.free(depth - 1)
            kinds += [self.series("[]", inner), self.series("{}", f"{STRING}{self.space}:{self.space}{inner}")]
        return _either(kinds)

    def series(self, brackets: str, item: str, low: int = 0, high: int | None = None) -> str:
        opening, closing = (re.escape(bracket) for bracket in brackets)
        more = "" if high is None else max(high - 1, 0)
        inner = f"{item}(?:{self.comma}{item}){{{max(low - 1, 0)},{more}}}"
        inner = "" if high == 0 else inner if low else f"(?:{inner})?"
        return f"{opening}{self.space}{inner}{self.space}{closing}"

    @property
    def comma(self) -> str:
        return f"{self.space},{self.space}"


def _check(keywords: list[str], allowed: str, where: str) -> None:
    known = allowed.split()
    other = [name for name in keywords if name not in known]
    if other:
        raise InputError(
            f"{where} has {', '.join(other)}, which is not supported there; the supported keywords are "
            f"{', '.join(known)} and annotations. Leave it out and check the value afterwards, or list the values in "
            "an enum"
        )


def _string(schema: dict[str, Any], where: str) -> str:
    given = [name for name in ("pattern", "format", "maxLength", "minLength") if name in schema]
    if len(given) > 1 and given != ["maxLength", "minLength"]:
        raise InputError(
            f"{where} has {' and '.join(given)}: keep only one of them, or put everything into the pattern"
        )
    if "pattern" in given:
        pattern = schema["pattern"]
        wrong = _written(pattern, [*b'"\\', *range(0x20)])
        if wrong is not None:
            raise InputError(
                f"{where} has the pattern {pattern!r}, which matches {wrong!r}: JSON must escape that character, so "
                r"exclude it, as in [^\x00-\x1f\x22\\] instead of a dot"
            )
        return f'"(?:{unanchored(pattern)})"'
    if "format" in given:
        if schema["format"] not in list(FORMATS):
            raise InputError(
                f"{where}: format must be one of {', '.join(FORMATS)}, got {schema['format']!r}; or use pattern"
            )
        return f'"(?:{FORMATS[schema["format"]]})"'
    low, high = _bounds(schema, "Length", where)
    return f'"{CHARACTER}{{{low},{"" if high is None else high}}}"'


def _written(pattern: str, forbidden: list[int]) -> str | None:
    """Return a forbidden byte that occurs in texts of the pattern, as a character; None if there is none."""
    used = np.any(compile_regex(pattern).table >= 0, axis=0)
    return next((chr(byte) for byte in forbidden if used[byte]), None)


def _bounds(schema: dict[str, Any], of: str, where: str) -> tuple[int, int | None]:
    low, high = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    for name, number in ((f"min{of}", low), (f"max{of}", high)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            raise InputError(f"{where}: {name} must be a whole number >= 0, got {number!r}")
    if high is not None and high < low:
        raise InputError(f"{where}: min{of} is {low} and max{of} is {high}: nothing satisfies both")
    return low, high


def _items(schema: dict[str, Any], keyword: str, where: str) -> list[Any]:
    items = schema[keyword]
    if not isinstance(items, list) or not items:
        raise InputError(f"{where}: {keyword} must be a non-empty list, got {items!r}")
    return items


def _literal(value: Any) -> str:
    return re.escape(json.dumps(value, ensure_ascii=False))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it has {name}")


def _optional(pattern: str, needed: bool) -> str:
    return pattern if needed else f"(?:{pattern})?"


def _either(patterns: list[str]) -> str:
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"
