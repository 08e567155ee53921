"""The service, as seen by OpenAI's client and a plain HTTP client."""

import asyncio
import concurrent.futures
import itertools
import json
import re
import time

import httpx
import numpy as np
import openai
import pydantic
import pytest

from jaxgen import score
from jaxgen.serving.limits import Limits
from tests.support.service import KEY, NEW, WIDTH, running

MESSAGES = [{"role": "user", "content": "Who are you?"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "owl"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}},
            "required": ["city"],
        },
    },
}
EXTREME = {
    "type": "function",
    "function": {
        "name": "extreme",
        "parameters": {"type": "object", "properties": {"max_new_tokens": {"type": "stone"}}},
    },
}


@pytest.fixture(scope="module")
def service():
    with running(keys=[KEY]) as made:
        yield made


def complete(http, **fields) -> dict:
    response = http.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


class Note(pydantic.BaseModel):
    text: str


def refused(http, path="/v1/completions", status=400, **fields) -> dict:
    response = http.post(path, json=fields)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def field_of(error) -> str:
    """Return the field of the request that an error names."""
    return re.split(r"[.\[]", error["param"])[0]


def events(http, path, **fields) -> list[dict]:
    """Return the chunks of a stream, which must end as the protocol requires."""
    with http.stream("POST", path, json={"stream": True, **fields}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = "".join(response.iter_text()).split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2] if not block.startswith(":")]


