"""Keywords of JSON schemas: the texts of each are judged by the jsonschema library, and valid texts are generated."""

import itertools
import json
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jsonschema.validators import validator_for

from jaxgen.core.grammar.byte_automaton import compile_expression
from jaxgen.core.grammar.json_schema import read_schema
from jaxgen.errors import InputError, JaxgenWarning
from tests.grammar.test_json_schema import compile_schema, texts
from tests.grammar.test_regex import accepts
from tests.support.schemas import problem

S, N, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
AB = {"type": "object", "properties": {"a": NULL, "b": NULL}}
DRAFT4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


# Each with values that are generated, and values that are not valid.
CASES = {
    "number_bounds": ({"type": "number", "minimum": 0, "maximum": 1}, [0, 1, 0.5, 0.125], [-0.1, 1.01, 2]),
    "exclusive": ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.3}, [0.29, 0.001], [0, 0.0, 0.3, 1]),
    "one_side": ({"type": "number", "maximum": -2.5}, [-2.5, -100, -2.75], [-2.4, 0, 3]),
    "draft_4": (DRAFT4 | {"type": "number", "minimum": 1, "exclusiveMinimum": True}, [1.5, 2], [1, 0]),
    "multiples": ({"type": "integer", "multipleOf": 30, "minimum": -60}, [0, -60, 90, 12030], [10, 45, -90]),
    "whole": ({"type": "number", "multipleOf": 4}, [8, -4], [2, 1.5]),
    "cents": ({"type": "number", "multipleOf": 0.01, "minimum": 0}, [0.25, 1.5, 19.75, 120], [0.125, -1]),
    "two_multiples": ({"allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "type": "integer"}, [12, 24], [4, 6, 8]),
    "pattern_length": (S | {"pattern": "^[a-z]+$", "maxLength": 3}, ["a", "abc"], ["abcd", "A", ""]),
    "format_length": (
        S | {"format": "uri", "minLength": 1, "maxLength": 20},
        ["http://a.b/c"],
        ["http://a.b/" + "c" * 20],
    ),
    "escaped_length": (S | {"pattern": '^(\n|"|é)*$', "maxLength": 2}, ['\n"', "éé"], ["\n\n\n"]),
    "inside": (S | {"pattern": "@"}, ["@", "a@b", '"@"'], ["", "ab"]),
    "start": (S | {"pattern": "^https?://"}, ["https://example.org/a"], ["xhttp://"]),
    "look_ahead": (S | {"pattern": "^(?=.*[A-Z])(?=.*[0-9]).{8,}$"}, ["abcdefG8"], ["abcdefgh", "G8"]),
    "decimal": (S | {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ["1.5", "-.5"], ["", "-", ".", "x"]),
    "two_patterns": ({"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}, ["ab", "xbxa"], ["a", "b"]),
    "ipv4": (S | {"format": "ipv4"}, ["192.168.0.1"], ["1.2.3", "256.1.1.1"]),
    "ipv6": (S | {"format": "ipv6"}, ["2001:db8::1", "::"], ["2001"]),
    "unknown_format": (S | {"format": "color"}, ["anything"], [3]),
    "integer_format": (N | {"format": "int64"}, [3], [1.5, "3"]),
    "annotations": (
        {"type": "string", "$id": "http://x/y", "x-order": 1, "contentMediaType": "a/b", "units": "m"},
        ["a"],
        [1],
    ),
    "nullable": ({"type": "integer", "nullable": True}, [None, 3], ["a"]),
    "enum_and_type": ({"enum": [1, "a", None], "type": ["string", "null"]}, ["a", None], [1, "b"]),
    "enum_of_objects": (
        {"type": "object", "properties": {"n": S}, "required": ["n"], "enum": [{"n": "x"}, {}]},
        [{"n": "x"}],
        [{}, {"n": "y"}],
    ),
    "tuple_7": (
        DRAFT7 | {"type": "array", "items": [S, N], "additionalItems": NULL},
        [["a", 1], ["a", 1, None]],
        [[1], [1, 1]],
    ),
    "tuple_limit": (
        {"type": "array", "prefixItems": [S, N], "minItems": 3, "items": NULL},
        [["a", 1, None]],
        [["a", 1]],
    ),
    "unique_enum": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1},
        [["a"], ["a", "c"], ["a", "b", "c"]],
        [[], ["a", "a"]],
    ),
    "unique_booleans": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        [[], [True, False]],
        [[True, True]],
    ),
    "contains": ({"type": "array", "items": N, "contains": {"const": 7}}, [[7], [1, 7, 2]], [[], [1]]),
    "property_names": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NULL},
        [{}, {"b": None}],
        [{"c": None}],
    ),
    "name_pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x", "maxLength": 2}, "additionalProperties": NULL},
        [{"xa": None}],
        [{"a": None}, {"xab": None}],
    ),
    "pattern_properties": (
        {
            "type": "object",
            "properties": {"xa": NULL},
            "patternProperties": {"^x": {}, "^y": N},
            "additionalProperties": False,
        },
        [{"xa": None}, {"y": 1}],
        [{"xa": 1}, {"y": "a"}, {"z": 1}],
    ),
    "additional": ({**AB, "additionalProperties": N}, [{"a": None, "c": 1}, {"d": 2, "e": 3}], [{"a": 1}, {"c": None}]),
    "required_unlisted": ({**AB, "required": ["c"]}, [{"c": 1}, {"a": None, "c": "x"}], [{"a": None}]),
    "min_properties": ({**AB, "minProperties": 1}, [{"a": None}, {"b": None}], [{}]),
    "max_properties": ({**AB, "maxProperties": 1}, [{}, {"a": None}, {"b": None}], [{"a": None, "b": None}]),
    "all_of": (
        {"allOf": [AB, {"properties": {"c": NULL}, "required": ["c"]}]},
        [{"a": None, "c": None}],
        [{"a": None}],
    ),
    "any_required": ({**AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": None}, {"b": None}], [{}]),
    "one_required": (
        {**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": None}, {"b": None}],
        [{}, {"a": None, "b": None}],
    ),
    "dependent": ({**AB, "dependentRequired": {"a": ["b"]}}, [{}, {"b": None}, {"a": None, "b": None}], [{"a": None}]),
    "dependencies": (DRAFT7 | AB | {"dependencies": {"a": {"required": ["b"]}}}, [{"b": None}], [{"a": None}]),
    "dependent_schema": (
        {**AB, "dependentSchemas": {"a": {"properties": {"b": False}}}},
        [{"a": None}, {"b": None}],
        [{"a": None, "b": None}],
    ),
    "if_then": (
        {
            "type": "object",
            "properties": {"a": {"enum": ["x", "y"]}, "b": NULL},
            "required": ["a"],
            "if": {"properties": {"a": {"const": "x"}}},
            "then": {"required": ["b"]},
        },
        [{"a": "x", "b": None}, {"a": "y"}],
        [{"a": "x"}],
    ),
    "if_else": (
        {"type": ["string", "integer"], "if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"minimum": 3}},
        ["a", 3],
        ["ab", 2],
    ),
    "not_required": ({**AB, "not": {"required": ["a"]}}, [{}, {"b": None}], [{"a": None}]),
    "not_enum": ({"type": "string", "not": {"enum": ["", "no"]}}, ["n", "nono"], ["", "no"]),
    "not_pattern": ({"type": "string", "not": {"pattern": "a"}}, ["", "bcd"], ["a", "bad"]),
    "not_type": ({"type": ["string", "integer"], "not": {"type": "string"}}, [3], ["a"]),
    "not_number": ({"type": "number", "not": {"const": 2.5}}, [2.51, 2, 25], [2.5]),
    "not_integer": ({"type": "number", "not": {"type": "integer"}}, [2.5, -0.125], [2, 2.0]),
    "reference_and_more": ({"$ref": "#/$defs/s", "maxLength": 2, "$defs": {"s": S}}, ["ab"], ["abc", 1]),
    "anchor": ({"$ref": "#s", "$defs": {"x": S | {"$anchor": "s"}}}, ["ab"], [1]),
    "nested_id": ({"$ref": "b", "$defs": {"x": {"$id": "b", "$ref": "#/$defs/s", "$defs": {"s": S}}}}, ["ab"], [1]),
    "draft_4_id": (
        DRAFT4
        | {
            "id": "http://x/y",
            "allOf": [{"$ref": "z#/definitions/a"}],
            "definitions": {"d": {"id": "z", "definitions": {"a": S}}},
        },
        ["ab"],
        [1],
    ),
    "false_member": (
        {**AB, "required": ["a"], "allOf": [{"properties": {"b": False}}]},
        [{"a": None}],
        [{"a": None, "b": None}],
    ),
    "other_type": ({"type": "string", "minimum": 3, "properties": {}}, ["a"], [1]),
}


@pytest.mark.parametrize("name", CASES)
def test_keyword_is_enforced(name):
    schema, possible, wrong = CASES[name]
    automaton = compile_schema(schema)
    judge = validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    for text in texts(automaton, 40, np.random.default_rng(0)):
        value = json.loads(text)
        assert judge.is_valid(value) or ("nullable" in schema and value is None), text
        assert "format" not in schema or problem(schema, text) is None
    assert all(accepts(automaton, json.dumps(value, ensure_ascii=False)) for value in possible)
    assert not any(accepts(automaton, json.dumps(value, ensure_ascii=False)) for value in wrong)


DECIMALS = st.decimals(-2000, 2000, places=3).map(float) | st.integers(-50, 50) | st.floats(-1, 1, width=32)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), DECIMALS, min_size=1
    ),
    st.lists(DECIMALS, max_size=10),
)
def test_bounds_of_numbers(bounds, values):
    schema = {"type": "number", **bounds}
    valid = jsonschema.Draft202012Validator(schema).is_valid
    try:
        automaton = compile_schema(schema)
    except InputError:
        assert not any(map(valid, values))
        return
    near = [round(bound + step, 3) for bound in bounds.values() for step in (-0.001, 0, 0.001)]
    for value in [value for value in [*values, *near] if "e" not in repr(value) and len(repr(value)) < 12]:
        assert accepts(automaton, json.dumps(value)) == valid(value) or json.dumps(value) == "-0.0", value
    assert all(valid(json.loads(text)) for text in texts(automaton, 10, np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "items": S, "uniqueItems": True}, "the schema has uniqueItems, .* unsupported='warn'"),
        ({"type": "object", "additonalProperties": False}, "has additonalProperties, .*: write additionalProperties"),
        ({"type": "string", "maxlength": 3}, "write maxLength"),
        ({"properties": {"a": {"unevaluatedProperties": False}}}, r"schema\.properties\.a has unevaluatedProperties"),
        ({"type": "string", "pattern": r"\bword"}, "a word boundary"),
        ({"type": "integer", "multipleOf": 99_991}, "multipleOf 99991 is not supported"),
        ({"$ref": "http://other/schema"}, "refers to 'http://other/schema'"),
        ({"type": "object", "required": True}, "required must be a list of names, got True"),
        ({"type": "object", "minProperties": 3}, "has minProperties 3"),
    ],
)
def test_unsupported_keywords_are_refused_or_left_out(schema, words):
    with pytest.raises(InputError, match=words):
        compile_schema(schema)
    left_out: list[str] = []
    compile_expression(read_schema(schema, unsupported="warn", left_out=left_out))
    assert len(left_out) == 1
    with pytest.warns(JaxgenWarning, match=re.escape(left_out[0])):
        read_schema(schema, unsupported="warn")


