"""The driver that runs a mode in chunks: what a streamer receives and when, and how runs end. No model is used."""

import dataclasses
import time
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.core.decoding.loop import Decoded, Mode, Progress
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.request.driver import compile_for, has_methods, prefill_only, run_fitting, run_watched, run_whole
from tests.support.compilations import compilations
from tests.support.prepared_calls import prepared
from tests.support.streamers import Collector, RowCollector

CAPACITY = 10


@flax.struct.dataclass
class Ticks:
    """State of `Clock`: the number of tokens per row so far, and each row's budget, which limits this number."""

    step: jax.Array
    budget: jax.Array

    @property
    def finished(self):
        return jnp.all(self.step >= self.budget)


class Clock(Mode):
    """A mode whose row r counts from 10 * r + 1. The prompt yields the first token, and each step yields two more."""

    watched = 2

    def start(self, run, request):
        return Ticks(jnp.int32(1), request.budget)

    def begin(self, run, rows, read):
        raise AssertionError("it reads no prompts")

    def step(self, run, state):
        return dataclasses.replace(state, step=state.step + 2)

    def finish(self, run, state):
        now = self.progress(run, state)
        reasons = jnp.where(now.done, jnp.int32(StopReason.LENGTH), StopReason.NONE)
        return Decoded(now.tokens, now.lengths, reasons, None, None)

    def progress(self, run, state):
        column = jnp.arange(CAPACITY)[None, :]
        lengths = jnp.minimum(state.step, state.budget)
        tokens = 10 * jnp.arange(2)[:, None] + column + 1
        tokens = jnp.where(column < lengths[:, None], tokens, 0)
        done = state.step >= state.budget
        return Progress(tokens, lengths, done, jnp.max(lengths), state.finished)


CLOCK = Clock()
ROWS = [[1, 2, 3], [11, 12, 13, 14, 15, 16, 17]]


def call(budget=(3, 7)):
    given = prepared([[8, 9], [7]])
    request = dataclasses.replace(given.request, budget=np.asarray(budget, np.int32))
    return dataclasses.replace(given, mode=CLOCK, request=request)


def test_streamer_gets_prompts_then_each_step_once():
    streamer = Collector()
    run = partial(run_watched, streamer=streamer, deadline=None)
    decoded = run_fitting(lambda more_prompts: call(), run, streamer)
    assert streamer.prompts.tolist() == [[8, 9], [0, 7]]
    assert streamer.tokens.tolist() == [[*ROWS[0], 0, 0, 0, 0], ROWS[1]]
    assert decoded.lengths.tolist() == [3, 7]
    assert decoded.reasons.tolist() == [StopReason.LENGTH] * 2


def test_row_streamer_gets_parts_and_one_end_per_row():
    streamer = RowCollector()
    run_watched(call(), streamer, None)
    assert [streamer.rows[row] for row in range(2)] == ROWS
    assert streamer.calls == {0: 2, 1: 3}  # the first token, then the tokens of up to two steps at a time
    assert streamer.over == [0, 1]


def test_row_may_end_without_another_token():
    class Late(Clock):
        def progress(self, run, state):
            now = super().progress(run, state)
            return dataclasses.replace(now, done=state.step >= jnp.maximum(state.budget, 5))

    calls = []

    class Rows:
        def put_row(self, row, ids, ended):
            calls.append((row, ids.tolist(), ended))

    run_watched(dataclasses.replace(call((1, 7)), mode=Late()), Rows(), None)
    assert [call for call in calls if call[0] == 0] == [(0, [1], False), (0, [], True)]
    assert [call for call in calls if call[0] == 1] == [
        (1, [11], False),
        (1, [12, 13, 14, 15], False),
        (1, [16, 17], True),
    ]


class Order:
    """A streamer that records when it gets tokens and when chunks are dispatched."""

    def __init__(self, monkeypatch):
        from jaxgen.core.request import driver

        self.seen, advance = [], driver._advance

        def noted(*arguments, **keywords):
            self.seen.append("chunk")
            return advance(*arguments, **keywords)

        monkeypatch.setattr(driver, "_advance", noted)

    def put_row(self, row, ids, ended):
        if row == 1:
            self.seen.append(len(ids))


def test_next_chunk_is_dispatched_before_the_last_is_read(monkeypatch):
    streamer = Order(monkeypatch)
    run_watched(call(), streamer, None)
    assert streamer.seen == [1, "chunk", "chunk", 4, "chunk", 2]


def test_deadline_ends_unfinished_rows():
    streamer = RowCollector()
    decoded = run_watched(call((1, 7)), streamer, time.monotonic() - 1)
    assert decoded.lengths.tolist() == [1, 1]
    assert decoded.reasons.tolist() == [StopReason.LENGTH, StopReason.TIME]
    assert streamer.rows == {0: [1], 1: [11]}
    assert streamer.over == [0]


def test_future_deadline_ends_no_rows():
    decoded = run_watched(call(), None, time.monotonic() + 600)
    assert decoded.reasons.tolist() == [StopReason.LENGTH] * 2


def test_run_that_ends_after_prefill_takes_no_steps(monkeypatch):
    streamer = Order(monkeypatch)
    decoded = run_watched(call((1, 1)), streamer, time.monotonic() - 1)
    assert streamer.seen == [1]
    assert decoded.reasons.tolist() == [StopReason.LENGTH] * 2


@pytest.mark.parametrize("watched", [True, False])
def test_compile_for_compiles_all_programs(watched):
    class Other(Clock):
        """A new class, for which nothing has been compiled yet."""

    given = dataclasses.replace(call(), mode=Other())
    compile_for(given, watched)
    with compilations() as compiled:
        decoded = (
            run_watched(given, Collector(), None) if watched else run_whole(given.run, given.request, mode=given.mode)
        )
        jax.block_until_ready(decoded)
    assert compiled == [0]
    assert decoded.lengths.tolist() == [3, 7]


def test_prefill_only_reads_the_prompts():
    given = prepared([[8, 9], [7]])
    continuation = prefill_only(given.run, given.request)
    assert continuation.count.tolist() == continuation.kv.total_length.tolist() == [2, 1]


def test_has_methods_accepts_delegated_methods():
    class Proxy:
        def __getattr__(self, name):
            return getattr(Collector(), name)

    assert has_methods(Proxy(), "put", "end")
    assert not has_methods(Proxy(), "put_row", "end")
    assert not has_methods(None, "put_row")
