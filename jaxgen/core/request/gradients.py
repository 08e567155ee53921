"""An error for attempts to differentiate generate(), which has no gradient because tokens are integers."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxgen.errors import InputError

T = TypeVar("T")


def without_gradient(tree: T) -> T:
    """Return the tree unchanged. Differentiating with respect to its arrays raises an error before compilation.

    The error comes from a differentiation rule. Checking the arrays themselves would not be enough: inside a jitted
    function, arrays do not show whether the function is being differentiated.
    """
    leaves, structure = jax.tree.flatten(tree)
    traced = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tracer) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            traced[index] = leaf
    if not traced:
        return tree
    constants = _constant(traced)
    return jax.tree.unflatten(structure, [constants.get(index, leaf) for index, leaf in enumerate(leaves)])


@jax.custom_jvp
def _constant(arrays: dict[int, Any]) -> dict[int, Any]:
    return arrays


@_constant.defjvp
def _refuse(primals: Any, tangents: Any) -> NoReturn:
    raise InputError(
        "generate() cannot be differentiated, because tokens are integers. score(params, out.sequences, cfg) can: it "
        "returns their log-probabilities. To generate inside the differentiated function, call "
        "generate(jax.lax.stop_gradient(params), ...)"
    )
