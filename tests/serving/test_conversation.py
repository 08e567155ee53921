import json
import re
from pathlib import Path

import msgspec
import pytest

from jaxgen import Tokenizer
from jaxgen.core.text.chat_template import continued
from jaxgen.errors import InputError
from jaxgen.serving.conversation import Dialect, dialect_of, read_messages, template_messages
from jaxgen.serving.formats.coder import Coder
from jaxgen.serving.formats.formats import format_of
from jaxgen.serving.formats.hermes import Hermes
from jaxgen.serving.formats.mistral import MistralList
from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.protocol import ChatRequest, Tool, decode
from jaxgen.serving.rendering import Renderer
from jaxgen.serving.tools import Tools
from tests.support.dialects import KINDS
from tests.support.tokenizers import byte_level

CITY = '{"city": "Köln"}'


def past_call(arguments=CITY, **more):
    return {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": arguments}, **more}


def written(messages, dialect=Dialect(), form=None):  # noqa: B008 - a constant
    return template_messages(read(messages), dialect, form or Hermes())


def chat_request(**fields):
    return msgspec.convert(fields, ChatRequest)


def read(messages):
    """Read the messages of the body of a request."""
    return read_messages(decode(json.dumps({"messages": messages}).encode(), ChatRequest).messages)


def tools_of(tools, choice=None):
    return Tools.of(tools and msgspec.convert(tools, list[Tool]), choice, None)


HISTORY = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Köln?"}]},
    {"role": "assistant", "content": None, "tool_calls": [past_call(index=0)], "refusal": None, "annotations": []},
    {"role": "tool", "content": "rain", "tool_call_id": "call-1", "name": "weather"},
]


def test_messages_become_those_of_templates():
    assert written(HISTORY) == [
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
    assert HISTORY[2]["tool_calls"][0]["function"]["arguments"] == CITY  # the request is unchanged


def test_irrelevant_keys_of_messages_are_ignored():
    message = {"role": "assistant", "content": "Hi", "tool_calls": [], "audio": None, "function_call": None}
    more = {
        "id": 7,
        "opts": {"visible": False},
        "annotations": [],
        "cache_control": None,
        "name": None,
        "prefix": False,
    }
    assert written([{**message, **more, "tool_call_id": None}]) == [{"role": "assistant", "content": "Hi"}]
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "annotations": []}
    assert written([{"role": "user", "content": [part]}]) == [{"role": "user", "content": "Hi"}]


def test_thoughts_reach_the_template_under_both_names():
    expected = {"role": "assistant", "content": "A wren.", "reasoning_content": "Small.", "reasoning": "Small."}
    for given in ({"reasoning_content": "Small."}, {"reasoning": "Small."}):
        assert written([{"role": "assistant", "content": "A wren.", **given}]) == [expected]
    parts = [{"type": "thinking", "thinking": "Small."}, {"type": "text", "text": "A wren."}]
    assert written([{"role": "assistant", "content": parts}]) == [expected]


def test_an_answer_without_text_is_empty_and_a_refusal_is_its_text():
    empty = {"role": "assistant", "content": ""}
    assert written([{"role": "assistant", "content": None}]) == [empty]
    assert written([{"role": "assistant"}]) == [empty]
    assert written([{"role": "assistant", "content": None, "refusal": "No."}]) == [empty | {"content": "No."}]
    assert written([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}])[0]["content"] == "No."


@pytest.mark.parametrize(
    ("given", "object_form", "text_form"),
    [
        (CITY, {"city": "Köln"}, CITY),
        ('{"city":"Köln"}', {"city": "Köln"}, '{"city":"Köln"}'),
        ({"city": "Köln"}, {"city": "Köln"}, CITY),
        ("", {}, "{}"),
        (" \n", {}, "{}"),
        (None, {}, "{}"),
        ("null", {}, "null"),
        ('{"city": "Kö', {"arguments": '{"city": "Kö'}, '{"city": "Kö'),
        ("[1]", {"arguments": "[1]"}, "[1]"),
        ("rain", {"arguments": "rain"}, "rain"),
    ],
)
def test_arguments_take_the_form_that_the_template_accepts(given, object_form, text_form):
    def arguments(**dialect):
        [message] = written([{"role": "assistant", "tool_calls": [past_call(given)]}], Dialect(**dialect))
        return message["tool_calls"][0]["function"]["arguments"]

    assert arguments(objects=True, strings=False) == object_form
    assert arguments(objects=False) == text_form
    is_cut = object_form == {"arguments": given}
    assert arguments(objects=True, strings=True) == (given if is_cut else object_form)


