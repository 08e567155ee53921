"""Batch files: the same answers as over HTTP, and files that are refused as a whole."""

import asyncio
import json

import httpx
import pytest

from jaxgen.cli.run_batch import _answer
from jaxgen.errors import GenerationError, InputError
from jaxgen.serving.batch import BatchRequest, answer_batch, read_batch
from jaxgen.serving.limits import Limits
from tests.support.service import running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def line(name: str, url: str = TEXT, **body) -> dict:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def batch(*lines: dict) -> list[BatchRequest]:
    return read_batch("batch", b"\n".join(json.dumps(each).encode() for each in lines))


def answers(running, requests: list[BatchRequest], at_once: int = 4) -> dict[int, dict]:
    async def collect():
        return [pair async for pair in answer_batch(running.service.app(), requests, range(len(requests)), at_once)]

    pairs = asyncio.run(collect())
    assert len(dict(pairs)) == len(pairs) == len(requests)
    return dict(pairs)


@pytest.fixture(scope="module")
def service():
    with running(most_waiting=4, warm=False, limits=Limits(share=1.0)) as made:
        yield made


def test_answers_equal_those_of_the_service(service):
    lines = [
        line("greedy", CHAT, messages=MESSAGES, max_tokens=8, temperature=0),
        line("drawn", CHAT, messages=MESSAGES, max_tokens=8, seed=3, n=2, logprobs=True),
        line("texts", TEXT, prompt=["a", "bc", "def"], max_tokens=5, seed=1, stream=False),
        line("typo", TEXT, prompt="a", max_tokns=5),
        line("unknown", CHAT, model="gpt-9", messages=MESSAGES),
        line("too many", TEXT, prompt=["a"] * 5, max_tokens=2),
        line("missing", CHAT),
        line("vector", "/v1/embeddings", input="a"),
        line("response", "/v1/responses", input="a", max_output_tokens=5, temperature=0),
    ]
    found = answers(service, batch(*lines), at_once=2)
    for index, each in enumerate(lines):
        entry = found[index]
        reply = httpx.post(service.url + each["url"], json=each["body"], timeout=60)
        expected, body = reply.json(), entry["response"]["body"]
        for one in (expected, body):
            assert one.pop("id", None) is None or reply.status_code == 200
            one.pop("created", None)
            one.pop("created_at", None)
            for item in one.get("output", []):
                item.pop("id")
        assert entry["response"] == {"status_code": reply.status_code, "body": expected} | {
            "request_id": entry["response"]["request_id"]
        }
        assert (entry["custom_id"], entry["error"]) == (each["custom_id"], None)
    statuses = [found[index]["response"]["status_code"] for index in range(len(lines))]
    assert statuses == [200, 200, 200, 400, 404, 400, 400, 200, 200]
    assert len({found[index]["id"] for index in found}) == len(found)


def test_refused_requests_are_retried(service):
    """With eight requests of four prompts at once, most are refused at first, and answered later."""
    assert 'status="429"' not in service.service.metrics.text()
    lines = [line(str(number), TEXT, prompt=["a", "b", "c", "d"], max_tokens=6, seed=number) for number in range(8)]
    found = answers(service, batch(*lines), at_once=8)
    assert {entry["response"]["status_code"] for entry in found.values()} == {200}
    assert [len(found[index]["response"]["body"]["choices"]) for index in range(8)] == [4] * 8
    assert 'status="429"' in service.service.metrics.text()


def test_requests_that_are_not_read_to_the_end_are_cancelled(service):
    sizes = enumerate([1, 100, 100, 100])
    requests = batch(*(line(str(number), prompt="a", max_tokens=size, ignore_eos=True) for number, size in sizes))

    async def first():
        answered = answer_batch(service.service.app(), requests, range(4), 4)
        await anext(answered)
        await answered.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(first())
    httpx.post(service.url + TEXT, json={"prompt": "a", "max_tokens": 1}, timeout=60)  # after the next chunk
    counts = service.engine.counts()
    assert (counts.running, counts.waiting) == (0, 0)


def test_an_engine_that_stops_ends_the_run(capsys):
    """Requests that it has not answered get no line, so that the run can continue."""
    with running(warm=False) as made:
        made.engine.close()
        with pytest.raises(GenerationError, match="the engine stopped: the service is shutting down"):
            asyncio.run(_answer(made.service, batch(line("a", prompt="x")), [0], None, 1))


GOOD = json.dumps(line("a", prompt="x"))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ("{", "line 2: the body is not valid JSON"),
        ("[]", "line 2: the body: expected `object`, got `array`"),
        ('"text"', "line 2: the body: expected `object`, got `str`"),
        ('{"method": "POST", "url": "/v1/completions", "body": {}}', "line 2: custom_id is missing"),
        (GOOD.replace('"a"', "7"), "line 2: custom_id: expected `str`, got `int`"),
        (GOOD, "line 2: custom_id 'a' is also that of line 1: give each its own"),
        (GOOD.replace("POST", "GET"), "line 2: method must be POST, got 'GET'"),
        (
            GOOD.replace("/v1/", "/v2/"),
            "url must be /v1/chat/completions, /v1/completions, /v1/responses or /v1/embeddings, got '/v2/completions'",
        ),
        (GOOD.replace('{"prompt": "x"}', "[1]"), r"line 2: body must be an object, got '\[1\]'"),
        (GOOD.replace('"x"', '"x", "stream": true'), "line 2: body.stream is not offered in a batch: leave it out"),
        (GOOD.replace('"custom_id"', '"priority": 1, "custom_id"'), "line 2: priority is not supported"),
        ("\udcff", "line 2: not UTF-8"),
    ],
)
def test_bad_files_are_refused(second, message):
    with pytest.raises(InputError, match=f"^file, {message}" if message.startswith("line") else message):
        read_batch("file", f"{GOOD}\n{second}\n".encode("utf-8", "surrogateescape"))


def test_file_without_requests_is_refused():
    with pytest.raises(InputError, match=r"^file has no request: write one per line"):
        read_batch("file", b"\n \n")


def test_empty_lines_are_skipped():
    assert [request.custom_id for request in read_batch("file", f"\n{GOOD}\n\n".encode())] == ["a"]
