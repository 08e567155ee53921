"""Logits processors: what they do holds for greedy search too. Each is a pure function, scores float32[rows, V] in
and out, with −inf for a token that is banned. They follow transformers' classes of the names given.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BANNED = -jnp.inf


def repetition_penalty(scores: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Divide the positive scores of tokens seen before by `penalty`, multiply the negative ones.

    `RepetitionPenaltyLogitsProcessor` (CTRL, arXiv 1909.05858).

    Args:
        scores: float32[rows, V].
        seen: bool[rows, V], the tokens of the row's prompt, padding left out, and of what it generated.
        penalty: float32, [rows, 1] or a scalar; above 1 discourages.
    """
    return jnp.where(seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


def ban(scores: jax.Array, tokens: jax.Array, rows: jax.Array) -> jax.Array:
    """Ban `tokens bool[V]` in the rows where `rows bool[rows]` holds.

    With the eos tokens while a row is shorter than wanted: `MinLengthLogitsProcessor`,
    `MinNewTokensLengthLogitsProcessor`.
    """
    return jnp.where(tokens[None, :] & rows[:, None], BANNED, scores)


def token_set(ids: jax.Array, vocab_size: int) -> jax.Array:
    """Return bool[V], True for each of `ids int32[n]`; negative ids stand for none."""
    ids = jnp.where(ids < 0, vocab_size, ids)
    return jnp.zeros(vocab_size, bool).at[ids].set(True, mode="drop")
