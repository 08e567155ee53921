import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import Tokenizer
from jaxgen.errors import InputError
from jaxgen.serving.tools import CLOSING, OPENING, Call, CallParser, Tools, template_messages
from tests.support.tokenizers import byte_level, llama

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["°C", "°F"]}},
    "required": ["city"],
}


def tool(name, parameters=None, **more):
    parameters = {} if parameters is None else {"parameters": parameters}
    return {"function": {**more, **parameters, "name": name}, "type": "function"}


TOOLS = [tool("weather", WEATHER, description="Tell the weather"), tool("now")]


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def written(name, arguments="{}"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# Messages


def past_call(arguments='{"city": "Köln"}', **more):
    return {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": arguments}, **more}


HISTORY = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Köln?"}]},
    {"role": "assistant", "content": None, "tool_calls": [past_call(index=0)], "refusal": None, "annotations": []},
    {"role": "tool", "content": "rain", "tool_call_id": "call-1", "name": "weather"},
]


def test_messages_become_those_of_templates():
    assert template_messages(HISTORY) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Köln?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
            ],
        },
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "call-1"},
    ]
    assert HISTORY[2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'  # the request is unchanged


def test_what_clients_send_back_without_a_value_has_no_effect():
    message = {"role": "assistant", "content": "Hi", "tool_calls": [], "audio": None, "function_call": None}
    assert template_messages([{**message, "name": None, "tool_call_id": None}]) == [
        {"role": "assistant", "content": "Hi"}
    ]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("Hi", "messages[0] must be an object, got 'Hi'"),
        ({"content": "Hi"}, "messages[0].role must be a string, got None"),
        ({"role": "function", "content": "Hi", "name": "f"}, 'messages[0].role is function, .*use the role "tool"'),
        ({"role": "user"}, "messages[0].content must be a string or a list of parts .*, got None"),
        ({"role": "user", "content": 3}, "messages[0].content must be a string or a list of parts .*, got 3"),
        ({"role": "user", "content": "Hi", "audio": {"id": "a"}}, "messages[0].audio is not supported"),
        ({"role": "user", "content": "Hi", "prefix": True}, "messages[0] has the key 'prefix'"),
        ({"role": "user", "content": "Hi", "name": 3}, "messages[0].name must be a string, got 3"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0] has the type image_url: only text is supported",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0] must have the key 'text'"),
        ({"role": "user", "content": [{"text": "Hi"}]}, "messages[0].content[0].type must be 'text', got None"),
        ({"role": "user", "content": ["Hi"]}, "messages[0].content[0] must be an object"),
        ({"role": "user", "content": None, "tool_calls": [past_call()]}, "messages[0].tool_calls needs the role assi"),
        ({"role": "user", "content": "Hi", "tool_call_id": "a"}, "messages[0].tool_call_id needs the role tool"),
        ({"role": "tool", "content": "Hi"}, "messages[0].tool_call_id must be a string, got None"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls must be a list that is not empty, got 'f'"),
    ],
)
def test_a_message_that_is_not_valid_is_refused(message, text):
    with pytest.raises(InputError, match=pattern(text)):
        template_messages([message])
    with pytest.raises(InputError, match=pattern(text.replace("[0]", "[1]", 1))):
        template_messages([HISTORY[0], message])


def pattern(text):
    """Return a pattern for the text, in which only `.*` is special."""
    return re.escape(text).replace(r"\.\*", ".*")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (past_call("{"), "function.arguments: not valid JSON"),
        (past_call(""), "function.arguments: not valid JSON"),
        (past_call("[1]"), "function.arguments must be the JSON of an object, got [1]"),
        (past_call({"city": "Köln"}), "function.arguments must be a string, got {"),
        (past_call(type="custom"), "type must be 'function', got 'custom'"),
        (past_call(id=None), "id must be a string, got None"),
        (past_call(other=1), " has the key 'other'"),
        ({"id": "a", "type": "function"}, " must have the key 'function'"),
        ({"id": "a", "type": "function", "function": {"arguments": "{}"}}, "function.name must be a string"),
    ],
)
def test_a_past_call_that_is_not_valid_is_refused(call, text):
    where = "messages[0].tool_calls[1]" + ("" if text.startswith(" ") else ".")
    with pytest.raises(InputError, match=pattern(where + text)):
        template_messages([{"role": "assistant", "tool_calls": [past_call(), call]}])


