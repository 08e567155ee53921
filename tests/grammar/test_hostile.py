"""Damaged and hostile schemas and patterns: each causes a one-line error, or allows only valid strings."""

import copy
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import regress

from jaxgen.core.grammar.byte_automaton import compile_expression
from jaxgen.core.grammar.json_schema import read_schema
from jaxgen.core.grammar.regex import read_regex
from jaxgen.errors import InputError
from tests.grammar.test_json_schema import texts
from tests.grammar.test_regex import accepts
from tests.support.bounded import MOST_SECONDS, bounded
from tests.support.models import slow
from tests.support.schemas import RandomSchemas, problem

ROOT = Path(__file__).resolve().parents[2]
WRONG = [None, True, False, 0, -1, 1.5, 10**400, "", "x", "a\nb", [], [None], [[]], [1, "a"], ["a", "a"], {}, {"a": 1}]
ANNOTATIONS = {"title"}  # these may have any value
KEYWORDS = (
    "type properties required items prefixItems minItems maxItems minLength maxLength pattern format enum const anyOf "
    "oneOf allOf $ref additionalProperties not if uniqueItems minimum $id $anchor $dynamicRef patternProperties"
).split()


def compile_schema(schema):
    return compile_expression(read_schema(schema), "the schema")


def refusal(build, given) -> str | None:
    """Return the one-line error, or None for accepted input."""
    try:
        with bounded(given):
            build(given)
        return None
    except InputError as error:
        line = str(error)
        assert "\n" not in line
        assert line.isprintable() or not line.isascii()
        assert len(line) < 1000, line
        return line


def parts(schema):
    """Yield all objects inside a schema, including the schema itself."""
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    yield from ([schema] if isinstance(schema, dict) else [])
    for part in inner:
        yield from parts(part)


def damaged(source: RandomSchemas):
    """Return a schema with a wrong value, a wrong keyword, or a missing part."""
    schema = copy.deepcopy(source.root())
    part = source.random.choice(list(parts(schema)))
    kind = source.random.randrange(4)
    if kind == 0 or not part:
        part[source.random.choice(KEYWORDS)] = source.random.choice(WRONG)
    elif kind == 1:
        part[source.random.choice(list(part))] = source.random.choice(WRONG)
    elif kind == 2:
        name = source.random.choice(list(part))
        part[source.random.choice(KEYWORDS)] = part.pop(name)
    else:
        del part[source.random.choice(list(part))]
    return schema


def check_damaged(seed: int, count: int) -> tuple[int, int]:
    source, rng, refused = RandomSchemas(seed), np.random.default_rng(seed), 0
    for _ in range(count):
        schema = damaged(source)
        if refusal(compile_schema, schema) is not None:
            refused += 1
            continue
        for part in list(parts(schema)):
            for name in ("exclusiveMinimum", "exclusiveMaximum"):  # false is draft 4's neutral value
                if part.get(name) is False:
                    del part[name]
            if isinstance(part.get("items"), list):  # a tuple of draft 7, as later drafts spell it
                first, rest = part.pop("items"), part.pop("additionalItems", True)
                part |= {"prefixItems": first, "items": rest} if first else {"items": rest}
        faults = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA).iter_errors(schema)
        assert all(ANNOTATIONS & {*map(str, fault.path)} or fault.validator == "uniqueItems" for fault in faults)
        for text in texts(compile_schema(schema), 3, rng):
            assert problem(schema, text) is None
    return refused, count - refused


def test_damaged_schemas_are_refused_quickly():
    refused, accepted = check_damaged(seed=0, count=100)
    assert refused > 40
    assert accepted > 15


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_damaged_schemas_are_refused_quickly(seed):
    check_damaged(seed, 500)


def test_damaged_schema_texts_are_refused_quickly():
    source, refused = RandomSchemas(1), 0
    for _ in range(100):
        text = json.dumps(source.root())
        place = source.random.randrange(len(text))
        kind = source.random.randrange(3)
        cut = text[:place] if kind == 0 else text[:place] + source.random.choice('{}[]",:\\\x00\ud800é1') + text[place:]
        cut = text[:place] + text[place + 1 :] if kind == 2 else cut
        refused += refusal(compile_schema, cut) is not None
    assert refused > 60


