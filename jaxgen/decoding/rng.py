"""Random keys of rows. With the same key, a row draws the same numbers in any batch.

`draw` in sample.py folds the row's step into the key. The step is the number of tokens that the row has generated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def prompt_keys(key: jax.Array, prompts: int) -> jax.Array:
    """Return one key per prompt: `key` itself if its shape is `[prompts]`, otherwise `fold_in(key, b)` for prompt b."""
    return key if key.ndim else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(prompts))


def sequence_keys(keys: jax.Array, copies: int) -> jax.Array:
    """Return one key per sequence, `key[rows * copies]`: `fold_in(row_key, r)` for sequence r of each row."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return fold(keys, jnp.arange(copies)).reshape(keys.shape[0] * copies)