def test_a_conversation_without_messages_is_refused():
    with pytest.raises(InputError, match="messages must have at least one"):
        template_messages([])


# Tools


@pytest.mark.parametrize("choice", [None, "none"])
@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_request_without_tools_has_none(choice, parallel):
    assert Tools.of(None, choice, parallel) is None


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
    tools = Tools.of(TOOLS, choice, None)
    assert tools is not None
    assert tools.for_template == TOOLS
    assert tools.parses
    assert (tools.names, tools.forced, tools.named) == (names, forced, single)
    assert tools.most_calls == (1 if single else None)
    assert (tools.key is not None) == forced
    for parallel in (True, False):
        other = Tools.of(TOOLS, choice, parallel)
        assert other.most_calls == (None if parallel and not single else 1)
    if not forced:
        assert tools.automaton(byte_level(), None) is None


def test_with_the_choice_none_template_and_parser_have_no_tools():
    tools = Tools.of(TOOLS, "none", None)
    assert (tools.for_template, tools.parses, tools.forced, tools.key) == (None, False, False, None)
    assert tools.automaton(byte_level(), None) is None


def test_the_template_gets_the_fields_that_models_know():
    given = tool("f", description=None, strict=True) | {}
    assert Tools.of([given], None, None).for_template == [tool("f")]


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "text"),
    [
        (None, "auto", None, "tool_choice needs tools, got tool_choice 'auto'"),
        (None, named("f"), None, "tool_choice needs tools"),
        ([], "none", None, "tools must be a list that is not empty, got []"),
        ({}, None, None, "tools must be a list"),
        (["f"], None, None, "tools[0] must be an object, got 'f'"),
        ([{"type": "custom", "custom": {}}], None, None, "tools[0].type must be 'function', got 'custom'"),
        ([{"type": "function"}], None, None, "tools[0] must have the key 'function'"),
        ([{**tool("f"), "more": 1}], None, None, "tools[0] has the key 'more'"),
        ([tool("f"), tool("a b")], None, None, "tools[1].function.name must be 1 to 64 of .*, got 'a b'"),
        ([tool("f\n")], None, None, "tools[0].function.name must be"),
        ([tool("f" * 65)], None, None, "tools[0].function.name must be"),
        ([tool(None)], None, None, "tools[0].function.name must be .*, got None"),
        ([tool("f"), tool("g"), tool("f")], None, None, "tools[2].function.name is f, as in an earlier tool"),
        ([tool("f", more=1)], None, None, "tools[0].function has the key 'more'"),
        ([tool("f", description=1)], None, None, "tools[0].function.description must be a string, got 1"),
        ([tool("f", strict="yes")], None, None, "tools[0].function.strict must be true or false, got 'yes'"),
        ([tool("f", [1])], None, None, "tools[0].function.parameters must be a JSON schema"),
        ([tool("f", {"type": "array"})], None, None, "tools[0].function.parameters.type must be 'object', got 'array'"),
        (TOOLS, None, "yes", "parallel_tool_calls must be true or false, got 'yes'"),
        (TOOLS, "any", None, "tool_choice must be 'auto', 'none', 'required' or .*, got 'any'"),
        (TOOLS, ["auto"], None, "tool_choice must be .*, got ['auto']"),
        (TOOLS, {"type": "custom"}, None, "tool_choice must be .*, got {'type': 'custom'}"),
        (TOOLS, {"type": "function"}, None, "tool_choice must have the key 'function'"),
        (TOOLS, {"type": "function", "name": "now"}, None, "tool_choice has the key 'name'"),
        (TOOLS, named("f"), None, "tool_choice.function.name is 'f', which is not one of the tools"),
        (TOOLS, named(3), None, "tool_choice.function.name must be a string, got 3"),
        (
            TOOLS,
            allowed("some", "now"),
            None,
            "tool_choice.allowed_tools.mode must be 'auto' or .*, got 'some'",
        ),
        (TOOLS, allowed("auto"), None, "tool_choice.allowed_tools.tools must be a list that is not empty"),
        (TOOLS, allowed("auto", "f"), None, "tool_choice.allowed_tools.tools[0].function.name is 'f'"),
    ],
)
def test_a_field_that_is_not_valid_is_refused(tools, choice, parallel, text):
    with pytest.raises(InputError, match="^" + pattern(text)):
        Tools.of(tools, choice, parallel)


