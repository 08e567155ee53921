"""Products with packed matrices of experts; see `expert_product`.

Dimensions: n rows (pairs of a token and an expert), E experts, F outputs, D inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.control import alike
from jaxgen.core.model import expert_product, workarounds
from jaxgen.core.model.context import Context
from jaxgen.core.model.packed_product import Forms, no_gradient
from jaxgen.shapes import at_most


def packed_product_of_experts(
    rows: jax.Array, experts: jax.Array, weight: Any, context: Context, in_lanes: Callable | None
) -> jax.Array:
    """Return `product_of_experts` for a weight whose arrays have a first axis for experts; see `packed_product`.

    Few rows read only the matrices of the chosen experts. For more rows, one matrix at a time is unpacked, unless
    `context` says that the weight is split across a mesh: then each device unpacks its part of all matrices.
    """
    leaves, structure = jax.tree.flatten(weight)
    rows, experts, *leaves = alike(rows, experts, *leaves)
    forms = Forms(in_lanes, None, context.divided, context.portable, context.expert_parts)
    return _product(rows, experts, structure.unflatten(leaves), forms)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(rows: jax.Array, experts: jax.Array, weight: Any, forms: Forms) -> jax.Array:
    if not workarounds.in_one_piece(forms.divided):
        return expert_product.in_rounds(rows, experts, weight.unpack().astype(rows.dtype), 2, forms.expert_parts)
    few = at_most(rows.shape[0], weight.shape[0] * forms.expert_parts)
    default = functools.partial(_in_tiles, axis=2, parts=forms.expert_parts, on_cpu=False)
    on_cpu = functools.partial(_in_tiles, axis=2, parts=forms.expert_parts, on_cpu=True)
    if few and forms.in_lanes is not None:
        on_cpu = functools.partial(_in_lanes, multiply=forms.in_lanes)
    # On a GPU, rows without an expert on this device cost as much as the others.
    on_gpu = _gathered if few and at_most(rows.shape[0], weight.shape[0]) else default
    return lax.platform_dependent(rows, experts, weight, cpu=on_cpu, cuda=on_gpu, default=default)


def _keep_operands(rows: jax.Array, experts: jax.Array, weight: Any, forms: Forms) -> tuple[jax.Array, tuple[Any, ...]]:
    return _product(rows, experts, weight, forms), (experts, weight, rows[:0])


def _gradients(forms: Forms, operands: tuple[Any, ...], change: jax.Array) -> tuple[Any, ...]:
    """Differentiate with respect to the rows, in the rows' dtype."""
    experts, weight, like = operands
    change = change.astype(like.dtype)
    if workarounds.in_one_piece(forms.divided):
        in_tiles = functools.partial(_in_tiles, axis=1, parts=forms.expert_parts)
        on_cpu, default = (functools.partial(in_tiles, on_cpu=on_cpu) for on_cpu in (True, False))
        to_rows = lax.platform_dependent(change, experts, weight, cpu=on_cpu, default=default)
    else:
        matrices = weight.unpack().astype(like.dtype)
        to_rows = expert_product.in_rounds(change, experts, matrices, 1, forms.expert_parts)
    return to_rows.astype(like.dtype), np.zeros(experts.shape, jax.dtypes.float0), jax.tree.map(no_gradient, weight)


_product.defvjp(_keep_operands, _gradients)


def _in_lanes(rows: jax.Array, experts: jax.Array, weight: Any, multiply: Callable) -> jax.Array:
    """Multiply few rows on a CPU, each in vector lanes."""
    return expert_product.in_tiles(rows.astype(jnp.float32), experts, weight, 2, 1, multiply)


def _in_tiles(rows: jax.Array, experts: jax.Array, weight: Any, axis: int, parts: int, on_cpu: bool) -> jax.Array:
    """Multiply tile by tile, where a tile consists of rows of one expert, whose matrix is unpacked.

    Without a unit for 16-bit matrices, a CPU multiplies fastest in float32.
    """
    rows = rows.astype(jnp.float32) if on_cpu else rows

    def multiply(rows: jax.Array, matrix: Any) -> jax.Array:
        return expert_product.contract(rows, matrix.unpack().astype(rows.dtype), axis)

    size = expert_product.slots_for(rows.shape[0], weight.shape[0] * parts)
    return expert_product.in_tiles(rows, experts, weight, axis, size, multiply, branch=on_cpu)


def _gathered(rows: jax.Array, experts: jax.Array, weight: Any) -> jax.Array:
    """Multiply few rows on a GPU, as sums of products, which XLA fuses with the selection of the matrices."""
    has_expert = (experts >= 0) & (experts < weight.shape[0])
    own = jnp.where(has_expert, experts, 0)
    chosen = jax.tree.map(lambda array: array[own], weight).unpack()
    out = jnp.sum(chosen * rows[:, None].astype(jnp.float32), axis=2)
    return jnp.where(has_expert[:, None], out, 0)
