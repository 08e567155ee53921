import copy
import json
import math
import re
from typing import Any

import numpy as np
import pytest

from jaxgen.core.grammar.byte_automaton import ByteAutomaton, compile_expression, distances, edges
from jaxgen.core.grammar.formats import FORMATS
from jaxgen.core.grammar.json_schema import read_schema
from jaxgen.errors import InputError
from tests.grammar.test_regex import accepts
from tests.support.schemas import problem


def compile_schema(schema, space=None) -> ByteAutomaton:
    return compile_expression(read_schema(schema, space), "the schema")


PERSON = {
    "type": "object",
    "title": "Person",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        'a "b"\n': {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["é", 1, None, 'x"y']}, "maxItems": 3},
        "more": {"anyOf": [{"$ref": "#/$defs/pair"}, {"type": "null"}], "default": None},
        "id": {"type": ["integer", "null"]},
    },
    "required": ["name", "tags"],
    "$defs": {
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "number"}, {"type": "string", "pattern": "^[a-c]+|d$"}],
            "minItems": 2,
        }
    },
}


def check_person(value):
    assert list(value) == [key for key in PERSON["properties"] if key in value]
    assert {"name", "tags"} <= set(value)
    assert isinstance(value["name"], str)
    assert 1 <= len(value["name"]) <= 4
    assert value.get('a "b"\n', True) in (True, False)
    assert len(value["tags"]) <= 3
    assert all(tag in ("é", 1, None, 'x"y') and tag is not True for tag in value["tags"])
    if value.get("more") is not None:
        number, word = value["more"]
        assert isinstance(number, int | float)
        assert re.fullmatch("[a-c]+|d", word)
    assert value.get("id") is None or type(value["id"]) is int


def check_free(value, depth=2):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is not None:
        assert depth > 0
        for part in inner:
            check_free(part, depth - 1)


def check_record(value):
    assert set(value) <= set("abc")
    assert all(part is None for part in value.values())


def check_map(value):
    assert all(isinstance(part, dict) and all(type(x) is bool for x in part.values()) for part in value.values())


def check_list(value):
    assert isinstance(value, list)
    assert 2 <= len(value) <= 4
    assert all(type(part) is int for part in value)


BOOLEANS = {"type": "object", "additionalProperties": {"type": "boolean"}}
CHOICE = {
    "oneOf": [{"const": {"k": ["é", 1.5]}}, {"allOf": [{"$ref": "#/definitions/~1x"}]}],
    "definitions": {"/x": {"enum": [3]}},
}
CASES: list[tuple[Any, Any]] = [
    (PERSON, check_person),
    ({}, check_free),
    ({"title": "anything"}, check_free),
    ({"type": "object"}, check_free),
    ({"properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"const": None}}}, check_record),
    ({"type": "object", "additionalProperties": BOOLEANS}, check_map),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}, check_list),
    ({"properties": {}}, lambda value: value == {}),
    ({"type": "array", "maxItems": 0}, lambda value: value == []),
    (CHOICE, lambda value: value in ({"k": ["é", 1.5]}, 3)),
]


def texts(automaton, count, rng):
    """Yield texts from random walks that, after forty bytes, take the shortest path to an accepting state."""
    table, accepting = automaton.table, automaton.accepting
    source, target = edges(table)
    distance = distances(accepting, target, source)
    for _ in range(count):
        state, text = automaton.start, b""
        while True:
            choices = np.flatnonzero(table[state] >= 0)
            if len(text) > 40:
                choices = choices[distance[table[state, choices]] < distance[state]]
            if not choices.size or (accepting[state] and rng.random() < 0.3):
                break
            byte = rng.choice(choices)
            state, text = table[state, byte], text + bytes([byte])
        assert accepting[state]
        yield text.decode()


