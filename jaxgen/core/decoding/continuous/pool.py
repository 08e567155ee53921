"""Prompts on their way into the loop. The prompts in the pool are read in pieces, and then wait for a free slot."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.control import while_loop
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.continuous.prefixes import NOT_STORED, copy_from, copy_to
from jaxgen.core.decoding.continuous.queue import NOBODY, Queue
from jaxgen.core.decoding.forward import Forward, in_one_pass, inputs_of
from jaxgen.core.decoding.loop import open_prompts
from jaxgen.core.decoding.request import Request, Tokens
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.causal_lm import ModelOutput
from jaxgen.core.model.sharding import rows_on
from jaxgen.shapes import where

_TOKENS = 512  # maximum number of tokens to read between steps, over all prompts
_PIECE = 128  # maximum number of tokens to read between steps for one prompt; `prefill_chunk_size` overrides it


@flax.struct.dataclass
class Pool:
    """Space for R prompts. Each pass reads the next piece of one prompt or, on a mesh, of all prompts.

    The pool's capacity R and the size of a piece depend only on the prompts' width, `slots`, `prefill_chunk_size` and
    the mesh. Other prompts therefore do not affect how a prompt is read.

    Attributes:
        number: int32[R], the number that identifies each prompt; `NOBODY` in empty entries.
        next: int32[R], the index of the next sequence of each prompt to enter the loop.
        end: int32[R], the index after the last one to enter.
        read: int32[streams * R], the number of tokens of each prompt that have been read or copied from the store.
        tokens: all tokens of the prompts.
        rows: one row per prompt, before any token is generated.
        logits: float32[streams * R, 1, V], at the last token of each prompt that has been fully read.
        states: the hidden states of all layers at the same token; see `Forward`.
        cache: a cache of the tokens read so far.
        keep: int32[R, J], `StoreIndices.keep` of each prompt; None without a store.
        store: the prefix store, with a row for each block; or None.
    """

    number: jax.Array
    next: jax.Array
    end: jax.Array
    read: jax.Array
    tokens: Tokens
    rows: Rows
    logits: jax.Array
    states: tuple[jax.Array, ...]
    cache: KVCache
    keep: jax.Array | None = None
    store: KVCache | None = None

    @classmethod
    def open(cls, run: Run, queue: Queue, most: int, stored: int = 0) -> Pool:
        """Return an empty pool for the prompts of a queue. Its capacity is at most `most`, rounded up for a mesh.

        If `stored` is not 0, the pool has a prefix store with space for `stored` blocks.
        """
        request = queue.request
        negative = 0 if request.negative_ids is None else request.negative_ids.shape[1]
        size = piece_size(run.cfg, max(request.ids.shape[1] + (request.cache is not None), negative))
        capacity = rows_on(run.mesh, min(most, max(_TOKENS // size, 1)))
        nobody = jnp.full(capacity, NOBODY, jnp.int32)
        tokens, rows, cache = _open(run, request, jnp.zeros(capacity, jnp.int32))
        layers = run.model.num_hidden_layers + 1 if run.reads_states else 0
        states = jnp.zeros((cache.rows, 1, run.model.hidden_size), run.model.dtype)
        pool = cls(
            number=nobody,
            next=nobody,
            end=nobody,
            read=jnp.zeros(cache.rows, jnp.int32),
            tokens=tokens,
            rows=rows,
            logits=jnp.zeros((cache.rows, 1, run.model.vocab_size), jnp.float32),
            states=(states,) * layers,
            cache=cache,
        )
        if not stored or queue.prefixes is None:
            return pool
        keep = jnp.full((capacity, queue.prefixes.keep.shape[1]), NOT_STORED, jnp.int32)
        store = KVCache.create(run.model, stored, size, run.cfg.cache_dtype)
        return dataclasses.replace(pool, keep=keep, store=store)

    def ready(self) -> jax.Array:
        """Return bool[R], True for prompts that have been fully read in all streams."""
        is_read = (self.read >= self.tokens.length).reshape(self.cache.streams, -1)
        return (self.number != NOBODY) & jnp.all(is_read, axis=0)

    def unread(self) -> jax.Array:
        """Return bool[R], True for prompts that have not been fully read."""
        return (self.number != NOBODY) & ~self.ready()

    def can_load(self, queue: Queue) -> jax.Array:
        """Return bool[], True if an entry is empty and a prompt is waiting."""
        return jnp.any(self.number == NOBODY) & (queue.waiting > 0)

    def load(self, run: Run, queue: Queue) -> tuple[Pool, Queue]:
        """Move the next prompts from the queue to the empty entries."""
        empty = self.number == NOBODY
        order = jnp.cumsum(empty, dtype=jnp.int32) - 1
        given, queue_index = empty & (order < queue.waiting), queue.queue_index(order)
        number = jnp.where(given, queue.number[queue_index], NOBODY)
        loaded = number != NOBODY
        tokens, rows, cache = _open(run, queue.request, queue_index)
        before, keep = cache.length, self.keep  # the cache may already contain a shared prefix
        if self.store is not None and queue.prefixes is not None:
            cache = copy_from(self.store, cache, queue.prefixes.have[queue_index])
            keep = where(loaded, queue.prefixes.keep[queue_index], keep)
        of_streams = cache.in_all_streams(loaded)
        new, old = (dataclasses.replace(kv, prefix=None) for kv in (cache, self.cache))
        pool = dataclasses.replace(
            self,
            number=jnp.where(loaded, number, self.number),
            next=jnp.where(loaded, queue.first_sequence[queue_index], self.next),
            end=jnp.where(loaded, (queue.first_sequence + queue.sequences)[queue_index], self.end),
            read=jnp.where(of_streams, cache.length - before, self.read),
            tokens=where(of_streams, tokens, self.tokens),
            rows=where(loaded, rows, self.rows),
            # Erase the previous prompt's keys and values, because a NaN would spread even from masked slots.
            cache=dataclasses.replace(where(of_streams, new, old), prefix=self.cache.prefix),
            keep=keep,
        )
        count = jnp.sum(given, dtype=jnp.int32)
        return pool, dataclasses.replace(queue, first=queue.queue_index(count), waiting=queue.waiting - count)

    def read_piece(self, run: Run) -> Pool:
        """Read the next piece of each prompt that has not been fully read.

        Each pass reads a piece of one prompt, so that no computation is wasted on the pool's empty entries. On a mesh,
        the pool's entries are divided among devices, so a single pass reads a piece of every prompt.
        """
        if run.mesh is not None:
            return self._read_prompts(run, jnp.arange(self.number.shape[0], dtype=jnp.int32))

        def read_next(carry: tuple[Pool, jax.Array]) -> tuple[Pool, jax.Array]:
            pool, unread = carry
            pool_index = jnp.argmax(unread)[None].astype(jnp.int32)
            return pool._read_prompts(run, pool_index), unread.at[pool_index].set(False)

        return while_loop(lambda carry: jnp.any(carry[1]), read_next, (self, self.unread()))[0]

    def _read_prompts(self, run: Run, pool_index: jax.Array) -> Pool:
        """Read the next piece of the prompts at the indices `pool_index int32[n]`."""
        at = self.cache.row_indices(pool_index)
        tokens, read = jax.tree.map(lambda x: x[at], (self.tokens, self.read))
        size = piece_size(run.cfg, tokens.mask.shape[1])
        remaining = tokens.length - read
        last = jnp.clip(remaining - 1, 0, size - 1)
        is_all = run.mesh is not None
        before = self.cache if is_all else self.cache.select(pool_index)
        with jax.named_scope("prefill"):
            after = in_one_pass(run, tokens.columns(read, size), before, last)
        ends = (remaining > 0) & (remaining <= size)
        old = jax.tree.map(lambda x: x[at], (self.logits, self.states))
        results = jax.tree.map(
            lambda x, new: x.at[at].set(new), (self.logits, self.states), where(ends, (after.logits, after.states), old)
        )
        store = self.store
        if store is not None and self.keep is not None:
            block = jnp.minimum(read // size, self.keep.shape[1] - 1)
            keep = jnp.take_along_axis(self.keep[pool_index], block[:, None], axis=1)[:, 0]
            is_kept = (remaining > 0) & (block == read // size) & (self.number[pool_index] != NOBODY)
            store = copy_to(store, after.cache, block, jnp.where(is_kept, keep, NOT_STORED))
        return dataclasses.replace(
            self,
            read=self.read.at[at].set(jnp.minimum(read + size, tokens.length)),
            logits=results[0],
            states=results[1],
            cache=after.cache if is_all else self.cache.insert(after.cache, pool_index),
            store=store,
        )

    def take(self, run: Run, pool_index: jax.Array) -> tuple[Pool, Rows, Forward]:
        """Take the next sequence of the prompt `pool_index int32[1]`. After its last sequence, it leaves the pool."""
        rows = self.rows.take(pool_index).sequence(self.next[pool_index])
        at = self.cache.row_indices(pool_index)
        logits, states = jax.tree.map(lambda x: x[at], (self.logits, self.states))
        read = Forward(logits, states, ModelOutput(logits), self.cache.select(pool_index))
        following = self.next.at[pool_index].add(1)
        number = jnp.where(following < self.end, self.number, NOBODY)
        return dataclasses.replace(self, next=following, number=number), rows, read


def _open(run: Run, request: Request, prompts: jax.Array) -> tuple[Tokens, Rows, KVCache]:
    """Return the model's tokens, the rows and the initial cache for the prompts at the indices `prompts int32[R]`."""
    run = dataclasses.replace(run, prompts=prompts.shape[0])
    tokens, cache, rows = open_prompts(run, request.select(prompts))
    tokens, rows = inputs_of(run, rows, tokens, cache, following=run.capacity)
    return tokens, rows, cache


def piece_size(cfg: GenerationConfig, width: int) -> int:
    """Return the number of tokens in a piece, for prompts padded to `width` tokens."""
    return min(cfg.prefill_chunk_size or _PIECE, width)
