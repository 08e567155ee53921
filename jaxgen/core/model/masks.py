"""Placement of new tokens: their positions, their cache slots, and the tokens to which they may attend.

Positions, slots and visible tokens are computed from a token's index in its row, which does not count padding.
"""

from __future__ import annotations

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxgen.core.model.cache import EMPTY, KVCache
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.context import NO_CONTEXT, Context
from jaxgen.core.model.rope import rope_angles
from jaxgen.errors import InputError
from jaxgen.shapes import repeat_rows


@flax.struct.dataclass
class Visibility:
    """Visibility of keys to queries, stored as one index per token. Masks `[B, T, S]` are built block by block.

    A query sees itself and the tokens before it, at most `window` tokens in total. The scores of visible keys are
    scaled, and possibly capped.

    Attributes:
        queries: int32[B, T], the index of each query in its row; arbitrary for padding.
        keys: for each part of the cache, int32[B, S], the index of the token in each slot; `EMPTY` for an empty slot or
            a hidden token.
        first: int32[B, T], the index of the first token that each query may see; None means 0.
        window: the maximum number of tokens that a query may see; None for no limit; static.
        scale: the factor of the scores; None means that they are divided by the square root of H; static.
        softcap: if not None, scores s become softcap * tanh(s / softcap); static.
        start: the slot in the last part at which the new tokens of all rows begin; None if unknown; static. Query i
            does not see the slots after `start + i`.
    """

    queries: jax.Array
    keys: tuple[jax.Array, ...]
    first: jax.Array | None = None
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    scale: float | None = flax.struct.field(pytree_node=False, default=None)
    softcap: float | None = flax.struct.field(pytree_node=False, default=None)
    start: int | None = flax.struct.field(pytree_node=False, default=None)

    def mask(self, part: int) -> jax.Array:
        """Return bool[B, T, S], True where a query may see the key in a slot of this part."""
        keys = self.keys[part][:, None, :]
        queries = self.queries[:, :, None]
        visible = keys <= queries
        if self.window is not None:
            visible &= queries - keys < self.window
        return visible if self.first is None else visible & (keys >= self.first[:, :, None])

    def scores(self, products: jax.Array, width: int) -> jax.Array:
        """Return the scores that belong to products of queries and keys with heads of size `width`."""
        scores = products / math.sqrt(width) if self.scale is None else products * self.scale
        return scores if self.softcap is None else jnp.tanh(scores / self.softcap) * self.softcap

    def span(self, part: int) -> tuple[jax.Array, jax.Array]:
        """Return the range [begin, end) of a part's slots that at least one query may see, as two int32[]."""
        keys, last = self.keys[part], jnp.max(self.queries, axis=1, keepdims=True)
        first = jnp.zeros_like(last) if self.first is None else jnp.min(self.first, axis=1, keepdims=True)
        if self.window is not None:
            first = jnp.maximum(first, jnp.min(self.queries, axis=1, keepdims=True) - self.window + 1)
        visible = jnp.any((keys <= last) & (keys >= first), axis=0)
        slot = jnp.arange(keys.shape[1], dtype=jnp.int32)
        return jnp.min(jnp.where(visible, slot, keys.shape[1])), jnp.max(jnp.where(visible, slot + 1, 0))

    def of_keys(self, part: int, start: jax.Array | int, size: int) -> Visibility:
        """Restrict the keys to slots `start` to `start + size - 1` of one part."""
        return dataclasses.replace(self, keys=(lax.dynamic_slice_in_dim(self.keys[part], start, size, axis=1),))

    def of_queries(self, begin: int, end: int, slots: int) -> Visibility:
        """Select queries `begin` to `end - 1`, and restrict the last part's keys to slots 0 to `slots - 1`."""
        first = None if self.first is None else self.first[:, begin:end]
        keys = (*self.keys[:-1], self.keys[-1][:, :slots])
        return dataclasses.replace(self, queries=self.queries[:, begin:end], keys=keys, first=first, start=None)

    def of_row(self, row: jax.Array) -> Visibility:
        """Restrict to one row."""
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1, axis=0), self)

    def query_blocks(self, size: int) -> tuple[jax.Array, jax.Array | None]:
        """Split `queries` and `first` into blocks `[blocks, B, size]`; the last block is padded with its last query."""

        def cut(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), mode="edge")
            # XLA's compiler for TPUs fails if it reshapes the rows of some batches, such as 8 rows of 2,048 tokens.
            return x.T.reshape(-1, size, x.shape[0]).swapaxes(1, 2)

        return cut(self.queries), None if self.first is None else cut(self.first)


