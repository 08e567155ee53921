"""Random keys of rows. With the same key, a row draws the same numbers in any batch.

`draw` in sample.py folds the row's step into the key. The step is the number of tokens that the row has generated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.errors import check_whole

_LOWER = 2**32 - 1
_REPEATS = {"rbg": 2, "unsafe_rbg": 2}  # how often the key's data repeats the seed, by implementation


def seed_words(seed: int) -> np.ndarray:
    """Return the data of `jax.random.key(seed, impl="threefry2x32")`, uint32[2]: the two halves of the 64-bit seed.

    jax itself reads more than the lower half only if `jax_enable_x64` is set. Here, a seed means the same everywhere.
    Raise an error if `seed` is not from -2**63 to 2**64 - 1. Like jax, take a negative seed as `2**64 + seed`.
    """
    seed = check_whole("seed", seed, -(2**63), 2**64 - 1)
    return np.array([seed >> 32 & _LOWER, seed & _LOWER], np.uint32)


def seed_key(seed: int, impl: str = "threefry2x32") -> jax.Array:
    """Return `jax.random.key(seed, impl=impl)` for all 64 bits of a seed. jax itself would compile two programs."""
    words: Any = np.tile(seed_words(seed), _REPEATS.get(impl, 1))
    return jax.random.wrap_key_data(words, impl=impl)


def prompt_keys(key: jax.Array, prompts: int) -> jax.Array:
    """Return one key per prompt: `key` itself if its shape is `[prompts]`, otherwise `fold_in(key, b)` for prompt b."""
    return key if key.ndim else folded(key, jnp.arange(prompts))


def folded(key: jax.Array, indices: jax.Array) -> jax.Array:
    """Return `fold_in(key, index)` for each index."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, indices)


def sequence_keys(keys: jax.Array, copies: int) -> jax.Array:
    """Return one key per sequence, `key[rows * copies]`: `fold_in(row_key, r)` for sequence r of each row."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return fold(keys, jnp.arange(copies)).reshape(keys.shape[0] * copies)