def test_supported_keywords_are_enforced_without_the_rest():
    schema = {
        "type": "array",
        "items": {"type": "string", "maxlength": 2, "maxLength": 3},
        "uniqueItems": True,
        "minItems": 2,
    }
    left_out: list[str] = []
    automaton = compile_expression(read_schema(schema, unsupported="warn", left_out=left_out))
    assert ["maxlength" in left_out[0], "uniqueItems" in left_out[1], len(left_out)] == [True, True, 2]
    assert [accepts(automaton, text) for text in ('["a","a"]', '["a"]', '["a","abcd"]')] == [True, False, False]
    with pytest.raises(InputError, match="unsupported must be 'error' or 'warn', got 'ignore'"):
        read_schema(schema, unsupported="ignore")  # type: ignore[arg-type]


def test_pydantic_classes():
    class Model:
        @staticmethod
        def model_json_schema():
            return {"type": "object", "properties": {"a": NULL}, "required": ["a"]}

    class Adapter:
        def json_schema(self):
            return {"const": 3}

    assert accepts(compile_schema(Model), '{"a":null}')
    assert accepts(compile_schema(Adapter()), "3")


def test_patterns_match_in_python_and_javascript():
    """Python's regular expressions differ from JavaScript's; generated texts match in both."""
    for pattern in (r"^\D\W\S$", r"^[^\d][^\w][^\s]$", r"^\s$", r"^(?!\d)[^a]$"):
        for text in texts(compile_schema({"type": "string", "pattern": pattern}), 40, np.random.default_rng(0)):
            assert re.search(pattern, json.loads(text)), (pattern, text)
    for pattern in (r"^.*$", r"\d", r"^\w*$", "^a$", r"^\S"):
        schema = {"type": "string", "not": {"pattern": pattern}}
        for text in texts(compile_schema(schema), 40, np.random.default_rng(0)):
            assert not re.search(pattern, json.loads(text)), (pattern, text)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=4), st.sampled_from([{}, {"minProperties": 1, "maxProperties": 2}]))
