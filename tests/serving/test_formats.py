"""The formats in which models write tool calls: parsers, grammars, and the choice by template."""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import Tokenizer
from jaxgen.core.grammar.byte_automaton import compile_expression
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.text.spelled import Spelled
from jaxgen.errors import InputError
from jaxgen.serving.formats.coder import Coder
from jaxgen.serving.formats.format import CallParser, arguments as arguments_of
from jaxgen.serving.formats.formats import FORMATS, format_of
from jaxgen.serving.formats.hermes import Hermes
from jaxgen.serving.formats.llama import Llama
from jaxgen.serving.formats.mistral import MistralIdentified, MistralList, MistralNamed
from jaxgen.serving.formats.reading import Call
from tests.grammar.test_regex import accepts
from tests.support.automata import matrix
from tests.support.dialects import KINDS
from tests.support.tokenizers import byte_level, byte_level_backend

PARAMETERS = {
    "type": "object",
    "properties": {
        "x": {"type": "integer"},
        "s": {"type": "string"},
        "o": {"type": "object"},
        "l": {"type": "array", "items": {"type": "integer"}},
        "b": {"type": "boolean"},
        "n": {"type": "number"},
        "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
FUNCTIONS = {"f": PARAMETERS, "g": {"type": "object", "properties": {}}, "now": None}
NAMES = [type(form).__name__ for form in FORMATS]
every_format = pytest.mark.parametrize("form", FORMATS, ids=NAMES)


def parse(form, pieces, most=None, functions=FUNCTIONS):
    parser = CallParser(form, functions, most)
    results = [*(parser.put(piece) for piece in pieces), parser.end()]
    return "".join(content for content, _ in results), [call for _, calls in results for call in calls]


def plain(calls):
    return [(call.name, json.loads(call.arguments)) for call in calls]


def check(form, text, content, calls, **options):
    """Check what is parsed from the whole text, from single characters, and from the two parts of every split."""
    splits = [[text], text, *([text[:cut], text[cut:]] for cut in range(1, len(text)))]
    for pieces in splits:
        found, made = parse(form, pieces, **options)
        assert (found, plain(made)) == (content, plain(calls))


F, G = Call("f", '{"x": 1}'), Call("g", "{}")


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("HERMES", Hermes),
        ("QWEN3", Hermes),
        ("CODER", Coder),
        ("LLAMA", Llama),
        ("NEMO", MistralList),
        ("SMALL", MistralIdentified),
        ("DEVSTRAL", MistralNamed),
        ("SMOL", Hermes),
    ],
)
def test_the_template_shows_the_format(kind, form):
    assert type(format_of(KINDS[kind])) is form


def test_without_a_template_the_format_is_hermes():
    assert type(format_of(None)) is Hermes


@every_format
def test_calls_are_found_and_the_rest_is_content(form):
    one, two = form.write([F]), form.write([F, G])
    check(form, one, "", [F])
    check(form, f" \n{one}\n", "", [F])
    check(form, two, "", [F, G])
    check(form, "Hello <b>[x]</b>;\n ", "Hello <b>[x]</b>;\n ", [])
    if not form.bare:
        check(form, f"Let me see. \n{one}\n\n{one}\n", "Let me see.", [F, F])
        check(form, f"One{one} two\n", "One two", [F])
    check(form, "", "", [])


@every_format
def test_calls_of_other_functions_are_content(form):
    text = form.write([Call("h", "{}")])
    check(form, text, text, [])


@every_format
def test_calls_beyond_the_limit_are_dropped(form):
    check(form, form.write([F, G, F]), "", [F], most=1)
    check(form, form.write([F, G, F]), "", [F, G], most=2)


@every_format
def test_unicode_is_preserved(form):
    check(form, form.write([Call("f", '{"s": "Köln 😀 \\" <tool>"}')]), "", [Call("f", '{"s": "Köln 😀 \\" <tool>"}')])


