"""Random JSON schemas made of supported keywords, and a validator of JSON texts."""

from __future__ import annotations

import datetime
import json
import random
import uuid
from typing import Any

import jsonschema
import regress

PATTERNS = [
    "^[a-c]{1,4}$",
    r"^\d{2,4}$",
    r"^\D\S\W$",
    r"^\w+@\w{1,3}\.[a-z]{2}$",
    r"^\s?[^\s]{1,3}$",
    r"yes|no",
    r"^(?:x|y)$|^z{2,3}$",
    r"^.{0,5}$",
    r"[^a]{2}",
    r'^"[\\/\n]\u00e9$',
    r"^(?<year>[12]\d{3})-\p{Lu}\P{L}?$",
    r"^[\u{1F600}-\u{1F64F}é]{1,2}$",
]
WORDS = ["a", "kind", "naïve", 'x"y', "tab\there", "👋", "", "$ref", "type", "line\nbreak", "\u007f", "</s>"]


class RandomSchemas:
    """A generator of random schemas."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.definitions: dict[str, Any] = {}

    def root(self) -> dict[str, Any]:
        self.definitions = {}
        schema = self.schema(3)
        if self.random.random() < 0.3:
            schema["title"] = "A title"
        return {**schema, "$defs": self.definitions} if self.definitions else schema

    def schema(self, depth: int) -> dict[str, Any]:
        kinds = [self.string, self.scalar, self.literal]
        kinds += [self.object, self.object, self.array, self.choice, self.reference] * (depth > 0)
        return self.random.choice(kinds)(depth)

    def string(self, _: int) -> dict[str, Any]:
        low, high = sorted(self.random.choices(range(9), k=2))
        kinds: list[dict[str, Any]] = [
            {},
            {"minLength": low},
            {"maxLength": high},
            {"minLength": low, "maxLength": high},
            {"pattern": self.random.choice(PATTERNS)},
            {"pattern": self.random.choice(PATTERNS)},
            {"format": self.random.choice(["date", "time", "date-time", "uuid", "email", "uri", "ipv4", "color"])},
            {"pattern": self.random.choice(PATTERNS), "maxLength": high + 2},
            {"format": "uri", "minLength": low, "maxLength": high + 12},
        ]
        return {"type": "string", **self.random.choice(kinds)}

    def scalar(self, _: int) -> dict[str, Any]:
        if self.random.random() < 0.4:
            return self.integer()
        if self.random.random() < 0.3:
            return self.number()
        names = ["integer", "number", "boolean", "null"]
        return {"type": self.random.choice([*names, self.random.sample(names, 2)])}

    def integer(self) -> dict[str, Any]:
        low, high = sorted(self.random.choice([-1, 1]) * self.random.randrange(10**digits) for digits in (1, 5))
        bounds = [("minimum", low), ("exclusiveMinimum", low - 0.5), ("maximum", high), ("exclusiveMaximum", high + 1)]
        return {"type": "integer", **dict(self.random.sample(bounds, self.random.randint(1, 4)))}

    def number(self) -> dict[str, Any]:
        low, high = sorted(
            self.random.choice([self.random.uniform(-9, 9), self.random.randint(-9, 9)]) for _ in range(2)
        )
        low, high = round(low, 2), round(high, 2) + 1
        bounds = [("minimum", low), ("exclusiveMinimum", low), ("maximum", high), ("exclusiveMaximum", high)]
        schema: dict[str, Any] = {"type": "number", **dict(self.random.sample(bounds, self.random.randint(1, 3)))}
        return schema | ({"multipleOf": self.random.choice([1, 2, 0.5, 0.01])} if self.random.random() < 0.3 else {})

    def value(self, depth: int = 1) -> Any:
        values = [None, True, False, 0, -3, 2.5, 1e30, self.random.choice(WORDS)]
        if depth:
            values += [[self.value(0), self.value(0)], {self.random.choice(WORDS): self.value(0)}, [], {}]
        return self.random.choice(values)

    def literal(self, _: int) -> dict[str, Any]:
        if self.random.random() < 0.3:
            return {"const": self.value()}
        values = [self.value() for _ in range(self.random.randint(1, 4))]
        return {"type": "string", "enum": ["b", *values]} if self.random.random() < 0.3 else {"enum": values}

    def object(self, depth: int) -> dict[str, Any]:
        if self.random.random() < 0.2:
            return {"type": "object", "additionalProperties": self.random.choice([True, False, self.schema(depth - 1)])}
        names = self.random.sample(WORDS, self.random.randint(0, 4))
        schema: dict[str, Any] = {"properties": {name: self.inner(depth) for name in names}}
        if self.random.random() < 0.8:
            schema["type"] = self.random.choice(["object", ["object", "null"]])
        if self.random.random() < 0.7:
            schema["required"] = [name for name in names if self.random.random() < 0.6]
        if self.random.random() < 0.3:
            schema["additionalProperties"] = self.random.choice([False, self.schema(0)])
        return schema | self.condition(names)

    def condition(self, names: list[str]) -> dict[str, Any]:
        """Return a further condition on an object with members of these names."""
        name, other = (self.random.choice(names or WORDS) for _ in range(2))
        required, without = {"required": [name]}, {"required": [other]}
        return self.random.choice(
            [
                *[{}] * 8,
                {"minProperties": self.random.randint(0, 2)},
                {"maxProperties": self.random.randint(1, 3)},
                {"patternProperties": {self.random.choice(["^a", "k"]): self.schema(0)}},
                {"propertyNames": {"maxLength": 4}},
                {"dependentRequired": {name: [other]}},
                {"anyOf": [required, without]},
                {"oneOf": [required, without]},
                {"not": required},
                {"if": required, "then": without, "else": {"minProperties": 1}},
                {"allOf": [{"properties": {name: self.schema(0)}}, without]},
            ]
        )

    def inner(self, depth: int) -> dict[str, Any]:
        return {"$ref": "#"} if self.random.random() < 0.05 else self.schema(depth - 1)

    def array(self, depth: int) -> dict[str, Any]:
        if self.random.random() < 0.3:
            size = self.random.randint(1, 3)
            schema: dict[str, Any] = {"prefixItems": [self.schema(depth - 1) for _ in range(size)]}
            return {**schema, **self.random.choice([{}, {"minItems": size}, {"items": False, "type": "array"}])}
        low, high = sorted(self.random.choices(range(4), k=2))
        limits = self.random.choice([{}, {"minItems": low}, {"maxItems": high}, {"minItems": low, "maxItems": high}])
        if self.random.random() < 0.2:
            return {"type": "array", "items": {"enum": [1, "a", None, True, 1.0]}, "uniqueItems": True, **limits}
        contains = {"contains": self.schema(0)} if self.random.random() < 0.1 else {}
        items = contains if self.random.random() < 0.1 else {"items": self.inner(depth), **contains}
        return {"type": "array", **items, **limits}

    def choice(self, depth: int) -> dict[str, Any]:
        kind = self.random.random()
        if kind < 0.1:
            return {"allOf": [self.schema(depth - 1)]}
        if kind < 0.2:
            return {"allOf": [self.schema(depth - 1), self.random.choice([self.schema(0), {"not": self.schema(0)}])]}
        if kind < 0.6:
            return {"anyOf": [self.schema(depth - 1) for _ in range(self.random.randint(1, 3))]}
        if kind < 0.8:
            tagged = [
                {"properties": {"kind": {"const": name}, "value": self.schema(depth - 1)}, "required": ["kind"]}
                for name in self.random.sample(WORDS, 2)
            ]
            return {"oneOf": [{**schema, "type": "object"} for schema in tagged]}
        return {"oneOf": [self.schema(depth - 1) for _ in range(2)]}

    def reference(self, depth: int) -> dict[str, Any]:
        if not self.definitions or self.random.random() < 0.5:
            schema = self.schema(depth - 1)
            self.definitions[f"d/{len(self.definitions)}"] = schema
        name = self.random.choice(list(self.definitions))
        return {"$ref": "#/$defs/" + name.replace("/", "~1")}


def _pattern(_, pattern, instance, schema):
    if isinstance(instance, str) and regress.Regex(pattern, "u").find(instance) is None:
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


_FORMATS = jsonschema.FormatChecker(["date", "email", "uuid", "ipv4", "ipv6"])


@_FORMATS.checks("time", raises=ValueError)
def _time(value: object) -> bool:
    return not isinstance(value, str) or datetime.time.fromisoformat(value).tzinfo is not None


@_FORMATS.checks("date-time", raises=ValueError)
def _date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.datetime.fromisoformat(value).tzinfo is not None


@_FORMATS.checks("uuid", raises=ValueError)
def _uuid(value: object) -> bool:
    return not isinstance(value, str) or str(uuid.UUID(value)) == value


_Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})


def problem(schema: dict[str, Any], text: str) -> str | None:
    """Return None if a text is valid JSON that matches the schema; otherwise, say what is wrong."""
    try:
        value = json.loads(text, parse_int=lambda digits: int(digits[:4000]))
        _Validator(schema, format_checker=_FORMATS).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{str(error)[:500]}\nin {text!r}\nagainst {json.dumps(schema)}"
    return None
