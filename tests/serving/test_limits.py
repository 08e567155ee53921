"""Limits on what one client uses: bytes of requests and answers, memory, the tokenizer, the queue."""

import asyncio
import gc
import gzip
import json
import threading
import time

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from starlette.responses import Response

from jaxgen.core.text.streaming import StopCut
from jaxgen.serving import answering
from jaxgen.serving.echo import echo_of
from jaxgen.serving.encoding import Encoder
from jaxgen.serving.exchange import Sending
from jaxgen.serving.grammars import GrammarSource
from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.in_flight import Account, BytesInFlight
from jaxgen.serving.limits import Limits
from jaxgen.serving.protocol import CompletionRequest
from tests.support.service import running
from tests.support.tokenizers import byte_level

ASK, JSON = "/v1/completions", {"content-type": "application/json"}


@pytest.fixture(scope="module")
def service():
    with running(limits=Limits(answer=2**20)) as made:
        yield made


@pytest.fixture(scope="module")
def http(service):
    with httpx.Client(base_url=service.url, timeout=60) as made:
        yield made


def message(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text[:500]
    return response.json()["error"]["message"]


def check_released(service) -> None:
    """Wait until no bytes are in flight; a client may have its answer a moment earlier."""
    end = time.monotonic() + 30
    while service.service._in_flight.total:
        assert time.monotonic() < end
        time.sleep(0.01)


class TestBytesInFlight:
    def test_total_of_all_clients_is_limited(self):
        in_flight = BytesInFlight(100)
        accounts = [Account(in_flight, name) for name in "abcde"]
        for account in accounts[:4]:
            account.add(25)
        with pytest.raises(ApiError, match="the service is using too much memory") as caught:
            accounts[4].add(1)
        assert (caught.value.status, caught.value.headers) == (429, {"retry-after": "1"})
        accounts[0].close()
        accounts[4].add(25)
        assert in_flight.total == 100

    def test_each_client_is_limited_to_a_quarter(self):
        in_flight = BytesInFlight(100)
        one, other = Account(in_flight, "a"), Account(in_flight, "a")
        one.add(20)
        with pytest.raises(ApiError, match="this client's requests are using too much memory"):
            other.add(6)
        one.close()
        other.add(6)
        other.close()
        other.add(6)  # by a thread that has not noticed that the client left
        assert (in_flight.total, in_flight.of_group) == (0, {})


class TestTexts:
    def test_texts_that_cannot_fit_are_not_encoded(self):
        tokenizer = byte_level()
        encoder = Encoder(tokenizer, 10)
        assert encoder.most_bytes == 1280
        assert len(encoder.encode("a" * 1280, "prompt")) == 1280
        tokenizer.backend = None  # nothing may be encoded
        with pytest.raises(ApiError, match=r"stop has 1,281 bytes of text, but at most 1,280 are accepted"):
            encoder.encode("a" * 1279 + "é", "stop")
        with pytest.raises(ApiError, match=r"bad_words has 1,300 bytes"):
            encoder.check(["a" * 650] * 2, "bad_words")

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (ASK, {"prompt": "a" * 10**6}),
            (ASK, {"prompt": "a" * 10**6, "truncate_prompt_tokens": 4}),
            (ASK, {"prompt": "a", "bad_words": ["a" * 10**6]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 10**6}]}),
            ("/v1/responses", {"input": "a" * 10**6}),
            ("/v1/embeddings", {"input": ["a", "a" * 10**6]}),
            ("/tokenize", {"prompt": "a" * 10**6}),
            ("/tokenize", {"messages": [{"role": "user", "content": "a" * 10**6}]}),
        ],
    )
    def test_length_of_text_is_limited_in_every_request(self, http, path, body):
        assert "bytes of text, but at most 51,200 are accepted" in message(http.post(path, json=body))

    def test_length_of_detokenized_text_is_limited(self, http):
        tokens = [97] * (2**20 + 1)
        assert "tokens have 1,048,577 bytes of text" in message(http.post("/detokenize", json={"tokens": tokens}))

    def test_equal_stop_strings_are_one(self):
        assert len(StopCut(["a", "b", "a"] * 1000, False)._strings) == 2

    def test_the_number_of_prompts_is_checked_first(self, http, service):
        start = time.process_time()
        text = message(http.post(ASK, json={"prompt": ["a"] * 300_000}))
        assert text == "prompt has 300000 prompts, but at most 512 are accepted"
        assert time.process_time() - start < 5