def test_parameters_that_json_cannot_have_are_refused():
    deep = {}
    for _ in range(5000):
        deep = {"items": deep}
    for parameters, reason in ((deep, "nested too deeply"), ({"default": float("nan")}, "NaN")):
        with pytest.raises(InputError, match=rf"tools\[0\]\.function\.parameters: .*{reason}"):
            Tools.of([tool("f", parameters)], None, None)


# Automata


def ends_of(automaton, ids) -> bool | None:
    """Return True if the ids' text is complete, False if more must follow, and None if it is not allowed."""
    classes, table, state = np.asarray(automaton.classes), np.asarray(automaton.transitions), int(automaton.start)
    for token in ids:
        state = table[state, classes[token]]
        if state < 0:
            return None
    return bool(automaton.accepting[state])


def verdict(tools, text, tok=None):
    tok = byte_level() if tok is None else tok
    return ends_of(tools.automaton(tok, len(tok) + 3), tok.encode(text, add_special_tokens=False))


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
    assert verdict(Tools.of(TOOLS, "required", None), text) is expected


@pytest.mark.parametrize(
    ("choice", "parallel", "most"),
    [
        ("required", False, 1),
        (named("now"), True, 1),
    ],
)
def test_a_forced_answer_has_one_call_if_the_request_says_so(choice, parallel, most):
    tools = Tools.of(TOOLS, choice, parallel)
    assert verdict(tools, "\n".join([written("now")] * most)) is True
    assert verdict(tools, "\n".join([written("now")] * most) + "\n") is None
    assert (verdict(tools, written("weather", '{"city": ""}')) is None) == (choice != "required")


@pytest.mark.parametrize("parallel", [None, False])
def test_random_answers_are_calls(parallel):
    tok, rng = byte_level(), np.random.default_rng(1)
    tools = Tools.of(TOOLS, "required", parallel)
    automaton = tools.automaton(tok, len(tok))
    classes, table = np.asarray(automaton.classes), np.asarray(automaton.transitions)
    shortest, accepting = np.asarray(automaton.shortest), np.asarray(automaton.accepting)
    for _ in range(30):
        state, ids = int(automaton.start), []
        while not (accepting[state] and rng.random() < 0.5):
            choices = np.flatnonzero(table[state, classes] >= 0)
            if not choices.size:
                break
            if len(ids) > 300:
                choices = choices[shortest[table[state, classes[choices]]] < shortest[state]]
            ids.append(int(rng.choice(choices)))
            state = table[state, classes[ids[-1]]]
        parser = CallParser(tools.names, tools.most_calls)
        (content, calls), rest = parser.put(tok.decode(ids)), parser.end()
        assert (content, rest) == ("", ("", []))
        assert len(calls) >= 1 if parallel is None else len(calls) == 1
        for name, arguments in calls:
            value = json.loads(arguments)
            assert name == "weather" or (name == "now" and value == {})
            assert name == "now" or len(value["city"]) <= 8


def test_schemas_without_a_type_are_of_objects():
    text = written("f", '{"a": [1, {"b": null}]}')
    assert verdict(Tools.of([tool("f", {})], "required", None), text) is True
    assert verdict(Tools.of([tool("f", {})], "required", None), written("f", "3")) is None
    node = {"properties": {"next": {"$ref": "#/$defs/node"}}}
    tools = Tools.of([tool("f", {"$ref": "#/$defs/node", "$defs": {"node": node}})], "required", None)
    assert verdict(tools, written("f", '{"next": {"next": {}}}')) is True


