"""Decode modes that exist only to test the loop's contract with its modes."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.decoding.loop import Decoded
from jaxgen.core.decoding.sample import Sample, SampleState


class Shuffle(Sample):
    """A mode that reorders each prompt's sequences after every step. Some are lost, and others are duplicated.

    After step s, sequence r of a prompt becomes sequence `parents[s % len(parents)][r]`.
    """

    def __init__(self, parents: list[list[int]]):
        self.parents = np.asarray(parents, np.int32)

    def step(self, run, state):
        step = jnp.max(state.rows.history.step)
        state = super().step(run, state)
        copies = run.cfg.num_return_sequences
        first = jnp.arange(0, state.rows.count, copies, dtype=jnp.int32)[:, None]
        parents = jnp.asarray(self.parents)[step % len(self.parents)][None, :]
        rows = (first + parents).reshape(-1)
        return SampleState(state.rows.select(rows), state.cache.select(rows))


@flax.struct.dataclass
class RefillState:
    """State of `Refill`: the slots that decode, and a pool with the rows of all prompts."""

    slots: SampleState
    pool: SampleState
    prompt_of: jax.Array  # int32[slots]
    following: jax.Array  # int32[], the next waiting prompt

    @property
    def finished(self):
        return jnp.all(self.pool.rows.history.done)


class Refill(Sample):
    """A mode that decodes many prompts in a few slots. When a row ends, the next prompt takes its slot."""

    def __init__(self, slots: int):
        self.slots = slots

    def begin(self, run, rows, read):
        rows, cache, read = rows.fork(1), read.cache, read.fork(1)
        rows = self.extend(run, rows, read, 0, rows.live)
        pool = SampleState(rows, cache.flatten(cache.slots + run.capacity))
        first = jnp.arange(self.slots, dtype=jnp.int32)
        return RefillState(self._take(pool, first), pool, first, jnp.int32(self.slots))

    def _take(self, state: SampleState, rows: jax.Array) -> SampleState:
        return SampleState(jax.tree.map(lambda x: x[rows], state.rows), state.cache.select(rows))

    def step(self, run, state):
        slots = super().step(run, state.slots)
        prompts, done = state.pool.rows.count, slots.rows.history.done
        pool = self.insert(run, state.pool, slots, jnp.where(done, state.prompt_of, prompts))
        following = state.following + jnp.cumsum(done, dtype=jnp.int32) - 1
        filled = done & (following < prompts)
        source = self._take(pool, jnp.minimum(following, prompts - 1))
        number = jnp.arange(self.slots, dtype=jnp.int32)
        slots = self.insert(run, slots, source, jnp.where(filled, number, self.slots))
        prompt_of = jnp.where(filled, following, state.prompt_of)
        return RefillState(slots, pool, prompt_of, state.following + jnp.sum(filled, dtype=jnp.int32))

    def finish(self, run, state):
        return Decoded.from_rows(run, state.pool.rows, state.pool.cache)

    def progress(self, run, state):
        return super().progress(run, state.pool)
