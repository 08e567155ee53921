"""Prompts on their way into the loop: a few at a time are read, in chunks, and then wait until a slot is free."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.decoding import guidance
from jaxgen.decoding.forward import Forward, ModelInputs, begin_hook, in_one_pass, inputs_of
from jaxgen.decoding.loop import Prefilled, open_prompts
from jaxgen.decoding.queue import NOBODY, Queue
from jaxgen.decoding.rows import Rows
from jaxgen.decoding.run import Request, Run
from jaxgen.model.cache import KVCache
from jaxgen.model.causal_lm import ModelOutput
from jaxgen.model.sharding import rows_on

_TOKENS = 512  # that a pass reads, of all prompts together
_CHUNK = 128  # the most that it reads of one prompt, unless `prefill_chunk_size` is set


@flax.struct.dataclass
class Pool:
    """R places for prompts. A pass reads the next chunk of each prompt that has not been read to its end.

    The number of places and the size of a chunk depend on the prompts' width, `slots`, `prefill_chunk_size` and the
    mesh, so that how a prompt is read does not depend on the other prompts.

    Attributes:
        number: int32[R], the number of the prompt in each place, `NOBODY` in an empty one.
        sequences: int32[R], how many sequences it gets.
        taken: int32[R], how many of them have been taken.
        read: int32[streams * R], how many of its tokens the model has read.
        inputs: all of its tokens.
        rows: one row per place, with nothing generated.
        logits: float32[streams * R, 1, V], for the last token of each prompt that has been read.
        states: the layers' hidden states at that token; see `Forward`.
        cache: the prompts' tokens that have been read.
    """

    number: jax.Array
    sequences: jax.Array
    taken: jax.Array
    read: jax.Array
    inputs: ModelInputs
    rows: Rows
    logits: jax.Array
    states: tuple[jax.Array, ...]
    cache: KVCache

    @classmethod
    def open(cls, run: Run, queue: Queue, most: int) -> Pool:
        """Return an empty pool for the prompts of a queue, with `most` places or fewer."""
        chunk = _chunk(run, _width(queue.request))
        places = rows_on(run.mesh, min(most, max(_TOKENS // chunk, 1)))
        nobody = jnp.full(places, NOBODY, jnp.int32)
        inputs, rows, cache = _open(run, queue.request, jnp.zeros(places, jnp.int32))
        layers = run.model.num_hidden_layers + 1 if run.reads_states else 0
        states = jnp.zeros((cache.rows, 1, run.model.hidden_size), run.model.dtype)
        return cls(
            number=nobody,
            sequences=nobody,
            taken=nobody,
            read=jnp.zeros(cache.rows, jnp.int32),
            inputs=inputs,
            rows=rows,
            logits=jnp.zeros((cache.rows, 1, run.model.vocab_size), jnp.float32),
            states=(states,) * layers,
            cache=cache,
        )

    def ready(self, run: Run) -> jax.Array:
        """bool[R], the places whose prompt has been read to its end."""
        ended = jnp.stack(guidance.split(run.cfg, self.read >= self.inputs.length))
        return (self.number != NOBODY) & jnp.all(ended, axis=0)

    def has_unread(self, run: Run) -> jax.Array:
        """bool[], True if a prompt has not been read to its end."""
        return jnp.any((self.number != NOBODY) & ~self.ready(run))

    def can_load(self, queue: Queue) -> jax.Array:
        """bool[], True if a place is empty and a prompt waits."""
        return jnp.any(self.number == NOBODY) & (queue.waiting > 0)

    def load(self, run: Run, queue: Queue) -> tuple[Pool, Queue]:
        """Put the next prompts of the queue into the empty places."""
        empty = self.number == NOBODY
        order = jnp.cumsum(empty, dtype=jnp.int32) - 1
        given, place = empty & (order < queue.waiting), queue.place(order)
        number = jnp.where(given, queue.number[place], NOBODY)
        loaded = number != NOBODY
        inputs, rows, cache = _open(run, queue.request, place)
        of_streams = guidance.stack(run.cfg, loaded)

        def where(loaded: jax.Array, new, old):
            return jax.tree.map(lambda new, old: jnp.where(_as_mask(loaded, new), new, old), new, old)

        def own(cache: KVCache) -> KVCache:
            return dataclasses.replace(cache, prefix=None)

        pool = dataclasses.replace(
            self,
            number=jnp.where(loaded, number, self.number),
            sequences=jnp.where(loaded, queue.sequences[place], self.sequences),
            taken=jnp.where(loaded, 0, self.taken),
            read=jnp.where(of_streams, 0, self.read),
            inputs=where(of_streams, inputs, self.inputs),
            rows=where(loaded, rows, self.rows),
            # The previous prompt's keys and values go: a NaN among them would spread, though nothing attends to it.
            cache=dataclasses.replace(where(of_streams, own(cache), own(self.cache)), prefix=self.cache.prefix),
        )
        return pool, queue.drop(jnp.sum(given, dtype=jnp.int32))

    def read_chunk(self, run: Run) -> Pool:
        """Read the next chunk of each prompt."""
        length = self.inputs.length
        chunk = _chunk(run, self.inputs.mask.shape[1])
        remaining = length - self.read
        last = jnp.clip(remaining - 1, 0, chunk - 1)
        with jax.named_scope("prefill"):
            read = in_one_pass(run, self.inputs.columns(self.read, chunk), self.cache, last)
        ends = (remaining > 0) & (remaining <= chunk)
        logits, states = jax.tree.map(
            lambda new, old: jnp.where(_as_mask(ends, new), new, old),
            (read.logits, read.states),
            (self.logits, self.states),
        )
        return dataclasses.replace(
            self, read=jnp.minimum(self.read + chunk, length), logits=logits, states=states, cache=read.cache
        )

    def take(self, run: Run, place: jax.Array) -> tuple[Pool, Prefilled]:
        """Take the next sequence of the prompt in `place int32[1]`; the last sequence leaves the place empty."""
        rows = self.rows.take(place).sequence(self.taken[place])
        at = guidance.rows_of_cache(run.cfg, place, self.number.shape[0])
        logits, states = jax.tree.map(lambda x: x[at], (self.logits, self.states))
        prefilled = Prefilled(rows, Forward(logits, states, ModelOutput(logits), self.cache.select(at)))
        taken = self.taken.at[place].add(1)
        number = jnp.where(taken < self.sequences, self.number, NOBODY)
        return dataclasses.replace(self, taken=taken, number=number), prefilled


def _open(run: Run, request: Request, prompts: jax.Array) -> tuple[ModelInputs, Rows, KVCache]:
    """Return the inputs of some prompts of a request, int32[R], their rows, and the cache before they are read."""
    run = run.of_prompts(prompts.shape[0])
    tokens, cache, rows = open_prompts(run, request.select(prompts))
    if run.extensions.hook is not None:
        rows = begin_hook(run, rows)
    inputs, rows = inputs_of(run, rows, tokens, cache, following=run.capacity)
    return inputs, rows, cache


def _width(request: Request) -> int:
    negative = 0 if request.negative_ids is None else request.negative_ids.shape[1]
    return max(request.ids.shape[1] + (request.cache is not None), negative)


def _chunk(run: Run, width: int) -> int:
    return min(run.cfg.prefill_chunk_size or _CHUNK, width)


def _as_mask(chosen: jax.Array, x: jax.Array) -> jax.Array:
    return chosen.reshape(-1, *[1] * (x.ndim - 1))
