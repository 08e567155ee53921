"""A load generator: clients that send completion requests to OpenAI-compatible servers and read the answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx

from jaxgen import Tokenizer

_SECONDS = 600  # the time limit of a request


@dataclasses.dataclass(frozen=True)
class Answer:
    """The outcome of one request: an error, or the number of tokens and the seconds until the first token."""

    tokens: int = 0
    first: float | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Load:
    """A measurement: the answers, the total seconds they took, and how many cores the load generator used."""

    answers: list[Answer]
    seconds: float
    cores: float | None = None

    @property
    def speed(self) -> float:
        """Tokens per second of all clients together."""
        return sum(answer.tokens for answer in self.answers) / self.seconds


def measured(
    name: str, address: str, body: dict[str, Any], prompts: Sequence[str], clients: int, tokenizer: Tokenizer
) -> Load:
    """Send the prompts, each with the fields of `body`, and measure the answers to all but the first `clients` prompts.

    The first `clients` prompts warm up the server. Print errors to stderr, with the server's name.
    """
    asyncio.run(_burst(address, body, prompts[:clients], clients))
    begin, cpu = time.perf_counter(), time.process_time()
    received = asyncio.run(_burst(address, body, prompts[clients:], clients))
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    answers = [_read(one, body["stream"], tokenizer) for one in received]
    for error in sorted({answer.error for answer in answers if answer.error})[:5]:
        print(f"{name}, {clients} clients: {error}", file=sys.stderr)
    print(f"{name}, {clients} clients: {len(answers)} answers in {seconds:.1f} s", file=sys.stderr)
    return Load(answers, seconds, cpu / seconds)


@dataclasses.dataclass
class _Received:
    """The raw response to one request, parsed later so as not to slow down other requests."""

    body: bytearray = dataclasses.field(default_factory=bytearray)
    first: float | None = None
    error: str | None = None


async def _burst(address: str, body: dict[str, Any], prompts: Sequence[str], clients: int) -> list[_Received]:
    """Send all prompts, one at a time per client."""
    waiting, received = iter(prompts), []
    # Each request has its own connection: a reused one fails if the server closes it while the request is being sent.
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=0)
    options = {"limits": limits, "timeout": _SECONDS, "trust_env": False}
    async with httpx.AsyncClient(headers={"accept-encoding": "identity"}, **options) as client:

        async def send_in_turn() -> None:
            for prompt in waiting:
                received.append(await _send(client, f"{address}/v1/completions", body | {"prompt": prompt}))

        await asyncio.gather(*(send_in_turn() for _ in range(clients)))
    return received


async def _send(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> _Received:
    got, begin = _Received(), time.perf_counter()
    try:
        async with client.stream("POST", url, json=body) as response:
            async for part in response.aiter_raw():
                got.body += part
                if got.first is None and body["stream"] and _has_text(got.body):
                    got.first = time.perf_counter() - begin
            if response.status_code != 200:
                got.error = f"status {response.status_code}: {got.body[:300].decode(errors='replace')}"
    except httpx.HTTPError as error:
        got.error = f"{type(error).__name__}: {error}"
    return got


def _events(body: bytes | bytearray) -> list[dict[str, Any]]:
    """Return the complete events of a stream."""
    lines = body.replace(b"\r", b"").split(b"\n")[:-1]
    return [json.loads(line[5:]) for line in lines if line.startswith(b"data:") and line[5:].strip() != b"[DONE]"]


def _has_text(body: bytes | bytearray) -> bool:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return any(choice["text"] for event in _events(body) for choice in event["choices"])
    return False


def _read(got: _Received, stream: bool, tokenizer: Tokenizer) -> Answer:
    """Parse a response. If the server does not report the number of tokens, count them with the tokenizer."""
    if got.error is not None:
        return Answer(error=got.error)
    try:
        events = _events(got.body) if stream else [json.loads(got.body)]
        if errors := [event["error"] for event in events if "error" in event]:
            return Answer(error=str(errors[0]))
        choices = [choice for event in events for choice in event["choices"]]
        if not any(choice.get("finish_reason") for choice in choices):
            return Answer(error="the answer does not end with a reason")
        usages = [event["usage"] for event in events if event.get("usage")]
        if usages:
            return Answer(usages[-1]["completion_tokens"], got.first)
        text = "".join(choice["text"] for choice in choices)
        return Answer(len(tokenizer.encode(text, add_special_tokens=False)), got.first)
    except (ValueError, KeyError, TypeError) as error:
        return Answer(error=f"not an answer ({type(error).__name__}: {error}): {bytes(got.body[:300])!r}")