CODED = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
CASES = [
    (Coder(), CODED, "", [F]),
    (Coder(), CODED.replace("\n", ""), "", [F]),
    (Coder(), CODED.removesuffix("</tool_call>"), "", [F]),
    (Coder(), CODED.removesuffix("_call>"), "", [F]),
    (Coder(), CODED.replace("</parameter>\n", ""), "", [F]),  # as the format's own parser does
    (Coder(), CODED.replace("</function>\n", ""), "", [F]),
    (Coder(), CODED.replace("</parameter>", "<parameter=s>a</parameter>"), "", [Call("f", '{"x": 1, "s": "a"}')]),
    (Coder(), CODED.replace("</function>\n</tool_call>", ""), CODED.replace("</function>\n</tool_call>", ""), []),
    (Coder(), CODED.replace("<function=f>", "<function=f"), CODED.replace("<function=f>", "<function=f"), []),
    (Coder(), CODED[:-30], CODED[:-30], []),
    (Coder(), f"<tool_call>\n{CODED}", "<tool_call>", [F]),
    (Coder(), CODED.replace("</parameter>", "</parameter><\n[ "), "", [F]),  # text between tags, as do all others below
    (Coder(), CODED.replace("</function>", "<paramter=s>\na\n</parameter>\n</function>"), "", [F]),
    (Coder(), CODED.replace("</function>", "<parameter=s\na\n</parameter>\n</function>"), "", [F]),
    (Coder(), CODED.replace("</function>", "</functio>"), "", [F]),
    (Coder(), CODED.replace("</tool_call>", "</tool_cal> done"), "\n</tool_cal> done", [F]),
    (Coder(), CODED.replace("\n</tool_call>", "<tool>"), "<tool>", [F]),
    (Coder(), CODED.replace("</tool_call>", "") + CODED, "", [F, F]),
    (Coder(), CODED.replace("\n</tool_call>", "") + CODED, "", [F, F]),
    (Coder(), CODED.removeprefix("<tool_call>\n") + CODED.removeprefix("<tool_call>\n"), "", [F, F]),
    (Coder(), f"Yes. <function{CODED.removeprefix('<tool_call>')}", "Yes. <function", [F]),
    (Coder(), CODED.replace("<tool_call>", "<tool_call>x"), "<tool_call>x", [F]),
    (Coder(), CODED[: CODED.index("</function>") + 2], "", [F]),
    (Coder(), CODED[: CODED.index("</function>") + 1], CODED[: CODED.index("</function>") + 1], []),
    (Coder(), CODED[: CODED.index("</function>")] + CODED, CODED[: CODED.index("\n</function>")], [F]),
    (Coder(), CODED.replace("=f>", "=h>") + CODED, CODED.replace("=f>", "=h>"), [F]),
    (Llama(), '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", [F]),
    (Llama(), 'Sure. <|python_tag|> {"name": "f", "parameters": {"x": 1}}', "Sure.", [F]),
    (Llama(), '{"type": "function", "name": "f", "parameters": {"x": 1}}', "", [F]),
    (Llama(), '{"name": "f", "arguments": {"x": 1}}', "", [F]),
    (Llama(), '{"name": "f", "parameters": {"x": 1}}\n{"name": "g"}', "", [F, G]),
    (Llama(), '{"name": "f", "parameters": {"x": 1}};{"name": "g"}', "", [F, G]),
    (Llama(), '{"name": "f", "parameters": {"x": 1}}; bye', "; bye", [F]),
    (Llama(), '{"name": "h"}; {"name": "g"}', '{"name": "h"}', [G]),
    (Llama(), '{"name": "g"}; {"name": "h"}; {"name": "g"}', '; {"name": "h"}', [G, G]),
    (Llama(), '{"name": 5}; {"name": "g"}', '{"name": 5}; {"name": "g"}', []),
    (Llama(), 'See {"name": "f", "parameters": {"x": 1}}', 'See {"name": "f", "parameters": {"x": 1}}', []),
    (Llama(), '{"answer": 1}', '{"answer": 1}', []),
    (Llama(), "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (Llama(), '{"name": "f", "parameters": {"x": 1}', '{"name": "f", "parameters": {"x": 1}', []),
    (MistralList(), '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', "", [F]),
    (MistralList(), '[TOOL_CALLS][{"name": "f", "arguments": "{\\"x\\": 1}"}]', "", [F]),  # as a text
    (
        MistralList(),
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}',
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}',
        [],
    ),
    (MistralList(), 'Yes. [TOOL_CALLS][{"name": "h"}, {"name": "g"}, 5]', 'Yes. {"name": "h"}5', [G]),
    (MistralList(), '[TOOL_CALLS][{"name": "g"}, {"name": "f"]', '[TOOL_CALLS][{"name": "g"}, {"name": "f"]', []),
    (MistralList(), "[TOOL_CALLS][{}]", "[TOOL_CALLS][{}]", []),
    (MistralList(), "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    (MistralList(), "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    (MistralList(), 'a [TOOL[TOOL_CALLS][{"name": "g"}] b', "a [TOOL b", [G]),
    (MistralList(), '[TOOL_CALLS]f[ARGS]{"x": 1}', "", [F]),
    (MistralNamed(), '[TOOL_CALLS]f{"x": 1}[TOOL_CALLS] g [ARGS] {}', "", [F, G]),
    (MistralNamed(), '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', "", [F]),
    (MistralNamed(), "[TOOL_CALLS]f[ARGS][1]", "[TOOL_CALLS]f[ARGS][1]", []),
    (MistralNamed(), "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
    (MistralIdentified(), '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"x": 1}', "", [F]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_each_format_is_parsed(form, text, content, calls):
    check(form, text, content, calls)


def test_ids_that_the_model_writes_are_kept():
    [call] = parse(MistralIdentified(), ["[TOOL_CALLS]g[CALL_ID]abcDEF123[ARGS]{}"])[1]
    assert call.id == "abcDEF123"
    [call] = parse(MistralList(), ['[TOOL_CALLS][{"name": "g", "id": "123456789"}]'])[1]
    assert call.id == "123456789"
    assert all(len(form.call_id()) == (9 if isinstance(form, MistralNamed) else 29) for form in FORMATS)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("x", "5", 5),
        ("x", "5.0", 5),
        ("x", "5.5", "5.5"),
        ("x", "five", "five"),
        ("n", "5", 5),
        ("n", "1e3", 1000.0),
        ("b", "true", True),
        ("b", "False", False),
        ("b", "yes", "yes"),
        ("s", "5", "5"),
        ("s", "null", "null"),
        ("s", " a\nb ", " a\nb "),
        ("s", '{"a": 1}', '{"a": 1}'),
        ("m", "null", None),
        ("m", "None", None),
        ("m", "text", "text"),
        ("o", '{"a": [1, null]}', {"a": [1, None]}),
        ("o", "{'a': 1}", "{'a': 1}"),
        ("l", "[1, 2]", [1, 2]),
        ("unknown", "5", "5"),
    ],
)
def test_the_schema_types_the_values_of_qwen3_coder(key, text, value):
    written = CODED.replace("=x>", f"={key}>").replace("\n1\n", f"\n{text}\n")
    [call] = parse(Coder(), [written])[1]
    assert json.loads(call.arguments) == {key: value}


def test_types_are_found_through_references_and_in_literals():
    schema = {
        "properties": {
            "a": {"$ref": "#/$defs/number"},
            "b": {"enum": [1, 2]},
            "c": {"const": True},
            "d": {"allOf": [{"type": "integer"}]},
            "e": {"type": ["integer", "string"]},
            "f": {"type": "string", "nullable": True},
            "g": {"$ref": "#/$defs/absent"},
            "h": True,
        },
        "$defs": {"number": {"type": "number"}},
    }
    texts = {"a": "1", "b": "2", "c": "true", "d": "4", "e": "5", "f": "null", "g": "7", "h": "8"}
    tags = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    text = f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"
    [call] = parse(Coder(), [text], functions={"f": schema})[1]
    assert json.loads(call.arguments) == {"a": 1, "b": 2, "c": True, "d": 4, "e": 5, "f": None, "g": "7", "h": "8"}


# Random texts


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
STRINGS = st.text(st.sampled_from('<>/tool_call"\\{}[] \né😀;') | st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    SCALARS | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
TAGS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<parameter=", "</parameter>")
PARTS = (*TAGS, '{"name": "f"', ', "arguments": {', "<function=f>", "</function>", '"x": ', "é😀", "\u2028\xa0", "f")
FRAGMENTS = st.lists(
    st.sampled_from([*PARTS, *'{}[]"\\<\n ;>', *(form.write([F]) for form in FORMATS)]) | st.text(max_size=3),
    max_size=12,
).map("".join)


def cut(text, places):
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[first:last] for first, last in itertools.pairwise(bounds)]


@every_format
@settings(max_examples=120, deadline=None)
@given(FRAGMENTS, st.lists(st.integers(0, 500), max_size=8), st.sampled_from([None, 1]))
def test_parsing_does_not_depend_on_the_pieces(form, text, places, most):
    whole = parse(form, [text], most=most)
    assert parse(form, cut(text, places), most=most) == parse(form, text, most=most) == whole
    if most is None and not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize(
    "form", [form for form in FORMATS if not isinstance(form, Coder)], ids=lambda f: type(f).__name__
)
@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(STRINGS, VALUES, max_size=3), min_size=1, max_size=3), st.lists(st.integers(0, 500)))
def test_every_call_is_found(form, values, places):
    calls = [Call("f", json.dumps(value)) for value in values]
    content, found = parse(form, cut(form.write(calls), places))
    assert (content, plain(found)) == ("", plain(calls))


