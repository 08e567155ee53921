"""The bytes in flight: requests that are being read and answers that are being made or sent, in all and per client."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable

from jaxgen.serving.errors import ApiError

_SHARE = 4  # a client may use the fourth part of all bytes


class BytesInFlight:
    """A count of bytes with a limit.

    Args:
        most: the limit.
    """

    def __init__(self, most: int):
        self._most, self._total = most, 0
        self._of_group: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """The bytes of all requests."""
        return self._total

    def hold(self, group: Hashable) -> Held:
        """Return an account for a request, which belongs to a group of requests."""
        return Held(self, group)

    def change(self, group: Hashable, count: int) -> None:
        """Add a number of bytes, which may be negative, or raise an `ApiError`."""
        with self._lock:
            total, own = self._total + count, self._of_group[group] + count
            if count > 0 and (total > self._most or own > self._most // _SHARE):
                what = "the service is" if total > self._most else "this client's other requests are"
                text = f"{what} using too much memory for {count:,} more bytes: try again later"
                raise ApiError(429, text, headers={"retry-after": "1"})
            self._total = total
            self._of_group[group] = own
            if not own:
                del self._of_group[group]


class Held:
    """The bytes in flight of one request.

    Attributes:
        bytes: their number.
    """

    def __init__(self, flight: BytesInFlight, group: Hashable):
        self._flight, self._group, self.bytes = flight, group, 0
        self._is_released = False
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count more bytes, or raise an `ApiError` with the status 429.

        Any thread may call this method. After `release`, it does nothing: the thread may notice later than the loop
        that the client has left.
        """
        with self._lock:
            if not self._is_released:
                self._flight.change(self._group, count)
                self.bytes += count

    def release(self) -> None:
        """Count none of the bytes any more."""
        with self._lock:
            count, self.bytes, self._is_released = self.bytes, 0, True
            self._flight.change(self._group, -count)