def row_order(mask: jax.Array, start: jax.Array) -> jax.Array:
    """Return each token's index in its row, int32[B, T], for rows that already have `start [B]` tokens."""
    return start[:, None] + jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1


def hide_keys(key_mask: jax.Array, order: jax.Array) -> jax.Array:
    """Return `order`, with `EMPTY` for the keys whose `key_mask` is False.

    Args:
        key_mask: bool[B, n], False for hidden tokens among the first n of each row. Later tokens stay visible.
        order: int32[B, S], the index of each key.
    """
    index = jnp.clip(order, 0, key_mask.shape[1] - 1)
    visible = jnp.take_along_axis(key_mask, index, axis=1) | (order >= key_mask.shape[1])
    return jnp.where(visible, order, EMPTY)


def first_of_segment(order: jax.Array, segments: jax.Array) -> jax.Array:
    """Return the index of the first token in each token's segment, int32[B, T], for `segments int32[B, T]`."""
    begins = jnp.diff(segments, axis=-1, prepend=segments[:, :1]) != 0
    return lax.cummax(jnp.where(begins, order, 0), axis=1)


def allocate_slots(
    cache: KVCache, cache_position: jax.Array | int | None, mask: jax.Array
) -> tuple[KVCache, jax.Array, jax.Array, jax.Array]:
    """Assign slots to the new tokens marked in `mask bool[B, T]`, and update the cache's lengths.

    Returns:
        The updated cache, each token's index in its row (int32[B, T]), each token's index in the arrays of the cache's
        last part (int32[B, T]), and bool[B], True for rows whose tokens do not fit. Padding and overflow have indices
        past the end of the arrays.
    """
    batch, steps = mask.shape
    if cache.rows != batch:
        raise InputError(
            f"the cache has {cache.rows} rows, but the input has {batch}: of an output's cache, pass "
            "out.cache.without_padding().kv"
        )
    start = cache.length if cache_position is None else _first_slot(cache_position, batch) - cache.offset
    slots = row_order(mask, start)
    length = start + jnp.sum(mask, axis=-1, dtype=jnp.int32)
    if not isinstance(length, Tracer):
        _check_fits(cache, start, length)
    order = slots + cache.prefix_length[:, None]
    misplaced = (length > cache.slots) | (start < 0) | (start > cache.length)
    # Each dropped token gets its own slot past the end, because the scatter's indices are declared unique.
    dropped = cache.slots + jnp.arange(steps, dtype=jnp.int32)[None, :]
    slots = jnp.where(mask & ~misplaced[:, None], slots, dropped)
    if cache.owners is not None:
        cache, slots = cache.write_slots(slots)
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


@flax.struct.dataclass
class Placement:
    """Placement of the new tokens, the same for all layers.

    Attributes:
        rotations: for each of the model's RoPEs, the cosines and sines of the tokens' rotation angles, `[B, T, R]`.
        slots: int32[B, T], the tokens' slots in the cache's last part, past the end for padding and overflow; None
            without a cache.
        visible: the keys that the tokens may see, before a layer applies its window.
        context: the context of the pass.
        before: for each part of the cache, int32[B], the number of its slots that are filled with earlier tokens; None
            if a row's tokens may be in other slots than the first ones, if some are hidden, or without a cache.
        output_attentions: whether to return the attention weights; static.
    """

    rotations: tuple[tuple[jax.Array, jax.Array], ...]
    slots: jax.Array | None
    visible: Visibility
    context: Context = NO_CONTEXT
    before: tuple[jax.Array, ...] | None = None
    output_attentions: bool = flax.struct.field(pytree_node=False, default=False)


