"""The arrival of a request: its time, and its client."""

from __future__ import annotations

import time
from collections.abc import Hashable
from typing import NamedTuple

from jaxgen.serving.http_errors import NO_RETRY, ApiError
from jaxgen.serving.in_flight import Account


class Arrival(NamedTuple):
    """When and from whom a request arrived.

    Attributes:
        started: the time of its arrival, as returned by `time.monotonic`.
        seconds: the time limit for answering it.
        group: identifies the client. Clients take turns.
        account: the request's bytes in flight.
    """

    started: float
    seconds: float
    group: Hashable
    account: Account

    @property
    def left(self) -> float:
        """The number of seconds that are left; at least 0."""
        return max(self.started + self.seconds - time.monotonic(), 0.0)

    def late(self) -> ApiError:
        """Return the error for a request that could not be answered in time."""
        return ApiError(408, f"the answer took more than {self.seconds:g} seconds", headers=NO_RETRY)