class TestChat:
    def test_an_answer(self, client, service):
        done = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9, seed=1)
        [choice] = done.choices
        assert done.object == "chat.completion"
        assert done.id.startswith("chatcmpl-")
        assert done.system_fingerprint == "fp_1"
        assert choice.message.role == "assistant"
        prompt = len(service.tokenizer.chat([MESSAGES]).ids[0])
        assert done.usage.prompt_tokens == prompt
        assert done.usage.total_tokens == prompt + done.usage.completion_tokens
        assert choice.finish_reason == ("length" if done.usage.completion_tokens == 9 else "stop")

    def test_stream_equals_the_whole_answer(self, client):
        own = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "n": 3, "seed": 5}
        whole = client.chat.completions.create(**own)
        texts, finish, usage, ids = {}, {}, [], set()
        for chunk in client.chat.completions.create(**own, stream=True, stream_options={"include_usage": True}):
            ids.add((chunk.id, chunk.created, chunk.model))
            usage.append(chunk.usage)
            for choice in chunk.choices:
                assert choice.index in finish or (choice.delta.role == "assistant") == (choice.index not in texts)
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                finish[choice.index] = choice.finish_reason or finish.get(choice.index)
        assert [texts[i] for i in range(3)] == [choice.message.content for choice in whole.choices]
        assert [finish[i] for i in range(3)] == [choice.finish_reason for choice in whole.choices]
        assert len(set(texts.values())) == 3
        assert len(ids) == 1
        assert usage[-1].completion_tokens == whole.usage.completion_tokens
        assert usage[:-1] == [None] * (len(usage) - 1)

    def test_log_probabilities(self, client):
        own = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "seed": 2, "logprobs": True, "top_logprobs": 3}
        whole = client.chat.completions.create(**own).choices[0].logprobs.content
        parts = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**own, stream=True)]
        assert [entry for part in parts if part for entry in part.content] == whole
        for entry in whole:
            assert len(entry.top_logprobs) == 3
            assert entry.top_logprobs[0].logprob >= max(entry.logprob, entry.top_logprobs[2].logprob)
            assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2).choices[0].logprobs is None

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_schema(self, client, stream):
        form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
        for seed in range(3):
            own = {"model": "tiny", "messages": MESSAGES, "response_format": form, "seed": seed}
            if stream:
                chunks = client.chat.completions.create(**own, stream=True)
                text = "".join(c.choices[0].delta.content or "" for c in chunks)
            else:
                text = client.chat.completions.create(**own).choices[0].message.content
            value = json.loads(text)
            assert value["kind"] in ("fox", "owl")
            assert 0 <= value["legs"] <= 9

    @pytest.mark.parametrize("stream", [False, True])
    def test_what_cannot_be_enforced_is_left_out_on_request(self, client, stream):
        schema = {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True, "maxItems": 2}
        form = {"type": "json_schema", "json_schema": {"name": "tags", "schema": schema}}
        own = {"model": "tiny", "messages": MESSAGES, "response_format": form, "max_tokens": 30, "seed": 1}
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            client.chat.completions.create(**own, stream=stream)
        done = client.chat.completions.create(**own, stream=stream, extra_body={"unsupported": "warn"})
        if stream:
            first, *rest = done
            left_out = first.left_out
            assert not any(hasattr(chunk, "left_out") for chunk in rest)
        else:
            left_out = done.left_out
            assert isinstance(json.loads(done.choices[0].message.content), list)
        [reason] = left_out
        assert "uniqueItems" in reason

    def test_what_a_tool_cannot_enforce_is_left_out_on_request(self, client):
        tags = {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True, "maxItems": 2}
        function = {"name": "f", "parameters": {"type": "object", "properties": {"tags": tags}, "required": ["tags"]}}
        own = {"model": "tiny", "messages": MESSAGES, "tools": [{"type": "function", "function": function}]}
        own |= {"tool_choice": "required", "max_tokens": 90, "seed": 1}
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            client.chat.completions.create(**own)
        done = client.chat.completions.create(**own, extra_body={"unsupported": "warn"})
        assert "uniqueItems" in done.left_out[0]
        assert done.choices[0].message.tool_calls[0].function.name == "f"

    def test_a_complete_text_at_the_end_of_the_budget_can_be_parsed(self, client):
        """The client refuses to parse an answer with the finish reason `length`."""
        for seed in range(4):
            done = client.chat.completions.parse(
                model="tiny", messages=MESSAGES, response_format=Note, seed=seed, max_tokens=16, temperature=2.0
            )
            assert done.choices[0].finish_reason == "stop"
            assert isinstance(done.choices[0].message.parsed, Note)
        assert done.usage.completion_tokens == 16

    @pytest.mark.slow
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    def test_tools_that_must_be_called(self, client, stream, choice):
        own = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "seed": 4}
        own["parallel_tool_calls"] = False
        if stream:
            chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**own, stream=True)]
            calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
            assert not any(chunk.delta.content for chunk in chunks)
            finish = chunks[-1].finish_reason
        else:
            [answer] = client.chat.completions.create(**own).choices
            assert answer.message.content is None
            calls, finish = answer.message.tool_calls, answer.finish_reason
        [call] = calls
        assert call.type == "function"
        assert call.function.name == "weather"
        assert len(json.loads(call.function.arguments)["city"]) <= 6
        assert finish == ("tool_calls" if choice == "required" else "stop")

    def test_conversation_continues_after_calls(self, client):
        own = {"model": "tiny", "tools": [WEATHER], "seed": 4}
        first = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **own).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in first.tool_calls]
        again = client.chat.completions.create(messages=[*MESSAGES, first, *results], max_tokens=3, **own)
        assert again.usage.completion_tokens <= 3


