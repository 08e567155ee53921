"""Activation functions of the feed-forward layer, by their names in config.json (`hidden_act`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

# The jax.nn function and its options. The function is given by name, so reading a config does not import jax.
ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("silu", {}),
    "relu": ("relu", {}),
    "gelu": ("gelu", {"approximate": False}),
    "gelu_new": ("gelu", {"approximate": True}),
    "gelu_pytorch_tanh": ("gelu", {"approximate": True}),
}


def activation(name: str) -> Callable:
    """Return the elementwise function with this name. It computes in float32 and rounds once, as torch does."""
    import jax
    import jax.numpy as jnp

    function, options = ACTIVATIONS[name]
    apply = functools.partial(getattr(jax.nn, function), **options)
    return lambda x: apply(x.astype(jnp.float32)).astype(x.dtype)
