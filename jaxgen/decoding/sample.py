"""How the next token of each row is chosen from its scores, and the keys that draws depend on."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_BLOCK = 512


def sequence_keys(key: jax.Array, prompts: int, copies: int) -> jax.Array:
    """Return one key per row, `key[prompts * copies]`.

    One key gives prompt b the row key `fold_in(key, b)`; `key[prompts]` gives the row keys outright. Sequence r of a
    prompt has `fold_in(row_key, r)`. So a row's draws do not depend on the batch that it is in.
    """
    if key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(prompts))
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return fold(key, jnp.arange(copies)).reshape(prompts * copies)


def greedy(scores: jax.Array) -> jax.Array:
    """Return the token of the highest score, the first of equals, int32[rows]."""
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def draw(keys: jax.Array, step: jax.Array, scores: jax.Array) -> jax.Array:
    """Draw a token from softmax(scores) in each row, int32[rows].

    First a block of tokens is drawn by its mass, then a token in it: random numbers for one block and the number of
    blocks, not for the whole vocabulary, and the same distribution.

    Args:
        keys: key[rows], of the sequences.
        step: int32[], folded into the keys.
        scores: float32[rows, V].
    """
    return jax.vmap(_draw_row, (0, None, 0))(keys, step, scores)


def _draw_row(key: jax.Array, step: jax.Array, scores: jax.Array) -> jax.Array:
    block_key, token_key = jax.random.split(jax.random.fold_in(key, step))
    blocks = -(-scores.shape[0] // _BLOCK)
    padded = jnp.pad(scores, (0, blocks * _BLOCK - scores.shape[0]), constant_values=-jnp.inf)
    padded = padded.reshape(blocks, _BLOCK)
    block = jax.random.categorical(block_key, jax.nn.logsumexp(padded, axis=-1))
    token = jax.random.categorical(token_key, padded[block])
    return (block * _BLOCK + token).astype(jnp.int32)
