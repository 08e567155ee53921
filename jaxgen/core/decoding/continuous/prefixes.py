"""A prefix store: the keys and values of whole pieces of prompts that the pool has read.

The keys and values of a piece depend only on its tokens and the tokens before it. A stored piece is a block. A prompt
that starts with stored pieces can therefore copy their blocks, which are bit-identical to newly computed keys and
values. The store is a cache with one row per block.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.core.decoding.request import Array
from jaxgen.core.model.cache import KVCache
from jaxgen.shapes import where

NOT_STORED = -1  # stands for "no index in the store"


@flax.struct.dataclass
class StoreIndices:
    """Indices in the store of the first J blocks of n prompts.

    Attributes:
        have: int32[n, J], the indices to copy from; `NOT_STORED` for pieces that the model must read.
        keep: int32[n, J], the indices at which to store pieces once they have been read; `NOT_STORED` for other pieces.
    """

    have: Array
    keep: Array


def copy_from(store: KVCache, cache: KVCache, have: jax.Array) -> KVCache:
    """Copy blocks to an empty cache with R rows. `have int32[R, J]` contains their indices in the store."""
    rows, blocks = have.shape
    known = have != NOT_STORED
    width = blocks * store.slots
    of_slots = jnp.repeat(known, store.slots, axis=1)

    def put(x: jax.Array, stored: jax.Array) -> jax.Array:
        new = jnp.moveaxis(stored[jnp.maximum(have, 0)], 1, 2)  # [R, K, J, C, ...]
        new = new.reshape(rows, x.shape[1], width, *x.shape[3:])
        mask = jnp.broadcast_to(of_slots[:, None, :], new.shape[:3])
        return x.at[:, :, :width].set(where(mask, new, x[:, :, :width]))

    length = jnp.sum(known, axis=1, dtype=jnp.int32) * store.slots
    return dataclasses.replace(cache, layers=jax.tree.map(put, cache.layers, store.layers), length=length)


def copy_to(store: KVCache, cache: KVCache, block: jax.Array, keep: jax.Array) -> KVCache:
    """Copy block `block int32[R]` of each cache row to index `keep int32[R]` of the store. Return the store."""
    # Each block to drop gets a different index past the store's end, because the scatter's indices must be unique.
    store_index = jnp.where(keep != NOT_STORED, keep, store.rows + jnp.arange(cache.rows, dtype=jnp.int32))

    def put(stored: jax.Array, x: jax.Array) -> jax.Array:
        new = jax.vmap(lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, store.slots, axis=1))
        return stored.at[store_index].set(new(x, block * store.slots), mode="drop", unique_indices=True)

    return dataclasses.replace(store, layers=jax.tree.map(put, store.layers, cache.layers))