def test_optional_members_are_in_any_order(required, limits):
    """Required members are in the schema's order, and optional ones are anywhere between them."""
    names = "abcd"[: len(required)]
    needed = [name for name, is_needed in zip(names, required, strict=True) if is_needed]
    schema = {
        "type": "object",
        "properties": {name: N if name == "b" else {"enum": [1, 12]} for name in names},
        "required": needed,
        "additionalProperties": False,
        **limits,
    }
    valid = jsonschema.Draft202012Validator(schema).is_valid
    if len(needed) > limits.get("maxProperties", 4):
        return
    automaton = compile_schema(schema)
    for size in range(len(names) + 1):
        for order in itertools.permutations(names, size):
            value = dict.fromkeys(order, 12)
            in_order = [name for name in order if name in needed] == needed
            assert accepts(automaton, json.dumps(value)) == (valid(value) and in_order)
            for name in order:
                assert not accepts(automaton, json.dumps(value)[:-1] + f', "{name}": 1}}')
    assert all(valid(json.loads(text)) for text in texts(automaton, 10, np.random.default_rng(0)))


def test_members_of_large_objects_are_in_the_order_of_the_schema():
    small = {"type": "object", "properties": dict.fromkeys("abc", NULL)}
    large = {"type": "object", "properties": dict.fromkeys("abcdefghij", NULL)}
    many = {"type": "object", "properties": {str(i): {**small, "required": ["a"]} for i in range(40)}}
    further = {**small, "additionalProperties": N}
    assert accepts(compile_schema(small), '{"c":null,"a":null}')
    assert accepts(compile_schema(large), '{"a":null,"c":null}')
    assert not accepts(compile_schema(large), '{"c":null,"a":null}')
    assert not accepts(compile_schema(many), '{"0":{"c":null,"a":null}}')  # the whole would be too large
    assert accepts(compile_schema(further), '{"c":null,"a":null,"x":1,"y":2}')
    assert not accepts(compile_schema(further), '{"c":null,"x":1,"a":null}')


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"if": {"minLength": "3"}}, r"the schema\.if: minLength must be a whole number >= 0, got '3'"),
        (
            {"anyOf": [{"type": "string"}, {"type": "null", "properties": []}]},
            r"anyOf\[1\]: properties must be",
        ),
        ({"oneOf": [{"type": "string"}, {"const": 1, "maxItems": -1}]}, r"oneOf\[1\]: maxItems must be a whole number"),
        ({"items": {"required": True}}, r"the schema\.items: required must be a list of names, got True"),
        ({"additionalProperties": {"type": "any"}}, r"additionalProperties: type must be one of string"),
        ({"$defs": {"a": {"not": {"enum": 3}}}}, r"\$defs\.a\.not: enum must be a non-empty list"),
        ({"definitions": {"a": 3}}, r"definitions\.a must be an object, or true for any value, got 3"),
        ({"then": {"allOf": []}}, r"then: allOf must be a non-empty list"),
    ],
)
def test_malformed_parts_are_refused_even_if_nothing_depends_on_them(part, words):
    schema = {"type": "string", **part}
    with pytest.raises(InputError, match=words):
        compile_schema(schema)
    left_out: list[str] = []
    compile_expression(read_schema(schema, unsupported="warn", left_out=left_out))
    assert len(left_out) == 1


def test_values_that_look_like_keywords_are_not_checked():
    schema = {
        "type": "string",
        "default": {"minLength": "3"},
        "x-more": {"type": 3},
        "enum": ["a"],
        "$defs": {"type": {"properties": {"required": NULL, "items": {}}}},
    }
    assert accepts(compile_schema(schema), '"a"')
