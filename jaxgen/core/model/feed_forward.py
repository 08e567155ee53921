"""Linear layers, which may be fused in groups, and the dense feed-forward layer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.model import workarounds
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.config_keys import ACTIVATIONS
from jaxgen.core.model.context import Context
from jaxgen.core.model.weights import linear, parameter


class Linear(nn.Module):
    """`torch.nn.Linear`, with `weight [out, in]` and an optional `bias [out]`."""

    features: int
    use_bias: bool
    cfg: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Map `[..., in]` to `[..., out]`."""
        cfg = self.cfg
        init = nn.initializers.normal(cfg.initializer_range)
        weight = parameter(self, "weight", (self.features, x.shape[-1]), init, cfg.dtype)
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", (self.features,), nn.initializers.zeros, cfg.dtype)
        return linear(x, weight, bias, context)


# Groups of projections with the same input. `fuse_projections` in model/fused.py merges each group into one matrix.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def project(
    module: nn.Module, fused: str, widths: tuple[int, ...], apply: Callable[[int, str], jax.Array], is_fused: bool
) -> list[jax.Array]:
    """Apply the projections in `FUSED[fused]`, whether the parameters of `module` are fused or separate.

    `apply(width, name)` applies the projection with this name and number of outputs. `is_fused` says which parameters
    to create under `init`.
    """
    if module.has_variable("params", fused) or (module.is_initializing() and is_fused):
        return jnp.split(apply(sum(widths), fused), np.cumsum(widths)[:-1], axis=-1)
    return [apply(width, name) for name, width in zip(FUSED[fused], widths, strict=True)]


class MLP(nn.Module):
    """Gated feed-forward layer (SwiGLU, arXiv 2002.05202), as in `Qwen2MLP`."""

    cfg: ModelConfig
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Map `x [B, T, D]` to `[B, T, D]`."""
        cfg = self.cfg

        def apply(width: int, name: str) -> jax.Array:
            return Linear(width, cfg.mlp_bias, cfg, name=name)(x, context)

        gate, up = project(self, "gate_up_proj", (self.width, self.width), apply, cfg.family.fused)
        gated = gated_activation(cfg.hidden_act)(gate, up)
        return Linear(cfg.hidden_size, cfg.mlp_bias, cfg, name="down_proj")(gated, context)


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """Return the elementwise function with this name. The function computes in float32 and rounds once, as in torch."""
    function, options = ACTIVATIONS[name]
    apply = functools.partial(getattr(jax.nn, function), **options)
    return lambda x: apply(x.astype(jnp.float32)).astype(x.dtype)


@functools.cache
def gated_activation(name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the function that multiplies `activation(name)` of its first argument by the second."""
    act = activation(name)
    return workarounds.recomputed(lambda gate, up: act(gate) * up)
