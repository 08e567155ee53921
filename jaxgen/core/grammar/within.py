"""Expansion of ranges of token classes to the tokens of a vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.control import fori_loop

_AT_A_TIME = 8  # ranges in one pass over the vocabulary


def within(classes: jax.Array, low: jax.Array, high: jax.Array, count: jax.Array) -> jax.Array:
    """Return bool[rows, V], True for the tokens whose class is in one of the row's ranges.

    Comparisons are fast on all platforms, whereas a gather per token is slow on a CPU and on a TPU. There is one pass
    for every eight ranges of the row that has the most, and at least one pass, which is not in the loop.

    Args:
        classes: uint16[rows, V] or uint16[1, V], the classes of the tokens, for each row or for all.
        low, high: int32[rows, n], the first and the last class of each range; empty if `low` is larger.
        count: int32[rows], the number of ranges of each row.
    """
    n = low.shape[1]
    exists = jnp.arange(n)[None, :] < count[:, None]
    padding = [(0, 0), (0, -n % _AT_A_TIME)]
    low = jnp.pad(jnp.where(exists, low, 1).astype(classes.dtype), padding, constant_values=1)
    high = jnp.pad(jnp.where(exists, high, 0).astype(classes.dtype), padding)

    def add(number: int | jax.Array, found: bool | jax.Array) -> jax.Array:
        first, last = (lax.dynamic_slice_in_dim(x, number * _AT_A_TIME, _AT_A_TIME, axis=1) for x in (low, high))
        for i in range(_AT_A_TIME):
            found |= (classes >= first[:, i : i + 1]) & (classes <= last[:, i : i + 1])
        return jnp.asarray(found)

    passes = (jnp.max(count, initial=0) + _AT_A_TIME - 1) // _AT_A_TIME
    return fori_loop(1, passes, add, add(0, False), (classes, low, high))
