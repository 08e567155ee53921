"""Requests that clients send to /v1/chat/completions: histories, neutral fields, thoughts and formats of calls."""

import json

import httpx
import msgspec
import openai
import pytest

from jaxgen import GenerationConfig
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.request.prompt import PromptReader
from jaxgen.core.request.prompt_options import PromptOptions
from jaxgen.core.text.streaming import TextStream
from jaxgen.engine.results import Event
from jaxgen.serving.protocol import ChatRequest, CompletionRequest
from jaxgen.serving.replies import Replies
from jaxgen.serving.requests import Reader
from jaxgen.serving.scored import TokenTexts
from tests.serving.test_service import events, refused
from tests.support.dialects import KINDS
from tests.support.service import MODEL, running
from tests.support.tokenizers import byte_level

USER = {"role": "user", "content": "A bird?"}
PATH = "/v1/chat/completions"
NOW = {"type": "function", "function": {"name": "now", "cache_control": {"type": "ephemeral"}}, "id": 3}
SKY = {
    "type": "function",
    "function": {"name": "sky", "parameters": {"properties": {"at": {"type": "integer"}}, "required": ["at"]}},
}


@pytest.fixture(scope="module")
def qwen():
    with running(template=KINDS["QWEN3"]) as made, httpx.Client(base_url=made.url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def r1():
    with running(template=KINDS["R1"]) as made, httpx.Client(base_url=made.url, timeout=60) as http:
        yield http


def chat_request(**fields):
    return msgspec.convert(fields, ChatRequest)


def chat(http, **fields) -> dict:
    response = http.post(PATH, json={"messages": [USER], "max_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "a wren", "reasoning_content": "small"},
        {"role": "assistant", "content": "a wren", "reasoning": "small", "reasoning_details": []},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None},
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "x", "id": 1947, "opts": {"visible": False}},
    ],
)
def test_messages_of_clients_are_accepted(qwen, message):
    assert "message" in chat(qwen, messages=[USER, message])["choices"][0]


@pytest.mark.parametrize("arguments", ["", "{", '{"at": 1}', {"at": 1}, None])
def test_past_calls_of_clients_are_accepted(qwen, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "noon"}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert "message" in chat(qwen, messages=[USER, asked, result])["choices"][0]


@pytest.mark.parametrize(
    "fields",
    [
        {"modalities": ["text"]},
        {"prediction": None, "audio": None, "functions": None, "web_search_options": None},
        {"length_penalty": 1.0, "use_beam_search": False, "early_stopping": False, "best_of": 1},
        {"priority": 0, "spaces_between_special_tokens": True, "suffix": "", "logit_bias": {}, "function_call": "none"},
        {"temperature": 0, "n": 1, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop": []},
        {"enable_thinking": True, "reasoning_effort": "low"},
        {"tools": [NOW], "tool_choice": "auto", "parallel_tool_calls": True},
    ],
)
def test_neutral_values_are_accepted(qwen, fields):
    assert "message" in chat(qwen, **fields)["choices"][0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"modalities": ["text", "audio"]},
            "modalities[1]: invalid enum value 'audio': only text is supported",
        ),
        ({"length_penalty": 0.5}, "length_penalty: expected `float` >= 1.0: beams are offered by generate"),
        ({"use_beam_search": True}, "use_beam_search: invalid enum value True: beams"),
        ({"priority": 3}, "priority: invalid enum value 3: requests"),
        (
            {"prediction": {"type": "content", "content": "x"}},
            "prediction: expected `null`, got `object`: leave it out",
        ),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens: invalid enum value False: tokens"),
        ({"best_of": 2}, "best_of=2 is not supported"),
        ({"continue_final_message": True}, "continue_final_message needs add_generation_prompt to be false"),
        ({"chat_template_kwargs": {"conversation": 1}}, "chat_template_kwargs must not have conversation"),
    ],
)
def test_other_values_are_refused_by_name(qwen, fields, words):
    error = refused(qwen, PATH, messages=[USER], **fields)
    assert words in error["message"]


