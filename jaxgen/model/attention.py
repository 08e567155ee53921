"""Grouped-query attention over a cache of one or several parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxgen.model.linear import precision


def attention(
    q: jax.Array,
    parts: Sequence[tuple[jax.Array, jax.Array]],
    masks: Sequence[jax.Array],
    dropout: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend from `q [B, N, T, H]` to the keys and values of all parts together.

    Args:
        q: rotated queries; head n reads kv head n // (N/K).
        parts: per part of the cache `(k, v)`, each `[P, K, S, H]`. P divides B: row b reads row b // (B/P), so
            rows that share a part read it in one product.
        masks: per part bool[B, T, S], True where the query may see the key.
        dropout: applied to the weights when training.

    Returns:
        The attended values `[B, N, T, H]` in q's dtype, and the weights float32 `[B, N, T, S]`, S over all parts.
        A query that may see nothing, which only padding is, gets the mean of everything rather than NaN.
    """
    batch, heads, steps, size = q.shape
    lowest = jnp.finfo(jnp.float32).min
    scores = [
        jnp.where(mask[:, None, None], _product(q, k, "bkqh,bksh->bkqs"), lowest)
        for (k, _), mask in zip(parts, masks, strict=True)
    ]
    weights = jax.nn.softmax(_join(scores) / math.sqrt(size), axis=-1)
    if dropout is not None:
        weights = dropout(weights)

    out, start = jnp.zeros((), jnp.float32), 0
    for _, v in parts:
        share = weights[..., start : start + v.shape[2]].reshape(batch, heads, steps, -1)
        out = out + _product(share, v, "bkqs,bksh->bkqh")
        start += v.shape[2]
    return out.astype(q.dtype).reshape(batch, heads, steps, size), weights.reshape(batch, heads, steps, -1)


def _join(scores: list[jax.Array]) -> jax.Array:
    return scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1)


def _product(x: jax.Array, part: jax.Array, equation: str) -> jax.Array:
    """Multiply `x [B, N, T, ...]` with a part of P rows and K heads; float32 `[B, K, N/K, T, ...]`.

    The queries of all heads and rows that read one kv head of one prefix row are the rows of one product.
    """
    batch, heads, steps, _ = x.shape
    owners, kv_heads = part.shape[:2]
    shared, groups = batch // owners, heads // kv_heads
    x = x.astype(part.dtype).reshape(owners, shared, kv_heads, groups * steps, -1).swapaxes(1, 2)
    x = x.reshape(owners, kv_heads, shared * groups * steps, -1)
    single = x.shape[2] == 1 and part.dtype != jnp.float32  # one 16-bit row: see linear.py
    if single:
        x = jnp.concatenate([x, jnp.zeros_like(x)], axis=2)
    out = jnp.einsum(equation, x, part, precision=precision(part.dtype), preferred_element_type=jnp.float32)
    out = out[:, :, :1] if single else out
    out = out.reshape(owners, kv_heads, shared, groups * steps, -1).swapaxes(1, 2)
    return out.reshape(batch, kv_heads, groups, steps, -1)