def test_a_tokenizer_of_the_other_kind_has_calls_too():
    tok = llama()
    automaton = Tools.of(TOOLS, named("now"), None).automaton(tok, len(tok))
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
    assert Tools.of(tools, "auto", None).parses  # only a forced call is constrained
    with pytest.raises(InputError, match=r"the tool weather: .*city has uniqueItems, which is supported for"):
        Tools.of(tools, "required", None).automaton(byte_level(), None)
    assert verdict(Tools.of(tools, named("f"), None), written("f")) is True


def test_calls_that_are_too_large_are_refused():
    def tools(length, choice, least=0):
        text = {"type": "string", "minLength": least, "maxLength": length}
        parameters = {"properties": {"text": text}, "required": ["text"]}
        return Tools.of([tool("f", parameters)], choice, None)

    assert verdict(tools(1000, named("f")), written("f", '{"text": "a"}')) is True
    assert verdict(tools(1000, "required"), "\n".join([written("f", '{"text": "a"}')] * 9)) is True
    with pytest.raises(InputError, match=r"f\.parameters\.properties\.text is too large"):
        tools(10_000, named("f"), 10_000).automaton(byte_level(), None)


def test_the_key_identifies_the_automaton():
    def key(tools=TOOLS, choice="required", parallel=None):
        return Tools.of(tools, choice, parallel).key

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


# Qwen's tags are added tokens, but not special tokens


@pytest.fixture(scope="module")
def qwen(data) -> Tokenizer:
    return Tokenizer.from_pretrained(data / "tokenizers" / "qwen2.5-instruct")


def test_qwens_tags_may_be_one_token_or_several(qwen):
    text = "\n".join([written("weather", '{"city": "Köln"}'), written("now")])
    tags = [qwen.backend.token_to_id(tag) for tag in (OPENING, CLOSING)]
    short = qwen.encode(text, add_special_tokens=False)
    assert [short.count(tag) for tag in tags] == [2, 2]
    spelled = {
        tag: [i for part in (text[:3], text[3:]) for i in qwen.encode(part, add_special_tokens=False)]
        for tag, text in zip(tags, (OPENING, CLOSING), strict=True)
    }
    long = [i for token in short for i in spelled.get(token, [token])]
    assert not set(long) & set(tags)
    assert qwen.decode(long) == qwen.decode(short) == text
    automaton = Tools.of(TOOLS, "required", None).automaton(qwen, 151_936)
    assert automaton.classes.shape == (151_936,)
    assert ends_of(automaton, short) is ends_of(automaton, long) is True
    parser = CallParser({"weather", "now"}, None)
    assert [call.name for call in parser.put(qwen.decode(short))[1]] == ["weather", "now"]


def test_qwens_template_writes_history_as_the_parser_reads_it(qwen):
    tools = Tools.of(TOOLS, None, None)
    prompt = qwen.render_chat(template_messages(HISTORY), tools=tools.for_template)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    weather = '{"name": "weather", "description": "Tell the weather", "parameters": {"type": "object", "properties": '
    assert f'<tools>\n{{"type": "function", "function": {weather}' in prompt
    assert '"required": ["city"]}}}\n{"type": "function", "function": {"name": "now"}}\n</tools>' in prompt
    assert "<|im_start|>assistant\n" + written("weather", '{"city": "Köln"}') + "<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>" in prompt
    answer = prompt.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    assert CallParser(tools.names, None).put(answer) == ("", [Call("weather", '{"city": "Köln"}')])


def test_the_choice_none_hides_the_tools(qwen):
    prompt = qwen.render_chat(template_messages(HISTORY[:2]), tools=Tools.of(TOOLS, "none", None).for_template)
    assert "weather" not in prompt


# The parser


def parse(pieces, names=("f", "g"), most=None):
    parser = CallParser(names, most)
    results = [*(parser.put(piece) for piece in pieces), parser.end()]
    return "".join(content for content, _ in results), [call for _, calls in results for call in calls]