@settings(max_examples=100, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "x": st.integers(),
            "s": STRINGS.filter(lambda text: "</" not in text and "<p" not in text),
            "o": st.dictionaries(st.sampled_from("ab"), SCALARS, max_size=2),
            "l": st.lists(st.integers(), max_size=3),
            "b": st.booleans(),
            "m": st.none(),
        },
    ),
    st.lists(st.integers(0, 500)),
)
def test_every_call_of_qwen3_coder_is_found(value, places):
    call = Call("f", json.dumps(value))
    assert plain(parse(Coder(), cut(Coder().write([call]), places))[1]) == [("f", value)]


def damaged(rng, text):
    """Return a text with one or two small changes."""
    for _ in range(rng.choice([1, 1, 2])):
        place = rng.randrange(len(text) + 1)
        removed = rng.choice(["arguments", "parameters", "</tool_call>", "name", "</parameter>", "[ARGS]"])
        text = rng.choice(
            [
                text[:place],
                text[:place] + text[place + 1 :],
                text[:place] + rng.choice('{}[]"\\<>x \n;') + text[place:],
                text.replace(rng.choice(["f", "g", "now"]), "unknown", 1),
                text + rng.choice([" done", "\n", "<tool_call>", "}", " [TOOL_CALLS]", ";"]),
                text.replace(removed, "", 1),
            ]
        )
    return text