class TestBodies:
    @pytest.mark.parametrize(
        "body",
        [
            '{"prompt": "a", "prompt": "b"}',
            '{"prompt": "a", "metadata": {"x": [{"y": 1, "y": 2}]}}',
            '{"prompt": "a", "structured_outputs": {"json": {"type": "object", "type": "string"}}}',
        ],
    )
    def test_duplicate_keys(self, http, body):
        assert "duplicate keys" in message(http.post(ASK, content=body, headers=JSON))
        assert "duplicate keys" in message(http.post("/v1/responses", content=body, headers=JSON))

    def test_number_of_brackets_is_limited(self, http):
        body = {"prompt": "a", "max_tokens": 1, "metadata": {"a": [[]] * (2**18 - 3)}}
        assert http.post(ASK, json=body).status_code == 200  # with the brace of the body, as many as are accepted
        body["metadata"]["a"].append([])
        text = message(http.post(ASK, json=body))
        assert "the body has 262,145 brackets and braces, but at most 262,144 are accepted" in text

    def test_a_large_body_without_its_length(self, http):
        parts = iter([b'{"prompt": "', *[b"a" * 2**20] * 4, b'"}'])
        text = message(http.post(ASK, content=parts, headers=JSON), 413)
        assert text == "the body is larger than the 4194304 bytes that are accepted"

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (ASK, {"prompt": "a", "x" * 10**6: 1}),
            (ASK, {"prompt": "a", "unsupported": "x" * 10**6}),
            ("/v1/responses", {"input": [{"type": "x" * 10**6}]}),
            ("/v1/responses", {"input": "a", "x" * 10**6: 1}),
        ],
    )
    def test_errors_are_short(self, http, path, body):
        response = http.post(path, json=body)
        assert "x" * 80 in message(response)
        assert len(response.content) < 2500

    def test_lone_surrogates_are_refused(self, http):
        text = message(http.post(ASK, content=rb'{"prompt": "a", "x\ud800": 1}', headers=JSON))
        assert text == "the body is not valid JSON: a string has half of a surrogate pair, such as \\ud83d"

    @pytest.mark.parametrize("coding", ["gzip", "GZIP", "br", "identity, gzip"])
    def test_content_encoding(self, http, coding):
        body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        for content in (body, gzip.compress(body)):
            response = http.post(ASK, content=content, headers=JSON | {"content-encoding": coding})
            assert "send the body without Content-Encoding" in message(response, 415)
        assert http.post(ASK, content=body, headers=JSON | {"content-encoding": "identity"}).status_code == 200

    @pytest.mark.parametrize("name", ["self", "conversation", "tools", "add_generation_prompt"])
    def test_reserved_names_of_a_template(self, http, name):
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: 1}}
        text = message(http.post("/v1/chat/completions", json=body))
        assert text.startswith(f"chat_template_kwargs must not have {name}: add_generation_prompt, conversation, ")

    def test_too_many_values_in_flight(self):
        """Parsed values take more memory than their JSON, so they count for more."""
        body = b'{"prompt": "a", "max_tokens": 1, "metadata": {"a": [' + b",".join([b"[]"] * 50_000) + b"]}}"
        for most, status in ((2**22, 429), (2**26, 200)):
            with running(limits=Limits(in_flight=most), warm=False) as made:
                response = httpx.post(made.url + ASK, content=body, headers=JSON, timeout=60)
                assert response.status_code == status, response.text
                check_released(made)


