"""Order statistics of scores, computed without sorting.

Sorting a vocabulary costs as much as a small model's forward pass, but the warpers need only a threshold. This
threshold is usually one of the highest scores, which can be found in a few passes over the scores. Otherwise, bisection
finds the exact threshold. Floats are mapped to integers that sort in the same order, and each pass over the scores
determines one bit of the threshold, starting with the highest bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxgen.control import fori_loop
from jaxgen.core.model import sharding

CANDIDATES = 128  # the maximum number of top scores that a GPU can find without sorting
ON_A_MESH = 64  # candidates exchanged per device


def candidates(scores: jax.Array, mesh: Mesh | None) -> tuple[jax.Array, jax.Array]:
    """Return each row's highest scores in descending order, and their ids, both `[rows, C]`; C <= `CANDIDATES`.

    The ids of equal scores may be in any order.
    """
    count = CANDIDATES if mesh is None else ON_A_MESH
    return sharding.sharded_top_k(scores[:, None], min(count, scores.shape[-1]), mesh, stable=False)


def ordered_bits(x: jax.Array) -> jax.Array:
    """Map float32 to uint32, preserving the order; −0.0 and 0.0 compare equal."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # not x + 0.0, which XLA would optimize away
    sign = jnp.uint32(1) << 31
    return jnp.where(bits >= sign, ~bits, bits | sign)


def from_ordered_bits(bits: jax.Array) -> jax.Array:
    """Return the float32 that `ordered_bits` maps to these bits."""
    sign = jnp.uint32(1) << 31
    return lax.bitcast_convert_type(jnp.where(bits >= sign, bits ^ sign, ~bits), jnp.float32)


def bisect(condition: Callable[[jax.Array], jax.Array], rows: int, bits: int = 32, reads: Any = ()) -> jax.Array:
    """Return, for each row, the largest `bits`-bit number that satisfies a condition, as uint32[rows].

    `condition` maps uint32[rows] to bool[rows]. A condition that is true for a number must be true for all smaller
    numbers. If the condition is false for all numbers, the result is 0. `reads` is as in `fori_loop`.
    """

    def set_bit(step: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1) << jnp.uint32(bits - 1 - step))
        return jnp.where(condition(candidate), candidate, found)

    return fori_loop(0, bits, set_bit, jnp.zeros(rows, jnp.uint32), reads)


def kth_largest(bits: jax.Array, k: jax.Array) -> jax.Array:
    """Return the k-th largest entry of each row of `bits uint32[rows, V]`, for `k int32[rows]` from 1 to V."""

    def enough(value: jax.Array) -> jax.Array:
        return jnp.sum(bits >= value[:, None], axis=-1, dtype=jnp.int32) >= k

    return bisect(enough, bits.shape[0], reads=(bits, k))


def last_of(chosen: jax.Array, count: jax.Array) -> jax.Array:
    """In each row of `chosen bool[rows, V]`, keep only the last True entries; `count int32[rows]` says how many."""
    rows, size = chosen.shape
    index = jnp.arange(size, dtype=jnp.uint32)[None, :]

    def enough(first: jax.Array) -> jax.Array:
        return jnp.sum(chosen & (index >= first[:, None]), axis=-1, dtype=jnp.int32) >= count

    return chosen & (index >= bisect(enough, rows, bits=size.bit_length(), reads=(chosen, count))[:, None])