@pytest.mark.parametrize("path", ["/v1//chat/completions", "//v1/chat/completions/", "/v1/chat//completions//"])
def test_slashes_in_paths_may_be_doubled(qwen, path):
    base = str(qwen.base_url).rstrip("/")
    assert qwen.post(base + path, json={"messages": [USER], "max_tokens": 1}).status_code == 200
    assert qwen.get(f"{base}//health/").status_code == 200
    assert qwen.get(f"{base}//v1//other").status_code == 404


def test_the_answer_continues_the_last_message(qwen):
    own = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
    whole = chat(qwen, **own)["choices"][0]["message"]["content"]
    prompt = byte_level(chat_template=KINDS["QWEN3"]).render_chat([USER])
    begun = {"role": "assistant", "content": "Zz"}
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    ids = qwen.post("/tokenize", json={"messages": [USER, begun], **fields}).json()["tokens"]
    assert byte_level().decode(ids, skip_special_tokens=False) == prompt + "Zz"
    again = chat(qwen, messages=[USER, begun], **fields, **own)["choices"][0]["message"]["content"]
    assert again != whole


FORM = {"structured_outputs": {"regex": "yes|no"}}


def test_a_stop_string_ends_a_thought(r1):
    own = {"max_tokens": 40, "seed": 3, **FORM}
    thought = chat(r1, **own)["choices"][0]["message"]["reasoning_content"]
    stop = next(c for c in thought[2:] if c.isalnum())
    [choice] = chat(r1, stop=stop, **own)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["message"]["reasoning_content"] == thought.partition(stop)[0].rstrip()
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_thought_is_separate_from_the_content(r1, stream):
    """The prompt opens the thought, and the grammar begins after it."""
    own = {"messages": [USER], "max_tokens": 40, "seed": 3, **FORM}
    if stream:
        chunks = events(r1, PATH, stream_options={"include_usage": True}, **own)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        content = "".join(delta.get("content") or "" for delta in deltas)
        usage = chunks[-1]["usage"]
        assert sum("reasoning_content" in delta for delta in deltas) > 1
    else:
        body = chat(r1, **own)
        [choice] = body["choices"]
        thought, content = choice["message"]["reasoning_content"], choice["message"]["content"]
        usage = body["usage"]
    assert content in ("yes", "no")
    assert len(thought) > 3
    assert "</think>" not in thought
    thinking = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 3 < thinking < usage["completion_tokens"] <= 40


def test_streamed_and_whole_answers_agree(r1):
    own = {"messages": [USER], "max_tokens": 40, "seed": 4, **FORM}
    message = chat(r1, **own)["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in events(r1, PATH, **own)]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]


def test_an_answer_cut_off_in_its_thought_has_no_content(r1):
    body = chat(r1, seed=1, max_tokens=5, ignore_eos=True)
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert message["reasoning_content"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


def test_model_decides_whether_to_think(qwen):
    wrapped = {"structured_outputs": {"regex": "<think>hm</think>\\n\\nyes"}, "max_tokens": 60}
    # The regular expression stands for the text after a thought, so this text has tags of its own.
    message = chat(qwen, chat_template_kwargs={"enable_thinking": False}, **wrapped)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    for seed in range(3):
        message = chat(qwen, seed=seed, max_tokens=40, **FORM)["choices"][0]["message"]
        assert message["content"] in ("yes", "no")


def test_thoughts_can_be_left_in_the_content():
    with (
        running(template=KINDS["R1"], options={"thoughts": False}) as made,
        httpx.Client(base_url=made.url, timeout=60) as http,
    ):
        body = chat(http, max_tokens=40, structured_outputs={"regex": "hm</think>yes"})
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "hm</think>yes", "refusal": None}
        assert "completion_tokens_details" not in body["usage"]


WRITTEN = {
    "LLAMA": r'\{"name": "sky", "parameters": \{"at": 12\}\}',
    "NEMO": r'\[TOOL_CALLS\]\[\{"name": "sky", "arguments": \{"at": 12\}\}\]',
    "DEVSTRAL": r'\[TOOL_CALLS\]sky\[ARGS\]\{"at": 12\}',
    "CODER": r"<tool_call>\n<function=sky>\n<parameter=at>\n12\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITTEN)
def test_calls_in_the_format_of_the_template(kind):
    with running(template=KINDS[kind]) as made, openai.OpenAI(base_url=f"{made.url}/v1", api_key="none") as client:
        own = {"model": "tiny", "messages": [USER], "tools": [SKY], "seed": 5, "max_tokens": 80}
        auto = client.chat.completions.create(**own, extra_body={"guided_regex": WRITTEN[kind]}).choices[0]
        assert auto.finish_reason in ("tool_calls", "length")
        assert json.loads(auto.message.tool_calls[0].function.arguments) == {"at": 12}
        assert auto.message.content is None
        forced = client.chat.completions.create(**own, tool_choice="required").choices[0]
        stream = client.chat.completions.create(**own, tool_choice="required", stream=True)
        streamed = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
        calls = forced.message.tool_calls
        assert [call.function.arguments for call in streamed] == [call.function.arguments for call in calls]
        assert all(isinstance(json.loads(call.function.arguments)["at"], int) for call in calls)
        if kind in ("NEMO", "DEVSTRAL"):
            assert all(len(call.id) == 9 for call in calls)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "blue"} for call in calls]
        client.chat.completions.create(**{**own, "messages": [USER, forced.message, *results], "max_tokens": 2})