@every_format
def test_seeded_texts_are_parsed_the_same_in_any_pieces(form):
    """Also broken ones: each character is in the content, or belongs to a call or the space around it."""
    rng, broken = random.Random(1), 0
    for _ in range(300):
        values = [
            {"x": rng.randrange(99), "s": rng.choice(["a", "b <c>", "two\nlines"])}
            for _ in range(rng.choice([1, 2, 3]))
        ]
        calls = [Call("f", json.dumps(value)) for value in values]
        text = form.write(calls)
        assert plain(parse(form, [text])[1]) == plain(calls)
        text = damaged(rng, text)
        places = [rng.randrange(500) for _ in range(rng.randrange(20))]
        content, found = whole = parse(form, [text])
        assert parse(form, cut(text, places)) == whole
        broken += len(found) < len(calls)
        if not found:
            assert content == text
    assert broken > 30


@pytest.mark.slow
@every_format
@pytest.mark.parametrize(
    "unit", ["{", "<", "[", " ", '{"', "OPEN", "CALL", "OPEN{}", "OPEN[", ";", "OPEN ", "<function=f>"]
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_parsing_takes_linear_time(form, unit, size):
    unit = unit.replace("OPEN", form.openings[0]).replace("CALL", form.write([G]))
    text, steps = unit * (20_000 // len(unit)), 0

    class Counting(CallParser):
        def _receive(self, *args):
            nonlocal steps
            steps += 1
            super()._receive(*args)

    parser = Counting(form, FUNCTIONS, None)
    pieces = [parser.put(text[i : i + size])[0] for i in range(0, len(text), size)]
    assert len("".join(pieces) + parser.end()[0]) <= len(text)
    assert steps <= 3 * len(text)


def test_content_and_calls_come_as_soon_as_they_are_certain():
    parser = CallParser(Hermes(), FUNCTIONS, None)
    assert parser.put("Hi, ") == ("Hi,", [])
    assert parser.put("<b") == (" <b", [])
    assert parser.put(">\n<tool_call") == (">", [])
    assert parser.put("s>") == ("\n<tool_calls>", [])
    assert parser.put('<tool_call>{"name": "g"}\n</tool_call') == ("", [])
    assert parser.put(">") == ("", [G])
    assert parser.put("<tool_call>{'") == ("<tool_call>{'", [])
    assert parser.put("\n") == ("", [])
    assert parser.end() == ("", [])
    parser = CallParser(Coder(), FUNCTIONS, None)
    assert parser.put(CODED.removesuffix("\n</tool_call>")) == ("", [F])
    assert parser.put("\n</tool_call>\n") == ("", [])
    assert parser.put("So") == ("\nSo", [])


# Grammars


def automaton(form, functions=FUNCTIONS, most=None, tok=None):
    tok = tok or byte_level()
    return TokenAutomaton.from_expression(form.grammar(functions, most), Spelled(tok, form.marks))


def ends_of(made, ids) -> bool | None:
    """Return True if the ids' text is complete, False if more must follow, and None if it is not allowed."""
    (classes, table), state = matrix(made), int(made.start)
    for token in ids:
        state = table[state, classes[token]]
        if state < 0:
            return None
    return bool(made.accepting[state])


def walk(made, rng, longest=300):
    """Return the ids of a random text that the automaton accepts."""
    classes, table = matrix(made)
    shortest, accepting = np.asarray(made.shortest), np.asarray(made.accepting)
    state, ids = int(made.start), []
    while not (accepting[state] and rng.random() < 0.5):
        choices = np.flatnonzero(table[state, classes] >= 0)
        if not choices.size or (len(ids) > longest and accepting[state]):
            break
        if len(ids) > longest:
            choices = choices[shortest[table[state, classes[choices]]] < shortest[state]]
        ids.append(int(rng.choice(choices)))
        state = table[state, classes[ids[-1]]]
    return ids


SMALL = {
    "f": {
        "properties": {
            "s": {"type": "string"},
            "k": {"enum": ["fox", "owl", 3]},
            "x": {"type": "integer", "minimum": 0, "maximum": 99},
            "b": {"type": "boolean"},
            "t": {"type": "string", "maxLength": 3},
            "d": {"$ref": "#/$defs/d"},
        },
        "required": ["s", "x"],
        "$defs": {"d": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    },
    "now": None,
}


@every_format
@pytest.mark.parametrize("most", [None, 1])
def test_random_answers_are_calls(form, most):
    tok, rng = byte_level(), np.random.default_rng(1)
    most = 1 if form.is_single else most
    made = automaton(form, SMALL, most)
    for _ in range(12):
        text = tok.decode(walk(made, rng))
        content, calls = parse(form, [text], functions=SMALL)
        assert content == ""
        assert len(calls) >= 1 if most is None else len(calls) == 1
        for name, arguments, _ in calls:
            value = json.loads(arguments)
            if name == "now":
                assert value == {}
                continue
            assert isinstance(value["s"], str)
            assert 0 <= value["x"] <= 99
            assert value.get("k", 3) in ("fox", "owl", 3)
            assert isinstance(value.get("b", True), bool)
            assert len(value.get("t", "")) <= 3
            assert value.get("d") is None or isinstance(value["d"], int)


@every_format
def test_the_text_of_a_call_follows_the_grammar(form):
    tok, calls = byte_level(), [Call("f", '{"s": "a <b", "x": 5}'), Call("now", "{}")]
    for count in (1,) if form.is_single else (1, 2):
        ids = tok.encode(form.write(calls[:count]), add_special_tokens=False)
        assert ends_of(automaton(form, SMALL), ids) is True
        assert ends_of(automaton(form, SMALL, 1), ids) is (True if count == 1 else None)


def test_tags_that_are_special_tokens_may_be_generated_as_such():
    backend = byte_level_backend()
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    tok = Tokenizer(backend, {})
    ids = tok.encode("[TOOL_CALLS]now[ARGS]{}", add_special_tokens=False)
    assert len(ids) == 7
    assert ends_of(automaton(MistralNamed(), SMALL, tok=tok), ids) is True
    plain_form = TokenAutomaton.from_expression(MistralNamed().grammar(SMALL, None), tok)
    assert ends_of(plain_form, ids) is None


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"properties": {"a": {"type": "string", "pattern": "x"}}},
            "the tool f: f.parameters.properties.a has pattern",
        ),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "a has format, but this model writes strings"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "a allows '</parameter>', which contains a tag"),
        ({"properties": {}, "required": ["a"]}, r"f.parameters requires \['a'\], which are not in its properties"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}}, "list the properties there"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "the tool f: .* refers to '#/\\$defs/b', which is not"),
    ],
)
def test_what_qwen3_coder_cannot_be_forced_to_write_is_refused(schema, words):
    with pytest.raises(InputError, match=words):
        automaton(Coder(), {"f": schema})


