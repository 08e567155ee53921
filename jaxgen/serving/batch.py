"""OpenAI's batch files: a request per line, answered by the service's application without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from starlette.types import ASGIApp

from jaxgen.errors import InputError, shown
from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.protocol import decode
from jaxgen.utf8_text import text_lines

# The service's paths that a line may name. The body and the answer are those of the path.
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
_TOO_MANY = 429


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a batch file; `body` is the request's body as JSON."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Streamed(msgspec.Struct):
    stream: Any = None


def read_batch(name: str, data: bytes) -> list[BatchRequest]:
    """Read a batch file's requests; empty lines are skipped.

    Like OpenAI, refuse the whole file if a line is not a request. Whether its body is valid is part of its answer.

    Raises:
        InputError: the file has no request; or, with its number: a line that is not a request, that has the same
            `custom_id` as another one, or that asks for a stream.
    """
    requests: list[BatchRequest] = []
    numbers: dict[str, int] = {}
    for number, line in text_lines(name, data):
        try:
            request = decode(line.encode(), BatchRequest)
            _check(request)
        except ApiError as error:
            raise InputError(f"{name}, line {number}: {error.message}") from error
        if (first := numbers.setdefault(request.custom_id, number)) != number:
            same = f"custom_id {shown(request.custom_id)} is also that of line {first}"
            raise InputError(f"{name}, line {number}: {same}: give each its own")
        requests.append(request)
    if not requests:
        raise InputError(f"{name} has no request: write one per line")
    return requests


def _check(request: BatchRequest) -> None:
    if request.method != "POST":
        raise ApiError(400, f"method must be POST, got {shown(request.method)}")
    if request.url not in URLS:
        raise ApiError(400, f"url must be {', '.join(URLS[:-1])} or {URLS[-1]}, got {shown(request.url)}")
    body = bytes(request.body)
    if not body.startswith(b"{"):
        raise ApiError(400, f"body must be an object, got {shown(body.decode())}")
    if msgspec.json.decode(body, type=_Streamed).stream:
        raise ApiError(400, "body.stream is not offered in a batch: leave it out")


async def answer_batch(
    app: ASGIApp, requests: Sequence[BatchRequest], indices: Sequence[int], at_once: int
) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """Answer the requests in `indices`, and yield the index and the output line of each one as it is answered.

    A request that the service refuses because too many prompts are waiting is repeated after the others, with fewer
    requests at a time.

    Args:
        app: the application of a `Service`.
        requests: all requests.
        indices: the requests to answer.
        at_once: the number of requests that are sent before the first of them is answered.
    """
    left = list(indices)
    while left:
        refused = []
        async with contextlib.aclosing(_each(app, requests, left, at_once)) as answered:
            async for index, status, body in answered:
                if status == _TOO_MANY:
                    refused.append(index)
                else:
                    yield index, _line(requests[index], status, body)
        left, at_once = refused, max(1, at_once // 2)


async def _each(
    app: ASGIApp, requests: Sequence[BatchRequest], indices: Sequence[int], at_once: int
) -> AsyncGenerator[tuple[int, int, bytes], None]:
    """Yield the index, the status and the body of each answer."""
    following, running = iter(indices), set()
    try:
        while True:
            for index in itertools.islice(following, at_once - len(running)):
                running.add(asyncio.ensure_future(_post(app, index, requests[index])))
            if not running:
                return
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _post(app: ASGIApp, index: int, request: BatchRequest) -> tuple[int, int, bytes]:
    """Call the application as a server would for a POST request."""
    messages = [{"type": "http.request", "body": bytes(request.body), "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if not messages:
            await asyncio.get_running_loop().create_future()  # this client waits for its answer
        return messages.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": request.url, "raw_path": request.url.encode(), "query_string": b"", "root_path": ""}
    await app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)
    return index, sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def _line(request: BatchRequest, status: int, body: bytes) -> dict[str, Any]:
    """Return a line of the output. A request that was refused has its error in the body, as over HTTP."""
    number = secrets.token_hex(12)
    response = {"status_code": status, "request_id": f"req_{number}", "body": msgspec.json.decode(body)}
    return {"id": f"batch_req_{number}", "custom_id": request.custom_id, "response": response, "error": None}
