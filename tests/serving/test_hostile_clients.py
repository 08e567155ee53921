"""Malformed and hostile requests: each is answered with a one-line error, and other clients are not affected."""

import concurrent.futures
import contextlib
import json
import random
import resource
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from jaxgen.serving.limits import Limits
from jaxgen.serving.protocol import ChatRequest, CompletionRequest
from tests.support.service import running

pytestmark = pytest.mark.slow
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
JUNK = [
    None, True, -1, 0, 2**31, 2**64, -(10**400), 1e308, -1.5, "", "x", "\0", "\u202e\U0010ffff", "a" * 5000, [], [[]],
    [None], [True], ["a", 1], [[2**40]], [-1], list(range(5000)), {}, {"": ""}, {"a": {"b": [{}]}}, {"type": "x"},
    {"type": "function"}, {"json": True}, [{"role": "user"}], [{"role": 5, "content": "a"}], [{"content": []}],
    {"1": 1e308}, {"99999999999": 1}, {"٣": 1}, [{"type": "function", "function": {"name": "\n"}}],
]  # fmt: skip
SCHEMAS = [
    {"type": "string", "maxLength": 10**9},
    {"type": "array", "items": {"type": "string", "maxLength": 900}, "maxItems": 900},
    {"enum": [f"{i:05}" * 30 for i in range(2000)]},
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf/0"}]},
    {"type": "object", "properties": {f"k{i}": {"type": "number"} for i in range(3000)}},
    {"oneOf": [{"type": "object", "properties": {f"k{i}": {"const": i}}} for i in range(400)]},
    {"type": "string", "pattern": "(" * 200 + "a" + ")" * 200},
    {"type": "string", "pattern": "(a|aa)*" * 300 + "b"},
    {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    {"type": "string", "not": {}},
    {"allOf": [{"allOf": [{"allOf": [{}]}]}], "if": {}},
]
REGEXES = [
    "(a{1000}){1000}",
    "(((a*)*)*)*b",
    "[^\\u0000-\\uffff]{900}",
    "\\p{L}{3000}",
    "(?=a)",
    "(",
    "\ud800",
    "a" * 20_000,
]
JSON = {"Content-Type": "application/json"}
GOOD = {"prompt": "Once upon", "max_tokens": 30, "seed": 7}


def deep(levels: int) -> bytes:
    return b'{"metadata":' + b'{"a":' * levels + b"1" + b"}" * levels + b',"prompt":"A"}'


def requests(seed: int, count: int):
    """Yield paths and bodies of requests."""
    rng = random.Random(seed)
    fields = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__, "unheard_of", "suffix", "\ud800"}
    fields = sorted(fields)
    for number in range(count):
        body = (
            {"prompt": "A", "max_tokens": 3} if rng.random() < 0.5 else {"messages": [{"role": "user", "content": "A"}]}
        )
        kind = number % 5
        if kind == 0:
            body |= {rng.choice(fields): rng.choice(JUNK) for _ in range(rng.randint(1, 3))}
        elif kind == 1:
            body["structured_outputs"] = rng.choice([{"json": rng.choice(SCHEMAS)}, {"regex": rng.choice(REGEXES)}])
        elif kind == 2:
            tool = {"type": "function", "function": {"name": "f", "parameters": rng.choice(SCHEMAS)}}
            body |= {"tools": [tool] * rng.choice([1, 200]), "tool_choice": "required"}
        path = rng.choice(PATHS[:2]) if kind < 3 else rng.choice(PATHS)
        content = json.dumps(body).encode()
        if kind == 3:
            content = rng.choice([deep(100), deep(100_000), b"[" * 10**6, content[: rng.randint(0, len(content))]])
        elif kind == 4:
            content = bytearray(content)
            for _ in range(rng.randint(1, 5)):
                content[rng.randrange(len(content))] = rng.randrange(256)
            content = bytes(content)
        yield path, content


@pytest.fixture(scope="module")
def service():
    limits = Limits(body=2**20, body_seconds=2.0, seconds=30.0, keep_alive=1.0)
    with running(limits=limits, most_waiting=16) as made:
        yield made


