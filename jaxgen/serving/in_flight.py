"""The bytes in flight: requests that are being read and answers that are being made or sent, in all and per client."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable

from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.limits import SHARE


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

    def account(self, group: Hashable) -> Account:
        """Return an account for a request, which belongs to a group of requests."""
        return Account(self, group)

    def change(self, group: Hashable, count: int) -> None:
        """Add a number of bytes, which may be negative, or raise an `ApiError`."""
        with self._lock:
            total, own = self._total + count, self._of_group[group] + count
            if count > 0 and (total > self._most or own > self._most // SHARE):
                what = "the service is" if total > self._most else "this client's requests are"
                text = f"{what} using too much memory for {count:,} more bytes: try again later"
                raise ApiError(429, text, headers={"retry-after": "1"})
            self._total = total
            self._of_group[group] = own
            if not own:
                del self._of_group[group]


class Account:
    """The bytes in flight of one request.

    Attributes:
        bytes: the number of bytes.
    """

    def __init__(self, in_flight: BytesInFlight, group: Hashable):
        self._in_flight, self._group, self.bytes = in_flight, group, 0
        self._is_closed = False
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Add bytes, or raise an `ApiError` with the status 429.

        Any thread may call this method. After `close`, it does nothing: the thread may notice later than the event loop
        that the client has left.
        """
        with self._lock:
            if not self._is_closed:
                self._in_flight.change(self._group, count)
                self.bytes += count

    def close(self) -> None:
        """Remove all bytes of the request."""
        with self._lock:
            count, self.bytes, self._is_closed = self.bytes, 0, True
            self._in_flight.change(self._group, -count)