F = Call("f", "{}")
PARSED = [
    ("", "", []),
    ("Hello <b>world</b>\n ", "Hello <b>world</b>\n ", []),
    (written("f"), "", [F]),
    ("\n" + written("f") + "\n", "", [F]),
    ("Let me see. \n" + written("f") + "\n\n" + written("g", '{"x":[1]}'), "Let me see.", [F, Call("g", '{"x": [1]}')]),
    ("One" + written("f") + "\ntwo " + written("f") + " three\n", "One\ntwo three", [F, F]),
    (written("f", '{"x": "</tool_call>"}'), "", [Call("f", '{"x": "</tool_call>"}')]),
    (written("f", '{"x": "\\"<tool_call>\\\\"}'), "", [Call("f", '{"x": "\\"<tool_call>\\\\"}')]),
    (written("f", '{"x": "K\\u00f6ln 😀"}'), "", [Call("f", '{"x": "Köln 😀"}')]),
    ('<tool_call>{"arguments":{},"id":1,"name":"f"}</tool_call>', "", [F]),
    ('<tool_call>{"name":"f"}</tool_call>', "", [F]),
    ('<tool_call>\n{"name": "f", "arguments": {}}\n', "", [F]),
    ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_', "", [F]),
    ('a <tool_call>\n{"name": "f", "arguments": {}', 'a <tool_call>\n{"name": "f", "arguments": {}', []),
    ("a <tool_call>\n", "a <tool_call>\n", []),
    ("a <tool_", "a <tool_", []),
    ("The tag <tool_call> begins a call:\n" + written("f"), "The tag <tool_call> begins a call:", [F]),
    ("<<tool_call<" + written("f"), "<<tool_call<", [F]),
    ('<tool_call>{"name": "f"}\n' + written("f"), '<tool_call>{"name": "f"}', [F]),  # no closing tag
    ('<tool_call>{"name": "f"}</tool_call' + written("f"), '<tool_call>{"name": "f"}</tool_call', [F]),
    ('<tool_call>{"name": "f \n' + written("f"), '<tool_call>{"name": "f', [F]),  # a string across lines
]
NOT_CALLS = [
    written("h"),
    written("f", "[]"),
    written("f", '"{}"'),
    written("f", "null"),
    written("f", '{"x": NaN}'),
    written("f", '{"x": 1e999}'),
    written("f", '{"x": "\\ud83d"}'),
    written("f", '{"x": 1, "x": 2}'),
    written("f", "{'x': 1}"),
    written("f", '{"x": 1'),
    written("f", '{"x": 1}}'),
    written("f", '{"x": 1,}'),
    '<tool_call>\n{"arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": ["f"]}\n</tool_call>',
    '<tool_call>\n[{"name": "f"}]\n</tool_call>',
    '<tool_call>\n"f"\n</tool_call>',
    "<tool_call></tool_call>",
    '<TOOL_CALL>{"name": "f"}</TOOL_CALL>',
    '< tool_call>{"name": "f"}</tool_call>',
    '<tool_call>{"name": "f"}< /tool_call>',
]


def check(text, content, calls, **options):
    """Check what is parsed from the whole text, from single characters, and from the two parts of every split."""
    assert parse([text], **options) == (content, calls)
    assert parse(text, **options) == (content, calls)
    for cut in range(1, len(text)):
        assert parse([text[:cut], text[cut:]], **options) == (content, calls)


@pytest.mark.parametrize(("text", "content", "calls"), PARSED)
def test_calls_are_found_and_the_rest_is_content(text, content, calls):
    check(text, content, calls)


@pytest.mark.parametrize("text", NOT_CALLS)
def test_what_is_not_a_call_is_content(text):
    for around in ("", "a ", "\n"):
        check(around + text + around, around + text + around, [])
    check(text + "\n" + written("f") + "\n" + text, text + "\n" + text, [F])


def test_a_call_with_too_many_levels_is_content():
    text = written("f", '{"x":' + "[" * 5000 + "]" * 5000 + "}")
    assert parse([text]) == parse(text) == (text, [])


