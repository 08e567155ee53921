import json
import re

import numpy as np
import pytest

from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.errors import InputError
from jaxgen.serving.formats.hermes import CLOSING, Hermes
from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.protocol import ChatRequest, decode
from jaxgen.serving.tools import Tools
from tests.support.automata import matrix
from tests.support.tokenizers import byte_level, llama

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["°C", "°F"]}},
    "required": ["city"],
}


def tool(name, parameters=None, **more):
    parameters = {} if parameters is None else {"parameters": parameters}
    return {"function": {**more, **parameters, "name": name}, "type": "function"}


def tools_of(tools, choice, parallel):
    """Return the tools of a request with these fields."""
    body = {"messages": [], "tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    request = decode(json.dumps(body).encode(), ChatRequest)
    return Tools.of(request.tools, request.tool_choice, request.parallel_tool_calls)


HERMES = Hermes()
TOOLS = [tool("weather", WEATHER, description="Tell the weather"), tool("now")]


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def written(name, arguments="{}"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def pattern(text):
    """Return a pattern for the text, in which only `.*` is special."""
    return re.escape(text).replace(r"\.\*", ".*")


def automaton_of(tools, tok, vocab_size=None, form=HERMES):
    return TokenAutomaton.from_expression(tools.grammar(form), tok, vocab_size=vocab_size)


# Tools


@pytest.mark.parametrize("choice", [None, "none"])
@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_request_without_tools_has_none(choice, parallel):
    assert tools_of(None, choice, parallel) is None


@pytest.mark.parametrize(
    ("choice", "names", "forced", "single"),
    [
        (None, ("weather", "now"), False, False),
        ("auto", ("weather", "now"), False, False),
        ("required", ("weather", "now"), True, False),
        (named("now"), ("now",), True, True),
        (allowed("auto", "now"), ("now",), False, False),
        (allowed("required", "now", "weather", "now"), ("weather", "now"), True, False),
    ],
)
def test_the_choice_determines_what_may_and_must_be_called(choice, names, forced, single):
    tools = tools_of(TOOLS, choice, None)
    assert tools is not None
    assert tools.for_template == TOOLS
    assert tools.parses
    assert (tools.names, tools.forced, tools.named) == (names, forced, single)
    assert tools.most_calls == (1 if single else None)
    for parallel in (True, False):
        other = tools_of(TOOLS, choice, parallel)
        assert other.most_calls == (None if parallel and not single else 1)


def test_with_the_choice_none_template_and_parser_have_no_tools():
    tools = tools_of(TOOLS, "none", None)
    assert (tools.for_template, tools.parses, tools.forced) == (None, False, False)


def test_the_template_gets_the_fields_that_models_know():
    given = tool("f", description=None, strict=True) | {}
    assert tools_of([given], None, None).for_template == [tool("f")]


@pytest.mark.parametrize(
    ("tools", "choice", "text"),
    [
        (None, "auto", "tool_choice needs tools, got tool_choice 'auto'"),
        (None, named("f"), "tool_choice needs tools"),
        ([], "none", "tools must be a list that is not empty, got []"),
        (["f"], None, "tools[0]: expected `object`, got `str`"),
        ([{"type": "custom", "custom": {}}], None, "tools[0].type: invalid enum value 'custom'"),
        ([{**tool("f"), "type": "custom"}], None, "tools[0].type: invalid enum value 'custom'"),
        ([{"type": "function", "name": "f"}], None, "tools[0].function is missing"),
        ([tool("f"), tool("a b")], None, "tools[1].function.name must be 1 to 64 of .*, got 'a b'"),
        ([tool("f\n")], None, "tools[0].function.name must be"),
        ([tool("f" * 65)], None, "tools[0].function.name must be"),
        ([tool(None)], None, "tools[0].function.name: expected `str`, got `null`"),
        ([tool("f"), tool("g"), tool("f")], None, "tools[2].function.name is f, as in an earlier tool"),
        ([tool("f", description=1)], None, "tools[0].function.description: expected `str | null`, got `int`"),
        ([tool("f", strict="yes")], None, "tools[0].function.strict: expected `bool | null`, got `str`"),
        ([tool("f", [1])], None, "tools[0].function.parameters: expected `object | null`, got `array`"),
        ([tool("f", {"type": "array"})], None, "tools[0].function.parameters.type must be 'object', got 'array'"),
        (TOOLS, "any", "tool_choice: invalid enum value 'any': use auto, none, required, or"),
        (TOOLS, ["auto"], "tool_choice: expected `str | object | null`, got `array`: use auto"),
        (TOOLS, {"type": "custom"}, "tool_choice.type: invalid value 'custom': use function or allowed_tools"),
        (TOOLS, {"type": "function"}, "tool_choice.function is missing"),
        (TOOLS, named("f"), "tool_choice.function.name is 'f', which is not one of the tools"),
        (TOOLS, named(3), "tool_choice.function.name: expected `str`, got `int`"),
        (TOOLS, allowed("some", "now"), "tool_choice.allowed_tools.mode: invalid enum value 'some'"),
        (TOOLS, allowed("auto"), "tool_choice.allowed_tools.tools: expected `array` of length >= 1"),
        (TOOLS, allowed("auto", "f"), "tool_choice.allowed_tools.tools[0].function.name is 'f'"),
    ],
)
def test_a_field_that_is_not_valid_is_refused(tools, choice, text):
    with pytest.raises((InputError, ApiError), match="^" + pattern(text)):
        tools_of(tools, choice, None)


def test_irrelevant_keys_of_tools_are_ignored():
    extra = {"cache_control": {"type": "ephemeral"}, "function": {**tool("f")["function"], "x": 1}}
    assert tools_of([{**tool("f"), **extra}], None, None).for_template == [tool("f")]


# Automata


def ends_of(automaton, ids) -> bool | None:
    """Return True if the ids' text is complete, False if more must follow, and None if it is not allowed."""
    (classes, table), state = matrix(automaton), int(automaton.start)
    for token in ids:
        state = table[state, classes[token]]
        if state < 0:
            return None
    return bool(automaton.accepting[state])


def verdict(tools, text, tok=None):
    tok = byte_level() if tok is None else tok
    return ends_of(automaton_of(tools, tok, len(tok) + 3), tok.encode(text, add_special_tokens=False))


ANSWERS = [
    (written("now"), True),
    (written("weather", '{"city": "Köln"}'), True),
    (written("weather", '{"city":"</tool_ca","unit": "°F" }'), None),  # too long
    (written("weather", '{"city":"</tool_c","unit": "°F" }'), True),
    (written("weather", '{"unit": "°F"}'), None),
    (written("weather"), None),
    (written("now", '{"city": "Köln"}'), None),
    (written("now", "{ }"), None),
    (written("later"), None),
    (written("now").replace(": {", ":{"), None),
    (written("now").removesuffix(CLOSING), False),
    ("", False),
    ("Sure. " + written("now"), None),
    (written("now") + "\n", False),
]


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
def test_a_forced_answer_is_a_call_of_one_of_the_functions(text, expected):
    assert verdict(tools_of(TOOLS, "required", None), text) is expected


@pytest.mark.parametrize(
    ("choice", "parallel", "most"),
    [
        ("required", False, 1),
        (named("now"), True, 1),
    ],
)
def test_forced_answer_has_one_call_without_parallel_calls(choice, parallel, most):
    tools = tools_of(TOOLS, choice, parallel)
    assert verdict(tools, "\n".join([written("now")] * most)) is True
    assert verdict(tools, "\n".join([written("now")] * most) + "\n") is None
    assert (verdict(tools, written("weather", '{"city": ""}')) is None) == (choice != "required")


@pytest.mark.parametrize("parallel", [None, False])
def test_random_answers_are_calls(parallel):
    tok, rng = byte_level(), np.random.default_rng(1)
    tools = tools_of(TOOLS, "required", parallel)
    automaton = automaton_of(tools, tok, len(tok))
    classes, table = matrix(automaton)
    shortest, accepting = np.asarray(automaton.shortest), np.asarray(automaton.accepting)
    for _ in range(30):
        state, ids = int(automaton.start), []
        while not (accepting[state] and (len(ids) > 300 or rng.random() < 0.5)):
            choices = np.flatnonzero(table[state, classes] >= 0)
            if not choices.size:
                break
            if len(ids) > 300:
                choices = choices[shortest[table[state, classes[choices]]] < shortest[state]]
            ids.append(int(rng.choice(choices)))
            state = table[state, classes[ids[-1]]]
        parser = tools.parser(HERMES)
        (content, calls), rest = parser.put(tok.decode(ids)), parser.end()
        assert (content, rest) == ("", ("", []))
        assert len(calls) >= 1 if parallel is None else len(calls) == 1
        for name, arguments, _ in calls:
            value = json.loads(arguments)
            assert name == "weather" or (name == "now" and value == {})
            assert name == "now" or len(value["city"]) <= 8


def test_schemas_without_a_type_mean_objects():
    text = written("f", '{"a": [1, {"b": null}]}')
    assert verdict(tools_of([tool("f", {})], "required", None), text) is True
    assert verdict(tools_of([tool("f", {})], "required", None), written("f", "3")) is None
    node = {"properties": {"next": {"$ref": "#/$defs/node"}}}
    tools = tools_of([tool("f", {"$ref": "#/$defs/node", "$defs": {"node": node}})], "required", None)
    assert verdict(tools, written("f", '{"next": {"next": {}}}')) is True


def test_calls_are_forced_with_a_sentencepiece_tokenizer():
    tok = llama()
    automaton = automaton_of(tools_of(TOOLS, named("now"), None), tok, len(tok))
    ids = [tok.backend.token_to_id(f"<0x{byte:02X}>") for byte in written("now").encode()]
    assert ends_of(automaton, ids) is True


@pytest.mark.parametrize(
    "city",
    [{"type": "array", "uniqueItems": True}, {"$ref": "#/$defs/city"}],
)
def test_an_unsupported_keyword_is_refused_with_the_tool(city):
    parameters = {
        "type": "object",
        "properties": {"city": city},
        "$defs": {"city": {"type": "array", "uniqueItems": True}},
    }
    tools = [tool("f"), tool("weather", parameters)]
    assert tools_of(tools, "auto", None).parses  # only a forced call is constrained
    with pytest.raises(InputError, match=r"the tool weather: .*city has uniqueItems, which is supported for"):
        automaton_of(tools_of(tools, "required", None), byte_level())
    assert verdict(tools_of(tools, named("f"), None), written("f")) is True


@pytest.mark.slow
def test_calls_that_are_too_large_are_refused():
    def tools(length, choice, least=0):
        text = {"type": "string", "minLength": least, "maxLength": length}
        parameters = {"properties": {"text": text}, "required": ["text"]}
        return tools_of([tool("f", parameters)], choice, None)

    assert verdict(tools(1000, named("f")), written("f", '{"text": "a"}')) is True
    assert verdict(tools(1000, "required"), "\n".join([written("f", '{"text": "a"}')] * 9)) is True
    with pytest.raises(InputError, match=r"f\.parameters\.properties\.text is too large"):
        automaton_of(tools(10_000, named("f"), 10_000), byte_level())


def test_the_key_identifies_the_automaton():
    def key(tools=TOOLS, choice="required", parallel=None):
        return tools_of(tools, choice, parallel).key

    flipped = {**WEATHER, "properties": dict(reversed(WEATHER["properties"].items()))}
    keys = [
        key(),
        key(parallel=False),
        key(choice=named("now")),
        key(choice=allowed("required", "now")),
        key([TOOLS[1], tool("weather", flipped)]),  # the same arguments in a different order
        key([TOOLS[0], tool("now", {})]),
    ]
    assert len(set(keys)) == len(keys)
    assert (
        key() == key(json.loads(json.dumps(TOOLS)), parallel=True) == key(choice=allowed("required", "now", "weather"))
    )
    assert key([tool("weather", WEATHER, description="other"), tool("now")]) == key()
