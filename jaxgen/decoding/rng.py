"""Random keys of rows. With the same key, a row draws the same numbers in any batch.

`draw` in sample.py folds the row's step into the key. The step is the number of tokens that the row has generated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def seed_key(seed: int) -> jax.Array:
    """Return `jax.random.key(seed, impl="threefry2x32")`, which itself would compile two programs.

    Whatever jax's default is, a seed means the same everywhere. `seed` must be below 2**32.
    """
    words: Any = np.array([0, seed], np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


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