class TestCompletions:
    def test_several_prompts_with_several_sequences(self, client):
        own = {"model": "tiny", "max_tokens": 7, "seed": 3}
        both = client.completions.create(prompt=["One", "Two"], n=2, **own)
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        alone = client.completions.create(prompt="One", n=2, **own)
        assert [choice.text for choice in both.choices[:2]] == [choice.text for choice in alone.choices]
        ids = client.completions.create(prompt=[[79, 110, 101]], **own)
        assert ids.usage.prompt_tokens == 3

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_stop_string_never_leaks(self, http, service, stream):
        whole = complete(http, prompt="Once", max_tokens=60, seed=6, ignore_eos=True)["choices"][0]["text"]
        stop = next(
            whole[i : i + 3] for i in range(5, 40) if whole.find(whole[i : i + 3]) == i and whole[i : i + 3].isascii()
        )
        own = {"prompt": "Once", "max_tokens": 60, "seed": 6, "ignore_eos": True, "stop": [stop, "\u2603\u2603"]}
        expected = whole[: whole.index(stop)]
        if stream:
            texts = [c["choices"][0]["text"] for c in events(http, "/v1/completions", **own)]
            assert all(expected.startswith(text) for text in itertools.accumulate(texts))
            assert "".join(texts) == expected
        else:
            [choice] = complete(http, **own)["choices"]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
            own["include_stop_str_in_output"] = True
            assert complete(http, **own)["choices"][0]["text"] == expected + stop

    def test_a_stop_string_does_not_begin_in_the_prompt(self, http):
        text = complete(http, prompt="Once", max_tokens=20, seed=6, ignore_eos=True)["choices"][0]["text"]
        own = {"max_tokens": 20, "seed": 6, "ignore_eos": True, "prompt": "Once", "stop": "ce" + text[:1]}
        assert complete(http, **own)["choices"][0]["text"] == text

    def test_echo_has_exact_log_probabilities(self, http, service):
        ids = [79, 110, 101, 32, 85]
        [choice] = complete(http, prompt=[ids], echo=True, logprobs=2, max_tokens=1, temperature=0)["choices"]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert len(logprobs["tokens"]) == len(ids) + 1
        scores = score(service.params, [ids], service.cfg, attention_mask=np.ones((1, 5), bool), top_logprobs=1)
        np.testing.assert_allclose(logprobs["token_logprobs"][1:-1], scores.logprobs[0, 1:], atol=1e-5)
        best = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
        np.testing.assert_allclose(best[:-1], scores.top_logprobs[0, 1:, 0], atol=1e-5)
        assert best[-1] == logprobs["token_logprobs"][-1]  # greedy
        assert choice["text"].startswith(service.tokenizer.decode(ids))
        places = [*logprobs["text_offset"], len(choice["text"])]
        assert places == [0, 1, 1, 2, 4, 5, len(choice["text"])]  # the second token is complete with the third
        [scored] = complete(http, prompt=[ids], echo=True, logprobs=0, max_tokens=0)["choices"]
        assert scored["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:-1]
        assert scored["text"] == service.tokenizer.decode(ids)

    def test_prompt_logprobs(self, http):
        ids = [79, 110, 101]
        [choice] = complete(http, prompt=[ids], prompt_logprobs=2, max_tokens=1)["choices"]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for token, entry in zip(ids[1:], others, strict=True):
            assert 2 <= len(entry) <= 3
            assert entry[str(token)]["decoded_token"] == chr(token) or str(token) in entry
            assert {value["rank"] for value in entry.values()} >= {1, 2}

    def test_options_have_their_effect(self, http):
        own = {"prompt": "Once", "max_tokens": 12, "seed": 9, "return_token_ids": True}
        plain = complete(http, **own)["choices"][0]["token_ids"]
        biased = complete(http, **own, logit_bias={"65": 100})["choices"][0]
        assert set(biased["token_ids"]) == {65}
        greedy = complete(http, **{**own, "temperature": 0})["choices"][0]["token_ids"]
        assert complete(http, **own, top_k=1)["choices"][0]["token_ids"] == greedy != plain
        assert complete(http, **own, top_p=1e-6)["choices"][0]["token_ids"] == greedy
        stopped = complete(http, **own, ignore_eos=True, stop_token_ids=[greedy[0]], top_k=1)["choices"][0]
        assert (stopped["token_ids"], stopped["finish_reason"]) == ([greedy[0]], "stop")
        least = complete(http, **own, ignore_eos=True, stop_token_ids=list(range(300)), min_tokens=3)
        assert least["usage"]["completion_tokens"] >= 3
        assert complete(http, **own, structured_outputs={"choice": ["a.b", "c"]})["choices"][0]["text"] in ("a.b", "c")
        assert complete(http, **own, guided_regex="[0-9]{3}")["choices"][0]["text"].isdigit()
        as_ids = complete(http, **own, logprobs=0, return_tokens_as_token_ids=True)["choices"][0]
        assert as_ids["logprobs"]["tokens"] == [f"token_id:{token}" for token in as_ids["token_ids"]]

    def test_many_biases(self, http):
        bias = {str(token): -100 for token in range(300) if token != 66}
        [choice] = complete(http, prompt="A", max_tokens=4, logit_bias=bias, return_token_ids=True, ignore_eos=True)[
            "choices"
        ]
        assert set(choice["token_ids"]) <= {66, *range(300, 320)}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_continue_is_an_error(http, stream):
    own = {"prompt": ["A", "A"], "guided_regex": "B", "bad_words": ["B"], "max_tokens": 4}
    last = events(http, "/v1/completions", **own)[-1]["error"] if stream else refused(http, **own)
    assert last["message"].startswith("the answer cannot continue: every token is banned")


def check_seed_under_load(http):
    own = {"prompt": "Once upon", "max_tokens": 40, "seed": 12, "n": 2, "logprobs": 1}

    def ask(number: int) -> dict:
        other = {"prompt": f"{number}" * (1 + number % 50), "max_tokens": 1 + number % 60, "top_k": 1 + number}
        return complete(http, **(own if number % 5 == 0 else other))

    alone = complete(http, **own)["choices"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(60)))
    assert all(answer["choices"] == alone for answer in answers[::5])


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_under_load(http):
    check_seed_under_load(http)


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_under_load_in_bfloat16():
    with running("bfloat16") as service, httpx.Client(base_url=service.url, timeout=60) as http:
        check_seed_under_load(http)


