"""Order statistics of scores without sorting them.

A full sort of a vocabulary costs as much as a small model's forward pass. What the warpers need of it is one value, a
threshold, and that is found exactly by bisection: floats are mapped to integers of the same order and the threshold's
bits are settled one after the other, from the highest, each by one pass over the scores.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def ordered_bits(x: jax.Array) -> jax.Array:
    """Map float32 to uint32 so that the order is the same; −0.0 and 0.0 become one."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # XLA drops an addition of 0.0
    sign = jnp.uint32(1) << 31
    return jnp.where(bits >= sign, ~bits, bits | sign)


def largest(holds: Callable[[jax.Array], jax.Array], rows: int, bits: int = 32) -> jax.Array:
    """Return per row the largest number of that many bits for which `holds` does, uint32[rows].

    `holds` maps uint32[rows] to bool[rows]. If it holds for a number it must hold for all smaller ones; where it
    holds for none the result is 0.
    """

    def settle(step: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1) << jnp.uint32(bits - 1 - step))
        return jnp.where(holds(candidate), candidate, found)

    return lax.fori_loop(0, bits, settle, jnp.zeros(rows, jnp.uint32))


def kth_largest(bits: jax.Array, k: jax.Array) -> jax.Array:
    """Return per row the k-th largest of `bits uint32[rows, V]`, k from 1 to V, int32[rows]."""
    return largest(lambda value: jnp.sum(bits >= value[:, None], axis=-1, dtype=jnp.int32) >= k, bits.shape[0])


def last_of(chosen: jax.Array, count: jax.Array) -> jax.Array:
    """Keep of `chosen bool[rows, V]` the `count int32[rows]` entries of the highest index."""
    rows, size = chosen.shape
    index = jnp.arange(size, dtype=jnp.uint32)[None, :]

    def enough(first: jax.Array) -> jax.Array:
        return jnp.sum(chosen & (index >= first[:, None]), axis=-1, dtype=jnp.int32) >= count

    return chosen & (index >= largest(enough, rows, bits=size.bit_length())[:, None])