class TestAnswers:
    @pytest.mark.parametrize("name", ["a" * 257, "a\nb", "\0"])
    def test_request_id_is_checked_and_returned(self, http, name):
        assert "at most 256 printable characters" in message(http.post(ASK, json={"prompt": "a", "request_id": name}))
        own = {"prompt": "a", "max_tokens": 1, "request_id": "a" * 256}
        assert http.post(ASK, json=own).json()["id"] == "a" * 256

    def test_too_large_answers_are_refused_before_any_work(self, http, service):
        before = service.engine.counts().tokens
        for own in (
            {"n": 128, "max_tokens": 100, "logprobs": 5},
            {"n": 128, "max_tokens": 1, "echo": True, "logprobs": 5, "prompt": "a" * 300},
            {"n": 128, "max_tokens": 1, "echo": True, "prompt": ["\0" * 390] * 4, "stream": True},
            {"n": 1, "max_tokens": 1, "prompt": ["\0" * 390] * 400, "prompt_logprobs": 5},
        ):
            text = message(http.post(ASK, json={"prompt": "a", "seed": 1, **own}))
            assert "but at most 1,048,576 are accepted: lower " in text
            assert all(name in text for name in own if name in ("n", "logprobs", "prompt_logprobs", "echo"))
        assert service.engine.counts().tokens == before

    def test_a_response_repeats_its_request(self, http):
        body = json.dumps({"input": "a", "max_output_tokens": 1}).encode()
        for spaces, status in ((1000, 200), (150_000, 400)):
            response = http.post("/v1/responses", content=body + b" " * spaces, headers=JSON)
            assert response.status_code == status, response.text
        assert "the answer could have 1," in message(response)

    @pytest.mark.parametrize(
        "own",
        [
            {"n": 8, "max_tokens": 100},
            {"n": 3, "max_tokens": 60, "logprobs": 5},
            {"n": 2, "max_tokens": 3, "logprobs": 5, "echo": True, "prompt": '\0\n"é' * 40},
            {"n": 2, "max_tokens": 3, "prompt_logprobs": 5, "return_token_ids": True, "prompt": "ab" * 40},
            {"n": 3, "max_tokens": 60, "logprobs": 3, "request_id": "\u00e9" * 256, "return_tokens_as_token_ids": True},
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_estimates_are_upper_bounds(self, service, http, own, stream):
        if stream and "prompt_logprobs" in own:
            pytest.skip("not offered in a stream")
        body = {"prompt": "a", "seed": 1, "ignore_eos": True, "stream": stream, **own}
        answering = service.service._answering
        sizes, found = answering._sizes.of, []
        answering._sizes.of = lambda *given: found.append(sizes(*given)) or found[0]
        try:
            response = http.post(ASK, json=body)
        finally:
            del answering._sizes.of
        assert response.status_code == 200, response.text
        [size] = found
        assert size.total / 20 < len(response.content) <= size.limit

    def test_memory_is_released(self, http, service):
        http.post(ASK, json={"prompt": "a", "max_tokens": 5, "seed": 1})
        http.post(ASK, json={"prompt": "a", "max_tokens": 5, "seed": 1, "stream": True})
        http.post(ASK, json={"prompt": 5})
        check_released(service)

    def test_a_stream_that_is_not_read_is_ended(self):
        """The client reads the beginning, and then neither reads nor leaves."""
        own = {"prompt": "a", "n": 4, "max_tokens": 100, "ignore_eos": True, "stream": True}
        given = [{"type": "http.request", "body": json.dumps(own).encode(), "more_body": False}]

        async def receive():
            return given.pop() if given else await asyncio.Event().wait()

        async def send(message):
            if message.get("body"):
                await asyncio.Event().wait()

        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": ASK}
        scope |= {"raw_path": ASK.encode(), "query_string": b"", "root_path": "", "asgi": {"version": "3.0"}}
        scope["headers"] = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        with running(limits=Limits(unread=2**14), warm=False) as made:
            asyncio.run(asyncio.wait_for(made.service.app()(scope, receive, send), 60))
            check_released(made)
            assert "request_cancelled_total" in made.service.metrics.text()

    def test_large_answers_are_sent_in_parts(self):
        """The server's buffer for a client has at most one part, however slowly the client reads."""
        account, sent = Account(BytesInFlight(2**20), "a"), []
        account.add(10)
        content = bytes(range(256)) * 1000

        async def send(message):
            assert account.bytes == 10
            sent.append(message)

        asyncio.run(Sending(Response(content), account, 60)({"type": "http"}, None, send))
        bodies = [message["body"] for message in sent[1:]]
        assert b"".join(bodies) == content
        assert max(map(len, bodies)) == 2**16
        assert [message["more_body"] for message in sent[1:]] == [True] * 3 + [False]
        assert account.bytes == 0

    def test_client_that_does_not_read_is_dropped(self):
        account = Account(BytesInFlight(2**20), "a")
        account.add(10)

        async def send(_):
            await asyncio.Event().wait()

        asyncio.run(Sending(Response(b"a"), account, 0.05)({"type": "http"}, None, send))
        assert account.bytes == 0


class TestEcho:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 262), max_size=30))
    def test_offsets_fit_the_text(self, ids):
        text, offsets = echo_of(byte_level(), ids, None)
        ends = [*offsets, len(text)][1:]
        assert len(offsets) == len(ids)
        assert offsets == sorted(offsets)
        assert "".join(text[begin:end] for begin, end in zip(offsets, ends, strict=True)) == text
        assert text == byte_level().decode(ids, skip_special_tokens=False)

    @pytest.mark.parametrize("stream", [False, True])
    def test_offsets_of_a_truncated_prompt(self, http, service, stream):
        own = {"truncate_prompt_tokens": 4, "echo": True, "logprobs": 0, "max_tokens": 20, "ignore_eos": True}
        body = {"prompt": "one two three four fünf", **own, "seed": 3, "n": 2, "stream": stream}
        texts, offsets = {0: "", 1: ""}, {0: [], 1: []}
        if stream:
            blocks = http.post(ASK, json=body).text.split("\n\n")
            choices = [json.loads(block[6:])["choices"][0] for block in blocks if block.startswith("data: {")]
        else:
            choices = http.post(ASK, json=body).json()["choices"]
        for choice in choices:
            texts[choice["index"]] += choice["text"]
            offsets[choice["index"]] += choice["logprobs"]["text_offset"] if choice["logprobs"] else []
        for index, text in texts.items():
            assert text.startswith("ünf")
            assert offsets[index][:5] == [0, 0, 1, 2, 3]
            assert len(offsets[index]) == 24
            assert np.all(np.diff(offsets[index]) >= 0)
            assert offsets[index][-1] <= len(text)

    def test_tokens_that_the_tokenizer_adds_are_not_echoed(self):
        tokenizer = byte_level()
        ids = [tokenizer.eos_token_id, *tokenizer.encode("ab", add_special_tokens=False)]
        assert echo_of(tokenizer, ids, "ab") == ("ab", [0, 0, 1])
        name = tokenizer.eos_token
        assert echo_of(tokenizer, ids, f"{name}ab").text == f"{name}ab"
        assert echo_of(tokenizer, ids, None).text == f"{name}ab"