def test_numbers_at_their_bounds(http):
    """A tiny temperature means the most likely token. A grammar bans most tokens, and divided scores stay banned."""
    fields = {"prompt": "Once", "max_tokens": 8, "seed": 1}
    [greedy] = complete(http, **fields, temperature=0)["choices"]
    for temperature in (1e-45, 1e-38, 1e-30):
        assert complete(http, **fields, temperature=temperature)["choices"] == [greedy]
    for name in ("temperature", "repetition_penalty", "frequency_penalty"):
        for number in (1e-38, 3.4e38):
            [choice] = complete(http, **fields, **{name: number}, guided_regex="a{8}")["choices"]
            assert choice["text"] == "a" * 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"suffix": "x"}, "suffix: invalid enum value 'x': text"),
        ({"use_beam_search": True}, "use_beam_search: invalid enum value True: beams"),
        ({"guided_grammar": "x"}, "use structured_outputs"),
        ({"unheard_of": 1}, "unheard_of is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
        ({"stream_options": {"chunk": 1}, "stream": True}, "stream_options.chunk is not supported"),
        ({"temperature": -1}, "temperature must be > 0 and finite (for greedy decoding set temperature=0), got -1.0"),
        ({"temperature": "hot"}, "temperature: expected"),
        ({"temperature": 1e-46}, "got 1e-46, which is 0 in float32"),
        ({"repetition_penalty": 1e39}, "got 1e+39, which is too large for float32"),
        ({"top_k": 10**40}, "top_k must fit into 32 bits, got a number of 133 bits"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 10_000}, f"max_tokens is 10000, together more than the context of {WIDTH}"),
        ({"n": 0}, "n must be from 1"),
        ({"n": 2, "temperature": 0}, "temperature=0 means greedy search"),
        ({"best_of": 4}, "best_of=4 is not supported"),
        ({"logprobs": 6}, "logprobs must be from 0 to 5, got 6"),
        ({"logit_bias": {"x": 1}}, "is not a token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias must be from -100 to 100"),
        ({"logit_bias": {"500": 1}}, "the vocabulary is 0 to 319"),
        ({"stop": [""]}, "stop must not be empty"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must contain token ids >= 0"),
        ({"min_tokens": 400}, "min_tokens"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "object", "not": {}}}}, "not"),
        ({"structured_outputs": {"regex": "a{300}b{300}"}, "max_tokens": 9}, "raise max_tokens"),
        ({"guided_choice": [""]}, "guided_choice must have texts"),
        ({"structured_outputs": {"regex": "(a{30}){3000}"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar is not supported"),
        ({"prompt": []}, "at least one text"),
        ({"prompt": [1, "a"]}, "prompt[0] must be a text or a list of ids"),
        ({"prompt": [[]]}, "the prompt has no tokens"),
        ({"prompt": ["A", ""]}, "the prompt has no tokens"),
        ({"prompt": [[400]]}, "the prompt contains the token 400"),
        ({"prompt": "a" * 500}, "the prompt has 500 tokens"),
        ({"prompt": None}, "prompt"),
        ({"seed": 1.5}, "seed"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is not offered with stream"),
    ],
)
def test_unsupported_fields_are_refused_by_name(http, fields, words):
    error = refused(http, **{"prompt": "A", **fields})
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert field_of(error) in fields


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages must have at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is supported"),
        ({"messages": [{"role": "temperature", "content": "A"}]}, "message 0 has the role 'temperature'"),
        ({"functions": []}, "functions: expected `null`, got `array`: use tools"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"tools": []}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name is"),
        ({"tools": [EXTREME], "tool_choice": "required"}, "extreme.parameters.properties.max_new_tokens: type must be"),
        ({"tool_choice": "auto"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type: invalid value 'xml': use text, json_object or"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "json_schema.schema is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "style": 1}}},
            "response_format.json_schema.style is not supported",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "both constrain the answer"),
        ({"echo": True}, "echo is not supported"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must not have messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be at least 1"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens is 1000000"),
        ({"max_completion_tokens": 2, "guided_regex": "a{300}b{300}"}, "raise max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"audio": {}}, "audio: expected `null`, got `object`: only text"),
    ],
)
def test_unsupported_chat_fields_are_refused(http, fields, words):
    error = refused(http, "/v1/chat/completions", **{"messages": MESSAGES, **fields})
    assert words in error["message"]
    assert field_of(error) in fields


