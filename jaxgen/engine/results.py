"""The results of a prompt: events report answers as they grow, and completions contain all of the answers so far."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxgen.core.decoding.logprobs import LogProbs
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.request.prompt import Prompt
from jaxgen.core.text.streaming import TextStream
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.engine.home import Home, waits
from jaxgen.errors import JaxgenError

_NEXT = "the iterator of a handle"  # in error messages


class Event(NamedTuple):
    """The next tokens of a sequence.

    Attributes:
        sequence: the index of the sequence within the prompt.
        tokens: the token ids. Only the last event of a sequence may have no tokens.
        text: the new text, in whole characters; empty if there is no tokenizer, and for listeners of `Engine.follow`.
        stop_reason: the reason why the sequence ended; `StopReason.NONE` if it has not ended.
        logprobs: the log-probabilities of the tokens, as in `Completion`.
    """

    sequence: int
    tokens: list[int]
    text: str
    stop_reason: StopReason
    logprobs: LogProbs | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """The result of a sequence.

    Attributes:
        index: the prompt's index.
        sequence: the index of the sequence within the prompt.
        ids: the prompt's tokens.
        tokens: the generated tokens, including eos.
        text: the generated text, without special tokens; None without a tokenizer.
        stop_reason: the reason why the sequence ended; `StopReason.NONE` if it never began or has not ended.
        logprobs: the log-probabilities of the tokens, `[n]`, and of the most likely tokens, `[n, top_logprobs]`; None
            if `output_logprobs` is off in the engine's config or for the prompt.
        error: the reason why the sequence failed, or None.
        versions: the versions of the weights that the tokens depend on, in ascending order. The first entry is
            the version in use when the sequence was sent to the device; see `Engine.update_params`.
        cached_tokens: the number of tokens at the start of the prompt that were copied from the prefix store.
        metadata: the prompt's `metadata`, or None.
    """

    index: int
    sequence: int
    ids: list[int]
    tokens: list[int]
    text: str | None
    stop_reason: StopReason
    logprobs: LogProbs | None = None
    error: str | None = None
    versions: tuple[int, ...] = ()
    cached_tokens: int = 0
    metadata: Any = None


class QueueFull(JaxgenError):
    """Too many prompts are waiting. Submit the prompt again later, or with a timeout."""


@dataclasses.dataclass
class _Answer:
    tokens: list[int] = dataclasses.field(default_factory=list)
    columns: list[np.ndarray] = dataclasses.field(default_factory=list)  # other columns of the journal
    reason: StopReason = StopReason.NONE
    versions: list[int] = dataclasses.field(default_factory=list)


class PromptResults:
    """The results of a prompt so far, which the engine writes and the prompt's handle reads.

    Attributes:
        prompt: the prompt.
        answers: the answer of each sequence.
        events: the events so far.
        failure: the exception with which the prompt failed, or None.
        cached_tokens: the number of the prompt's tokens that were copied from the prefix store.
        changed: the condition that guards the other attributes. It is notified when one of them has changed.
        waiters: the events that coroutines wait for, each with its event loop.
        listening: the thread of each call of the listener that is in progress.
    """

    def __init__(self, prompt: Prompt, listener: Callable[[Event], object] | None):
        self.prompt, self._listener = prompt, listener
        self.answers = [_Answer() for _ in range(prompt.sequences)]
        self.events: list[Event] = []
        self.failure: BaseException | None = None
        self.cached_tokens = 0
        self.changed = threading.Condition()
        self.waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self.listening: list[int] = []
        self._has_ended = False

    @property
    def done(self) -> bool:
        """True if all sequences have ended, or cannot continue."""
        return self.failure is not None or self._has_ended

    def add(
        self,
        number: int,
        tokens: list[int],
        reason: StopReason,
        columns: np.ndarray | None = None,
        versions: tuple[int, ...] = (),
    ) -> None:
        """Add new results of a sequence, and call the listener."""
        with self.changed:
            answer = self.answers[number]
            if answer.reason:  # cancelled in the meantime
                return
            answer.tokens += tokens
            answer.reason = reason
            if columns is not None and columns.shape[1]:
                answer.columns.append(columns)
            answer.versions += dict.fromkeys(v for v in versions if tokens and v not in answer.versions)
            logprobs = None if columns is None else _logprobs([columns], self.prompt)
            event = Event(number, tokens, "", reason, logprobs)
            self.events.append(event)
            self.listening.append(threading.get_ident())
        self._notify(event)
        with self.changed:
            self.listening.remove(threading.get_ident())
            # The last sequences begin last, so this usually ends at once.
            self._has_ended = not self.listening and all(answer.reason for answer in reversed(self.answers))
            self._wake()

    def end(self, reason: StopReason) -> None:
        """End the sequences that have not ended."""
        for number, answer in enumerate(self.answers):
            if not answer.reason:
                self.add(number, [], reason)

    def fail(self, error: BaseException) -> bool:
        """Make the prompt fail with `error`. Return False if it has already ended."""
        with self.changed:
            if self.done:
                return False
            self.failure = error
            self._wake()
            return True

    def notify_failure(self) -> None:
        """Send the listener an `Event` without tokens or a stop reason, which says that the prompt has failed."""
        self._notify(Event(0, [], "", StopReason.NONE))

    def _notify(self, event: Event) -> None:
        """Call the listener. If it raises an exception, the prompt fails, and the listener is not called again."""
        listener = self._listener
        if listener is None:
            return
        try:
            listener(event)
        except BaseException as error:  # even SystemExit must not end the engine
            self._listener = None
            self.fail(error)

    def _wake(self) -> None:
        self.changed.notify_all()
        for loop, event in self.waiters:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so nobody is waiting
                loop.call_soon_threadsafe(event.set)


class Handle:
    """A prompt that was submitted to an engine.

    Iterate over the handle, with `for` or `async for`, to get all events as they occur, or call `result` to wait for
    the end. Several threads can iterate and wait at the same time.
    """

    def __init__(self, results: PromptResults, tokenizer: Tokenizer | None, cancel: Callable[[], object], home: Home):
        self._results, self._tokenizer, self._cancel, self._home = results, tokenizer, cancel, home

    @property
    def failure(self) -> BaseException | None:
        """The exception that `result` raises, or None."""
        return self._results.failure

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens copied from the prefix store; 0 until the first event."""
        return self._results.cached_tokens

    @property
    def index(self) -> int:
        """The prompt's index."""
        return self._results.prompt.index

    @property
    def sequences(self) -> int:
        """The number of sequences to generate for the prompt."""
        return len(self._results.answers)

    @property
    def done(self) -> bool:
        """True if all sequences have ended, or cannot continue."""
        return self._results.done

    def cancel(self) -> None:
        """Cancel the prompt. Its sequences end with `StopReason.CANCELLED` and keep the tokens generated so far."""
        self._home.check()
        self._cancel()

    def result(self, timeout: float | None = None) -> list[Completion]:
        """Wait until all sequences have ended, and return them in order.

        Args:
            timeout: the number of seconds to wait; None for no limit.

        Raises:
            TimeoutError: the sequences did not end in time; they keep running.
            EngineClosed: the engine was closed before the sequences ended; or this is a fork of its process.
            InputError: this method was called in `on_event` before the sequences ended, which would cause a deadlock.
        """
        if not self._wait("result", lambda: self.done, timeout):
            raise TimeoutError(f"prompt {self.index} was not answered in {timeout} seconds: it continues")
        self._raise_failure()
        return self.completions()

    def _wait(self, name: str, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `ready` returns True, and return True; return False after `timeout` seconds."""
        if ready():
            return True
        self._check_wait(name)
        with self._results.changed:
            return self._results.changed.wait_for(ready, timeout)

    def _check_wait(self, name: str) -> None:
        """Raise an error if the current thread cannot wait for the prompt; `name` is the name of the call."""
        self._home.check_wait(name)
        if threading.get_ident() in self._results.listening:  # a thread that cancels the prompt also calls the listener
            raise waits(name)

    def completions(self) -> list[Completion]:
        """Return the sequences in their current state. Sequences that have not ended have `StopReason.NONE`."""
        return [self.completion(number) for number in range(self.sequences)]

    def completion(self, number: int) -> Completion:
        """Return one of the sequences in its current state."""
        answer, prompt = self._results.answers[number], self._results.prompt
        tokens = list(answer.tokens)
        return Completion(
            index=prompt.index,
            sequence=number,
            ids=prompt.ids.tolist(),
            tokens=tokens,
            text=None if self._tokenizer is None else self._tokenizer.decode(tokens),
            stop_reason=answer.reason,
            logprobs=_logprobs(answer.columns, prompt),
            error=answer.reason.failure,
            versions=tuple(answer.versions),
            cached_tokens=self.cached_tokens,
            metadata=prompt.metadata,
        )

    def __iter__(self) -> Iterator[Event]:
        """Yield events until all sequences have ended. If the prompt fails, raise `failure`.

        In `on_event`, the events so far are yielded, and then an `InputError` is raised, to avoid a deadlock.
        """
        reader, seen, done = EventReader(self._tokenizer), 0, False
        while not done:
            self._wait(_NEXT, lambda seen=seen: len(self._results.events) > seen or self.done)
            done = self.done  # read before the events, because an event comes before the end
            for event in self._results.events[seen:]:
                seen += 1
                yield reader.read(event)
        self._raise_failure()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield the same events as the synchronous iteration."""
        reader, seen, done = EventReader(self._tokenizer), 0, False
        waiter = asyncio.get_running_loop(), asyncio.Event()
        if not self.done:
            self._home.check()
            with self._results.changed:
                self._results.waiters.add(waiter)
        try:
            while not done:
                waiter[1].clear()
                done, before = self.done, seen
                for event in self._results.events[seen:]:
                    seen += 1
                    yield reader.read(event)
                if not done and seen == before:
                    self._check_wait(_NEXT)
                    await waiter[1].wait()
        finally:
            if waiter in self._results.waiters:
                with self._results.changed:
                    self._results.waiters.discard(waiter)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


class EventReader:
    """Decoder that adds the text of new tokens to events."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._streams: dict[int, TextStream] = {}

    def read(self, event: Event) -> Event:
        """Return a copy of an event with its text filled in."""
        text = ""
        if self._tokenizer is not None:
            stream = self._streams.setdefault(event.sequence, TextStream(self._tokenizer))
            text = stream.put(event.tokens) + (stream.end() if event.stop_reason else "")
        return event._replace(text=text)


def _logprobs(parts: list[np.ndarray], prompt: Prompt) -> LogProbs | None:
    """Return the log-probabilities that a prompt requests, from columns of the journal; None if it requests none."""
    if not parts or not prompt.logged:
        return None
    columns, top = np.concatenate(parts), prompt.top_logprobs
    numbers = columns.view(np.float32)
    if not top:
        return LogProbs(numbers[:, 0])  # pyright: ignore[reportArgumentType]
    stored = (columns.shape[1] - 1) // 2
    return LogProbs(numbers[:, 0], numbers[:, 1 + stored :][:, :top], columns[:, 1 : 1 + stored][:, :top])  # pyright: ignore[reportArgumentType]
