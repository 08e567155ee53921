"""Compile the grammars of requests, one at a time, and cache them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import hashlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax

from jaxgen.core.grammar.grammar import Grammar
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.engine.results import QueueFull
from jaxgen.errors import InputError, JaxgenError

_MOST_BYTES = 2**27  # maximum size of all cached grammars together
_TURN = 0.002  # seconds that the thread works, and then sleeps, while the engine is busy
_LONGEST_PAUSE = 1.0  # seconds that the thread sleeps after a grammar that was stopped
_MOST_JOBS = 64  # maximum number of grammars that wait to be compiled


class CompiledGrammar(NamedTuple):
    """The automaton that an answer follows, and what its schemas have that is not enforced."""

    automaton: TokenAutomaton
    left_out: Sequence[str]


@dataclasses.dataclass(frozen=True)
class GrammarSource:
    """The grammar that a request needs.

    Attributes:
        key: identifies the grammar.
        build: compiles the grammar; may raise an `InputError`.
        field: the field of the request that errors name.
    """

    key: Hashable
    build: Callable[[], CompiledGrammar]
    field: str = ""


class _Stopped(Exception):
    """Nobody waits for a grammar any more."""


class _Job:
    """A grammar to compile, for a number of `waiters`. The result of `future` is the grammar or an error."""

    def __init__(self, key: bytes, build: Callable[[], CompiledGrammar], group: Hashable):
        self.key, self.build, self.group = key, build, group
        self.future: concurrent.futures.Future[CompiledGrammar | BaseException] = concurrent.futures.Future()
        self.stop = threading.Event()
        self.waiters = 0


class Grammars:
    """A cache of grammars, and a thread that compiles them.

    Requests that need the same grammar wait for the same job. If all of them have left, the job is dropped, even while
    it runs. Groups of requests take turns, so that the many grammars of one client do not delay another client.

    Args:
        fits: raises an `InputError` if the engine cannot use an automaton. Such grammars are not cached.
        seconds: the time limit for compiling one grammar.
        is_busy: returns True while the engine answers prompts. Then, compilation takes only half of the time.
        most_bytes: the maximum size of all cached grammars. Those that were not used for the longest time are dropped.
        most_jobs: the maximum number of grammars that wait.
    """

    def __init__(
        self,
        fits: Callable[[TokenAutomaton], None],
        seconds: float = 30.0,
        is_busy: Callable[[], bool] = lambda: False,
        most_bytes: int = _MOST_BYTES,
        most_jobs: int = _MOST_JOBS,
    ):
        self._fits, self._seconds, self._is_busy = fits, seconds, is_busy
        self._most_bytes, self._most_jobs = most_bytes, most_jobs
        self._cached: OrderedDict[bytes, tuple[CompiledGrammar, int]] = OrderedDict()
        self._bytes = 0
        self._jobs: dict[bytes, _Job] = {}
        self._queue: OrderedDict[Hashable, deque[_Job]] = OrderedDict()  # by group; the first group is the next
        self._lock = threading.Lock()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "jaxgen grammar")

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False)

    @property
    def cached_bytes(self) -> int:
        """The size of all cached grammars."""
        return self._bytes

    @property
    def jobs(self) -> int:
        """The number of grammars that are being compiled or wait."""
        return len(self._jobs)

    async def get(self, source: GrammarSource, group: Hashable = None) -> CompiledGrammar:
        """Return a grammar. Compile it if it is not in the cache.

        Raises:
            QueueFull: too many grammars are waiting.
            InputError: the grammar cannot be compiled or used, or compiling it takes too long.
        """
        key = hashlib.sha256(repr(source.key).encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key][0]
            job = self._jobs.get(key) or self._add(_Job(key, source.build, group))
            job.waiters += 1
        try:
            outcome = await asyncio.shield(asyncio.wrap_future(job.future))
        finally:
            with self._lock:
                job.waiters -= 1
                if not job.waiters and self._jobs.get(key) is job:
                    self._drop(job)
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                del outcome, job  # the error's traceback has this frame
        return outcome

    def _add(self, job: _Job) -> _Job:
        if len(self._jobs) >= self._most_jobs:
            raise QueueFull(f"{self._most_jobs} grammars are waiting to be compiled: try again later")
        self._jobs[job.key] = job
        self._queue.setdefault(job.group, deque()).append(job)
        self._thread.submit(self._run_next)
        return job

    def _drop(self, job: _Job) -> None:
        """Forget a job, and end it if it is running."""
        del self._jobs[job.key]
        job.stop.set()
        if (waiting := self._queue.get(job.group)) is not None and job in waiting:
            waiting.remove(job)
            if not waiting:
                del self._queue[job.group]

    def _next(self) -> _Job | None:
        """Take the next job of the group whose turn it is; None if the job was dropped."""
        with self._lock:
            if not self._queue:
                return None
            group, waiting = self._queue.popitem(last=False)
            job = waiting.popleft()
            if waiting:
                self._queue[group] = waiting
            return job

    def _run_next(self) -> None:
        if (job := self._next()) is None:
            return
        begin = woke = time.monotonic()

        def check() -> None:
            nonlocal woke
            if job.stop.is_set():
                raise _Stopped
            if (now := time.monotonic()) - woke > _TURN:
                if self._is_busy():  # let the engine's thread run
                    time.sleep(_TURN)
                woke = time.monotonic()
            if now > begin + self._seconds:
                raise InputError(f"the grammar takes more than {self._seconds:g} seconds to compile: simplify it")

        outcome: CompiledGrammar | BaseException
        try:
            with Grammar.stoppable(check):
                outcome = job.build()
                self._fits(outcome.automaton)
        except JaxgenError as error:
            outcome = error.with_traceback(None)  # which has this frame, and so the job
        except BaseException as error:
            outcome = error
        if isinstance(outcome, _Stopped) and self._is_busy():  # work that nobody waits for takes a fourth of the time
            time.sleep(min(time.monotonic() - begin, _LONGEST_PAUSE))
        with self._lock:
            if self._jobs.get(job.key) is job:
                del self._jobs[job.key]
            if isinstance(outcome, CompiledGrammar):
                self._store(job.key, outcome)
        job.future.set_result(outcome)  # an error is a result, because everybody may have left

    def _store(self, key: bytes, grammar: CompiledGrammar) -> None:
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(grammar.automaton))
        if size > self._most_bytes or key in self._cached:  # a dropped job may have ended before it noticed
            return
        self._cached[key] = grammar, size
        self._bytes += size
        while self._bytes > self._most_bytes:
            self._bytes -= self._cached.popitem(last=False)[1][1]