@pytest.mark.parametrize(("schema", "check"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("space", [None, "[\n ]*", ""])
def test_every_text_is_valid(schema, check, space):
    automaton = compile_schema(schema, space)
    for text in texts(automaton, 40, np.random.default_rng(0)):
        value = json.loads(text, parse_int=lambda digits: int(digits[:40]))
        assert check(value) in (None, True), text


@pytest.mark.parametrize("as_text", [False, True])
def test_valid_texts_are_accepted(as_text):
    schema = json.dumps(PERSON) if as_text else copy.deepcopy(PERSON)
    automaton = compile_schema(schema)
    assert schema == (json.dumps(PERSON) if as_text else PERSON)
    full = {"name": "jö/👋", 'a "b"\n': True, "tags": ["é", 1, None], "more": [-1.5e-3, "abca"], "id": -12}
    assert accepts(automaton, json.dumps(full, ensure_ascii=False))
    assert accepts(automaton, json.dumps(full, ensure_ascii=False, separators=(",", ":")))
    assert accepts(automaton, '{"name":"\\n\\"","tags":[ ]}')
    for wrong in (
        {**full, "name": ""},
        {**full, "name": "abcde"},
        {**full, "id": 1.5},
        {**full, "other": 1},
        {**full, "more": [1, "e"]},
        {"name": "a"},
        dict(reversed(full.items())),
    ):
        assert not accepts(automaton, json.dumps(wrong, ensure_ascii=False))


@pytest.mark.parametrize(
    ("schema", "valid", "other"),
    [
        ({"type": "integer"}, ["0", "-7", "120"], ["01", "1.0", "+1", "1e3"]),
        ({"type": "number"}, ["0", "-7.50", "1e9", "2.5E-31"], ["1.", ".5", "NaN", "1e", "1e400"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
        ({"type": "string"}, ['""', '"a\\\\b"', '"é👋"'], ['"', '"a"b"', '"\n"', '"\\x"', '"\x7f"']),
        ({"const": "a.b"}, ['"a.b"'], ['"axb"']),
    ],
)
def test_scalar_schemas(schema, valid, other):
    automaton = compile_schema(schema)
    assert [accepts(automaton, text) for text in valid + other] == [True] * len(valid) + [False] * len(other)


@pytest.mark.parametrize(
    ("name", "valid", "other"),
    [
        ("date", ["2024-02-29"], ["2024-13-01", "٢٠٢٤-01-01"]),
        ("time", ["23:59:00Z", "01:02:03.5+01:00"], ["24:00:00Z", "01:02:03"]),
        ("date-time", ["2024-02-29T01:02:03Z"], ["2024-02-29 01:02:03Z"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
        ("email", ["a.b+c@x-y.org"], ["a@b", '"a"@b.c']),
        ("uri", ["https://x.org/a?b=c#d", "urn:isbn:1"], ["x.org", 'http://a"b']),
    ],
)
def test_formats(name, valid, other):
    automaton = compile_schema({"type": "string", "format": name})
    assert name in FORMATS
    assert all(accepts(automaton, f'"{text}"') for text in valid)
    assert not any(accepts(automaton, f'"{text}"') for text in other)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"type": "integer", "minimum": 1, "exclusiveMaximum": 1.5, "maximum": 0},
            "minimum 1 and maximum 0 and excl.*: no number satisfies",
        ),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "matches no text"),
        ({"type": "integer", "minimum": 10**40}, "matches no text"),
        ({"type": "integer", "maximum": -(10**4000)}, "matches no text"),
        (
            {"type": "integer", "exclusiveMaximum": True},
            "exclusiveMaximum must be a number, or true beside maximum, got True",
        ),
        ({"type": "integer", "minimum": "1"}, "minimum must be a number, got '1'"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
            r"properties\.a has uniqueItems",
        ),
        ({"not": {}}, "matches no text"),
        ({"type": "string", "pattern": "(a$|b)c"}, r"has \$ inside"),
        ({"type": "string", "format": ["date"]}, "format must be a string"),
        ({"type": "string", "maxLength": 2.5}, "whole number"),
        ({"type": "string", "minLength": True}, "whole number"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "nothing satisfies both"),
        ({"enum": []}, "non-empty"),
        ({"enum": [math.nan]}, "not valid JSON"),
        ('{"enum": [NaN]}', "NaN is not a number"),
        ("{", "not valid JSON"),
        ("3", "the schema must be an object.* got 3"),
        ({"type": "array", "items": 3}, r"items must be an object.* got 3"),
        ({"type": "strin"}, "must be one of string.* or a list of them, got 'strin'"),
        ({"type": []}, "or a list of them"),
        ({"properties": []}, "properties must be an object"),
        ({"$ref": "#/$defs/b", "$defs": {}}, "not in the schema"),
        ({"$ref": "http://x"}, "inside the schema"),
    ],
)
def test_unsupported_schemas_are_refused(schema, words):
    with pytest.raises(InputError, match=words):
        compile_schema(schema)


def test_bad_arguments_are_refused():
    with pytest.raises(InputError, match="also matches 'x'"):
        compile_schema({}, "x| ")
    for wrong in (True, None, [{}]):
        with pytest.raises(TypeError, match="dict or its text"):
            compile_schema(wrong)  # type: ignore[arg-type]


def levels(value) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(levels, inner), default=0)


NODE = {"properties": {"left": {"$ref": "#/$defs/a"}, "right": {"$ref": "#/$defs/a"}}, "required": ["left", "right"]}


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        ({"type": "array", "items": {"$ref": "#"}}, 3),
        ({"properties": {"next": {"$ref": "#"}, "value": {"type": "null"}}, "required": ["value"]}, 4),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"oneOf": [{"type": "null"}, {"type": "object", **NODE}]}}}, 3),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/%61"}]}}}, 1),
        ({"anyOf": [{"const": 1}, {"prefixItems": [{"$ref": "#/$defs/a"}]}], "$defs": {"a": {"type": "array",
          "items": {"$ref": "#"}}}}, 6),
    ],
)  # fmt: skip
def test_recursive_schemas_end_after_three_levels(schema, most):
    found = list(texts(compile_schema(schema), 300, np.random.default_rng(0)))
    assert all(problem(schema, text) is None for text in found)
    assert max(levels(json.loads(text)) for text in found) == most


def test_parts_that_share_references_are_converted_once():
    chain = {str(i): {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(20)}
    schema = {"$ref": "#/$defs/0", "$defs": {**chain, "20": {"type": "null"}}}
    assert len(compile_schema(schema).table) < 400
