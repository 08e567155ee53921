"""Multiplication by weights, and row look-ups."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.control import alike
from jaxgen.core.model import workarounds
from jaxgen.core.model.context import NO_CONTEXT, Context
from jaxgen.core.model.weights import Weight


def linear(
    x: jax.Array, weight: jax.Array | Weight, bias: jax.Array | None = None, context: Context = NO_CONTEXT
) -> jax.Array:
    """Map `x [..., D]` to `x Wᵀ + b`, of shape `[..., F]` and x's dtype. The shape of `weight` is [F, D], as in torch.

    Products are accumulated in float32. As in torch, float32 operands are never rounded to lower precision, regardless
    of `jax_default_matmul_precision`.
    """
    out = product(x.reshape(-1, x.shape[-1]), weight, context)
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def product(rows: jax.Array, weight: jax.Array | Weight, context: Context = NO_CONTEXT) -> jax.Array:
    """Return `rows [n, D]` times the transposed `weight [F, D]`, as float32[n, F]."""
    if isinstance(weight, Weight):
        return weight.product(rows, context)
    return _product(*alike(rows, weight), context.divided, context.portable)


def look_up(ids: jax.Array, table: jax.Array | Weight) -> jax.Array:
    """Return the rows of `table [V, D]` at `ids int32[B, T]`, as `[B, T, D]`; an id outside [0, V) gives NaN."""
    if isinstance(table, Weight):
        return table.look_up(ids)
    ids = jnp.where(ids < 0, table.shape[0], ids)  # a negative index would wrap around
    return workarounds.look_up(_gather, ids, table)


def precision(dtype) -> lax.Precision | None:
    """Return the precision at which products of this dtype match those in torch: full float32, not TF32 or bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(rows: jax.Array, weight: jax.Array, divided: bool | None, portable: bool) -> jax.Array:
    """Multiply using the platform's implementation; the gradient multiplies in the operands' dtype, as in torch.

    jax's default gradient would convert the 16-bit factor to float32, the dtype of the result's gradient.
    """
    return workarounds.product(_plain, rows, weight, divided, portable)


def _keep_operands(rows: jax.Array, weight: jax.Array, divided: bool | None, portable: bool):
    return _product(rows, weight, divided, portable), (rows, weight)


def _gradients(divided: bool | None, portable: bool, operands: tuple[jax.Array, jax.Array], change: jax.Array):
    rows, weight = operands
    change = change.astype(weight.dtype)
    to_rows, to_weight = _contract(change, weight, 1, 0), _contract(change, rows, 0, 0)
    return to_rows.astype(rows.dtype), to_weight.astype(weight.dtype)


_product.defvjp(_keep_operands, _gradients)


def _plain(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return _contract(rows, weight, 1, 1)


def _contract(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """Contract one axis of each matrix; the result is float32."""
    return lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=precision(right.dtype),
        preferred_element_type=jnp.float32,
    )


def _gather(ids: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan)