def test_chunks_do_not_depend_on_other_events_read_together():
    """A busy service reads several events of an answer before it writes their chunks."""
    cfg = GenerationConfig(model=MODEL, max_new_tokens=200, output_logprobs="logits", top_logprobs=1)
    tokenizer = byte_level(chat_template=KINDS["HERMES"])
    request = chat_request(messages=[USER], tools=[NOW], stop=["END"])
    prompts = PromptReader(PromptOptions(cfg, 400), tokenizer, "threefry2x32")
    asked = Reader(prompts, 800, 1).chat(request)
    [answer] = asked.answers()
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    texts = [call, call * 2, "Noon.", "END"]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    reasons = [StopReason.NONE] * 3 + [StopReason.STOP_STRING]
    deltas = [answer.put(Event(0, tokens, "", reason)) for tokens, reason in zip(ids, reasons, strict=True)]
    replies = Replies(request, asked, "m", "", TokenTexts(tokenizer))
    choices = [replies.chunk(0, answer, delta, False, None)["choices"][0] for delta in deltas]
    calls = [call["index"] for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert calls == [0, 1, 2]
    ends = [(choice["finish_reason"], choice["stop_reason"]) for choice in choices]
    assert ends == [(None, None)] * 3 + [("tool_calls", "END")]


@pytest.mark.parametrize(
    ("fields", "ends"),
    [({}, [260, 262]), ({"ignore_eos": True}, []), ({"ignore_eos": True, "stop_token_ids": [5]}, [5])],
)
def test_the_tokenizers_end_of_turn_ends_an_answer(fields, ends):
    """A generation config that names only a base model's token lacks the token that ends turns."""
    cfg = GenerationConfig(model=MODEL, max_new_tokens=20, eos_token_id=260, output_logprobs="logits", top_logprobs=1)
    tokenizer = byte_level(chat_template=KINDS["QWEN3"])
    reader = Reader(PromptReader(PromptOptions(cfg, 800), tokenizer, "threefry2x32"), 1000, 1)

    def kept(asked):
        ids = asked.prompts[0].options["eos_token_id"]
        return ids[ids >= 0].tolist()

    asked = reader.chat(chat_request(messages=[USER], **fields))
    assert kept(asked) == ends
    completed = reader.completion(CompletionRequest(prompt="A", **fields))
    assert kept(completed) == ends


def test_special_tokens_that_are_tags_stay_in_the_text():
    tok = byte_level(additional_special_tokens=["[TOOL_CALLS]"])
    ids = tok.encode("<|end|>[TOOL_CALLS]a<|end|>", add_special_tokens=False)
    for kept, expected in (((), "a"), (("[TOOL_CALLS]",), "[TOOL_CALLS]a")):
        stream = TextStream(tok, kept=kept)
        assert "".join([stream.put(token) for token in ids]) + stream.end() == expected