def nested(depth, inner=None):
    schema = inner or {"type": "integer"}
    for level in range(depth):
        schema = {"type": "array", "items": schema} if level % 2 else {"properties": {"a": schema}}
    return schema


def mutual(size):
    """Return a schema whose definitions all refer to each other."""
    properties = {f"p{i}": {"$ref": f"#/$defs/{i}"} for i in range(size)}
    return {"$ref": "#/$defs/0", "$defs": {str(i): {"properties": properties} for i in range(size)}}


def relay(chains, length):
    """Return a schema with chains of references, each of which leads to the start of the previous one."""
    defs: dict = {"0": {"type": "null"}}
    for i in range(1, chains * length):
        defs[str(i)] = {"properties": {"a": {"$ref": f"#/$defs/{i - 1}"}}}
    first = [{"$ref": f"#/$defs/{i}"} for i in range(0, chains * length, length)]
    return {"prefixItems": first, "$defs": defs}


def shared(levels):
    """Return a dict whose JSON doubles in size at each level."""
    schema: dict = {"type": "null"}
    for _ in range(levels):
        schema = {"prefixItems": [schema, schema]}
    return schema


def doubling(keyword, levels, **more):
    """Return a schema whose references double at each level."""
    defs = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 2, **more} for i in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{levels}": {"type": "boolean"}}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("[" * 10_000, "nested too deeply"),
        ('{"items":' * 10_000, "nested too deeply"),
        ('{"a":[' * 400 + "]}" * 400, "nested too deeply"),
        (json.dumps(nested(65)), "nested more than 64 levels deep"),
        ({"enum": [json.loads("[" * 150 + "]" * 150)], "items": 1}, "items must be an object, or true"),
        ({"type": "string", "minLength": 10**9}, "the schema is too large"),
        ({"type": "array", "minItems": 10**400}, "the schema is too large"),
        ('{"type": "array", "maxItems": 1' + "0" * 5000 + "}", "not valid JSON.*4300 digits"),
        ('{"const": 1e400}', "number 1e400 is too large"),
        ({"properties": {"a": {"properties": {"b": {"type": "string", "minLength": 10**6}}}}},
         r"the schema\.properties\.a\.properties\.b is too large"),
        ({"type": "string", "pattern": "(a|b)*a(a|b){30}"}, r"'\(a\|b\)\{30\}' in the pattern of the schema .* large"),
        (nested(12, {"type": "array", "minItems": 60, "items": {"type": "array", "minItems": 60}}), "is too large"),
        (doubling("prefixItems", 28), "is too large"),
        (doubling("anyOf", 28), "too many combinations of alternatives"),
        ({"enum": [f"value {i}" * 9 for i in range(9_000)]}, "is too large"),
        ("[" + "1," * 600_000 + "1]", "the schema has more than 1000000 characters"),
        ('{"type": "null", "type": "string"}', "duplicate keys: type"),
        ('{"properties": {"a": {}, "a": {}}}', "duplicate keys: a"),
        (json.dumps({"properties": {"a" * 30 + str(i): {} for i in range(9000)}})[:-2] + ', "a": {}, "a": {}}}',
         "duplicate keys: a"),
        ({"$ref": "#"}, "matches no text"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "matches no text"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "matches no text"),
        *slow((mutual(8), "is too large")),
        (mutual(30), "nested more than 64 levels deep"),
        ({"prefixItems": [{"$ref": f"#/$defs/{i}"} for i in range(600)], "$defs": {str(i): {} for i in range(600)}},
         "refers to more than 500"),
        (relay(20, 25), "nested too deeply"),
        *slow(({"properties": {f"p{i}": {} for i in range(60_000)}}, "more than 20000 parts")),
        *slow(({"properties": {f"p{i}": {} for i in range(15_000)}}, "is too large")),
        ({"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(20_000)], "$defs": [None] * 30_000},
         r"\$defs must be an object"),
        *slow(({"anyOf": [{"enum": list(range(i, i + 99))} for i in range(900)]}, "is too large")),
        *slow(({"oneOf": [{"enum": list(range(i, i + 9))} for i in range(0, 9000, 9)]}, "to compare")),
        ({"type": "string", "pattern": "|".join(r"[^\p{L}]" for _ in range(999))}, "more than 100 Unicode categories"),
        ({"$ref": "#a"}, "not in the schema"),
        ({"$ref": "a"}, "only references inside the schema"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/anyOf/٠"}]}, "not in the schema"),
        *slow((shared(30), "the schema has more than 1000000 characters")),
        ({"$ref": "#/anyOf/9/0", "anyOf": [{}]}, "not in the schema"),
        ({"$ref": ["#"]}, r"\$ref must be a string"),
        ({"$id": 0, "type": "null"}, r"\$id must be"),
        ({"$id": "#/$defs/a", "type": "null"}, r"\$id must be"),
        ({"properties": {"line\nbreak": 3}}, r"properties\.line\\nbreak must be an object"),
        ({"required": [["a"]], "properties": {}}, "required must be a list of names"),
        ({"type": "string", "enum": [1, None]}, "matches no text"),
        ({"const": False, "enum": [0, "a"]}, "matches no text"),
        ({"prefixItems": [{}], "items": []}, "items must be a schema or a boolean beside prefixItems"),
        ({"const": "\ud800"}, "half of a surrogate pair"),
        ({"type": "string", "pattern": 3}, "pattern must be a string"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "matches no text"),
        ({"oneOf": [{"uniqueItems": True}, {"type": "array", "items": {}}]}, "keywords that cannot be negated"),
        ({"allOf": [{"anyOf": [{"minLength": i}, {"maxItems": i}]} for i in range(60)]}, "too many combinations"),
        ({"allOf": [{"anyOf": [{}, {}]}] * 70}, "too many combinations|more than 64 choices"),
        ({"dependentRequired": {str(i): [str(i + 1)] for i in range(70)}}, "more than 64 choices"),
        ({"type": "integer", "multipleOf": 99_991}, "multipleOf 99991 is not supported"),
        *slow(({"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(8, 14)]}, "is too large")),
        *slow(({"type": "string", "pattern": "^(?=(a|b)*a(a|b){12}$)", "minLength": 9999}, "is too large")),
        ({"type": "number", "minimum": 10**400}, "matches no text"),
        ({"patternProperties": {"[": {}}}, "class that is not closed"),
        ({"not": {"not": {"$ref": "#"}}}, "matches no text"),
        *slow(({"oneOf": [{"const": i} for i in range(1000)]}, "too many literals and alternatives to compare")),
        ("a/path.json", "not its path"),
        ("", r"not valid JSON: Expecting value at character 1$"),
        ("\ufeff{}", "not valid JSON"),
    ],
)  # fmt: skip
def test_hostile_schemas_are_refused(schema, words):
    line = refusal(compile_schema, schema)
    assert line is not None
    assert re.search(words, line), line


@pytest.mark.parametrize(
    "schemas",
    [
        [{"type": "string"}, {"type": "integer"}, {"type": ["null", "array"]}],
        [{"const": 1}, {"enum": [True, "1", None, [1]]}],
        [{"type": "integer", "maximum": 3}, {"type": "integer", "exclusiveMinimum": 3}, {"type": "null"}],
        [{"type": "integer", "minimum": 3}, {"enum": [2, 2.5]}],
        [{"enum": [{"a": 1}]}, {"properties": {"a": {"type": "string"}}, "type": "object"}],
        [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}, {"type": "array"}],
        [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}],
        [{"prefixItems": [{"const": 1}], "type": "array"}, {"prefixItems": [{"const": 2}], "type": "array"}],
        [{"type": "object", "properties": {name: {}}, "required": [name]} for name in "ab"],
        [{"type": "object", "properties": {"k": {"const": k}, "v": {}}, "required": ["k"]} for k in range(4)],
        [
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]},
            {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
        ],
        [{"type": "object", "additionalProperties": False}, {"properties": {"a": {}}, "required": ["a"]}],
        [{"anyOf": [{"type": "null"}, {"$ref": "#/$defs/s"}]}, {"allOf": [{"type": "boolean"}]}],
    ],
)
def test_one_of_disjoint_schemas(schemas):
    schema = {"oneOf": schemas, "$defs": {"s": {"type": "string"}}}
    if any("properties" in part and "type" not in part for part in schemas):
        schemas[-1]["type"] = "object"
    joint, rng = compile_schema(schema), np.random.default_rng(0)
    assert all(problem(schema, text) is None for text in texts(joint, 40, rng))
    for part in schemas:
        assert all(accepts(joint, text) for text in texts(compile_schema({**part, "$defs": schema["$defs"]}), 5, rng))


@pytest.mark.parametrize(
    "schemas",
    [
        [{"type": "string"}, {"type": "string", "minLength": 3}],
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 3}],
        [{"const": 3.0}, {"type": "integer", "maximum": 3}],
        [{}, {"type": "null"}],
        [{"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"type": "null"}}}],
        [{"type": "string"}, {"properties": {}}],
        [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}],
        [{"type": "object", "properties": {name: {"type": "null"}}, "required": [name]} for name in "ab"],
        [{"enum": [1, 2, "a"]}, {"enum": [2, 3]}, {"type": "string"}],
        [{"type": "array", "items": {"type": "null"}}, {"type": "array", "minItems": 2}],
        [{"$ref": "#/$defs/s"}, {"anyOf": [{"maxLength": 3}, {"type": "null"}]}],
        [{"type": "object", "properties": {name: {}}, "additionalProperties": False} for name in "ab"],
    ],
)
def test_one_of_overlapping_schemas_is_enforced(schemas):
    schema = {"oneOf": schemas, "$defs": {"s": {"type": "string"}}}
    found = list(texts(compile_schema(schema), 60, np.random.default_rng(0)))
    assert all(problem(schema, text) is None for text in found)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"enum": [1], "nullable": True}, {"type": ["null", "string"]}]},
        {"not": {"enum": ["a"], "nullable": True}, "type": ["null", "string", "integer"]},
    ],
)
def test_one_of_excludes_null_of_nullable_schemas(schema):
    joint = compile_schema(schema)
    assert not accepts(joint, "null")
    assert accepts(joint, '"b"')
    assert accepts(joint, "1")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 10**400},
        {"type": "array", "maxItems": 10**400, "items": {"type": "null"}},
        {"type": "string", "format": "uri", "maxLength": 2083},
        mutual(4),
        {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 5000} for i in range(30)}},
    ],
)
def test_oversized_limits_are_lowered(schema):
    with bounded(schema):
        automaton = compile_schema(schema)
    assert all(problem(schema, text) is None for text in texts(automaton, 10, np.random.default_rng(0)))


