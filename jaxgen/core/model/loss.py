"""The loss of next-token prediction."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.errors import InputError


def next_token_loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the summed next-token cross-entropy and the number of labels, not counting labels that are -100.

    Args:
        logits: float32[B, T, V].
        labels: int32[B, T], usually the ids; position t predicts label t + 1. A label that is neither -100 nor a valid
            token makes the sum NaN.
    """
    labels = jnp.asarray(labels)
    if labels.shape != logits.shape[:2]:
        raise InputError(f"labels must have the shape of the ids, {list(logits.shape[:2])}, got {list(labels.shape)}")
    targets = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    counted = targets != -100
    losses = jnp.where(counted, _cross_entropy(logits, targets), 0.0)
    return jnp.sum(losses), jnp.sum(counted, dtype=jnp.float32)


@jax.custom_vjp
def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the cross-entropy of each target as float32[B, T]; NaN for targets that are not tokens."""
    return _keep(logits, targets)[0]


def _keep(logits: jax.Array, targets: jax.Array):
    largest = jnp.max(logits, axis=-1, keepdims=True)
    log_total = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1, keepdims=True))
    tokens = jnp.where(targets < 0, logits.shape[-1], targets)  # a negative index would wrap around
    target = jnp.take_along_axis(logits, tokens[:, :, None], axis=-1, mode="fill", fill_value=jnp.nan)
    losses = log_total - (target - largest)
    return losses[:, :, 0], (logits, targets, largest, log_total)


def _gradient(kept: tuple[jax.Array, ...], change: jax.Array):
    """Differentiate with respect to the logits. The exponentials are recomputed instead of stored."""
    logits, targets, largest, log_total = kept
    targets, change = targets[:, :, None], change[:, :, None]
    known = (targets >= 0) & (targets < logits.shape[-1])
    probs = jnp.exp(logits - largest - log_total)
    is_target = jnp.arange(logits.shape[-1])[None, None, :] == targets
    to_logits = (probs - is_target.astype(jnp.float32)) * jnp.where(known, change, jnp.nan)
    return jnp.where(change == 0, 0.0, to_logits), np.zeros(targets.shape[:2], jax.dtypes.float0)


_cross_entropy.defvjp(_keep, _gradient)


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean loss over the labels that are not -100; NaN if all labels are -100, as in torch."""
    total, count = next_token_loss(logits, labels)
    return total / count


def router_loss(logits: tuple[jax.Array, ...], mask: jax.Array | None, chosen: int) -> jax.Array:
    """Return the loss that balances the use of experts (arXiv 2101.03961), as in `load_balancing_loss_func`.

    Args:
        logits: the router's logits in each layer with experts, `[B, T, E]`.
        mask: `[B, T]`, 0 for padding, which does not count; None if there is none.
        chosen: the number of experts per token.
    """
    probabilities = jax.nn.softmax(jnp.stack(logits).astype(jnp.float32), axis=-1)
    count = probabilities.shape[-1]
    real = jnp.ones(probabilities.shape[1:3], jnp.float32) if mask is None else mask.astype(jnp.float32)
    experts = lax.top_k(lax.stop_gradient(probabilities), chosen)[1]
    uses = jnp.sum(jax.nn.one_hot(experts, count, dtype=jnp.float32), axis=3)
    total = len(logits) * jnp.sum(real)
    shares = [jnp.einsum("lbte,bt->e", x, real, precision=lax.Precision.HIGHEST) / total for x in (uses, probabilities)]
    return count * jnp.sum(shares[0] * shares[1])
