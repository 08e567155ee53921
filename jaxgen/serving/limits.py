"""Limits of size and time for the clients of the service."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Attributes:
        body: the most bytes of a request's body.
        body_seconds: the time in which a client must send it.
        seconds: the time in which a request must be answered.
        keep_alive: the seconds of silence in a stream after which a comment is sent.
    """

    body: int = 2**22
    body_seconds: float = 30.0
    seconds: float = 600.0
    keep_alive: float = 10.0
