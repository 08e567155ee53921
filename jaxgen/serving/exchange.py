"""The body of a request, and the response: received and sent within limits."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxgen.serving.http_errors import NO_RETRY, ApiError
from jaxgen.serving.in_flight import Account
from jaxgen.serving.limits import Limits

_PART = 2**16  # maximum number of bytes that are sent before the client has received earlier ones
_VALUE = 64  # approximate size of a parsed list, object or number


async def receive_body(request: Request, limits: Limits, account: Account) -> bytes:
    """Return the body of a request, and add its size and that of its values to `account`.

    Raises:
        ApiError: the body is too large, takes too long or is compressed, or too many bytes are in flight.
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", ""):
        text = f"the content encoding {coding[:40]!r} is not supported: send the body without Content-Encoding"
        raise ApiError(415, text)
    too_large = ApiError(413, f"the body is larger than the {limits.body} bytes that are accepted")
    if int(request.headers.get("content-length", "0") or 0) > limits.body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                account.add(len(part))
                body += part
                if len(body) > limits.body:
                    raise too_large
    except TimeoutError as error:
        text = f"the body did not arrive within {limits.body_seconds:g} seconds"
        raise ApiError(408, text, headers=NO_RETRY) from error
    account.add(2 * len(body) + _VALUE * sum(map(body.count, (b",", b"[", b"{"))))
    return bytes(body)


class Sending:
    """A response that is sent in parts, so that only a client that reads gets all of it.

    Args:
        response: the response.
        account: the bytes in flight of the request, which are released at the end.
        seconds: the time limit for sending the response.
    """

    def __init__(self, response: Response, account: Account, seconds: float):
        self._response, self._account, self._seconds = response, account, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response."""

        async def send_in_parts(message: Any) -> None:
            body = message.get("body", b"")
            if len(body) <= _PART:
                return await send(message)
            view = memoryview(body)
            for start in range(0, len(body), _PART):
                more = message.get("more_body", False) or start + _PART < len(body)
                await send({**message, "body": bytes(view[start : start + _PART]), "more_body": more})

        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await self._response(scope, receive, send_in_parts)
        finally:
            self._account.close()
