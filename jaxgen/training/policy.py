"""Objectives for policy-gradient training (GRPO, PPO, DAPO) as pure functions of log-probabilities.

B is the number of answers, G the number of answers per prompt, and N the width to which answers are padded. Masks are
True for generated tokens. Log-probabilities refer to the distribution that tokens are sampled from. To obtain such
log-probabilities, use `generate` with `output_logprobs="scores"`, or `score(..., of="scores")` for the parameters being
trained.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxgen.errors import ConfigError, InputError


def group_advantage(rewards: jax.Array, group: int, *, divide: bool = True, eps: float = 1e-4) -> jax.Array:
    """Return GRPO's advantage: how much better each answer is than the other answers to the same prompt.

    The advantage is (r - mean) / (std + eps), with the group's mean and sample std (arXiv 2402.03300, eps as in TRL).

    Args:
        rewards: float32[B], in the order in which `generate` returns answers: G for prompt 0, then G for prompt 1, ...
        group: G, at least 2.
        divide: if True, divide by the standard deviation; if False, return Dr. GRPO's advantage (arXiv 2503.20783).
        eps: added to the standard deviation.

    Returns:
        float32[B]; 0 for every answer in a group whose rewards are all equal.
    """
    if group < 2:
        raise ConfigError(f"group must be at least 2, got {group}: a single answer cannot be compared with others")
    if rewards.ndim != 1 or rewards.shape[0] % group:
        raise InputError(f"rewards must be [B] with B a multiple of group={group}, got {list(rewards.shape)}")
    groups = rewards.astype(jnp.float32).reshape(-1, group)
    centered = groups - jnp.mean(groups, axis=1, keepdims=True)
    if divide:
        centered = centered / (jnp.std(groups, axis=1, ddof=1, keepdims=True) + eps)
    return centered.reshape(-1)


def answer_mask(lengths: jax.Array, width: int) -> jax.Array:
    """Return the mask of answers as bool[B, width]; `lengths int32[B]` counts each answer's tokens, including eos."""
    return jnp.arange(width)[None, :] < lengths[:, None]


def exclude_rows(mask: jax.Array, rows: jax.Array) -> jax.Array:
    """Clear the rows of `mask` where `rows bool[B]` is True, as DAPO does for truncated answers (arXiv 2503.14476)."""
    return mask & ~rows[:, None]


def clipped_objective(
    logprobs: jax.Array, old: jax.Array, advantage: jax.Array, *, low: float = 0.2, high: float | None = None
) -> jax.Array:
    """Return PPO's clipped objective for each token, to be maximized (arXiv 1707.06347).

    The objective is min(ratio A, clip(ratio, 1 - low, 1 + high) A), with ratio = exp(logprobs - old) and advantage A.

    Args:
        logprobs: float32[B, N], the log-probabilities under the parameters being trained.
        old: float32[B, N], the log-probabilities at the start of the step; no gradient flows through them.
        advantage: float32[B], or float32[B, N].
        low: how far the ratio may fall below 1.
        high: how far the ratio may rise above 1; by default, equal to `low`. DAPO uses 0.28 (arXiv 2503.14476).
    """
    advantage = advantage[:, None] if advantage.ndim == 1 else advantage
    ratio = jnp.exp(_bounded(logprobs - jax.lax.stop_gradient(old)))
    clipped = jnp.clip(ratio, 1 - low, 1 + (low if high is None else high))
    return jnp.minimum(ratio * advantage, clipped * advantage)


def importance_weight(trainer: jax.Array, sampler: jax.Array, *, most: float = 2.0) -> jax.Array:
    """Return the truncated importance weight of each token: min(exp(trainer - sampler), most), without gradients.

    The weight corrects for differences between the sampler's and the trainer's log-probabilities (Ionides 2008,
    Truncated Importance Sampling; also in verl). For example, the sampler may round differently or use older weights.

    Args:
        trainer: float32[B, N], the trainer's log-probabilities at the start of the step.
        sampler: float32[B, N], the sampler's log-probabilities.
        most: the maximum weight.
    """
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(_bounded(trainer - sampler)), most))


def kl(logprobs: jax.Array, other: jax.Array, estimator: str = "k3") -> jax.Array:
    """Estimate KL(policy || other) at each token that the policy sampled (http://joschu.net/blog/kl-approx.html).

    Args:
        logprobs: float32[B, N], the log-probabilities under the policy.
        other: float32[B, N], the log-probabilities under the other distribution, such as a reference model's.
        estimator: "k1" for -d (unbiased), "k2" for d^2 / 2 (never negative), or "k3" for exp(d) - 1 - d (unbiased and
            never negative), where d is other - logprobs. GRPO uses k3.
    """
    difference = other - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference**2 / 2
    if estimator == "k3":
        return jnp.expm1(_bounded(difference)) - difference
    raise ConfigError(f"estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")


def token_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the mean over all answers' tokens as float32[]. As in DAPO's loss, long answers count more.

    The mean is 0 if there are no tokens.
    """
    total = jnp.sum(mask, dtype=jnp.float32)
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(total, 1.0)


def sequence_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Average over each answer's tokens, then over answers, as in GRPO (arXiv 2402.03300); return float32[].

    Answers without tokens are left out. If no answer has tokens, the mean is 0.
    """
    counts = jnp.sum(mask, axis=1, dtype=jnp.float32)
    means = jnp.sum(jnp.where(mask, values, 0.0), axis=1) / jnp.maximum(counts, 1.0)
    return jnp.sum(means) / jnp.maximum(jnp.sum(counts > 0, dtype=jnp.float32), 1.0)


def _bounded(log_ratio: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio, -20.0, 20.0)  # so that exp stays finite in float32; verl has the same limits
