"""The stream of a response: server-sent events that are named by their type."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.limits import Limits
from jaxgen.serving.live import Live
from jaxgen.serving.metrics import Metrics
from jaxgen.serving.response_records import Event
from jaxgen.serving.response_writer import ResponseWriter
from jaxgen.serving.stream import EventStream


class ResponseStream(EventStream):
    """Response that sends the events of `writer`. If it fails, the last event is `response.failed`."""

    _END = b""

    def __init__(
        self,
        writer: ResponseWriter,
        groups: AsyncIterator[list[Event]],
        live: Live,
        limits: Limits,
        metrics: Metrics,
    ):
        super().__init__(groups, live, limits, metrics)
        self._writer = writer

    def _encoded(self, chunk: Any) -> bytes:
        return f"event: {type(chunk).__struct_config__.tag}\n".encode() + super()._encoded(chunk)

    def _failure(self, error: ApiError) -> Any:
        return self._writer.fail(error)
