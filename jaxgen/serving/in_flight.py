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
        limit: the maximum number of bytes.

    Attributes:
        total: the bytes of all requests.
        of_group: the bytes of the requests of each group.
        lock: held while any of the counts changes.
    """

    def __init__(self, limit: int):
        self.limit, self.total = limit, 0
        self.of_group: Counter[Hashable] = Counter()
        self.lock = threading.Lock()


class Account:
    """The bytes in flight of one request, which belongs to a group of requests.

    Attributes:
        bytes: the number of bytes.
    """

    def __init__(self, in_flight: BytesInFlight, group: Hashable):
        self._in_flight, self._group, self.bytes, self._is_closed = in_flight, group, 0, False

    def add(self, count: int) -> None:
        """Add bytes, or raise an `ApiError` with the status 429.

        Any thread may call this method. After `close`, it does nothing: the thread may notice later than the event loop
        that the client has left.
        """
        flight = self._in_flight
        with flight.lock:
            total, of_group = flight.total + count, flight.of_group[self._group] + count
            if self._is_closed:
                return
            if total > flight.limit or of_group > flight.limit // SHARE:
                what = "the service is" if total > flight.limit else "this client's requests are"
                text = f"{what} using too much memory for {count:,} more bytes: try again later"
                raise ApiError(429, text, headers={"retry-after": "1"})
            self.bytes += count
            flight.total, flight.of_group[self._group] = total, of_group

    def close(self) -> None:
        """Remove all bytes of the request."""
        flight = self._in_flight
        with flight.lock:
            flight.total -= self.bytes
            flight.of_group[self._group] -= self.bytes
            if not flight.of_group[self._group]:
                del flight.of_group[self._group]
            self.bytes, self._is_closed = 0, True