def test_calls_beyond_the_most_are_dropped():
    text = "a\n" + "\n".join([written("f"), written("g"), written("h"), written("g")])
    check(text, "a\n" + written("h"), [F], most=1)
    check(text, "a\n" + written("h"), [F, Call("g", "{}")], most=2)


def test_any_function_may_be_called_without_names():
    check(written("h é"), "", [Call("h é", "{}")], names=None)


def test_content_and_calls_come_as_soon_as_they_are_certain():
    parser = CallParser({"f"}, None)
    assert parser.put("Hi, ") == ("Hi,", [])
    assert parser.put("<b") == (" <b", [])
    assert parser.put(">\n<tool_call") == (">", [])
    assert parser.put("s>") == ("\n<tool_calls>", [])
    assert parser.put('<tool_call>{"name": "f"}\n</tool_call') == ("", [])
    assert parser.put(">") == ("", [F])
    assert parser.put("<tool_call>{'") == ("<tool_call>{'", [])
    assert parser.put("\n") == ("", [])
    assert parser.end() == ("", [])


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
STRINGS = st.text(st.sampled_from('<>/tool_call"\\{}[] \né😀') | st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    SCALARS | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(["x", "é", OPENING, CLOSING, '"']), VALUES, max_size=3)
PARTS = (OPENING, CLOSING, '{"name": "f"', ', "arguments": {', '"x": ', '{"name": "<tool_call>', "é😀", "\u2028\xa0")
FRAGMENTS = st.lists(
    st.sampled_from([*PARTS, *'{}["\\<\n ', "</", "tool_call>", written("g")]) | st.text(max_size=3), max_size=12
).map("".join)


def cut(text, places):
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[first:last] for first, last in itertools.pairwise(bounds)]


@settings(max_examples=250, deadline=None)
@given(FRAGMENTS, st.lists(st.integers(0, 500), max_size=8), st.sampled_from([None, 1]))
def test_where_the_text_is_cut_has_no_effect(text, places, most):
    whole = parse([text], most=most)
    assert parse(cut(text, places), most=most) == parse(text, most=most) == whole
    if OPENING not in text:
        assert whole == (text, [])
    if most is None and not whole[1]:
        assert whole[0] == text


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.text("ab <>é😀.\n", max_size=6), OBJECTS, st.booleans(), st.sampled_from([None, 2]))),
    st.lists(st.integers(0, 500), max_size=5),
)
def test_every_call_is_found(parts, places):
    text, content = "", ""
    for before, value, ascii_only, indent in parts:
        body = json.dumps({"name": "f", "arguments": value}, ensure_ascii=ascii_only, indent=indent)
        text += f"{before}{OPENING}\n{body}\n{CLOSING}"
        content += before.rstrip(" \n")
    calls = [Call("f", json.dumps(value, ensure_ascii=False)) for _, value, _, _ in parts]
    assert parse(cut(text, places)) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        OPENING + '{"x": "' + "y" * 100_000,
        OPENING + " " * 100_000,
        " " * 100_000,
        OPENING + "{" + '"":[],' * 14_000,
        OPENING * 9_000,
        (OPENING + '{"') * 7_000,
        (OPENING + "{}") * 7_000,
        (OPENING + "{}" + CLOSING) * 4_000,
        "<" * 100_000,
    ],
    ids=lambda text: text[:24],
)
@pytest.mark.parametrize("size", [1, 10**6])
def test_the_work_is_linear_in_the_text(text, size):
    class Counting(CallParser):
        steps = joined = 0

        def _reads(self, char):
            self.steps += 1
            return super()._reads(char)

        def _call(self, text):
            self.joined += len(text)
            return super()._call(text)

    parser = Counting({"f"}, None)
    pieces = [parser.put(text[i : i + size])[0] for i in range(0, len(text), size)]
    assert "".join(pieces) + parser.end()[0] == text
    assert parser.steps <= 3 * len(text)
    assert parser.joined <= len(text)
