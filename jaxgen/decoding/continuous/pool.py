"""Prompts on their way into the loop. The prompts in the pool are read in chunks, and then wait for a free slot."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.control import while_loop
from jaxgen.decoding.continuous.prefixes import NOWHERE, copy_from, copy_to
from jaxgen.decoding.continuous.queue import NOBODY, Queue
from jaxgen.decoding.forward import Forward, ModelInputs, in_one_pass, inputs_of
from jaxgen.decoding.loop import Prefilled, open_prompts
from jaxgen.decoding.request import Request
from jaxgen.decoding.rows import Rows
from jaxgen.decoding.run import Run
from jaxgen.model.cache import KVCache
from jaxgen.model.causal_lm import ModelOutput
from jaxgen.model.sharding import rows_on
from jaxgen.shapes import where

_TOKENS = 512  # maximum number of tokens to read between steps, over all prompts
_CHUNK = 128  # maximum number of tokens to read between steps for one prompt; `prefill_chunk_size` overrides it


@flax.struct.dataclass
class Pool:
    """R places for prompts. Each pass reads the next chunk of one prompt or, on a mesh, of all prompts.

    The number of places and the size of a chunk depend only on the prompts' width, `slots`, `prefill_chunk_size` and
    the mesh. Other prompts therefore do not affect how a prompt is read.

    Attributes:
        number: int32[R], the number that identifies the prompt in each place; `NOBODY` in an empty place.
        next: int32[R], the index of the next sequence of each prompt to enter the loop.
        end: int32[R], the index after the last one to enter.
        read: int32[streams * R], the number of tokens of each prompt that have been read or copied from the store.
        inputs: all tokens of the prompts.
        rows: one row per place, before any token is generated.
        logits: float32[streams * R, 1, V], at the last token of each prompt that has been fully read.
        states: the hidden states of all layers at the same token; see `Forward`.
        cache: a cache of the tokens read so far.
        keep: int32[R, J], `Places.keep` of each prompt; None without a store.
        store: the prefix store, with a row for each chunk; or None.
    """

    number: jax.Array
    next: jax.Array
    end: jax.Array
    read: jax.Array
    inputs: ModelInputs
    rows: Rows
    logits: jax.Array
    states: tuple[jax.Array, ...]
    cache: KVCache
    keep: jax.Array | None = None
    store: KVCache | None = None

    @classmethod
    def open(cls, run: Run, queue: Queue, most: int, stored: int = 0) -> Pool:
        """Return an empty pool for the prompts of a queue, with at most `most` places, rounded up for a mesh.

        If `stored` is not 0, the pool has a prefix store with space for `stored` chunks.
        """
        request = queue.request
        negative = 0 if request.negative_ids is None else request.negative_ids.shape[1]
        chunk = chunk_size(run.cfg, max(request.ids.shape[1] + (request.cache is not None), negative))
        places = rows_on(run.mesh, min(most, max(_TOKENS // chunk, 1)))
        nobody = jnp.full(places, NOBODY, jnp.int32)
        inputs, rows, cache = _open(run, request, jnp.zeros(places, jnp.int32))
        layers = run.model.num_hidden_layers + 1 if run.reads_states else 0
        states = jnp.zeros((cache.rows, 1, run.model.hidden_size), run.model.dtype)
        pool = cls(
            number=nobody,
            next=nobody,
            end=nobody,
            read=jnp.zeros(cache.rows, jnp.int32),
            inputs=inputs,
            rows=rows,
            logits=jnp.zeros((cache.rows, 1, run.model.vocab_size), jnp.float32),
            states=(states,) * layers,
            cache=cache,
        )
        if not stored or queue.prefixes is None:
            return pool
        keep = jnp.full((places, queue.prefixes.keep.shape[1]), NOWHERE, jnp.int32)
        store = KVCache.create(run.model, stored, chunk, run.cfg.cache_dtype)
        return dataclasses.replace(pool, keep=keep, store=store)

    def ready(self) -> jax.Array:
        """Return bool[R], True for places with a prompt that has been fully read in all streams."""
        ended = (self.read >= self.inputs.length).reshape(self.cache.streams, -1)
        return (self.number != NOBODY) & jnp.all(ended, axis=0)

    def unread(self) -> jax.Array:
        """Return bool[R], True for places with a prompt that has not been fully read."""
        return (self.number != NOBODY) & ~self.ready()

    def can_load(self, queue: Queue) -> jax.Array:
        """Return bool[], True if a place is empty and a prompt is waiting."""
        return jnp.any(self.number == NOBODY) & (queue.waiting > 0)

    def load(self, run: Run, queue: Queue) -> tuple[Pool, Queue]:
        """Move the next prompts from the queue to the empty places."""
        empty = self.number == NOBODY
        order = jnp.cumsum(empty, dtype=jnp.int32) - 1
        given, place = empty & (order < queue.waiting), queue.place(order)
        number = jnp.where(given, queue.number[place], NOBODY)
        loaded = number != NOBODY
        inputs, rows, cache = _open(run, queue.request, place)
        before, keep = cache.length, self.keep  # the cache may already contain a shared prefix
        if self.store is not None and queue.prefixes is not None:
            cache = copy_from(self.store, cache, queue.prefixes.have[place])
            keep = where(loaded, queue.prefixes.keep[place], keep)
        of_streams = cache.in_all_streams(loaded)
        new, old = (dataclasses.replace(kv, prefix=None) for kv in (cache, self.cache))
        pool = dataclasses.replace(
            self,
            number=jnp.where(loaded, number, self.number),
            next=jnp.where(loaded, queue.first_sequence[place], self.next),
            end=jnp.where(loaded, (queue.first_sequence + queue.sequences)[place], self.end),
            read=jnp.where(of_streams, cache.length - before, self.read),
            inputs=where(of_streams, inputs, self.inputs),
            rows=where(loaded, rows, self.rows),
            # Erase the previous prompt's keys and values, because a NaN would spread even from masked slots.
            cache=dataclasses.replace(where(of_streams, new, old), prefix=self.cache.prefix),
            keep=keep,
        )
        count = jnp.sum(given, dtype=jnp.int32)
        return pool, dataclasses.replace(queue, first=queue.place(count), waiting=queue.waiting - count)

    def read_chunk(self, run: Run) -> Pool:
        """Read the next chunk of each prompt that has not been fully read.

        Each pass reads a chunk of one prompt, so that no computation is wasted on the pool's empty places. On a mesh,
        the pool's places are divided among devices, so a single pass reads a chunk of every prompt.
        """
        if run.mesh is not None:
            return self._read_places(run, jnp.arange(self.number.shape[0], dtype=jnp.int32))

        def read_next(carry: tuple[Pool, jax.Array]) -> tuple[Pool, jax.Array]:
            pool, unread = carry
            place = jnp.argmax(unread)[None].astype(jnp.int32)
            return pool._read_places(run, place), unread.at[place].set(False)

        return while_loop(lambda carry: jnp.any(carry[1]), read_next, (self, self.unread()))[0]

    def _read_places(self, run: Run, places: jax.Array) -> Pool:
        """Read the next chunk of the prompts at the indices `places int32[n]`."""
        at = self.cache.row_indices(places)
        inputs, read = jax.tree.map(lambda x: x[at], (self.inputs, self.read))
        chunk = chunk_size(run.cfg, inputs.mask.shape[1])
        remaining = inputs.length - read
        last = jnp.clip(remaining - 1, 0, chunk - 1)
        is_all = run.mesh is not None
        before = self.cache if is_all else self.cache.select(places)
        with jax.named_scope("prefill"):
            after = in_one_pass(run, inputs.columns(read, chunk), before, last)
        ends = (remaining > 0) & (remaining <= chunk)
        old = jax.tree.map(lambda x: x[at], (self.logits, self.states))
        results = jax.tree.map(
            lambda x, new: x.at[at].set(new), (self.logits, self.states), where(ends, (after.logits, after.states), old)
        )
        store = self.store
        if store is not None and self.keep is not None:
            number = jnp.minimum(read // chunk, self.keep.shape[1] - 1)
            keep = jnp.take_along_axis(self.keep[places], number[:, None], axis=1)[:, 0]
            is_kept = (remaining > 0) & (number == read // chunk) & (self.number[places] != NOBODY)
            store = copy_to(store, after.cache, number, jnp.where(is_kept, keep, NOWHERE))
        return dataclasses.replace(
            self,
            read=self.read.at[at].set(jnp.minimum(read + chunk, inputs.length)),
            logits=results[0],
            states=results[1],
            cache=after.cache if is_all else self.cache.insert(after.cache, places),
            store=store,
        )

    def take(self, run: Run, place: jax.Array) -> tuple[Pool, Prefilled]:
        """Take the next sequence of the prompt at `place int32[1]`. After the last one, the prompt leaves the pool."""
        rows = self.rows.take(place).sequence(self.next[place])
        at = self.cache.row_indices(place)
        logits, states = jax.tree.map(lambda x: x[at], (self.logits, self.states))
        prefilled = Prefilled(rows, Forward(logits, states, ModelOutput(logits), self.cache.select(place)))
        following = self.next.at[place].add(1)
        number = jnp.where(following < self.end, self.number, NOBODY)
        return dataclasses.replace(self, next=following, number=number), prefilled


def _open(run: Run, request: Request, prompts: jax.Array) -> tuple[ModelInputs, Rows, KVCache]:
    """Return the model's inputs, the rows and the initial cache for the prompts at the indices `prompts int32[R]`."""
    run = run.of_prompts(prompts.shape[0])
    tokens, cache, rows = open_prompts(run, request.select(prompts))
    inputs, rows = inputs_of(run, rows, tokens, cache, following=run.capacity)
    return inputs, rows, cache


def chunk_size(cfg: GenerationConfig, width: int) -> int:
    """Return the number of tokens in a chunk, for prompts padded to `width` tokens."""
    return min(cfg.prefill_chunk_size or _CHUNK, width)
