"""Run eager calls, either as one compiled program or in chunks that the host can watch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.decoding import loop
from jaxgen.core.decoding.loop import Decoded, Mode
from jaxgen.core.decoding.request import Request
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.request.prepare import Prepared
from jaxgen.memory import NotEnoughMemory
from jaxgen.programs import Program, program

T = TypeVar("T")


class Streamer(Protocol):
    """The interface of a `streamer`, as in transformers' `BaseStreamer`."""

    def put(self, value: np.ndarray) -> None:
        """Receive the prompts, int32[B, P], in the first call, and each row's next token, int32[rows], afterwards."""

    def end(self) -> None:
        """Finish the stream."""


class RowStreamer(Protocol):
    """The interface of a `streamer` that receives tokens row by row."""

    def put_row(self, row: int, ids: np.ndarray, ended: bool) -> None:
        """Receive the next tokens of a row, int32[n]. If `ended`, they are the row's last tokens, and n may be 0."""

    def end(self) -> None:
        """Finish the stream. If `max_time` stops a row, `put_row` does not report the row as ended."""


def has_methods(streamer: Any, *names: str) -> bool:
    """Return True if a streamer has these methods, or delegates them to another object."""
    return all(callable(getattr(streamer, name, None)) for name in names)


run_whole = Program(loop.decode, "generate", static_argnames=["mode"])
prefill_only = Program(loop.continuation_of, "prefill")


@program("generate (prefill)", static_argnames=["mode"])
def _start(run: Run, request: Request, *, mode: Mode):
    state = mode.start(run, request)
    return state, loop.progress(run, state, mode)


@program("generate (steps)", static_argnames=["mode"], donate_argnames=["state"])
def _advance(run: Run, state, *, mode: Mode):
    state = loop.advance(run, state, mode, mode.watched)
    return state, loop.progress(run, state, mode)


@program("generate (end)", static_argnames=["mode"])
def _finish(run: Run, state, out_of_time: jax.Array, *, mode: Mode) -> Decoded:
    decoded = mode.finish(run, state)
    if run.mesh is not None:
        decoded = loop.without_padding(run, decoded)
    late = out_of_time & (decoded.reasons == StopReason.NONE)
    return dataclasses.replace(decoded, reasons=jnp.where(late, jnp.int32(StopReason.TIME), decoded.reasons))


def run_fitting(
    prepare: Callable[..., Prepared], run: Callable[[Prepared], T], streamer: Streamer | RowStreamer | None = None
) -> T:
    """Run a call with the number of prompts rounded up or, if this does not fit into memory, with that number itself.

    `prepare(more_prompts=...)` prepares the call. A `Streamer` first gets the prompts, only once.
    """
    prepared = prepare(more_prompts=True)
    if streamer is not None and not has_methods(streamer, "put_row"):
        cast(Streamer, streamer).put(prepared.ids)
    try:
        return run(prepared)
    except NotEnoughMemory:
        if not prepared.has_more_prompts:
            raise
    return run(prepare(more_prompts=False))


def compile_for(prepared: Prepared, watched: bool) -> None:
    """Generate one token, to compile the programs that `run_whole` or `run_watched` needs for similar calls."""
    run, mode = prepared.run, prepared.mode
    request = dataclasses.replace(prepared.request, budget=np.ones_like(prepared.request.budget))
    if watched:
        state = _start(run, request, mode=mode)[0]
        state = _advance(run, state, mode=mode)[0]
        decoded = _finish(run, state, np.bool_(False), mode=mode)
    else:
        decoded = run_whole(run, request, mode=mode)
    jax.block_until_ready(decoded)


def run_watched(prepared: Prepared, streamer: Streamer | RowStreamer | None, deadline: float | None) -> Decoded:
    """Run a call in chunks, dispatching each chunk before the tokens of the previous chunk are read.

    The first chunk is read before the second is dispatched, so that the first tokens do not wait for a compilation.
    Unless `deadline` is None, the run stops at this time, as measured by `time.monotonic`.
    """
    run, mode, before, by_row = prepared.run, prepared.mode, None, has_methods(streamer, "put_row")

    def show(progress: loop.Progress) -> bool:
        """Pass new tokens to the streamer. Return True if all rows have ended."""
        nonlocal before
        seen = jax.device_get(progress)
        if prepared.has_more_prompts:
            rows = prepared.cut((seen.tokens, seen.lengths, seen.done))
            seen = loop.Progress(*rows, seen.steps, seen.finished)
        if streamer is not None:
            _stream(streamer, by_row, before, seen)
        before = seen
        return bool(seen.finished)

    state, progress = _start(run, prepared.request, mode=mode)
    finished, late = show(progress), False
    while not (finished or late):
        late = deadline is not None and time.monotonic() > deadline
        previous = progress
        if not late:
            state, progress = _advance(run, state, mode=mode)
        finished = show(previous)
    return _finish(run, state, np.bool_(late and not finished), mode=mode)


def _stream(streamer: Any, by_row: bool, before: Any, now: Any) -> None:
    """Stream everything new since `before`: the tokens of each row, or the steps that all rows have completed.

    `now` is a `Progress` with arrays on the host. `before` is the previous `Progress`, or None if `now` is the first.
    """
    if not by_row:
        for column in range(0 if before is None else int(before.steps), int(now.steps)):
            streamer.put(now.tokens[:, column])
        return
    begin = np.zeros_like(now.lengths) if before is None else before.lengths
    just_ended = now.done if before is None else now.done & ~before.done
    for row in np.flatnonzero((now.lengths > begin) | just_ended):
        streamer.put_row(int(row), now.tokens[row, begin[row] : now.lengths[row]], bool(now.done[row]))
