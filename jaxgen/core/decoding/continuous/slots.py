"""Continuous batching: decode many sequences in a few slots. When a sequence ends, the next one takes its slot.

A round reads prompts if a slot is free and no prompt is ready, moves sequences into free slots, and takes steps until a
slot can be filled again. Each part of a round is a separate loop inside the loop over rounds. With a `lax.cond`
instead, XLA may copy the cache in every round.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.control import while_loop
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.kinds import INT32_MAX
from jaxgen.core.decoding.continuous.pool import Pool
from jaxgen.core.decoding.continuous.queue import NOBODY, Queue
from jaxgen.core.decoding.logprobs import LogProbs
from jaxgen.core.decoding.loop import Decoded, Mode, Progress
from jaxgen.core.decoding.needs import Needs
from jaxgen.core.decoding.request import Request
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.model.sharding import rows_on

_STEPS = 4  # maximum number of steps per round, so that a streamer does not have to wait until a row ends


@flax.struct.dataclass
class Sequences:
    """Identities of sequences.

    Attributes:
        number: int32[n], the number that identifies the prompt; `NOBODY` if there is no sequence.
        copy: int32[n], the index of the sequence within the prompt.
    """

    number: jax.Array
    copy: jax.Array


class Results(Protocol):
    """The record of the sequences: `Answers` in `generate`, `Journal` in an engine. By default, nothing is recorded."""

    def has_space(self) -> jax.Array:
        """Return bool[], True if there is space for the results of one more step."""
        return jnp.ones((), bool)

    def follow(self, sequences: Sequences, before: Rows | None, after: Rows) -> Self:
        """Record a step of the rows of `sequences`. `before` is None for rows that are new."""
        return self

    def leave(self, run: Run, sequences: Sequences, rows: Rows) -> Self:
        """Record that `sequences` leave, except those whose number is `NOBODY`. `rows` are their final rows."""
        return self


@flax.struct.dataclass
class Answers(Results):
    """The results of all sequences, in the order of the prompts. Sequences that have not begun have empty results.

    Attributes:
        tokens: int32[rows, N], the generated tokens, followed by pad ids.
        lengths: int32[rows], the number of generated tokens.
        reasons: int32[rows], the `StopReason` of each row.
        logprobs: `[rows, N, ...]`; None unless requested.
    """

    tokens: jax.Array
    lengths: jax.Array
    reasons: jax.Array
    logprobs: LogProbs | None

    @classmethod
    def from_rows(cls, run: Run, rows: Rows) -> Answers:
        """Return the current results of the rows, some of which may not be done."""
        tokens = rows.history.generated(run.capacity, run.pad_id)
        return cls(tokens, rows.history.step, rows.reasons, rows.logprobs)

    @classmethod
    def empty(cls, run: Run, rows: Rows) -> Answers:
        """Return the initial, empty results of all sequences, with log-probabilities if `rows` have them.

        On a mesh, the sequences of prompts that only pad the batch are marked as done from the start.
        """
        count = run.padded_prompts * run.needs.sequences
        padding = jnp.arange(count) >= run.prompts * run.needs.sequences
        return cls(
            tokens=jnp.broadcast_to(run.pad_id, (count, run.capacity)),
            lengths=jnp.zeros(count, jnp.int32),
            reasons=jnp.where(padding, jnp.int32(StopReason.LENGTH), jnp.int32(StopReason.NONE)),
            logprobs=jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), rows.logprobs),
        )

    def leave(self, run: Run, sequences: Sequences, rows: Rows) -> Answers:
        """Store the results of all `sequences` whose number is not `NOBODY`."""
        count = self.lengths.shape[0]
        # Each dropped sequence gets a different index, because the scatter's indices must be unique.
        dropped = count + jnp.arange(rows.count, dtype=jnp.int32)
        result_index = sequences.number * run.needs.sequences + sequences.copy
        result_index = jnp.where(sequences.number == NOBODY, dropped, result_index)

        def write(x: jax.Array, new: jax.Array) -> jax.Array:
            return x.at[result_index].set(new, mode="drop", unique_indices=True)

        return jax.tree.map(write, self, Answers.from_rows(run, rows))


@flax.struct.dataclass
class ContinuousState:
    """State of continuous batching.

    Attributes:
        rows: the state of the mode, with one row per slot. Slots whose row is done are free.
        sequences: the latest sequence in each slot.
        pool: the prompts that are being read, or have been read and are waiting for a slot.
        results: the `Results` of the sequences.
        queue: the waiting prompts.
        steps: int32[], the number of steps so far.
        last: int32[], the value of `steps` at which the host reads the results.
        finished: bool[], True when all sequences are done.
    """

    rows: Any
    sequences: Sequences
    pool: Pool
    results: Any
    queue: Queue
    steps: jax.Array
    last: jax.Array
    finished: jax.Array

    @property
    def free(self) -> jax.Array:
        """bool[S], True for slots whose row is done."""
        return self.rows.rows.history.done


@dataclasses.dataclass(frozen=True)
class Continuous(Mode):
    """Wrapper that lets rows join and leave while a mode runs. The mode must have `refills` set."""

    mode: Any
    slots: int
    watched = 1

    def needs(self, cfg: GenerationConfig) -> Needs:
        """Return the requirements of the wrapped mode."""
        return self.mode.needs(cfg)

    def start(self, run: Run, request: Request) -> ContinuousState:
        """Return the state in which all slots are free, and all prompts are waiting and numbered from 0."""
        prompts = run.prompts
        number = jnp.arange(prompts, dtype=jnp.int32)
        sequences = jnp.full(prompts, run.needs.sequences, jnp.int32)
        zero = jnp.zeros((), jnp.int32)
        queue = Queue(request.complete(), number, jnp.zeros_like(number), sequences, zero, jnp.int32(prompts))
        state = self.open(run, queue)
        return dataclasses.replace(state, results=Answers.empty(run, state.pool.rows))

    def open(self, run: Run, queue: Queue, stored: int = 0) -> ContinuousState:
        """Return a state with no results, all slots free, and a prefix store with space for `stored` blocks."""
        slots = rows_on(run.mesh, self.slots)
        pool = Pool.open(run, queue, slots, stored)
        nobody = jnp.full(slots, NOBODY, jnp.int32)
        return ContinuousState(
            rows=self.mode.empty(run, pool.rows, pool.cache, slots),
            sequences=Sequences(nobody, nobody),
            pool=pool,
            results=None,
            queue=queue,
            steps=jnp.zeros((), jnp.int32),
            last=jnp.int32(INT32_MAX),
            finished=jnp.zeros((), bool),
        )

    def step(self, run: Run, state: ContinuousState) -> ContinuousState:
        """Run one round."""
        return self._advance(run, self._fill(run, self._read(run, state)))

    def _read(self, run: Run, state: ContinuousState) -> ContinuousState:
        """If a slot is free and no prompt is ready, fill the pool, and read one piece of each prompt in the pool."""
        pool, queue = state.pool, state.queue
        wanted = jnp.any(state.free) & ~jnp.any(pool.ready())

        def can_load(carry: tuple[Pool, Queue]) -> jax.Array:
            return wanted & carry[0].can_load(carry[1])

        def read(carry: tuple[jax.Array, Pool]) -> tuple[jax.Array, Pool]:
            return jnp.zeros((), bool), carry[1].read_piece(run)

        pool, queue = while_loop(can_load, lambda carry: carry[0].load(run, carry[1]), (pool, queue))
        pool = while_loop(lambda carry: carry[0], read, (wanted & jnp.any(pool.unread()), pool))[1]
        return dataclasses.replace(state, pool=pool, queue=queue)

    def _fill(self, run: Run, state: ContinuousState) -> ContinuousState:
        """Move sequences into slots while a slot is free and a prompt is ready."""

        def can_enter(state: ContinuousState) -> jax.Array:
            return jnp.any(state.free) & jnp.any(state.pool.ready()) & state.results.has_space()

        def enter(state: ContinuousState) -> ContinuousState:
            slot, pool_index = (jnp.argmax(x)[None].astype(jnp.int32) for x in (state.free, state.pool.ready()))
            old = jax.tree.map(lambda x: x[slot], state.sequences)
            new = Sequences(state.pool.number[pool_index], state.pool.next[pool_index])
            pool, rows, read = state.pool.take(run, pool_index)
            entered = self.mode.enter(run, rows, read)
            results = state.results.leave(run, old, state.rows.rows.take(slot))
            return dataclasses.replace(
                state,
                rows=self.mode.insert(run, state.rows, entered, slot),
                sequences=jax.tree.map(lambda x, new: x.at[slot].set(new), state.sequences, new),
                pool=pool,
                results=results.follow(new, None, entered.rows),
            )

        with jax.named_scope("enter"):
            return while_loop(can_enter, enter, state)

    def _advance(self, run: Run, state: ContinuousState) -> ContinuousState:
        """Take one or more steps, until a slot can be filled. Rows therefore advance between any two pieces."""
        someone_waits = jnp.any(state.pool.number != NOBODY) | (state.queue.waiting > 0)

        def goes_on(carry: tuple[jax.Array, Any, Any]) -> jax.Array:
            step, rows, results = carry
            can_be_filled = (step > 0) & someone_waits & jnp.any(rows.rows.history.done)
            in_time = (step < _STEPS) & (state.steps + step < state.last)
            return ~rows.finished & ~can_be_filled & in_time & results.has_space()

        def step(carry: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, Any, Any]:
            step, rows, results = carry
            after = self.mode.step(run, rows)
            return step + 1, after, results.follow(state.sequences, rows.rows, after.rows)

        with jax.named_scope("decode"):
            carry = jnp.zeros((), jnp.int32), state.rows, state.results
            steps, rows, results = while_loop(goes_on, step, carry)
        finished = rows.finished & ~someone_waits
        return dataclasses.replace(state, rows=rows, results=results, steps=state.steps + steps, finished=finished)

    def finish(self, run: Run, state: ContinuousState) -> Decoded:
        """Return the results without a cache, because the keys and values of most sequences have been overwritten."""
        answers = _all_answers(run, state)
        return Decoded(answers.tokens, answers.lengths, answers.reasons, None, None, answers.logprobs)

    def progress(self, run: Run, state: ContinuousState) -> Progress:
        """Return the tokens so far."""
        answers = _all_answers(run, state)
        done = answers.reasons != StopReason.NONE
        longest = jnp.max(answers.lengths)
        steps = jnp.min(jnp.where(done, longest, answers.lengths))
        return Progress(answers.tokens, answers.lengths, done, steps, state.finished)


def _all_answers(run: Run, state: ContinuousState) -> Answers:
    """Return the results of all sequences, including the sequences in the slots."""
    return state.results.leave(run, state.sequences, state.rows.rows)