def test_states_grow_linearly_with_nesting():
    sizes = [len(compile_schema(nested(depth)).table) for depth in range(4, 61, 8)]
    assert len(set(np.diff(sizes))) == 1


def hostile_patterns(seed: int, count: int):
    """Yield nested repetitions with bounds of all sizes."""
    source = random.Random(seed)

    def bound() -> str:
        low = source.choice([0, 1, 2, 3, 9, 30, 1000, 10**9])
        return source.choice(["*", "+", "?", f"{{{low}}}", f"{{{low},}}", f"{{0,{low}}}", f"{{{low},{2 * low}}}"])

    def part(depth: int) -> str:
        if not depth or source.random() < 0.2:
            return source.choice(
                ["a", "b", ".", r"\w", r"\D", r"\p{L}", "[^a]", "", "é", "(?=a)", r"\1", "^", "$", "["]
            )
        inner = source.choice(["", "|"]).join(part(depth - 1) for _ in range(source.randint(1, 3)))
        return f"({inner}){bound()}"

    for _ in range(count):
        yield "".join(part(source.randint(1, 3)) for _ in range(source.randint(1, 3)))


def check_patterns(seed: int, count: int) -> tuple[int, int]:
    refused = sum(
        refusal(lambda pattern: compile_expression(read_regex(pattern)), pattern) is not None
        for pattern in hostile_patterns(seed, count)
    )
    return refused, count - refused


