"""Random keys of rows. With the same key, a row draws the same numbers in any batch.

`draw` in sample.py folds in the step, that is, the number of tokens that the row has generated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def prompt_keys(key: jax.Array, prompts: int) -> jax.Array:
    """Return `key[prompts]`: `fold_in(key, b)` for prompt b, or `key` itself if it already has one key per prompt."""
    return key if key.ndim else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(prompts))


def sequence_keys(keys: jax.Array, copies: int) -> jax.Array:
    """Return `key[rows * copies]`: `fold_in(row_key, r)` for sequence r of each row."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return fold(keys, jnp.arange(copies)).reshape(keys.shape[0] * copies)
