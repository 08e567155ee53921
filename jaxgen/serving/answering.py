"""Answer requests with the engine: read them, submit their prompts, and follow the answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Any

import jax
import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.request.prompt import Prompt
from jaxgen.core.scoring.score import score
from jaxgen.engine.engine import Engine
from jaxgen.engine.results import QueueFull
from jaxgen.errors import InputError
from jaxgen.serving.answer_text import Answer, Delta
from jaxgen.serving.arrival import Arrival
from jaxgen.serving.embeddings import Embedder
from jaxgen.serving.grammars import CompiledGrammar, Grammars, GrammarSource
from jaxgen.serving.http_errors import NO_RETRY, ApiError
from jaxgen.serving.limits import Limits
from jaxgen.serving.live import Live, in_thread
from jaxgen.serving.metrics import Metrics
from jaxgen.serving.protocol import Common, StreamOptions
from jaxgen.serving.replies import Replies
from jaxgen.serving.requests import Asked
from jaxgen.serving.response_records import Item
from jaxgen.serving.response_store import ResponseStore, StoredResponse
from jaxgen.serving.response_writer import Event, ResponseWriter
from jaxgen.serving.scored import Scored, TokenTexts
from jaxgen.serving.sizes import Size, Sizes
from jaxgen.serving.stream import disconnected

LARGE = 2**16  # number of bytes above which JSON is read and written in another thread
_PREPARING = 2  # number of threads that read requests


class _FourthOfTheTime(concurrent.futures.ThreadPoolExecutor):
    """A thread that works for a fourth of the time while the engine is busy, so that the engine's thread can run."""

    def __init__(self, name: str, is_busy: Callable[[], bool]):
        super().__init__(1, name)
        self._is_busy = is_busy

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        def run() -> Any:
            begin = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                if self._is_busy():
                    time.sleep(3 * (time.monotonic() - begin))

        return super().submit(run)


