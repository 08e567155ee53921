"""Products of rows with the matrices of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxgen.core.model.context import NO_CONTEXT, Context
from jaxgen.core.model.weights import Weight, precision


def product_of_experts(
    rows: jax.Array, experts: jax.Array, weight: jax.Array | Weight, context: Context = NO_CONTEXT
) -> jax.Array:
    """Return each of the `rows [n, D]` times the transposed matrix of its own expert, as float32[n, F].

    Args:
        rows: the rows.
        experts: int32[n], the index of each row's expert.
        weight: `[E, F, D]`, an array, or a `Weight` whose arrays have E as an additional first axis.
        context: information about the pass.
    """
    own = jax.tree.map(lambda array: array[experts], weight)
    if isinstance(own, Weight):
        return jax.vmap(lambda row, weight: weight.product(row[None], context)[0])(rows, own)
    return jnp.einsum("nd,nfd->nf", rows, own, precision=precision(own.dtype), preferred_element_type=jnp.float32)
