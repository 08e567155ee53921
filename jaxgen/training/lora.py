"""Low-rank updates of weights (LoRA, arXiv 2106.09685): W + scale * B A, with A `[r, in]` and B `[out, r]`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import flax.traverse_util
import jax
import jax.numpy as jnp

from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.feed_forward import FUSED
from jaxgen.core.model.lowrank import LowRank
from jaxgen.errors import ConfigError, InputError

# The projections of a layer, separate or fused. Embeddings and the head never get updates.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", *FUSED)


def init(params, rank: int, key: jax.Array, targets: tuple[str, ...] | None = None):
    """Return updates for the named projections of all layers; A is random and B is zero, so the model is unchanged.

    By default (None), all projections get updates. If projections are fused in `params`, as in the checkpoints of some
    families, the fused matrices get updates.

    The updates are nested like `params`, with `{"a": float32[r, in], "b": float32[out, r]}` for each projection.

    Raises:
        ConfigError: the rank is below 1, `targets` is empty or contains a name that is not in `TARGETS`, or a target is
            a matrix of experts.
        InputError: `targets` contains a name that `params` do not have, such as "q_proj" if projections are fused.
    """
    if rank < 1:
        raise ConfigError(f"the rank must be at least 1, got {rank}")
    if targets is not None:
        check_targets(targets)
        there = {path[-2] for path in flax.traverse_util.flatten_dict(dict(params)) if path[-2] in TARGETS}
        if absent := set(targets) - there:
            raise InputError(f"params have no {min(absent)}: choose from {', '.join(sorted(there))}")

    def updates(node, key):
        chosen = {}
        for index, (name, child) in enumerate(node.items()):
            if not isinstance(child, Mapping):
                continue
            own = jax.random.fold_in(key, index)
            if name in (targets or TARGETS):
                out, *rest = child["weight"].shape
                if len(rest) > 1:
                    allowed = ", ".join(TARGETS[:4])
                    raise ConfigError(f"targets: {name}: experts cannot have updates: choose from {allowed}")
                width = rest[0]
                a = jax.random.normal(own, (rank, width), jnp.float32) / width**0.5
                chosen[name] = {"a": a, "b": jnp.zeros((out, rank), jnp.float32)}
            elif deeper := updates(child, own):
                chosen[name] = deeper
        return chosen

    return updates(params, key)


def targets_of(model: ModelConfig) -> tuple[str, ...]:
    """Return the projections of a layer in the checkpoints of a model's family."""
    others = {part for parts in FUSED.values() for part in parts} if model.family.fused else FUSED
    return tuple([name for name in TARGETS if name not in others])


def check_targets(targets: Collection[str], allowed: Collection[str] = TARGETS) -> None:
    """Raise a `ConfigError` if there are no targets, or if one of them is not in `allowed`."""
    unknown = [repr(name) for name in targets if name not in allowed]
    if unknown or not targets:
        found = f"unknown projections {', '.join(unknown)}" if unknown else "no projections are named"
        raise ConfigError(f"targets: {found}: choose from {', '.join(allowed)}")


def attach(params, updates, scale: float):
    """Return `params` with a `LowRank` in place of each weight that has updates. A `LowRank` never computes W + B A."""
    if set(updates) == {"a", "b"}:
        return {**params, "weight": LowRank(params["weight"], updates["a"], updates["b"] * scale)}
    return {name: attach(child, updates[name], scale) if name in updates else child for name, child in params.items()}


def merge(params, updates, scale: float):
    """Return `params` with the updates added to the weights, which keep their dtype."""
    if set(updates) == {"a", "b"}:
        weight = params["weight"]
        change = jnp.matmul(updates["b"], updates["a"], precision=jax.lax.Precision.HIGHEST) * scale
        return {**params, "weight": (weight.astype(jnp.float32) + change).astype(weight.dtype)}
    return {name: merge(child, updates[name], scale) if name in updates else child for name, child in params.items()}
