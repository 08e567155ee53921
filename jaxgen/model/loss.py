"""The loss of next-token prediction."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxgen.errors import InputError


def next_token_loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropies of the next tokens, summed over the labels that are not -100, and the number of these.

    Args:
        logits: float32[B, T, V].
        labels: int32[B, T], the ids again; position t predicts label t + 1. A label that is neither -100 nor a
            token makes the sum NaN.
    """
    labels = jnp.asarray(labels)
    if labels.shape != logits.shape[:2]:
        raise InputError(f"labels must have the shape of the ids, {list(logits.shape[:2])}, got {list(labels.shape)}")
    targets = labels[:, 1:]
    counted = targets != -100
    log_probs = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    tokens = jnp.where(counted, jnp.where(targets < 0, logits.shape[-1], targets), 0)  # a negative index would wrap
    picked = jnp.take_along_axis(log_probs, tokens[..., None], axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]
    return -jnp.sum(jnp.where(counted, picked, 0.0)), jnp.sum(counted, dtype=jnp.float32)


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean over the labels that are not -100; NaN if there is none, as in torch."""
    total, count = next_token_loss(logits, labels)
    return total / count
