"""Follow the prompts of one request while the engine answers them."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxgen.engine.engine import Engine
from jaxgen.engine.results import Event, Handle
from jaxgen.serving.arrival import Arrival
from jaxgen.serving.metrics import Metrics
from jaxgen.serving.requests import Asked
from jaxgen.serving.sizes import Size


class Live:
    """A request's prompts in the engine, and a queue of their events for the coroutine that answers the request.

    Attributes:
        asked: the request.
        arrival: the time at which the request arrived, and its client.
        streams: if True, all events are queued; otherwise, only the last event of each sequence. A stream has a
            maximum number of bytes in the queue, `most_unread`.
        size: the estimated size of the answer.
        overrun: called in the loop's thread if the client of a stream does not read; it should end the stream.
        events: the queue. Each item consists of a sequence's index within the request and one of the sequence's events.
        handles: the prompts' handles in the engine.
    """

    def __init__(
        self,
        asked: Asked,
        engine: Engine,
        metrics: Metrics,
        arrival: Arrival,
        size: Size,
        most_unread: int | None,
    ):
        self.asked, self.arrival, self.size, self.streams = asked, arrival, size, most_unread is not None
        self.overrun: Callable[[], object] = lambda: None
        self._most_unread, self._unread = most_unread or 0, 0
        self._engine, self._metrics = engine, metrics
        self._loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.handles: list[Handle] = []
        self._last: dict[int, float] = {}
        self._is_cancelled = False
        self._lock = threading.Lock()

    def submit(self) -> None:
        """Submit all prompts; any thread may call this method. If an error is raised, no prompt is answered."""
        try:
            for number, prompt in enumerate(self.asked.prompts):
                on_event = functools.partial(self._on_event, number)
                handle = self._engine.follow(prompt, on_event, 0, group=self.arrival.group)
                with self._lock:
                    self.handles.append(handle)
                    if self._is_cancelled:
                        handle.cancel()
        except BaseException:
            self.cancel()
            raise

    def _on_event(self, number: int, event: Event) -> None:
        """Handle an event of prompt `number`: update metrics, and queue the event if needed. See `Engine.follow`."""
        choice, now = number * self.asked.sequences + event.sequence, time.monotonic()
        if event.tokens:
            count = len(event.tokens)
            if choice in self._last:
                self._metrics.observe("inter_token_latency_seconds", (now - self._last[choice]) / count)
            elif event.sequence == 0:
                self._metrics.observe("time_to_first_token_seconds", now - self.arrival.started)
            self._last[choice] = now
            self._metrics.count("generation_tokens_total", count)
        if self.streams or event.stop_reason or not event.tokens:
            self._loop.call_soon_threadsafe(self._queue, choice, event)

    def _queue(self, choice: int, event: Event) -> None:
        self.events.put_nowait((choice, event))
        self._unread += len(event.tokens) * self.size.token
        if self.streams and self._unread > self._most_unread:
            self.cancel()
            self.overrun()

    async def get(self) -> list[tuple[int, Event]]:
        """Wait for events, and take all of them from the queue."""
        happened = [await self.events.get()]
        while not self.events.empty():
            happened.append(self.events.get_nowait())
        self._unread = 0
        return happened

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that were found in the prefix store."""
        return sum(handle.cached_tokens for handle in self.handles)

    def cancel(self) -> None:
        """Cancel the prompts that have not ended."""
        with self._lock:
            self._is_cancelled = True
            handles = list(self.handles)
        for handle in handles:
            if not handle.done:
                handle.cancel()


async def in_thread(pool: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread pool."""
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
