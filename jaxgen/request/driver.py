"""The eager driver: compiled programs for a whole run, and for a run in chunks while the host watches."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.decoding import loop
from jaxgen.decoding.loop import Decoded, Mode
from jaxgen.decoding.run import Request, Run
from jaxgen.decoding.stopping import StopReason
from jaxgen.request.prepare import Prepared

_CHUNK = 4  # steps per call of the compiled loop while the host watches: with a streamer, or max_time


class Streamer(Protocol):
    """The interface of `streamer`: `BaseStreamer` of transformers."""

    def put(self, value: np.ndarray) -> None:
        """Receive the prompts, int32[B, P], once, and then the next token of each row, int32[rows], step by step."""

    def end(self) -> None:
        """Finish the stream."""


run_whole = jax.jit(loop.decode, static_argnames="mode")
prefill_only = jax.jit(loop.continuation_of)


@functools.partial(jax.jit, static_argnames="mode")
def _start(run: Run, request: Request, mode: Mode):
    state = mode.begin(run, loop.prefill(run, request))
    return state, loop.progress(run, state, mode)


@functools.partial(jax.jit, static_argnames="mode", donate_argnames="state")
def _advance(run: Run, state, mode: Mode):
    state = loop.advance(run, state, mode, _CHUNK)
    return state, loop.progress(run, state, mode)


@functools.partial(jax.jit, static_argnames="mode")
def _finish(run: Run, state, mode: Mode, out_of_time: jax.Array) -> Decoded:
    decoded = loop.finish(run, state, mode)
    late = out_of_time & (decoded.reasons == StopReason.NONE)
    return dataclasses.replace(decoded, reasons=jnp.where(late, jnp.int32(StopReason.TIME), decoded.reasons))


def run_watched(prepared: Prepared, mode: Mode, streamer: Streamer | None, deadline: float | None) -> Decoded:
    """Run in chunks, each dispatched before the tokens of the previous one are read.

    Args:
        prepared: the call.
        mode: the decode mode.
        streamer: receives the prompts and the tokens.
        deadline: when to stop, on `time.monotonic`'s clock, or None.
    """
    run = prepared.run
    if streamer is not None:
        streamer.put(prepared.ids)
    state, progress = _start(run, prepared.request, mode)
    shown, finished, late = 0, False, False
    while not (finished or late):
        late = deadline is not None and time.monotonic() > deadline
        following = progress
        if not late:
            state, following = _advance(run, state, mode)
        seen = jax.device_get(progress)
        steps, finished = int(seen.steps), bool(seen.finished)
        if streamer is not None:
            for column in range(shown, steps):
                streamer.put(seen.tokens[:, column])
        shown, progress = steps, following
    return _finish(run, state, mode, np.bool_(late and not finished))
