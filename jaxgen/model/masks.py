"""Which tokens see which. All of it follows from one number per token: its order in its row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxgen.model.cache import EMPTY


def row_order(mask: jax.Array, start: jax.Array) -> jax.Array:
    """int32[B, T]: the order of each token in its row, padding not counted, when `start [B]` tokens precede."""
    return start[:, None] + jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1


def key_order(order: jax.Array, mask: jax.Array) -> jax.Array:
    """The order of tokens as keys: padding, where `mask bool[B, T]` is False, is never seen."""
    return jnp.where(mask, order, EMPTY)


def hidden_by(key_mask: jax.Array, order: jax.Array) -> jax.Array:
    """Make those keys unseen, of `order int32[B, S]`, that `key_mask bool[B, n]` has False for, by their order.

    Tokens of order n and later are seen.
    """
    index = jnp.clip(order, 0, key_mask.shape[1] - 1)
    seen = jnp.take_along_axis(key_mask, index, axis=1) | (order >= key_mask.shape[1])
    return jnp.where(seen, order, EMPTY)


def first_of_segment(order: jax.Array, segments: jax.Array) -> jax.Array:
    """int32[B, T]: the order of the first token of each token's segment, for `segments int32[B, T]`."""
    begins = jnp.diff(segments, axis=-1, prepend=segments[:, :1]) != 0
    return jax.lax.cummax(jnp.where(begins, order, 0), axis=1)


def visible(queries: jax.Array, keys: jax.Array, window: int | None, first: jax.Array | None = None) -> jax.Array:
    """bool[B, T, S]: may the query of order `queries [B, T]` see the key of order `keys [B, S]`?

    A query sees itself and what came before it, at most `window` tokens in all, and none before `first [B, T]`.
    """
    keys = keys[:, None, :]
    queries = queries[:, :, None]
    seen = keys <= queries
    if window is not None:
        seen &= queries - keys < window
    return seen if first is None else seen & (keys >= first[:, :, None])
