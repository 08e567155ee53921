"""Where new tokens go in a cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxgen.errors import InputError
from jaxgen.model.cache import KVCache
from jaxgen.model.masks import row_order


def place(cache: KVCache, cache_position: jax.Array | int | None, mask: jax.Array):
    """Find the slots of the new tokens and update the cache's lengths.

    Returns the cache, the tokens' order int32[B, T] in their rows, their slots int32[B, T] in the last part
    (padding past its end), and bool[B], the rows that do not fit.
    """
    batch, steps = mask.shape
    if cache.rows != batch:
        raise InputError(f"the cache has {cache.rows} rows, the input has {batch}")
    start = cache.length if cache_position is None else _first_slot(cache_position, batch) - cache.offset
    slots = row_order(mask, start)
    length = start + jnp.sum(mask, axis=-1, dtype=jnp.int32)
    _check_fits(cache, start, length)
    order = slots + cache.prefix_length[:, None]
    # Each dropped token has a slot of its own past the end: a scatter's indices are promised to be unique.
    dropped = cache.slots + jnp.arange(steps, dtype=jnp.int32)[None, :]
    slots = jnp.where(mask & (slots < cache.slots), slots, dropped)
    misplaced = (length > cache.slots) | (start < 0) | (start > cache.length)
    return dataclasses.replace(cache, length=length), order, slots, misplaced


def _first_slot(cache_position: jax.Array | int, batch: int) -> jax.Array:
    position = jnp.asarray(cache_position)
    if not jnp.issubdtype(position.dtype, jnp.integer) or position.shape not in ((), (batch,)):
        raise InputError(
            f"cache_position must be the slot of the first new token, one integer or one per row, [{batch}], "
            f"got {position.dtype}{list(position.shape)}"
        )
    return jnp.broadcast_to(position.astype(jnp.int32), (batch,))


def _check_fits(cache: KVCache, start: jax.Array, length: jax.Array) -> None:
    if isinstance(length, Tracer) or isinstance(start, Tracer):
        return
    if int(jnp.min(start)) < 0:
        raise InputError(
            f"cache_position must be at least {cache.offset}, the cache's first slot outside of its prefix"
        )
    if bool(jnp.any(start > cache.length)):
        raise InputError(
            f"cache_position leaves a gap: the rows are filled up to {(cache.length + cache.offset).tolist()}"
        )
    if int(jnp.max(length)) > cache.slots:
        raise InputError(
            f"the cache is full: it has {cache.slots} slots and the new tokens end at {int(jnp.max(length))}; "
            "create it with more slots"
        )