class Answering:
    """Runs requests in an engine.

    Attributes:
        pool: the threads that read requests.
        large: the thread that reads and writes what is large, so that small requests do not wait for it.
        scoring: the thread that runs the model outside of the engine: scores of prompts, and embeddings.
    """

    def __init__(
        self, engine: Engine, params: Any, cfg: GenerationConfig, limits: Limits, metrics: Metrics, texts: TokenTexts
    ):
        self._engine, self._params, self._cfg, self._limits, self._metrics = engine, params, cfg, limits, metrics
        self._sizes = Sizes(texts, cfg.model.vocab_size, limits)
        self.pool = concurrent.futures.ThreadPoolExecutor(_PREPARING, "jaxgen request")
        self.large = _FourthOfTheTime("jaxgen large request", lambda: engine.is_busy)
        self.grammars = Grammars(engine.check_grammar, limits.grammar_seconds, lambda: engine.is_busy)
        self.scoring = concurrent.futures.ThreadPoolExecutor(1, "jaxgen scores")

    def close(self) -> None:
        """Let the threads end."""
        self.grammars.close()
        for pool in (self.pool, self.large, self.scoring):
            pool.shutdown(wait=False)

    async def begin(
        self,
        request: Common,
        read: Callable[[Any, int], Asked],
        adapter: int,
        arrival: Arrival,
        *,
        repeated: int = 0,
        copies: int = 1,
    ) -> Live:
        """Read a request, reserve memory for its answer, and compile its grammar.

        `adapter` is the number of the adapter that it uses, or -1. `repeated` and `copies` are as in `Sizes.of`.
        """
        pool = self.pool_for(arrival.account.bytes)
        asked, size = await in_thread(pool, self._read, request, read, adapter, repeated, copies)
        arrival.account.add(self._sizes.memory(size, bool(request.stream)))
        if asked.source is not None:
            grammar = await self._grammar(asked.source, arrival.group)
            prompts = [self._engine.prompts.following(prompt, grammar.automaton) for prompt in asked.prompts]
            asked = dataclasses.replace(asked, prompts=prompts, left_out=grammar.left_out)
        self._metrics.observe("request_params_n", asked.sequences)
        self._metrics.observe("request_params_max_tokens", asked.budget)
        most_unread = self._limits.unread if request.stream else None
        return Live(asked, self._engine, self._metrics, arrival, size, most_unread)

    def pool_for(self, size: int) -> concurrent.futures.Executor:
        """Return the threads that read or write a number of bytes."""
        return self.pool if size < LARGE else self.large

    def _read(
        self, request: Common, read: Callable[[Any, int], Asked], adapter: int, repeated: int, copies: int
    ) -> tuple[Asked, Size]:
        asked = read(request, adapter)
        return asked, self._sizes.of(request, asked, repeated, copies)

    async def _grammar(self, source: GrammarSource, group: Hashable) -> CompiledGrammar:
        try:
            return await self.grammars.get(source, group)
        except InputError as error:
            raise ApiError(400, f"{source.field}: {error}", source.field) from error

    async def submit(self, live: Live) -> None:
        """Submit the prompts of a request, unless nothing is to be generated."""
        if not live.asked.budget:
            return
        free = self._engine.free_places
        if (count := len(live.asked.prompts)) > max(1, int(self._limits.share * free)):
            raise QueueFull(f"{count} prompts are too many for the {free} free places in the queue: submit them later")
        await in_thread(self.pool, live.submit)
        lengths = [len(prompt.ids) for prompt in live.asked.prompts]
        self._metrics.count("prompt_tokens_total", sum(lengths))
        self._metrics.count("prefix_cache_queries_total", sum(lengths))
        for length in lengths:
            self._metrics.observe("request_prompt_tokens", length)

    async def until_left(self, http: Request, work: Any, live: Live | None = None) -> Any:
        """Run a coroutine and return its result; cancel it if the client disconnects or time runs out."""
        arrival: Arrival = http.state.arrival
        task, left = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(http.receive))
        try:
            await asyncio.wait({task, left}, timeout=arrival.left, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if left.done():
                raise ClientDisconnect
            self._metrics.count("request_cancelled_total")
            raise arrival.late()
        finally:
            if live is not None and (not task.done() or task.exception() is not None):
                live.cancel()
            for each in (task, left):
                each.cancel()
            del task, each  # a task has its error, whose traceback has this frame: the request would stay in memory

    async def whole(self, replies: Replies, live: Live) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        scored = await self.scored(live.asked)
        await self.submit(live)
        answers = live.asked.answers()
        deltas = dict([pair async for group in self.deltas(answers, live) for pair in group])
        choices = [(answer, deltas[choice]) for choice, answer in enumerate(answers)]
        usage = replies.usage(answers, live.cached_tokens)
        write = functools.partial(replies.whole, choices, usage, scored, live.size.limit)
        return write() if live.size.total < LARGE else await in_thread(self.large, write)

    async def chunks(
        self, replies: Replies, live: Live, scored: list[Scored] | None
    ) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield groups of chunks that are ready to be sent; a group is empty if the new tokens add nothing to send."""
        options = replies.request.stream_options or StreamOptions()
        answers, begun = live.asked.answers(), set()

        def chunk(choice: int, delta: Delta) -> dict[str, Any]:
            of_prompt = None if scored is None else scored[choice // live.asked.sequences]
            body = replies.chunk(choice, answers[choice], delta, choice not in begun, of_prompt)
            begun.add(choice)
            if options.continuous_usage_stats:
                return body | {"usage": replies.usage(answers, live.cached_tokens)}
            return body | ({"usage": None} if options.include_usage else {})

        async for group in self.deltas(answers, live):
            yield [chunk(choice, delta) for choice, delta in group if _has_content(delta, choice not in begun)]
        if options.include_usage:
            yield [replies.last(replies.usage(answers, live.cached_tokens))]

    async def exhaust(self, events: AsyncIterator[Any], live: Live) -> None:
        """Answer a request whose events are not sent."""
        await self.submit(live)
        async for _ in events:
            pass

    async def response_events(
        self, writer: ResponseWriter, live: Live, items: list[Item], store: ResponseStore
    ) -> AsyncIterator[list[Event]]:
        """Yield groups of events. Put the response, which follows `items`, in the store before its last event."""
        [answer] = answers = live.asked.answers()
        yield writer.begin()
        async for group in self.deltas(answers, live):
            yield [event for _, delta in group for event in writer.put(delta)]
        last = writer.end(len(live.asked.prompts[0].ids), live.cached_tokens, answer.count, answer.thinking)
        response = writer.response
        if response.store:
            whole = msgspec.json.encode([*items, *response.output])
            made = tuple(item.id for item in response.output if item.id is not None)
            stored = StoredResponse(msgspec.json.encode(response), whole, made)
            response.store = store.put(response.id, stored)
        yield last

    async def deltas(self, answers: list[Answer], live: Live) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Yield groups of additions that became available together, each addition with the index of its answer."""
        left = len(answers)
        if not live.asked.budget:
            yield [(choice, Delta("", [], [], None, "length")) for choice in range(left)]
            return
        while left:
            group = []
            for choice, event in await live.get():
                handle = live.handles[choice // live.asked.sequences]
                if handle.failure is not None:
                    raise handle.failure
                if event.stop_reason:
                    done = handle.completion(event.sequence)
                    if event.stop_reason == StopReason.NOT_A_NUMBER:
                        raise ApiError(500, "the answer cannot continue: the model computed NaN", headers=NO_RETRY)
                    if done.error:
                        raise ApiError(400, f"the answer cannot continue: {done.error}", headers=NO_RETRY)
                    if not live.streams:  # only this event was queued, so it must contain all tokens
                        event = event._replace(tokens=done.tokens, logprobs=done.logprobs)
                group.append((choice, answers[choice].put(event)))
                if event.stop_reason:
                    left -= 1
                    self._ended(answers[choice], live.arrival.started)
            yield group
        self._metrics.count("prefix_cache_hits_total", live.cached_tokens)

    def _ended(self, answer: Answer, started: float) -> None:
        """Update the metrics for a sequence that has ended."""
        reason = {StopReason.LENGTH: "length", StopReason.CANCELLED: "abort"}.get(answer.reason, "stop")
        self._metrics.count("request_success_total", finished_reason=reason)
        self._metrics.observe("request_generation_tokens", answer.count)
        self._metrics.observe("e2e_request_latency_seconds", time.monotonic() - started)

    async def scored(self, asked: Asked) -> list[Scored] | None:
        """Return the log-probabilities of the prompts' tokens, or None if they were not requested."""
        if asked.prompt_logprobs is None:
            return None
        return [await in_thread(self.scoring, self._score, prompt, asked) for prompt in asked.prompts]

    def _score(self, prompt: Prompt, asked: Asked) -> Scored:
        # top_logprobs is always the maximum, so that only one program is compiled for each width.
        ids, cfg = prompt.ids, self._cfg.replace(adapter=int(prompt.options.get("adapter", -1)))
        scores = score(
            self._params, [ids], cfg, attention_mask=np.ones((1, len(ids)), bool), top_logprobs=cfg.top_logprobs
        )
        row = jax.tree.map(lambda x: np.asarray(x)[0], scores)
        return Scored(ids.tolist(), row, asked.prompt_logprobs or 0, is_beginning=True)

    async def vectors(self, embedder: Embedder, rows: list[list[int]], adapter: int) -> np.ndarray:
        """Return the vectors of texts; between two passes, other requests have their turn."""
        found: dict[int, np.ndarray] = {}
        for indices in embedder.passes(rows):
            own = [rows[index] for index in indices]
            vectors = await in_thread(self.scoring, embedder.vectors, own, adapter)
            found |= zip(indices, vectors, strict=True)
        return np.stack([found[index] for index in range(len(rows))])


def _has_content(delta: Delta, is_first: bool) -> bool:
    return bool(is_first or delta.text or delta.thought or delta.calls or delta.finish or delta.logprobs is not None)