def test_200_random_requests_are_answered(service):
    expected = None
    statuses = []
    with httpx.Client(base_url=service.url, timeout=60) as http:
        for number, (path, content) in enumerate(requests(1, 200)):
            response = http.post(path, content=content, headers=JSON)
            statuses.append(response.status_code)
            assert response.status_code in (200, 400, 404, 408, 413, 429), (path, content[:500], response.text)
            if response.status_code != 200:
                message = response.json()["error"]["message"]
                assert message.isprintable(), message
                assert len(message) < 3000
            if number % 20 == 0:
                good = http.post("/v1/completions", json=GOOD)
                expected = expected or good.json()["choices"]
                assert good.json()["choices"] == expected
    assert statuses.count(400) > 100


def raw(service, content: bytes, seconds: float = 0.0, shuts: bool = False) -> bytes:
    """Send bytes to the service, wait for `seconds`, and return the answer."""
    address = urlsplit(service.url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(content)
            if shuts:
                connection.shutdown(socket.SHUT_WR)
        time.sleep(seconds)
        answer = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while part := connection.recv(2**16):
                answer += part
                if b"\r\n\r\n" in answer and b"\r\n0\r\n" not in answer and b"chunked" not in answer:
                    break
        return answer


def head(length: int, path: str = "/v1/completions", more: str = "") -> bytes:
    more = f"Content-Type: application/json\r\nContent-Length: {length}\r\n{more}"
    return f"POST {path} HTTP/1.1\r\nHost: a\r\n{more}\r\n".encode()


def test_damaged_http_is_refused(service):
    body = json.dumps(GOOD).encode()
    assert raw(service, b"GARBAGE\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert raw(service, b"GET /nowhere HTTP/9.9\r\n\r\n").startswith(b"HTTP/1.1 4")
    answer = raw(service, head(len(body), more="X: " + "a" * 10**6 + "\r\n"))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")  # empty if the connection was closed too early
    assert b" 413 " in raw(service, head(10**12))
    assert raw(service, head(0, more="Content-Length: x\r\n")).startswith(b"HTTP/1.1 400")
    assert b" 408 " in raw(service, head(1000) + b'{"prompt": ')  # the rest of the body never arrives
    raw(service, head(len(body)) + body[:5], shuts=True)
    raw(service, head(len(body)) + body, shuts=True)
    assert httpx.post(f"{service.url}/v1/completions", json=GOOD, timeout=60).status_code == 200


def test_slow_readers_and_floods_do_not_block_others(service):
    with httpx.Client(base_url=service.url, timeout=60) as http:
        expected = http.post("/v1/completions", json=GOOD).json()["choices"]
    address = urlsplit(service.url)
    body = json.dumps({"prompt": ["A"] * 4, "n": 4, "max_tokens": 100, "stream": True, "logprobs": 5}).encode()
    connections = contextlib.ExitStack()

    def connect() -> socket.socket:
        return connections.enter_context(socket.create_connection((address.hostname, address.port)))

    for _ in range(20):
        reader = connect()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        reader.sendall(head(len(body)) + body)  # and read nothing
    for _ in range(100):
        connect()  # and send nothing

    def ask(number: int) -> httpx.Response:
        limits = {"prompt": f"{number}", "max_tokens": 20}
        return httpx.post(f"{service.url}/v1/completions", json=limits, timeout=60)

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        statuses = {response.status_code for response in pool.map(ask, range(200))}
    assert statuses <= {200, 429}
    connections.close()
    end = time.monotonic() + 30
    while service.engine.counts()[3:] != (0, 0):
        assert time.monotonic() < end
        time.sleep(0.05)
    again = httpx.post(f"{service.url}/v1/completions", json=GOOD, timeout=60)
    assert again.json()["choices"] == expected


def test_memory_does_not_grow(service, default_gc):
    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    with httpx.Client(base_url=service.url, timeout=60) as http:
        for seed, most in ((2, None), (3, 60)):
            before = peak()
            for path, content in requests(seed, 150):
                http.post(path, content=content, headers=JSON)
            # The first round has run all the code. The second may add up to 60 MB to the peak, for its largest bodies.
            assert most is None or peak() - before < most
