"""The HTTP server of `jaxgen serve`: uvicorn, with limits on idle connections."""

from __future__ import annotations

import asyncio
import functools
import itertools
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST = 1024  # connections, even if the process may open more files
_FILES = 256  # files that are not connections, and connections that have been accepted but not yet counted
_BACKLOG = 128  # connections that the operating system accepts before the process does
_TURNS = itertools.count()
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def server(app: ASGIApp, *, header_seconds: float = 30.0, limit: int | None = None, **options: Any) -> uvicorn.Server:
    """Return a server for an application.

    The parser is always h11, even if httptools is installed: it limits the size of a header.

    Args:
        app: the application.
        header_seconds: the time limit for sending a request's header.
        limit: the maximum number of connections. By default, 1024, or what the process's limit on open files allows.
        options: further options of `uvicorn.Config`, such as `ssl_certfile`.
    """
    protocol: Any = functools.partial(Connection, header_seconds, limit or _most_connections())
    quiet = {"log_level": "warning", "access_log": False, "server_header": False, "ws": "none"}
    return uvicorn.Server(uvicorn.Config(app, http=protocol, backlog=_BACKLOG, **quiet, **options))


class Connection(H11Protocol):
    """A connection, which is closed if a request's header is not complete in time.

    If there are too many connections, a new one takes the place of the one that has waited longest for its next
    request. If requests from all of them are being answered, the new one is refused with status 503.

    Attributes:
        turn: increases in the order in which connections have begun to wait.
    """

    def __init__(self, header_seconds: float, limit: int, **options: Any):
        super().__init__(**options)
        self._header_seconds, self._most = header_seconds, limit
        self._timer: asyncio.TimerHandle | None = None
        self.turn = next(_TURNS)

    @property
    def answers(self) -> bool:
        """True from the end of a request's header to the end of its answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first header."""
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > self._most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Read bytes. The time for a header begins with the first of them, or with the connection."""
        before = self.cycle
        if self._timer is None and not self.answers:
            self._start_timer()
        super().data_received(data)
        if self.cycle is not before:
            self._stop_timer()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self.turn = next(_TURNS)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once, even if the client does not read."""
        self.connections.discard(self)
        self.transport.abort()

    def _make_room(self) -> None:
        others: set[Any] = self.connections - {self}
        if waiting := [other for other in others if not other.answers]:
            min(waiting, key=lambda other: other.turn).drop()
        else:
            self.connections.discard(self)
            self.transport.write(_BUSY)
            self.transport.close()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._header_seconds, self.drop)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _most_connections() -> int:
    """Return how many connections may be open, so that files can still be opened."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return _MOST
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else min(_MOST, max(files - _FILES, files // 2))