def test_rejected_ids_are_replaced_in_calls_and_results():
    messages = written(HISTORY[2:], form=MistralList())
    own = messages[0]["tool_calls"][0]["id"]
    assert re.fullmatch("[a-z0-9]{9}", own)
    assert messages[1]["tool_call_id"] == own
    given = [{"role": "assistant", "tool_calls": [past_call(id="abcDEF123")]}]
    assert written(given, form=MistralList())[0]["tool_calls"][0]["id"] == "abcDEF123"


def test_calls_can_be_written_into_the_content():
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert written([HISTORY[2]], Dialect(writes=False)) == [{"role": "assistant", "content": text}]
    both = [{**HISTORY[2], "content": "Let me see."}]
    assert written(both, Dialect(writes=False))[0]["content"] == f"Let me see.\n{text}"
    cut = [{"role": "assistant", "tool_calls": [past_call("{")]}]
    assert "<parameter=arguments>\n{\n" in written(cut, Dialect(writes=False), Coder())[0]["content"]


def test_several_calls_become_messages_with_their_results():
    calls = [past_call(id=name) for name in "abc"]
    results = [{"role": "tool", "content": name.upper(), "tool_call_id": name} for name in "cax"]
    last = {"role": "user", "content": "Thanks"}
    messages = written([{"role": "assistant", "tool_calls": calls}, *results, last], Dialect(parallel=False))
    order = [m["tool_calls"][0]["id"] if "tool_calls" in m else m["content"] for m in messages]
    assert order == ["a", "A", "b", "c", "C", "X", "Thanks"]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("Hi", "messages[0]: expected `object`, got `str`"),
        ({"content": "Hi"}, "messages[0].role is missing"),
        ({"role": 3, "content": "Hi"}, "messages[0].role: expected `str`, got `int`"),
        ({"role": "function", "content": "Hi", "name": "f"}, 'messages[0].role is function, .*use the role "tool"'),
        ({"role": "user"}, "messages[0].content must be a string or a list of text parts, got null"),
        ({"role": "tool", "tool_call_id": "a"}, "messages[0].content must be a string or a list of text parts"),
        ({"role": "user", "content": 3}, "messages[0].content: expected `str | array | null`, got `int`"),
        (
            {"role": "user", "content": "Hi", "audio": {"id": "a"}},
            "messages[0].audio: expected `null`, got `object`: leave it out",
        ),
        (
            {"role": "user", "content": "Hi", "prefix": True},
            "messages[0].prefix: invalid enum value True: use",
        ),
        ({"role": "user", "content": "Hi", "name": 3}, "messages[0].name: expected `str | null`, got `int`"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0] has the type image_url: only text is supported",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0] has the type input_audio"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text is missing"),
        ({"role": "user", "content": [{"text": "Hi"}]}, "messages[0].content[.*].type is missing"),
        ({"role": "user", "content": ["Hi"]}, "messages[0].content[.*]: expected `object`, got `str`"),
        ({"role": "user", "content": None, "tool_calls": [past_call()]}, "messages[0].tool_calls needs the role assi"),
        ({"role": "user", "content": "Hi", "tool_call_id": "a"}, "messages[0].tool_call_id needs the role tool"),
        ({"role": "tool", "content": "Hi"}, "messages[0].tool_call_id is missing"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls: expected `array | null`, got `str`"),
        (
            {"role": "assistant", "tool_calls": [past_call(type="custom")]},
            "messages[0].tool_calls[0].type: invalid enum",
        ),
        (
            {"role": "assistant", "tool_calls": [past_call(3)]},
            "messages[0].tool_calls[.*].function.arguments: expected",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls[.*].function is missing"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"arguments": "{}"}}]},
            "messages[0].tool_calls[.*].function.name is missing",
        ),
    ],
)
def test_a_message_that_is_not_valid_is_refused(message, text):
    for before in ([], [HISTORY[0]]):
        expected = re.escape(text.replace("messages[0]", f"messages[{len(before)}]")).replace(r"\.\*", ".*")
        with pytest.raises((InputError, ApiError), match="^" + expected):
            read([*before, message])