def place(
    cfg: ModelConfig,
    x: jax.Array,
    attention_mask: jax.Array | None,
    cache: KVCache | None,
    cache_position: jax.Array | int | None,
    position_ids: jax.Array | None,
    segment_ids: jax.Array | None,
    key_mask: jax.Array | None,
    context: Context = NO_CONTEXT,
) -> tuple[Placement, KVCache | None, jax.Array | None]:
    """Find the positions, cache slots and visible keys of the new tokens, whose embeddings are `x [B, T, D]`.

    For the other arguments, see `CausalLM.__call__`. Return the tokens' placement, the cache with its new lengths,
    and bool[B], True for rows whose tokens do not fit. Without a cache, the last two results are None.
    """
    batch, steps, _ = x.shape
    mask = _mask(attention_mask, batch, steps)
    first = start = before = None
    if cache is None:
        start = 0
        if cache_position is not None:
            raise InputError("cache_position needs a cache: pass cache too, or leave cache_position out")
        order = row_order(mask, jnp.zeros(batch, jnp.int32))
        slots, overflow, orders = None, None, [jnp.where(mask, order, EMPTY)]
        if segment_ids is not None:
            first = first_of_segment(order, _per_token("segment_ids", segment_ids, batch, steps))
            if cfg.short_length is not None and steps > cfg.short_length:
                raise InputError(
                    f"rows of {steps} tokens contain several texts. longrope has other factors beyond "
                    f"{cfg.short_length} tokens, the same for all texts in a row: use rows of at most that length"
                )
    else:
        if segment_ids is not None:
            raise InputError("segment_ids cannot be combined with a cache: leave one of them out")
        if isinstance(cache_position, int) and cache.owners is None:  # rows that share slots interleave their tokens
            start = max(cache_position - cache.offset, 0)
        cache, order, slots, overflow = allocate_slots(cache, cache_position, mask)
        orders = [repeat_rows(part.token_order(), batch) for part in cache.parts]
        cache.check_model(cfg)
        if context.left_aligned and key_mask is None and all(part.owners is None for part in cache.parts):
            of_new = jnp.sum(mask, axis=-1, dtype=jnp.int32)
            before = (*[repeat_rows(part.length, batch) for part in cache.parts[:-1]], cache.length - of_new)

    if position_ids is not None:
        positions = _per_token("position_ids", position_ids, batch, steps)
    else:
        positions = order if first is None else order - first
    positions, dtype = jnp.maximum(positions, 0), jnp.float32 if cfg.family.rotates_in_float32 else x.dtype
    rotations = tuple([rope_angles(cfg, rope, positions, mask, dtype) for rope in cfg.ropes])
    if key_mask is not None:
        if key_mask.ndim != 2 or key_mask.shape[0] != batch or key_mask.dtype != bool:
            raise InputError(f"key_mask must be bool[{batch}, n], got {key_mask.dtype}{list(key_mask.shape)}")
        orders = [hide_keys(key_mask, keys) for keys in orders]
    visible = Visibility(order, tuple(orders), first, start=start)
    return Placement(rotations, slots, visible, context, before), cache, overflow


def _mask(attention_mask: jax.Array | None, batch: int, steps: int) -> jax.Array:
    if attention_mask is None:
        return jnp.ones((batch, steps), bool)
    attention_mask = jnp.asarray(attention_mask)
    if attention_mask.shape != (batch, steps):
        raise InputError(
            f"attention_mask must have the new tokens' shape, {[batch, steps]}, got {list(attention_mask.shape)}; "
            "the mask must not cover cached tokens"
        )
    return attention_mask.astype(bool)


def _per_token(name: str, values: jax.Array, batch: int, steps: int) -> jax.Array:
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer) or values.shape not in ((batch, steps), (1, steps)):
        raise InputError(
            f"{name} must be integers of the ids' shape, {[batch, steps]}, got {values.dtype}{list(values.shape)}"
        )
    return jnp.broadcast_to(values.astype(jnp.int32), (batch, steps))
