"""Responses that later requests continue or read again."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from jaxgen.serving.http_errors import ApiError

_MOST = 4096  # maximum number of responses


class StoredResponse(NamedTuple):
    """A response, encoded as JSON.

    Attributes:
        body: the response.
        items: the whole conversation: the items before the response, and the items of its output.
        output: the ids of the items of its output.
    """

    body: bytes
    items: bytes
    output: tuple[str, ...] = ()


class ResponseStore:
    """A store for responses. If it is full, the responses that were not used for the longest time are deleted.

    A response has a copy of the items before it, so it can be continued after those responses were deleted.

    Args:
        most_bytes: the maximum size of all responses together.
        most: the maximum number of responses.
    """

    def __init__(self, most_bytes: int, most: int = _MOST):
        self._most_bytes, self._most, self._bytes = most_bytes, most, 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._makers: dict[str, str] = {}  # the names of the responses, by the ids of the items of their output

    def put(self, name: str, response: StoredResponse) -> bool:
        """Store a response; return False if it is larger than the store."""
        if len(response.body) + len(response.items) > self._most_bytes:
            return False
        self._responses[name] = response
        self._makers |= dict.fromkeys(response.output, name)
        self._bytes += len(response.body) + len(response.items)
        while self._bytes > self._most_bytes or len(self._responses) > self._most:
            self._remove(next(iter(self._responses)))
        return True

    def get(self, name: str) -> StoredResponse:
        """Return a response, or raise an `ApiError` with the status 404."""
        if name not in self._responses:
            raise ApiError(404, f"Response with id '{name[:80]}' not found.", "response_id")
        self._responses.move_to_end(name)
        return self._responses[name]

    def previous(self, name: str) -> StoredResponse:
        """Return the response that a request continues, or raise OpenAI's error."""
        try:
            return self.get(name)
        except ApiError as error:
            text = f"Previous response with id '{name[:80]}' not found."
            raise ApiError(400, text, "previous_response_id", code="previous_response_not_found") from error

    def maker(self, name: str) -> StoredResponse:
        """Return the response whose output has an item, or raise an `ApiError` with the status 404."""
        if name not in self._makers:
            raise ApiError(404, f"Item with id '{name[:80]}' not found.", "input")
        return self.get(self._makers[name])

    def delete(self, name: str) -> None:
        """Delete a response, or raise an `ApiError` with the status 404."""
        self.get(name)
        self._remove(name)

    def _remove(self, name: str) -> None:
        response = self._responses.pop(name)
        self._bytes -= len(response.body) + len(response.items)
        for item in response.output:
            del self._makers[item]