def test_a_conversation_without_messages_is_refused():
    with pytest.raises(InputError, match="messages must have at least one"):
        read([])


# Dialects


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("HERMES", Dialect(strings=False)),
        ("QWEN3", Dialect()),
        ("R1", Dialect(empty=None, objects=False, together=False)),
        ("CODER", Dialect(strings=False)),
        ("LLAMA", Dialect(strings=False, together=False, parallel=False)),
        ("NEMO", Dialect(strings=False, together=False)),
        ("DEVSTRAL", Dialect(strings=False)),
        ("FUNCTIONARY", Dialect(objects=False)),
        ("CARELESS", Dialect(objects=False)),
        ("SMOL", Dialect(writes=False)),
    ],
)
def test_the_form_that_a_template_accepts_is_found(kind, expected):
    tok = byte_level(chat_template=KINDS[kind])
    assert dialect_of(lambda messages: tok.render_chat(messages, False)) == expected


USER = {"role": "user", "content": "Weather?"}
CALL, OTHER = past_call(), {"id": "b", "type": "function", "function": {"name": "later", "arguments": '{"at": 12}'}}
RESULT = {"role": "tool", "content": "rain", "tool_call_id": "call-1"}
REST = [RESULT, {"role": "assistant", "content": "It rains."}, {"role": "user", "content": "And later?"}]
CONVERSATIONS = {
    "null": [{"role": "assistant", "content": None, "tool_calls": [CALL]}, *REST],
    "text": [{"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}, *REST],
    "thought": [{"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]}, RESULT],
    "parallel": [
        {"role": "assistant", "content": "", "tool_calls": [CALL, OTHER]},
        RESULT,
        {"role": "tool", "content": "sun", "tool_call_id": "b"},
    ],
    "cut": [{"role": "assistant", "tool_calls": [past_call('{"city": "Köln')]}, RESULT],
    "empty": [{"role": "assistant", "tool_calls": [CALL, past_call("", id="c")]}, RESULT],
    "object": [{"role": "assistant", "tool_calls": [past_call({"city": "Köln"})]}, RESULT],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("has_tools", [False, True])
def test_past_calls_are_in_the_prompt(kind, name, has_tools):
    renderer = Renderer(byte_level(chat_template=KINDS[kind]), True)
    tools = [{"type": "function", "function": {"name": "search"}}] if has_tools else None
    request = chat_request(messages=[USER, *CONVERSATIONS[name]], tools=tools)
    text = renderer.prompt(request, tools_of(tools)).text
    assert "weather" in text
    assert "Köln" in text
    assert "rain" in text
    assert "None" not in text
    assert "'city'" not in text
    assert name != "parallel" or ("later" in text and "12" in text and "sun" in text)
    assert name != "thought" or kind != "QWEN3" or "<think>\nHm.\n</think>" in text


def test_a_template_is_probed_once(monkeypatch):
    renderer, rendered = Renderer(tok := byte_level(chat_template=KINDS["R1"]), True), []
    original = tok.render_chat
    monkeypatch.setattr(tok, "render_chat", lambda *args, **more: rendered.append(1) or original(*args, **more))
    request = chat_request(messages=[USER, *CONVERSATIONS["null"]])
    renderer.prompt(request, None)
    assert len(rendered) > 1
    rendered.clear()
    renderer.prompt(request, None)
    assert len(rendered) == 1


# The last message continues


@pytest.mark.parametrize("kind", ["HERMES", "QWEN3", "LLAMA", "DEVSTRAL", "R1"])
@pytest.mark.parametrize("text", ["A wren is", "A wren is ", "\n A\nwren", "Weather?", "end", "<"])
def test_the_answer_continues_the_last_message(kind, text):
    renderer = Renderer(byte_level(chat_template=KINDS[kind]), True)
    messages = [USER, {"role": "assistant", "content": text}]
    request = chat_request(messages=messages, add_generation_prompt=False, continue_final_message=True)
    prompt = renderer.prompt(request, None)
    whole = renderer.prompt(chat_request(messages=messages, add_generation_prompt=False), None).text
    assert whole.startswith(prompt.text)
    assert prompt.text.endswith(text.strip() if kind == "LLAMA" else text)
    assert prompt.text.count("Weather?") == 1 + (text == "Weather?")


def test_last_message_may_end_within_a_thought():
    def is_open(text):
        messages = [USER, {"role": "assistant", "content": text}]
        request = chat_request(messages=messages, add_generation_prompt=False, continue_final_message=True)
        return Renderer(byte_level(chat_template=KINDS["QWEN3"]), True).prompt(request, None).is_open

    assert [is_open(text) for text in ("<think>\nHm", "<think>Hm</think>\nA", "A wren")] == [True, False, False]


@pytest.mark.parametrize(
    ("messages", "prompted", "words"),
    [
        ([USER, {"role": "assistant", "content": "A"}], True, "needs add_generation_prompt to be false"),
        ([USER], False, "and a last message of the assistant"),
        ([USER, {"role": "assistant", "content": " "}], False, "cannot continue the last message: it has no text"),
    ],
)
def test_messages_that_cannot_be_continued_are_refused(messages, prompted, words):
    request = chat_request(messages=messages, add_generation_prompt=prompted, continue_final_message=True)
    with pytest.raises((InputError, ApiError), match=words):
        Renderer(byte_level(chat_template=KINDS["HERMES"]), True).prompt(request, None)
    with pytest.raises(InputError, match="the chat template changes it"):
        continued(lambda messages: "<user>Hi<assistant>other", [{"role": "assistant", "content": "A wren"}])


@pytest.mark.parametrize(
    ("fields", "closes"),
    [
        ({}, False),
        ({"enable_thinking": False}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "low"}, False),
        ({"reasoning_effort": "none", "enable_thinking": True}, False),
    ],
)
def test_thinking_fields_reach_the_template(fields, closes):
    prompt = Renderer(byte_level(chat_template=KINDS["QWEN3"]), True).prompt(
        chat_request(messages=[USER], **fields), None
    )
    assert prompt.text.endswith("<think>\n\n</think>\n\n") == closes
    assert not prompt.is_open
    assert (prompt.before is None) == closes


CHATS = Path(__file__).parents[1] / "goldens" / "seed0" / "chats"


def test_formats_that_are_not_implemented_are_refused():
    granite = Renderer(Tokenizer.from_pretrained(CHATS / "granite"), True)
    tools = tools_of([{"type": "function", "function": {"name": "weather"}}])
    own = r"tools: this model writes calls after <\|tool_call\|>, a format that is not implemented"
    for messages, given in (([USER], tools), (HISTORY, None)):
        with pytest.raises(InputError, match=own):
            granite.prompt(chat_request(messages=messages), given)
    assert "Weather?" in granite.prompt(chat_request(messages=[USER]), None).text
    smollm3 = Renderer(Tokenizer.from_pretrained(CHATS / "smollm3"), True).prompt(chat_request(messages=[USER]), tools)
    assert isinstance(smollm3.form, Hermes)
    assert "'name': 'weather'" in smollm3.text


# Qwen's template


@pytest.fixture(scope="module")
def qwen(data) -> Tokenizer:
    return Tokenizer.from_pretrained(data / "tokenizers" / "qwen2.5-instruct")


def test_qwens_template_writes_history_as_the_parser_reads_it(qwen):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "weather", "description": "Tell the weather", "parameters": parameters}
    tools = tools_of([{"type": "function", "function": function}])
    prompt = Renderer(qwen, True).prompt(chat_request(messages=HISTORY), tools)
    assert prompt.text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert json.dumps({"type": "function", "function": function}) in prompt.text
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in prompt.text
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>" in prompt.text
    assert isinstance(format_of(qwen.chat_template), Hermes)
    hidden = Renderer(qwen, True).prompt(
        chat_request(messages=HISTORY[:2]),
        tools_of([{"type": "function", "function": function}], "none"),
    )
    assert "weather" not in hidden.text


def test_many_results_of_equal_calls_take_linear_time():
    """If the template accepts one call in a message, each result follows the first call with its id."""
    calls = [past_call(id="a"), past_call(id="a"), past_call(id="b")]
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in ("x", "b", "a", "y", "a")]
    messages = [{"role": "assistant", "content": "c", "tool_calls": calls}, *results]
    one = Dialect(parallel=False)
    found = written(messages, one)
    assert [m.get("tool_call_id") or len(m["tool_calls"]) for m in found] == [1, "a", "a", 1, 1, "b", "x", "y"]
    many = [{"role": "assistant", "content": None, "tool_calls": [past_call(id="a")] * 3000}, *[results[2]] * 3000]
    assert len(written(many, one)) == 6000