def test_hostile_patterns_are_bounded():
    refused, accepted = check_patterns(seed=0, count=80)
    assert refused > 40
    assert accepted > 10


PIECES = [
    *'ab-[]()|*+?^$.{}&=#/ é👋"',
    *["[^", "(?:", "(?<n>", "(?=", "{2}", "{1,3}", "{,2}", "[a-c]", r"[^\d]", r"[\w-]", "[-a]", "[a^]", "[$]", "]]"],
    *[r"\d", r"\w", r"\s", r"\S", r"\-", r"\]", r"\b", r"\B", r"\0", r"\x41", r"\u0041", r"\u{1F600}", r"\cA", r"\/"],
    *[r"\p{Lu}", r"\^", r"\.", r"\t", r"\u00e9", r"\ud83d\udc4b", r"\1", r"\"", r"\#", r"\ "],
]


def check_pieces(seed: int, count: int) -> tuple[int, int]:
    """Check that strings allowed by random patterns match them in full in ECMAScript, with or without the flag u."""
    source, rng, refused = random.Random(seed), np.random.default_rng(seed), 0
    for _ in range(count):
        pattern = "".join(source.choices(PIECES, k=source.randint(1, 7)))
        if refusal(lambda given: compile_expression(read_regex(given)), pattern) is not None:
            refused += 1
            continue
        try:
            ecma = regress.Regex(f"^(?:{pattern})$", "u")
        except regress.RegressError:
            if any(piece in pattern for piece in (r"\p", r"\u", "👋")):
                continue  # these mean something else without the flag
            ecma = regress.Regex(f"^(?:{pattern})$")
        for text in texts(compile_expression(read_regex(pattern)), 3, rng):
            assert ecma.find(text) is not None, (pattern, text)
    return refused, count - refused


