"""Server-sent events, which deliver the chunks of an answer as they become available."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from jaxgen.serving.http_errors import ApiError, api_error
from jaxgen.serving.limits import Limits
from jaxgen.serving.live import Live
from jaxgen.serving.metrics import Metrics
from jaxgen.serving.replies import SHORTER

_LAST_WORDS = 2.0  # seconds allowed for sending the final error to a client that may not be reading


class EventStream(StreamingResponse):
    """Response that sends groups of chunks as they become ready. The response ends if the client disconnects.

    If the stream ends early, the prompts in `live` are cancelled. If it fails, the error is its last chunk.

    Args:
        groups: the chunks. One with a `type` is an event that is named by it.
        live: the prompts.
        limits: limits for requests.
        metrics: counts the streams that fail or end early.
        fail: returns the chunk for an error.
        end: the data after the last chunk.
    """

    def __init__(
        self,
        groups: AsyncIterator[list[dict[str, Any]]],
        live: Live,
        limits: Limits,
        metrics: Metrics,
        fail: Callable[[ApiError], dict[str, Any]] = lambda error: error.body,
        end: bytes = b"data: [DONE]\n\n",
    ):
        self._groups, self._live, self._limits, self._metrics, self._ended = groups, live, limits, metrics, False
        self._fail, self._end = fail, end
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._bodies(), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream."""
        try:
            with contextlib.suppress(TimeoutError, ClientDisconnect):
                async with asyncio.timeout(self._live.arrival.left + _LAST_WORDS) as clock:
                    self._live.overrun = lambda: clock.reschedule(0)  # the client has stopped reading
                    await super().__call__(scope, receive, send)
        finally:
            self._live.overrun = lambda: None
            self._live.cancel()
            if not self._ended:
                self._metrics.count("request_cancelled_total")

    async def _bodies(self) -> AsyncIterator[bytes]:
        """Yield the data to send: groups of chunks, or a comment if there has been no group for a while."""
        error, sent = None, 0
        following = asyncio.ensure_future(anext(self._groups, None))
        try:
            while (left := self._live.arrival.left) > 0:
                await asyncio.wait({following}, timeout=min(self._limits.keep_alive, left))
                if not following.done():
                    yield b": keep-alive\n\n"
                    continue
                if (group := following.result()) is None:
                    self._ended = True
                    break
                following = asyncio.ensure_future(anext(self._groups, None))
                if group:
                    data = b"".join(map(_encoded, group))
                    sent += len(data)
                    if sent > self._live.size.limit:
                        raise ApiError(400, f"the answer has more than {self._live.size.limit:,} bytes: {SHORTER}")
                    yield data
            else:
                error = self._live.arrival.late()
        except Exception as failure:
            error, self._ended = api_error(failure), True
            self._metrics.count("request_error_total", status=str(error.status))
        finally:
            following.cancel()
        if error is not None:
            yield _encoded(self._fail(error))
        yield self._end


def _encoded(chunk: dict[str, Any]) -> bytes:
    name = f"event: {chunk['type']}\n".encode() if "type" in chunk else b""
    return name + b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def disconnected(receive: Any) -> None:
    """Wait until the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
