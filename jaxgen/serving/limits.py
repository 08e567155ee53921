"""Size and time limits for requests to the service."""

from __future__ import annotations

import dataclasses

SHARE = 4  # a client may use a quarter of the bytes in flight


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits for requests.

    Attributes:
        body: the maximum number of bytes in a request's body.
        body_seconds: the time limit for sending the body.
        answer: the maximum number of bytes in an answer; of a stream, without the tokens that are generated.
        in_flight: the maximum number of bytes of all requests and answers together. A client may use a quarter of them.
        stored: the maximum number of bytes of all stored responses together; 0 turns the store off.
        unread: the number of bytes of a stream that may wait until the client reads them.
        seconds: the time limit for a request, from its arrival to the end of its answer.
        grammar_seconds: the time limit for compiling one grammar.
        share: the share of the free places in the queue that a request of several prompts may take.
        keep_alive: the number of seconds without data after which a stream sends a comment.
    """

    body: int = 2**22
    body_seconds: float = 30.0
    answer: int = 2**26
    in_flight: int = 2**30
    stored: int = 2**26
    unread: int = 2**24
    seconds: float = 600.0
    grammar_seconds: float = 30.0
    share: float = 0.5
    keep_alive: float = 10.0

    @property
    def least_in_flight(self) -> int:
        """The value of `in_flight` below which the largest request could never be answered."""
        return SHARE * (3 * self.body + self.answer + max(self.answer, self.unread))