def test_a_string_of_qwen3_coder_has_no_tag_of_the_format():
    made, tok = automaton(Coder(), {"f": {"properties": {"s": {"type": "string"}}, "required": ["s"]}}), byte_level()

    def verdict(text):
        written = f"<tool_call>\n<function=f>\n<parameter=s>\n{text}\n</parameter>\n</function>\n</tool_call>"
        return ends_of(made, tok.encode(written, add_special_tokens=False))

    for text in ("", "a", "<", "<<", "</", "</par", "<</p a", "</div><p>\n", "</parameter", "<parameter", "a\n\n"):
        assert verdict(text) is True, text
    for text in ("</parameter>", "a<parameter=b", "<</function>", "x</tool_call>y", "\n</parameter>\n"):
        assert verdict(text) is None, text


@pytest.mark.parametrize(("count", "reordered"), [(2, True), (60, False)])
def test_optional_arguments_are_in_any_order_if_the_grammars_are_not_too_large(count, reordered):
    schema = {"properties": {name: {"type": "boolean"} for name in "abcd"}, "required": ["a"]}
    left_out = []
    functions = {f"f{number}": schema | {"contains": number} for number in range(count)}
    grammars = arguments_of(functions, left_out)
    assert list(grammars) == list(functions)
    assert len(left_out) == count  # each fault is listed once
    grammar = compile_expression(grammars["f1"].expression)
    assert accepts(grammar, '{"a": true, "b": true, "c": false}')
    assert accepts(grammar, '{"a": true, "c": false, "b": true}') == reordered
