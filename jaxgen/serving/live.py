"""The prompts of one request while the engine answers them."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxgen.engine.engine import Engine
from jaxgen.engine.results import Completion, Event, Handle
from jaxgen.serving.metrics import Metrics
from jaxgen.serving.requests import Asked


class Live:
    """A request's prompts in the engine, and a queue of their events for the coroutine that answers the request.

    Args:
        asked: the request.
        engine: the engine that answers the request.
        metrics: the counters to update.
        started: when the request arrived, as returned by `time.monotonic`.
        streams: if True, queue all events; otherwise, only the last event of each sequence.

    Attributes:
        news: the queue. Each item consists of a sequence's index within the request and an event of this sequence.
        handles: the prompts' handles in the engine.
    """

    def __init__(self, asked: Asked, engine: Engine, metrics: Metrics, started: float, streams: bool):
        self._asked, self._engine, self._metrics, self._started, self._streams = (
            asked,
            engine,
            metrics,
            started,
            streams,
        )
        self._loop = asyncio.get_running_loop()
        self.news: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.handles: list[Handle] = []
        self._last: dict[int, float] = {}
        self._is_cancelled = False
        self._lock = threading.Lock()

    def submit(self) -> None:
        """Submit all prompts; can be called from any thread.

        Raises:
            QueueFull, EngineClosed, JaxgenError, TypeError: as in `Engine.submit`. In this case, no prompt is answered.
        """
        try:
            for number, prompt in enumerate(self._asked.prompts):
                handle = self._engine.follow(prompt, functools.partial(self._hear, number), 0)
                with self._lock:
                    self.handles.append(handle)
                    if self._is_cancelled:
                        handle.cancel()
        except BaseException:
            self.cancel()
            raise

    def _hear(self, number: int, news: Event) -> None:
        """Update the metrics for an event of a prompt, and queue the event if needed; called in the engine's thread."""
        place, now = number * self._asked.sequences + news.sequence, time.monotonic()
        if news.tokens:
            count = len(news.tokens)
            if place in self._last:
                self._metrics.observe("inter_token_latency_seconds", (now - self._last[place]) / count, count)
            elif news.sequence == 0:
                self._metrics.observe("time_to_first_token_seconds", now - self._started)
            self._last[place] = now
            self._metrics.count("generation_tokens_total", count)
        if self._streams or news.stop_reason or not news.tokens:
            self._loop.call_soon_threadsafe(self.news.put_nowait, (place, news))

    def completion(self, place: int) -> Completion:
        """Return the current state of a sequence."""
        prompt, sequence = divmod(place, self._asked.sequences)
        return self.handles[prompt].completion(sequence)

    def whole(self, place: int, news: Event) -> Event:
        """Return a sequence's last event; if its tokens were not streamed, the event contains all of them."""
        if self._streams:
            return news
        done = self.completion(place)
        return Event(done.sequence, done.tokens, "", done.stop_reason, done.logprobs)

    def failure(self, place: int) -> BaseException | None:
        """Return the exception that made the engine give up on a sequence's prompt, or None."""
        return self.handles[place // self._asked.sequences].failure

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
