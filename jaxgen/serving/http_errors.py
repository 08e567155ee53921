"""Errors of the service, in OpenAI's format."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxgen.engine.home import EngineClosed
from jaxgen.engine.results import QueueFull
from jaxgen.errors import LONGEST_VALUE, JaxgenError, one_line

NO_RETRY = {"x-should-retry": "false"}  # without this header, OpenAI's clients retry failed requests
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# Options that have a different name in requests.
_FIELDS = {
    "min_new_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "sequence_bias": "logit_bias",
    "bad_words_ids": "bad_words",
    "do_sample=False": "temperature=0",
}
_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "tool_choice",
)
# A name in quotes, or after a dot, is part of a value: for example, a property in a schema.
_OPTION = re.compile(rf"(?<!['\".])\b({'|'.join((*_FIELDS, *_SAME))})\b")
_log = logging.getLogger("jaxgen.serving")


class ApiError(Exception):
    """Error response to a request.

    Attributes:
        status: the HTTP status.
        message: states the value received, what is allowed, and what to do; at most 2,000 characters.
        param: the field of the request that caused the error, or None.
        headers: additional response headers.
        code: OpenAI's name for the error, or the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.headers = status, one_line(message), headers or {}
        self.param = param and one_line(param, LONGEST_VALUE)
        self.code = code or status

    @property
    def body(self) -> dict[str, Any]:
        """The response's body."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@contextlib.contextmanager
def about(field: str) -> Iterator[None]:
    """Let the errors that the block raises name a field of the request, unless they name another."""
    try:
        yield
    except (JaxgenError, TypeError) as error:
        # With Python 3.13, the error's traceback would be part of a cycle that keeps the request in memory.
        raise api_error(error, field) from error.with_traceback(None)


@contextlib.contextmanager
def renaming(names: Sequence[tuple[re.Pattern[str], str]]) -> Iterator[None]:
    """Replace what matches a pattern in the errors that the block raises, and in the fields that they name."""
    try:
        yield
    except (ApiError, JaxgenError, TypeError) as error:
        raise _renamed(api_error(error), names) from error.with_traceback(None)  # as in `about`


def _renamed(error: ApiError, names: Sequence[tuple[re.Pattern[str], str]]) -> ApiError:
    text, param = error.message, error.param or ""
    for pattern, name in names:
        text, param = pattern.sub(name, text), pattern.sub(name, param)
    return ApiError(error.status, text, param or None, error.headers)


def api_error(error: BaseException, field: str | None = None) -> ApiError:
    """Return the error response for an exception; log unexpected exceptions.

    `field` is the field of the request that the error is about, unless its message names an option.
    """
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(429, "too many requests are waiting: try again later", headers={"retry-after": "1"})
        case EngineClosed():
            return ApiError(503, "the service is shutting down", headers={"retry-after": "5"})
        case JaxgenError() | TypeError():
            named = _OPTION.search(str(error))
            text = _OPTION.sub(lambda match: _FIELDS.get(match[1], match[1]), str(error))
            return ApiError(400, text, field if named is None else _FIELDS.get(named[1], named[1]))
    _log.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", headers=NO_RETRY)