@pytest.mark.parametrize("prompt", ["", "a" * 500])
def test_a_prompt_of_a_wrong_length_is_refused_by_name(http, prompt):
    assert refused(http, prompt=prompt)["param"] == "prompt"
    if prompt:
        message = {"role": "user", "content": prompt}
        assert refused(http, "/v1/chat/completions", messages=[message])["param"] == "messages"


@pytest.mark.parametrize(
    "body", [b"", b"[", b"[]", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"prompt": ' * 100_000, b"1"]
)
def test_invalid_bodies_are_refused(http, body):
    response = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_a_grammar_of_many_classes_is_answered_and_one_that_never_fits_is_refused(http):
    words = "|".join(chr(97 + i) + chr(97 + j) for i in range(26) for j in range(26))
    answer = http.post("/v1/completions", json={"prompt": "A", "guided_regex": words, "max_tokens": 4}).json()
    assert answer["choices"][0]["text"] in words.split("|")
    error = refused(http, prompt="A", guided_regex="a{1,3000}", max_tokens=4)
    assert "needs 3,001 states (grammar_states: twice as many), but the engine allows at most 2,048" in error["message"]
    answer = http.post("/v1/completions", json={"prompt": "A", "guided_regex": "yes|no", "max_tokens": 4}).json()
    assert answer["choices"][0]["text"] in ("yes", "no")


def test_fields_without_effect_are_accepted(client):
    own = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"}
    own |= {"prompt_cache_key": "k", "verbosity": "low"}
    assert client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, **own).choices


def test_models_health_and_versions(client, http):
    [card] = client.models.list().data
    assert (card.id, card.max_model_len) == ("tiny", WIDTH)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="A")
    assert http.get("/health").status_code == 200
    assert http.get("/version").json()["version"]
    assert http.get("/v1/nowhere").json()["error"]["code"] == 404
    assert http.get("/v1/completions").json()["error"]["code"] == 405


