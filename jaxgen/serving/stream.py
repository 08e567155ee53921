"""Server-sent events: the chunks of an answer as they become available."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from jaxgen.serving.errors import NO_RETRY, ApiError, api_error
from jaxgen.serving.limits import Limits
from jaxgen.serving.live import Live

_LAST_WORDS = 2.0  # seconds allowed for sending the final error to a client that may not be reading


class EventStream:
    """ASGI response that sends the chunks of an answer. It ends if the client disconnects.

    Args:
        groups: the chunks, in groups that are ready together.
        live: the prompts, which are cancelled if the stream ends early.
        limits: the time limit for the answer, and how long to wait before sending a comment.
        count: called with the name of the counter to increment.
    """

    def __init__(
        self, groups: AsyncIterator[list[dict[str, Any]]], live: Live, limits: Limits, count: Callable[[str], None]
    ):
        self._groups, self._live, self._limits, self._count = groups, live, limits, count

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream."""
        sending, left = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(leaves(receive))
        try:
            await asyncio.wait({sending, left}, timeout=self._limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                self._count("request_cancelled_total")
                is_there = not left.done()
                await _cancelled(sending)
                if is_there:
                    message = f"the answer took more than {self._limits.seconds:g} seconds"
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(_send_last(send, ApiError(408, message, headers=NO_RETRY)), _LAST_WORDS)
            else:
                sending.result()
        finally:
            self._live.cancel()
            await _cancelled(sending)
            await _cancelled(left)

    async def _send(self, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        error: ApiError | None = None
        try:
            async for body in self._bodies():
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except OSError:  # the client disconnected
            return
        except Exception as failure:
            error = api_error(failure)
            self._count("request_error_total")
        await _send_last(send, error)

    async def _bodies(self) -> AsyncIterator[bytes]:
        """Yield the data to send: groups of chunks, or a comment if there has been no group for a while."""
        following = asyncio.ensure_future(anext(self._groups, None))
        try:
            while True:
                await asyncio.wait({following}, timeout=self._limits.keep_alive)
                if not following.done():
                    yield b": keep-alive\n\n"
                    continue
                if (group := following.result()) is None:
                    return
                following = asyncio.ensure_future(anext(self._groups, None))
                if group:
                    yield b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in group)
        finally:
            await _cancelled(following)


async def _send_last(send: Any, error: ApiError | None) -> None:
    """End a stream, with an error if there is one."""
    body = b"data: [DONE]\n\n"
    if error is not None:
        body = b"data: " + msgspec.json.encode(error.body) + b"\n\n" + body
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def leaves(receive: Any) -> None:
    """Wait until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: asyncio.Future) -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
