"""Size and time limits for requests to the service."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits for a request.

    Attributes:
        body: the maximum number of bytes in a request's body.
        body_seconds: the time limit for sending the body.
        seconds: the time limit for answering a request.
        keep_alive: the number of seconds without data after which a stream sends a comment.
    """

    body: int = 2**22
    body_seconds: float = 30.0
    seconds: float = 600.0
    keep_alive: float = 10.0