def test_random_patterns_are_bounded():
    refused, accepted = check_pieces(seed=0, count=600)
    assert refused > 200
    assert accepted > 150


@pytest.mark.slow
def test_many_random_patterns_are_bounded():
    check_pieces(seed=1, count=20_000)


@pytest.mark.slow
def test_many_hostile_patterns_are_bounded():
    check_patterns(seed=1, count=400)


LARGE = [
    "(a|b)*a(a|b){25}",
    ".{0,4000}",
    "[a-z]{0,60000}",
    "(a?){9000}",
    r"(\p{L}+ ?){0,50}",
    "(?i)" + r"[\p{L}x]" * 150,
    "(.*a){999}",
    "((((a{1,9}){1,9}){1,9}){1,9}){1,9}",
    "(a|b|c)*" * 300 + "(.*c){60}",
    "|".join(f"{i}.{{{i}}}" for i in range(1000)),
]
MEASURE = """
import re, sys, time
from jaxgen.errors import InputError
from jaxgen.core.grammar.byte_automaton import compile_expression
from jaxgen.core.grammar.regex import read_regex
for pattern in sys.argv[1:]:
    start = time.process_time()
    try:
        compile_expression(read_regex(pattern))
    except InputError:
        pass
    # Not ru_maxrss: it begins with the memory of the process that started this one.
    peak = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]
    print(time.process_time() - start, int(peak) / 1024)
"""


@pytest.mark.slow
def test_large_patterns_are_cheap():
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, *LARGE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    figures = np.array([line.split() for line in measured.stdout.splitlines()], float)
    assert figures.shape == (len(LARGE), 2)
    assert figures[:, 0].max() < MOST_SECONDS, dict(zip(LARGE, figures[:, 0], strict=True))
    assert figures[:, 1].max() < 500
