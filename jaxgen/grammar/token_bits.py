"""Sets of token classes as bits, and their expansion to the tokens of a vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.control import cond

BITS = 32


def as_words(low: jax.Array, high: jax.Array, included: jax.Array, words: int) -> jax.Array:
    """Return the union of ranges of classes, as uint32[rows, words]; bit b of word w stands for class 32w + b.

    `low` and `high` (int32[rows, n]) are the first and the last class of each range, and `included bool[rows, n]` tells
    which ranges are in the union. The ranges of a row must not overlap.
    """
    begin = BITS * jnp.arange(words)[None, None, :]
    bits = _below(high[:, :, None] + 1 - begin) - _below(low[:, :, None] - begin)
    return jnp.sum(jnp.where(included[:, :, None], bits, jnp.uint32(0)), axis=1, dtype=jnp.uint32)


def contains(words: jax.Array, classes: jax.Array) -> jax.Array:
    """Return bool[rows, V], True for the tokens whose class is in the row's set.

    `classes`, int32[rows, V] or int32[1, V], contains the classes of the tokens, for each row or for all.
    """
    return lax.platform_dependent(words, classes, cpu=look_up, default=select)


def _below(count: jax.Array) -> jax.Array:
    """Return uint32 numbers whose lowest `count` bits are set."""
    bits = (jnp.uint32(1) << jnp.clip(count, 0, BITS - 1).astype(jnp.uint32)) - jnp.uint32(1)
    return jnp.where(count >= BITS, ~jnp.uint32(0), bits)


def look_up(words: jax.Array, classes: jax.Array) -> jax.Array:
    """Return the same as `contains`. On a CPU, a gather is fast, unless it is fused with a reduction of the scores.

    The branch prevents the fusion.
    """

    def inside(words: jax.Array, classes: jax.Array) -> jax.Array:
        if classes.shape[0] == 1:
            word = words.at[:, classes[0] >> 5].get(mode="promise_in_bounds")
        else:
            word = jnp.take_along_axis(words, classes >> 5, axis=1, mode="promise_in_bounds")
        return _bit(word, classes)

    def none(words: jax.Array, classes: jax.Array) -> jax.Array:
        return jnp.zeros((words.shape[0], classes.shape[1]), bool)

    return cond(jnp.any(words != 0), inside, none, words, classes)


def select(words: jax.Array, classes: jax.Array) -> jax.Array:
    """Return the same as `contains`, without a gather, which is slow on a TPU."""
    word = [words[:, i : i + 1] for i in range(words.shape[1])]
    bit = BITS
    while len(word) > 1:
        is_odd = (classes & bit) != 0
        word = [jnp.where(is_odd, odd, even) for even, odd in zip(word[::2], word[1::2], strict=True)]
        bit *= 2
    return _bit(word[0], classes)


def _bit(word: jax.Array, classes: jax.Array) -> jax.Array:
    return (word >> (classes & (BITS - 1)).astype(jnp.uint32)) & jnp.uint32(1) != 0
