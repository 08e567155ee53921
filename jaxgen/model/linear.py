"""Products with weights and look-ups in them, as implemented for each platform and dtype."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxgen.model import lanes
from jaxgen.model.config import CpuForm, ModelConfig
from jaxgen.model.weights import Weight

# Up to this many rows, a product is bound by reading the weights.
_FEW_ROWS = 16


def linear(
    x: jax.Array, weight: jax.Array | Weight, bias: jax.Array | None = None, *, cpu: CpuForm = "any"
) -> jax.Array:
    """Return `x Wᵀ + b`, `[..., F]` in x's dtype, for `x [..., D]` and `weight [F, D]` as torch stores it.

    Products are accumulated in float32. float32 operands are never rounded to a shorter format, as in torch,
    regardless of `jax_default_matmul_precision`.

    `cpu`: the form of products that are lowered for a CPU; see `for_this_machine`.
    """
    out = product(x.reshape(-1, x.shape[-1]), weight, cpu)
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def product(rows: jax.Array, weight: jax.Array | Weight, cpu: CpuForm = "any") -> jax.Array:
    """Multiply `rows [n, D]` by the transposed `weight [F, D]`: float32[n, F]."""
    if isinstance(weight, Weight):
        return weight.product(rows, cpu)
    return _product(rows, weight) if weight.dtype == jnp.float32 else _narrow_product(rows, weight, cpu)


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


def for_this_machine(model: ModelConfig, mesh: Mesh | None = None) -> ModelConfig:
    """Return `model` with machine-specific fields set, for programs that are compiled and run here.

    Do not call it for programs that run elsewhere, such as exported ones: without it they run on every machine.

    Args:
        model: the model of the program.
        mesh: the mesh that the parameters are divided over, if they are.
    """
    form: CpuForm = "divided" if mesh is not None else "tiles" if _has_tiles() else "any"
    return dataclasses.replace(model, cpu_form=form)


@functools.cache
def _has_tiles() -> bool:
    """Return True if this CPU has AMX for bfloat16."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text()


def _product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return _contract(rows, weight, 1, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow_product(rows: jax.Array, weight: jax.Array, cpu: CpuForm) -> jax.Array:
    """Multiply 16-bit operands, with gradients that are 16-bit products too, as in torch.

    jax's own gradient has a float32 factor, because the result is float32, and converts the other factor to float32.
    """
    on_cpu = _cpu_product(rows.shape[0], weight, cpu)
    if on_cpu is _product:
        return _product(rows, weight)
    return lax.platform_dependent(rows, weight, cpu=on_cpu, default=_product)


def _keep_operands(rows: jax.Array, weight: jax.Array, cpu: CpuForm):
    return _narrow_product(rows, weight, cpu), (rows, weight)


def _narrow_gradients(cpu: CpuForm, operands: tuple[jax.Array, jax.Array], change: jax.Array):
    del cpu
    rows, weight = operands
    change = change.astype(weight.dtype)
    to_rows, to_weight = _contract(change, weight, 1, 0), _contract(change, rows, 0, 0)
    return to_rows.astype(rows.dtype), to_weight.astype(weight.dtype)


_narrow_product.defvjp(_keep_operands, _narrow_gradients)


def _cpu_product(rows: int, weight: jax.Array, cpu: CpuForm) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the function that multiplies this many rows with a 16-bit weight on a CPU."""
    if cpu != "divided" and lanes.fits(rows, weight.shape[1]):
        return lanes.product
    if cpu == "tiles" and weight.dtype == jnp.bfloat16 and rows <= _FEW_ROWS:
        return _weight_first
    return _two_rows if rows == 1 else _product


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
    return _product(jnp.concatenate([row, jnp.zeros_like(row)]), weight)[:1]


def _weight_first(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply with the weight as the left operand: XLA's CPU product packs the right one at each call.

    With AMX, whose kernels take a fifth of the time that packing does, few rows are multiplied faster this way. Without
    AMX the kernel takes most of the time, and this way is slower. The barrier keeps XLA from swapping the operands.
    """
    count = rows.shape[0]
    if count == 1:
        rows = jnp.concatenate([rows, jnp.zeros_like(rows)])
    return lax.optimization_barrier(_product(weight, rows)).T[:count]


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
