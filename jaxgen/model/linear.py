"""Products with weights and look-ups in them, as implemented for each platform and dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.model import lanes
from jaxgen.model.barriers import NEW_CPU_PRODUCTS, rounded
from jaxgen.model.context import NO_CONTEXT, Context
from jaxgen.model.weights import Weight
from jaxgen.shapes import at_most

# On a CPU, a product of up to this many rows, if they are fewer than the weight's, has the weight as its left operand.
# Without AMX that is faster up to 256 rows; with AMX, 128 rows are 1.6 times faster as the left operand.
_SOME_ROWS = 32
# Since jax 0.11, up to this many 16-bit rows are multiplied faster as the left operand, unless they are wider than the
# result.
_ROWS_FIRST = 8 if NEW_CPU_PRODUCTS else 0

# XLA's compiler for an H100 (jax 0.10.2 to 0.11.2) makes one kernel of a sum of up to this many numbers, and two of
# 18,944, the width of a 7B model.
_LONGEST_SUM = 9472


def linear(
    x: jax.Array, weight: jax.Array | Weight, bias: jax.Array | None = None, context: Context = NO_CONTEXT
) -> jax.Array:
    """Return `x Wᵀ + b`, `[..., F]` in x's dtype, for `x [..., D]` and `weight [F, D]` as torch stores it.

    Products are accumulated in float32. float32 operands are never rounded to a shorter format, as in torch,
    regardless of `jax_default_matmul_precision`.
    """
    out = product(x.reshape(-1, x.shape[-1]), weight, context)
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def product(rows: jax.Array, weight: jax.Array | Weight, context: Context = NO_CONTEXT) -> jax.Array:
    """Multiply `rows [n, D]` by the transposed `weight [F, D]`: float32[n, F]."""
    if isinstance(weight, Weight):
        return weight.product(rows, context)
    return _product(rows, weight, context.divided)


def look_up(ids: jax.Array, table: jax.Array | Weight) -> jax.Array:
    """Return the rows `ids int32[B, T]` of `table [V, D]`: `[B, T, D]`; NaN for an id that is not in [0, V)."""
    if isinstance(table, Weight):
        return table.look_up(ids)
    ids = jnp.where(ids < 0, table.shape[0], ids)  # a negative index would wrap
    if table.dtype == jnp.float32:
        return _gather(ids, table)
    return lax.platform_dependent(ids, table, cpu=_gather_in_branch, default=_gather)


def precision(dtype) -> lax.Precision | None:
    """Return the precision at which products of this dtype equal torch's: full float32, no TF32 or bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(rows: jax.Array, weight: jax.Array, divided: bool | None) -> jax.Array:
    """Multiply in the platform's form, with gradients that are products of the operands' dtype, as in torch.

    jax's own gradient has a float32 factor, because the result is float32, and converts the other factor to float32.
    """
    on_cpu = _cpu_product(rows.shape[0], weight, divided)
    on_gpu = functools.partial(_row_sums, in_parts=divided is False) if rows.shape[0] == 1 else _plain
    if on_cpu is _plain and on_gpu is _plain:
        return _plain(rows, weight)
    return lax.platform_dependent(rows, weight, cpu=on_cpu, cuda=on_gpu, default=_plain)


def _keep_operands(rows: jax.Array, weight: jax.Array, divided: bool | None):
    return _product(rows, weight, divided), (rows, weight)


def _gradients(divided: bool | None, operands: tuple[jax.Array, jax.Array], change: jax.Array):
    del divided
    rows, weight = operands
    change = change.astype(weight.dtype)
    to_rows, to_weight = _contract(change, weight, 1, 0), _contract(change, rows, 0, 0)
    return to_rows.astype(rows.dtype), to_weight.astype(weight.dtype)


_product.defvjp(_keep_operands, _gradients)


def _cpu_product(rows: int, weight: jax.Array, divided: bool | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the function that multiplies this many rows with a weight on a CPU."""
    narrow = weight.dtype != jnp.float32
    if narrow and in_one_piece(divided) and lanes.fits(rows, weight.shape[1]):
        return lanes.product
    features, columns = weight.shape
    few = narrow and at_most(rows, _ROWS_FIRST) and columns <= features
    if not divided and not few and at_most(rows, _SOME_ROWS) and 1 < rows < features:
        return _weight_first
    return _two_rows if narrow and rows == 1 else _plain


def in_one_piece(divided: bool | None) -> bool:
    """Return True if the weight of a product on a CPU is on one device: see `Context`.

    Under the caller's jit that is not known, unless this machine's CPU is only one device.
    """
    return jax.local_device_count("cpu") == 1 if divided is None else not divided


def _plain(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return _contract(rows, weight, 1, 1)


def _contract(left: jax.Array, right: jax.Array, left_axis: int, right_axis: int) -> jax.Array:
    """Sum over one axis of each matrix: float32."""
    return lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=precision(right.dtype),
        preferred_element_type=jnp.float32,
    )


def _two_rows(row: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply one row, `[1, D]`, together with a row of zeros.

    XLA's CPU product of one 16-bit row converts the weights to float32, and in a loop stores the float32 copy of all
    weights. With two rows or more it reads them without converting.
    """
    return _plain(jnp.concatenate([row, jnp.zeros_like(row)]), weight)[:1]


def _row_sums(row: jax.Array, weight: jax.Array, in_parts: bool) -> jax.Array:
    """Multiply one row, `[1, D]`, as sums of products, which XLA's GPU compiler fuses with what comes before and after.

    Of a product with a large weight it makes a kernel of partial sums and one that adds them up. It does the same with
    long sums, unless they are `in_parts`: parts of equal length are one kernel. A weight that may be divided over a
    mesh is left in one part, because its columns may be on several devices.
    """
    columns = weight.shape[1]
    parts = -(-columns // _LONGEST_SUM) if in_parts else 1
    parts = next((count for count in range(parts, 4 * parts) if columns % count == 0), parts)
    weights = weight.astype(jnp.float32) * row.astype(jnp.float32)
    return functools.reduce(jnp.add, [jnp.sum(part, axis=1) for part in jnp.array_split(weights, parts, axis=1)])[None]


def _weight_first(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply with the weight as the left operand.

    XLA's CPU product packs its right operand at each call, so the smaller operand should be the right one. Rounding
    keeps XLA from swapping them.
    """
    return rounded(_plain(weight, rows)).T


def _gather(ids: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan)


def _gather_in_branch(ids: jax.Array, table: jax.Array) -> jax.Array:
    """Look up rows inside a branch.

    XLA's CPU compiler converts a 16-bit table to float32 to gather from it and, in a loop, stores that whole copy. It
    does not move the conversion out of a branch, and there converts only the rows that are read.
    """
    return lax.cond(jnp.any(ids < table.shape[0]), _gather, _gather_nothing, ids, table)


def _gather_nothing(ids: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.full((*ids.shape, table.shape[1]), jnp.nan, table.dtype)