def test_tokens_round_trip(http, service):
    body = http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert body["tokens"] == service.tokenizer.encode("héllo")
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "héllo"}
    chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == service.tokenizer.chat([MESSAGES]).ids[0].tolist()
    assert "either" in refused(http, "/tokenize")["message"]
    for token in (-1, 320, 2**32, 2**63):
        assert refused(http, "/detokenize", tokens=[0, token])["param"] == "tokens[1]"


def test_seeds_of_64_bits(http):
    def text(seed: int) -> str:
        return complete(http, prompt="Once", max_tokens=20, temperature=2.0, seed=seed, ignore_eos=True)["choices"][0][
            "text"
        ]

    assert text(-1) == text(2**64 - 1)
    assert len({text(seed) for seed in (5, 2**32 + 5, -1)}) == 3
    assert "seed must be from" in refused(http, "/v1/completions", prompt="Once", seed=2**64)["message"]


def test_keys_are_required(service):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}, {"Authorization": KEY}):
        response = httpx.get(f"{service.url}/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{service.url}/health").status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_metrics(http):
    def value(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"jaxgen:{name}{{"))

    names = ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count")
    before = [value(name) for name in names]
    usage = complete(http, prompt="Once", max_tokens=5, ignore_eos=True)["usage"]
    after = [value(name) for name in names]
    assert np.subtract(after, before).tolist() == [5, usage["prompt_tokens"], 1]
    assert value("num_requests_running") == 0


def until(condition, seconds: float = 20.0) -> None:
    """Wait until a condition holds, or fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(http, service, stream):
    own = {"prompt": ["A"] * 12, "max_tokens": NEW, "n": 8, "ignore_eos": True, "stream": stream}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=service.url, headers={"Authorization": f"Bearer {KEY}"}) as client:
            task = asyncio.ensure_future(client.post("/v1/completions", json=own))
            while not service.engine.counts().running:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait({task})

    asyncio.run(leave())
    tokens = service.engine.counts().tokens
    until(lambda: service.engine.counts()[3:] == (0, 0))
    assert service.engine.counts().tokens - tokens < 12 * 8 * NEW / 2
    assert complete(http, prompt="A", max_tokens=2)


@pytest.mark.slow
def test_full_queue_timeout_and_shutdown():
    limits = Limits(seconds=3.0, keep_alive=0.2, body=10_000)
    longest = {"prompt": "A", "max_tokens": NEW, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with running(slots=1, most_waiting=1, limits=limits) as service, httpx.Client(base_url=service.url) as http:
            assert "at most 1 are accepted" in refused(http, prompt=["A", "B"])["message"]
            service.engine.pause()
            waiting = pool.submit(httpx.post, f"{service.url}/v1/completions", json=longest, timeout=60)
            until(lambda: service.engine.counts().waiting)
            response = http.post("/v1/completions", json=longest)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["type"] == "rate_limit_error"
            service.engine.resume()
            assert waiting.result().status_code == 200
            assert http.post("/v1/completions", json={"prompt": "A" * 20_000}).status_code == 413
            parts = iter([b'{"prompt": "', *[b"A" * 1000] * 20, b'"}'])
            kind = {"Content-Type": "application/json"}
            assert http.post("/v1/completions", content=parts, headers=kind).status_code == 413
            service.engine.pause()
            late = http.post("/v1/completions", json={"prompt": "A"}, timeout=60)
            assert late.status_code == 408
            assert late.headers["x-should-retry"] == "false"
            with http.stream("POST", "/v1/completions", json={"prompt": "A", "stream": True}, timeout=60) as stream:
                text = "".join(stream.iter_text())
            assert text.count(": keep-alive\n\n") >= 3
            assert '"code":408' in text
            assert text.endswith("data: [DONE]\n\n")
            service.engine.resume()
            until(lambda: service.engine.counts()[3:] == (0, 0))
            answer = pool.submit(httpx.post, f"{service.url}/v1/completions", json=longest, timeout=60)
            until(lambda: service.engine.counts().running)
        # The service answers the accepted request before it stops.
        assert answer.result().json()["usage"]["completion_tokens"] == NEW
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{service.url}/health")
