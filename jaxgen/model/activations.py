"""Activation functions of the feed-forward layer, by their names in config.json (`hidden_act`)."""

import functools
from collections.abc import Callable

import jax

_gelu_tanh = functools.partial(jax.nn.gelu, approximate=True)

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}
