"""Slots of new tokens, and the tokens that each may attend to.

Both follow from a token's order: its index in its row, padding not counted.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxgen.errors import InputError
from jaxgen.model.cache import EMPTY, KVCache


@flax.struct.dataclass
class Visibility:
    """The keys that each query may see, as one number per token: masks `[B, T, S]` are made block by block.

    A query sees itself and the tokens before it, at most `window` in all.

    Attributes:
        queries: int32[B, T], the order of each query; padding queries have any order.
        keys: per part of the cache int32[B, S], the order of the token in each slot; `EMPTY` for an empty slot or a
            hidden token.
        first: int32[B, T], the order of the first token that a query may see; None for 0.
        window: the maximum number of tokens that a query may see, static; None for all.
        start: the slot in the last part from which the new tokens are stored in all rows, static; None if not known.
            Query i sees none of the slots after `start + i`.
    """

    queries: jax.Array
    keys: tuple[jax.Array, ...]
    first: jax.Array | None = None
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    start: int | None = flax.struct.field(pytree_node=False, default=None)

    def mask(self, part: int) -> jax.Array:
        """bool[B, T, S]: True if the query may see the key of the part."""
        keys = self.keys[part][:, None, :]
        queries = self.queries[:, :, None]
        visible = keys <= queries
        if self.window is not None:
            visible &= queries - keys < self.window
        return visible if self.first is None else visible & (keys >= self.first[:, :, None])

    def span(self, part: int) -> tuple[jax.Array, jax.Array]:
        """The range [begin, end) of slots of a part that any query may see, two int32[]."""
        keys, last = self.keys[part], jnp.max(self.queries, axis=1, keepdims=True)
        first = jnp.zeros_like(last) if self.first is None else jnp.min(self.first, axis=1, keepdims=True)
        if self.window is not None:
            first = jnp.maximum(first, jnp.min(self.queries, axis=1, keepdims=True) - self.window + 1)
        visible = jnp.any((keys <= last) & (keys >= first), axis=0)
        slot = jnp.arange(keys.shape[1], dtype=jnp.int32)
        return jnp.min(jnp.where(visible, slot, keys.shape[1])), jnp.max(jnp.where(visible, slot + 1, 0))

    def of_keys(self, part: int, start: jax.Array | int, size: int) -> Visibility:
        """Return the visibility of one part's slots from `start` on."""
        return dataclasses.replace(self, keys=(lax.dynamic_slice_in_dim(self.keys[part], start, size, axis=1),))

    def of_queries(self, begin: int, end: int, slots: int) -> Visibility:
        """Restrict to queries `begin` to `end - 1`, and the last part to its first `slots` slots."""
        first = None if self.first is None else self.first[:, begin:end]
        keys = (*self.keys[:-1], self.keys[-1][:, :slots])
        return Visibility(self.queries[:, begin:end], keys, first, self.window)

    def of_row(self, row: jax.Array) -> Visibility:
        """Return the visibility within one row."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1, axis=0), self)

    def query_blocks(self, size: int) -> tuple[jax.Array, jax.Array | None]:
        """Cut `queries` and `first` into blocks `[blocks, B, size]`; the last one is padded with its last query."""

        def cut(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), mode="edge")
            return x.reshape(x.shape[0], -1, size).swapaxes(0, 1)

        return cut(self.queries), None if self.first is None else cut(self.first)


def row_order(mask: jax.Array, start: jax.Array) -> jax.Array:
    """int32[B, T]: the order of each token in its row, padding not counted, after `start [B]` tokens."""
    return start[:, None] + jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1


def key_order(order: jax.Array, mask: jax.Array) -> jax.Array:
    """The order of tokens as keys: `EMPTY` for padding, where `mask bool[B, T]` is False."""
    return jnp.where(mask, order, EMPTY)


def hide_keys(key_mask: jax.Array, order: jax.Array) -> jax.Array:
    """Mark keys whose `key_mask` is False as `EMPTY`.

    Args:
        key_mask: bool[B, n], for the first n tokens of each row. Later tokens stay visible.
        order: int32[B, S], the order of the keys.
    """
    index = jnp.clip(order, 0, key_mask.shape[1] - 1)
    visible = jnp.take_along_axis(key_mask, index, axis=1) | (order >= key_mask.shape[1])
    return jnp.where(visible, order, EMPTY)


def first_of_segment(order: jax.Array, segments: jax.Array) -> jax.Array:
    """int32[B, T]: the order of the first token of each token's segment, for `segments int32[B, T]`."""
    begins = jnp.diff(segments, axis=-1, prepend=segments[:, :1]) != 0
    return lax.cummax(jnp.where(begins, order, 0), axis=1)


def allocate_slots(
    cache: KVCache, cache_position: jax.Array | int | None, mask: jax.Array
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """Find the slots of the new tokens `mask bool[B, T]` and update the cache's lengths.

    Returns:
        The cache, the tokens' order int32[B, T] in their rows, their places int32[B, T] in the last part (padding past
        its end), and bool[B], True for the rows that do not fit.
    """
    batch, steps = mask.shape
    if cache.rows != batch:
        raise InputError(f"the cache has {cache.rows} rows, the input has {batch}")
    start = cache.length if cache_position is None else _first_slot(cache_position, batch) - cache.offset
    slots = row_order(mask, start)
    length = start + jnp.sum(mask, axis=-1, dtype=jnp.int32)
    _check_fits(cache, start, length)
    order = slots + cache.prefix_length[:, None]
    # Each dropped token gets its own slot past the end, because the scatter promises unique indices.
    dropped = cache.slots + jnp.arange(steps, dtype=jnp.int32)[None, :]
    slots = jnp.where(mask & (slots < cache.slots), slots, dropped)
    misplaced = (length > cache.slots) | (start < 0) | (start > cache.length)
    cache, places = cache.places(slots)
    return dataclasses.replace(cache, length=length), order, places, misplaced


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
        raise InputError(f"cache_position must be at least {cache.offset}, the cache's first slot after its prefix")
    if bool(jnp.any(start > cache.length)):
        raise InputError(
            f"cache_position leaves a gap: the rows are filled up to {(cache.length + cache.offset).tolist()}"
        )
    if int(jnp.max(length)) > cache.slots:
        raise InputError(
            f"the cache is full: it has {cache.slots} slots and the new tokens end at {int(jnp.max(length))}; "
            "create it with more slots"
        )
