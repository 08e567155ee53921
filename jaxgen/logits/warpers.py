"""Logits warpers: they shape the distribution that sampling draws from. Pure functions, scores float32[rows, V] in and
out, −inf for a token that cannot be drawn. A knob is a scalar or float32[rows, 1], one value per row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.logits.processors import BANNED
from jaxgen.logits.select import kth_largest, largest, last_of, ordered_bits


def temperature(scores: jax.Array, value: jax.Array) -> jax.Array:
    """Return `scores / value`: `TemperatureLogitsWarper`."""
    return scores / value


def top_k(scores: jax.Array, k: jax.Array, min_tokens_to_keep: int = 1) -> jax.Array:
    """Keep the k highest scores and all that equal the k-th: `TopKLogitsWarper`. k = 0 keeps all."""
    vocab = scores.shape[-1]
    k = jnp.where(k == 0, vocab, jnp.clip(k, min(min_tokens_to_keep, vocab), vocab))
    bits = ordered_bits(scores)
    kept = bits >= kth_largest(bits, jnp.broadcast_to(k.reshape(-1), scores.shape[:1]))[:, None]
    return jnp.where(kept, scores, BANNED)


def top_p(scores: jax.Array, p: jax.Array, min_tokens_to_keep: int = 1) -> jax.Array:
    """Keep the smallest set of most probable tokens whose mass reaches p: `TopPLogitsWarper` (arXiv 1904.09751).

    A token is kept where the mass of all tokens above it is below p, at least `min_tokens_to_keep`. Of equal
    scores at the boundary those of the highest index are kept, as a stable ascending sort has it. p = 1 keeps all.
    """
    rows = scores.shape[0]
    p = jnp.broadcast_to(jnp.reshape(p, (-1,)), (rows,))
    bits = ordered_bits(scores)
    probs = jax.nn.softmax(scores, axis=-1)

    def mass(chosen: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(chosen, probs, 0.0), axis=-1)

    threshold = largest(lambda value: mass(bits >= value[:, None]) >= p, rows)
    least = kth_largest(bits, jnp.full(rows, min_tokens_to_keep))
    threshold = jnp.minimum(threshold, least)

    above, equal = bits > threshold[:, None], bits == threshold[:, None]
    # How many of the tokens at the threshold: as many as start below p, and what min_tokens_to_keep lacks.
    each = jnp.max(jnp.where(equal, probs, 0.0), axis=-1)
    wanted = jnp.ceil((p - mass(above)) / jnp.where(each > 0, each, 1.0))
    lacking = min_tokens_to_keep - jnp.sum(above, axis=-1, dtype=jnp.int32)
    ties = jnp.sum(equal, axis=-1, dtype=jnp.int32)
    count = jnp.clip(jnp.maximum(wanted, lacking.astype(jnp.float32)), 1, ties.astype(jnp.float32)).astype(jnp.int32)
    equal = lax.cond(jnp.any(count < ties), lambda: last_of(equal, count), lambda: equal)
    return jnp.where(above | equal | (p >= 1.0)[:, None], scores, BANNED)


def min_p(scores: jax.Array, p: jax.Array, min_tokens_to_keep: int = 1) -> jax.Array:
    """Keep the tokens at least p times as probable as the most probable one: `MinPLogitsWarper`."""
    probs = jax.nn.softmax(scores, axis=-1)
    kept = probs >= p * jnp.max(probs, axis=-1, keepdims=True)
    if min_tokens_to_keep > 1:
        rows = jnp.arange(scores.shape[0])[:, None]
        kept = kept.at[rows, lax.top_k(scores, min_tokens_to_keep)[1]].set(True)
    return jnp.where(kept, scores, BANNED)
