"""Decoding in chunks of steps. Between chunks, the host adds and cancels prompts.

By itself, `Continuous` decodes a fixed list of prompts. Here, each chunk starts by applying the `Arrivals` since the
previous chunk, and ends by returning a `Journal` of what happened in it.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.control import while_loop
from jaxgen.core.decoding.continuous.journal import Journal
from jaxgen.core.decoding.continuous.prefixes import StoreIndices
from jaxgen.core.decoding.continuous.queue import NOBODY, Queue
from jaxgen.core.decoding.continuous.slots import Continuous, ContinuousState
from jaxgen.core.decoding.request import Array, Request
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.model.sharding import REPLICATED, constrain


@flax.struct.dataclass
class Arrivals:
    """The changes to apply before a chunk, in arrays of fixed sizes.

    Attributes:
        request: a request with M prompts, in the form that `Request.complete` returns, without random keys.
        number: int32[M], the number that identifies each prompt; `NOBODY` in unused entries.
        first_sequence: int32[M], the index of the first sequence to generate for each prompt.
        sequences: int32[M], the number of sequences to generate for each prompt.
        key_data: uint32[M, ...], the key data of each prompt.
        index: uint32[M], the value to fold into each key.
        own_key: bool[M], True if the prompt's key is used unchanged.
        cancelled: int32[C], the numbers of cancelled prompts, padded with a number that no prompt has.
        prefixes: the store indices of the prompts' first blocks; None without a store.
    """

    request: Request
    number: Array
    first_sequence: Array
    sequences: Array
    key_data: Array
    index: Array
    own_key: Array
    cancelled: Array
    prefixes: StoreIndices | None = None


def open_queue(
    run: Run, arrivals: Arrivals, mode: Continuous, key_impl: str, queue_capacity: int, entries: int, stored: int
):
    """Return the initial state, in which all slots are free and no prompt is waiting.

    Args:
        run: the constants of the run; every option that a prompt may use must be on.
        arrivals: an example with the same shapes as later arrivals; its prompts are ignored.
        mode: the mode.
        key_impl: the implementation of the random keys, as in the `impl` argument of `jax.random.key`.
        queue_capacity: the maximum number of waiting prompts.
        entries: the capacity of the journal, in entries per slot.
        stored: the capacity of the prefix store, in blocks; 0 for no store.
    """
    one = dataclasses.replace(arrivals.request, key=_keys(arrivals, key_impl))
    at = jnp.zeros(queue_capacity, jnp.int32)
    nobody, zero = jnp.full(queue_capacity, NOBODY, jnp.int32), jnp.zeros((), jnp.int32)
    prefixes = jax.tree.map(lambda x: jnp.asarray(x)[at], arrivals.prefixes)
    state = mode.open(run, Queue(one.select(at), nobody, nobody, nobody, zero, zero, prefixes), stored)
    return dataclasses.replace(state, results=Journal.open(state.rows.rows, entries))


def run_chunk(run: Run, state: ContinuousState, arrivals: Arrivals, steps: Array, mode: Continuous, key_impl: str):
    """Apply the arrivals, then take steps: at most `steps int32[]`, fewer if nothing is left or the journal is full.

    The queue must have space for the waiting prompts and the new ones.

    Returns:
        The new state, and an array int32[E + 1, C] for the host to read. The array's first row contains the number of
        journal entries, the number of waiting prompts, and the total number of steps so far. The journal entries follow
        in the other rows.
    """
    state = _cancel(_admit(state, arrivals, key_impl), arrivals.cancelled)
    journal = dataclasses.replace(state.results, count=jnp.zeros((), jnp.int32))
    state = dataclasses.replace(state, results=journal, last=state.steps + steps, finished=jnp.zeros((), bool))

    def goes_on(state: ContinuousState) -> jax.Array:
        return ~state.finished & (state.steps < state.last) & state.results.has_space()

    state = while_loop(goes_on, lambda state: mode.step(run, state), state)
    journal = state.results
    head = jnp.stack([journal.count, state.queue.waiting, state.steps])
    head = jnp.pad(head, (0, journal.entries.shape[1] - head.shape[0]))
    return state, constrain(jnp.concatenate([head[None, :], journal.entries]), run.mesh, REPLICATED)


def run_first_chunk(run: Run, arrivals: Arrivals, steps: Array, mode: Continuous, key_impl: str, **sizes: int):
    """Run a chunk from the initial state; `sizes` are the last three arguments of `open_queue`.

    On a mesh, the initial state is split across the devices in the same way as the returned state. If `open_queue` ran
    as a separate program, every device would store the whole initial state.
    """
    state = open_queue(run, arrivals, mode, key_impl, **sizes)
    # Put the step count on the mesh. Otherwise, `run_chunk` would be compiled twice, first for a step count that is not
    # on the mesh, and then for one that is.
    state = dataclasses.replace(state, steps=constrain(state.steps, run.mesh, REPLICATED))
    return run_chunk(run, state, arrivals, steps, mode, key_impl)


def _keys(arrivals: Arrivals, key_impl: str) -> jax.Array:
    own = jax.random.wrap_key_data(arrivals.key_data, impl=key_impl)
    folded = jax.vmap(jax.random.fold_in)(own, arrivals.index)
    return jnp.where(arrivals.own_key, own, folded)


def _admit(state: ContinuousState, arrivals: Arrivals, key_impl: str) -> ContinuousState:
    """Append the new prompts to the queue."""
    queue, given = state.queue, arrivals.number != NOBODY
    order = jnp.arange(given.size, dtype=jnp.int32)
    # Unused entries get distinct indices past the end, because the scatter requires unique indices.
    queue_index = jnp.where(given, queue.queue_index(queue.waiting + order), queue.capacity + order)
    request = dataclasses.replace(arrivals.request, key=_keys(arrivals, key_impl))

    def put(x: jax.Array, new: jax.Array) -> jax.Array:
        return x.at[queue_index].set(new, mode="drop", unique_indices=True)

    queue = dataclasses.replace(
        queue,
        request=jax.tree.map(put, queue.request, request),
        number=put(queue.number, arrivals.number),
        first_sequence=put(queue.first_sequence, arrivals.first_sequence),
        sequences=put(queue.sequences, arrivals.sequences),
        prefixes=jax.tree.map(put, queue.prefixes, arrivals.prefixes),
        waiting=queue.waiting + jnp.sum(given, dtype=jnp.int32),
    )
    return dataclasses.replace(state, queue=queue)


def _cancel(state: ContinuousState, cancelled: jax.Array) -> ContinuousState:
    """Cancel prompts: skip prompts that are waiting, and end the rows of prompts in the loop."""

    def remaining(number: jax.Array) -> jax.Array:
        hit = jnp.any(number[:, None] == cancelled[None, :], axis=1)
        return jnp.where(hit, NOBODY, number)

    number = remaining(state.sequences.number)
    rows = state.rows.rows.end((number == NOBODY) & state.rows.rows.live, jnp.int32(StopReason.CANCELLED))
    return dataclasses.replace(
        state,
        rows=dataclasses.replace(state.rows, rows=rows),
        sequences=dataclasses.replace(state.sequences, number=number),
        pool=dataclasses.replace(state.pool, number=remaining(state.pool.number)),
        queue=dataclasses.replace(state.queue, number=remaining(state.queue.number)),
    )
