"""Feed-forward layers made of experts: a router chooses a few experts for each token (arXiv 1701.06538).

Additional dimensions: E experts, k experts per token, I width of an expert, n tokens of all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.core.model import workarounds
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.context import Context
from jaxgen.core.model.expert_parts import sum_over_devices
from jaxgen.core.model.expert_product import product_of_experts
from jaxgen.core.model.feed_forward import FUSED, MLP, Linear, gated_activation
from jaxgen.core.model.weights import parameter


@flax.struct.dataclass
class Routing:
    """The router's output in one layer.

    Attributes:
        logits: [B, T, E], in the dtype of the activations.
        experts: int32[B, T, k], the experts of each token, best first.
    """

    logits: jax.Array
    experts: jax.Array


class SparseMLP(nn.Module):
    """The layer of all families with experts, as in `Qwen2MoeSparseMoeBlock` and `MixtralSparseMoeBlock`.

    An expert can have any number of tokens, and none are dropped. A token's output therefore does not depend on other
    tokens.
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, experts: jax.Array | None) -> tuple[jax.Array, Routing]:
        """Map `x [B, T, D]` to `[B, T, D]`. If `experts int32[B, T, k]` is given, it replaces the router's choice.

        Negative entries of `experts` leave the choice to the router.
        """
        cfg = self.cfg
        logits = Linear(cfg.num_experts or 0, False, cfg, name="gate")(x, context)
        out, experts = Experts(cfg, name="experts")(x, logits, experts, context)
        if cfg.shared_expert_intermediate_size is not None:
            shared = MLP(cfg, cfg.shared_expert_intermediate_size, name="shared_expert")(x, context)
            gate = Linear(1, False, cfg, name="shared_expert_gate")(x, context)
            out = out + jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype) * shared
        return out, Routing(logits, experts)


def _route(cfg: ModelConfig, logits: jax.Array, experts: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return the weights of the chosen experts as float32[B, T, k], and the experts as int32[B, T, k]."""
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    _, best = workarounds.top_k(lax.stop_gradient(probabilities), cfg.num_experts_per_tok or 0)
    experts = best if experts is None else jnp.where(experts < 0, best, experts)
    weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    if cfg.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, experts


class Experts(nn.Module):
    """The experts of one layer. Each projection is one parameter for all experts."""

    cfg: ModelConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, logits: jax.Array, experts: jax.Array | None, context: Context
    ) -> tuple[jax.Array, jax.Array]:
        """Return the weighted sum of the outputs of each token's experts, `[B, T, D]`, and the experts, int32[B, T, k].

        `x [B, T, D]`, the router's `logits [B, T, E]` and `experts` are as in `SparseMLP`.
        """
        cfg, width = self.cfg, self.cfg.moe_intermediate_size or 0
        fused = "gate_up_proj"
        names = (fused,) if self.has_variable("params", fused) else FUSED[fused]
        first = [ExpertMatrices(2 * width // len(names), cfg.hidden_size, cfg, name=name)() for name in names]
        last = ExpertMatrices(cfg.hidden_size, width, cfg, name="down_proj")()
        route, add = functools.partial(_route, cfg), functools.partial(_add_outputs, gated_activation(cfg.hidden_act))
        total, experts = sum_over_devices(route, add, (first, last), (x, logits, experts), context)
        return total.astype(x.dtype), experts


class ExpertMatrices(nn.Module):
    """The matrices of a linear layer of each expert: `weight [E, out, in]`."""

    outputs: int
    inputs: int
    cfg: ModelConfig

    @nn.compact
    def __call__(self) -> Any:
        """Return the weight, an array or a `Weight`."""
        cfg = self.cfg
        shape = (cfg.num_experts or 0, self.outputs, self.inputs)
        return parameter(self, "weight", shape, nn.initializers.normal(cfg.initializer_range), cfg.dtype)


def _add_outputs(
    activate: Callable, matrices: tuple, x: jax.Array, experts: jax.Array, weights: jax.Array, context: Context
) -> jax.Array:
    """Return the weighted sum of the outputs of each token's experts, as float32[B, T, D]; see `sum_over_devices`.

    `matrices` has the matrices of the first layer, one or two per expert, and those of the last layer.
    """
    first, last = matrices
    pairs = jnp.repeat(x.reshape(-1, x.shape[-1]), experts.shape[-1], axis=0)
    own = experts.reshape(-1)
    parts = [product_of_experts(pairs, own, weight, context).astype(x.dtype) for weight in first]
    gate, up = parts if len(parts) == 2 else jnp.split(parts[0], 2, axis=-1)
    outputs = product_of_experts(activate(gate, up), own, last, context).astype(x.dtype).reshape(*experts.shape, -1)
    terms = outputs.astype(jnp.float32) * weights.astype(x.dtype).astype(jnp.float32)[..., None]
    # Add in the router's order, in float32.
    total = terms[:, :, 0]
    for index in range(1, terms.shape[2]):
        total = total + terms[:, :, index]
    return total