class TestFairness:
    def test_several_prompts_take_at_most_half_of_the_queue(self):
        with running(most_waiting=8, warm=False) as made, httpx.Client(base_url=made.url, timeout=60) as http:
            assert "at most 4 are accepted" in message(http.post(ASK, json={"prompt": ["a"] * 5}))
            response = http.post(ASK, json={"prompt": ["a"] * 4, "max_tokens": 1, "seed": 1})
            assert response.status_code == 200

    def test_the_clock_starts_at_the_arrival(self):
        """Compiling a grammar counts toward the time limit."""
        with running(limits=Limits(seconds=0.05), warm=False, grammar_states=2**16) as made:
            body = {"prompt": "a", "guided_regex": "[a-z]{2100}"}
            text = message(httpx.post(made.url + ASK, json=body, timeout=60), 408)
            assert text == "the answer took more than 0.05 seconds"


@pytest.mark.parametrize("is_busy", [True, False])
def test_large_requests_leave_most_of_the_time_to_a_busy_engine(is_busy, monkeypatch):
    pauses, sleep = [], time.sleep
    thread = answering._FourthOfTheTime("large", lambda: is_busy)
    monkeypatch.setattr(answering.time, "sleep", pauses.append)
    assert thread.submit(lambda seconds: sleep(seconds) or "read", 0.02).result() == "read"
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 / 0).result()
    thread.shutdown()
    assert len(pauses) == 2 * is_busy
    assert not pauses or pauses[0] >= 0.06


