"""A prefix store: the keys and values of whole chunks of prompts that the pool has read.

The keys and values of a chunk depend only on its tokens and the tokens before it. A prompt that starts with stored
chunks can therefore copy their keys and values, which are bit-identical to newly computed ones. The store is a cache
with one row per chunk.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.decoding.request import Array
from jaxgen.model.cache import KVCache
from jaxgen.shapes import where

NOWHERE = -1  # stands for "no place in the store"


@flax.struct.dataclass
class Places:
    """Places in the store for the first J chunks of n prompts.

    Attributes:
        have: int32[n, J], the places to copy chunks from; `NOWHERE` for chunks that the model must read.
        keep: int32[n, J], the places to store chunks in once they have been read; `NOWHERE` for other chunks.
    """

    have: Array
    keep: Array


def copy_from(store: KVCache, cache: KVCache, have: jax.Array) -> KVCache:
    """Copy stored chunks to an empty cache with R rows. `have int32[R, J]` contains the chunks' places in the store."""
    rows, chunks = have.shape
    known = have != NOWHERE
    width = chunks * store.slots
    of_slots = jnp.repeat(known, store.slots, axis=1)

    def put(x: jax.Array, stored: jax.Array) -> jax.Array:
        new = jnp.moveaxis(stored[jnp.maximum(have, 0)], 1, 2)  # [R, K, J, C, ...]
        new = new.reshape(rows, x.shape[1], width, *x.shape[3:])
        mask = jnp.broadcast_to(of_slots[:, None, :], new.shape[:3])
        return x.at[:, :, :width].set(where(mask, new, x[:, :, :width]))

    length = jnp.sum(known, axis=1, dtype=jnp.int32) * store.slots
    return dataclasses.replace(cache, layers=jax.tree.map(put, cache.layers, store.layers), length=length)


def copy_to(store: KVCache, cache: KVCache, chunk: jax.Array, keep: jax.Array) -> KVCache:
    """Copy each cache row's chunk at index `chunk int32[R]` to place `keep int32[R]` of the store. Return the store."""
    # Each chunk to drop gets a different index past the store's end, because the scatter's indices must be unique.
    place = jnp.where(keep != NOWHERE, keep, store.rows + jnp.arange(cache.rows, dtype=jnp.int32))

    def put(stored: jax.Array, x: jax.Array) -> jax.Array:
        new = jax.vmap(lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, store.slots, axis=1))
        return stored.at[place].set(new(x, chunk * store.slots), mode="drop", unique_indices=True)

    return dataclasses.replace(store, layers=jax.tree.map(put, store.layers, cache.layers))