def test_whole_answers_are_valid_json(http):
    body = http.post(ASK, json={"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "seed": 1}).content
    assert [choice["index"] for choice in msgspec.json.decode(body)["choices"]] == [0, 1, 2, 3]


def test_small_requests_do_not_wait_for_large_ones(service, http):
    """A thread of its own reads large requests."""
    begin = threading.Event()
    service.service._answering.large.submit(begin.wait, 60)
    try:
        assert http.post(ASK, json={"prompt": "a", "max_tokens": 1, "seed": 1}).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            http.post(ASK, json={"prompt": "a" * 100_000, "max_tokens": 1}, timeout=0.2)
    finally:
        begin.set()
    assert "bytes of text" in message(http.post(ASK, json={"prompt": "a" * 100_000, "max_tokens": 1}))


@pytest.mark.parametrize("more", [{}, {"guided_regex": "a"}])
def test_long_stop_strings_are_refused_before_tables_are_built(http, more):
    """The tables of 500,000 bytes would have 512 MB."""
    start, body = time.process_time(), {"prompt": "a", "stop": ["a" * 250_000, "b" * 250_000], **more}
    assert "stop needs 500,002 states" in message(http.post(ASK, json=body))
    assert time.process_time() - start < 5


def test_the_bytes_of_clients_that_left_are_released(service):
    """A thread adds the size of an answer after its client has left."""
    begun, ended, tokenizer = threading.Event(), threading.Event(), service.service._reader.encoder.tokenizer

    class Slow:
        def encode(self, *given, **more):
            begun.set()
            check_released(service)
            ended.set()
            return tokenizer.encode(*given, **more)

    service.service._reader.encoder.tokenizer = Slow()
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{service.url}/tokenize", json={"prompt": "abc"}, timeout=0.2)
        assert begun.is_set()
        assert ended.wait(30)
        service.service._answering.pool.submit(int).result()
    finally:
        service.service._reader.encoder.tokenizer = tokenizer
    time.sleep(0.1)
    assert service.service._in_flight.total == 0


@pytest.mark.parametrize(
    "own",
    [
        {"prompt": ["a"] * 1000},
        {"prompt": "a" * 60_000},
        {"prompt": ["a"], "guided_regex": "("},
        {"prompt": ["a"], "temperature": -1},
        {"prompt": ["a"], "max_tokens": 3, "seed": 1},
        {"prompt": ["a"], "max_tokens": 3, "seed": 1, "stream": True},
    ],
)
def test_requests_are_freed_without_the_garbage_collector(service, http, own):
    """Cycles of errors and their tracebacks would keep large requests in memory for long."""

    def left() -> int:
        return sum(type(each) in (CompletionRequest, GrammarSource) for each in gc.get_objects())

    http.post(ASK, json=own)
    gc.collect()
    gc.disable()
    gc.freeze()  # `get_objects` returns only later objects
    try:
        assert left() == 0
        for number in range(1, 4):  # each request has a grammar that was not refused before
            pattern = {name: own[name] + number * "a" for name in own if name == "guided_regex"}
            http.post(ASK, json=own | pattern)
        check_released(service)
        end = time.monotonic() + 5
        while left() and time.monotonic() < end:
            time.sleep(0.01)
        assert left() == 0
    finally:
        gc.unfreeze()
        gc.enable()
