"""How a matrix product with a weight, and a look-up in one, is done on this backend and in this dtype."""

from __future__ import annotations

import functools
import pathlib

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

# Up to so many rows a product is bound by reading the weights.
_FEW_ROWS = 16


@flax.struct.dataclass
class LowRank:
    """A weight `[F, D]` with an update that is kept apart: what is meant is `weight + b a`.

    Attributes:
        weight: `[F, D]`.
        a: `[r, D]`.
        b: `[F, r]`.
    """

    weight: jax.Array
    a: jax.Array
    b: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape, [F, D]."""
        return self.weight.shape

    @property
    def dtype(self):
        """The weight's dtype."""
        return self.weight.dtype


def linear(x: jax.Array, weight: jax.Array | LowRank, bias: jax.Array | None = None) -> jax.Array:
    """Return `x Wᵀ + b`, `[..., F]` in x's dtype, for `x [..., D]` and `weight [F, D]` as torch keeps it.

    Products are accumulated in float32. float32 operands are never rounded to a shorter format on the way, as in
    torch, whatever `jax_default_matmul_precision` says.
    """
    if isinstance(weight, LowRank):
        return linear(x, weight.weight, bias) + linear(linear(x, weight.a), weight.b)
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    on_cpu = jax.default_backend() == "cpu"
    if count == 1 and on_cpu and weight.dtype != jnp.float32:
        # XLA's CPU product of one 16-bit row converts the weights to float32, and in a loop keeps that copy of
        # them all; from two rows on it reads them as they are.
        rows = jnp.concatenate([rows, jnp.zeros_like(rows)])
    if on_cpu and count <= _FEW_ROWS and weight.dtype == jnp.bfloat16 and _cpu_multiplies_tiles():
        out = _weight_first(rows, weight)
    else:
        out = _product(rows, weight)
    out = out[:count]
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply `rows [R, D]` with `weight [F, D]`: float32[R, F]."""
    return _contract(rows, weight, 1, 1) if weight.dtype == jnp.float32 else _narrow_product(rows, weight)


@jax.custom_vjp
def _narrow_product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Do so for 16-bit operands, with gradients that are 16-bit products too, as in torch.

    jax's own gradient has a float32 factor, because the result is float32, and converts the other one to it.
    """
    return _contract(rows, weight, 1, 1)


def _keep_operands(rows: jax.Array, weight: jax.Array):
    return _narrow_product(rows, weight), (rows, weight)


def _narrow_gradients(operands: tuple[jax.Array, jax.Array], change: jax.Array):
    rows, weight = operands
    change = change.astype(weight.dtype)
    to_rows, to_weight = _contract(change, weight, 1, 0), _contract(change, rows, 0, 0)
    return to_rows.astype(rows.dtype), to_weight.astype(weight.dtype)


_narrow_product.defvjp(_keep_operands, _narrow_gradients)


def _contract(left: jax.Array, right: jax.Array, of_left: int, of_right: int) -> jax.Array:
    """Sum over one axis of each matrix: float32."""
    return lax.dot_general(
        left,
        right,
        (((of_left,), (of_right,)), ((), ())),
        precision=precision(right.dtype),
        preferred_element_type=jnp.float32,
    )


def _weight_first(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Do the same with the weight as left operand: XLA's CPU product packs the right one anew at each call.

    With AMX, whose kernels take a fifth of the time that packing does, this reads few rows' weights faster; without
    it the kernel is what takes the time, and it is slower. The barrier keeps XLA from swapping the operands back.
    """
    return lax.optimization_barrier(_product(weight, rows)).T


@functools.cache
def _cpu_multiplies_tiles() -> bool:
    """Whether this CPU has AMX for bfloat16."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text()


def embed(ids: jax.Array, table: jax.Array) -> jax.Array:
    """Return the rows `ids int32[B, T]` of `table [V, D]`; an id outside the table gives NaN."""

    ids = jnp.where(ids < 0, table.shape[0], ids)  # a negative index would wrap

    def look_up() -> jax.Array:
        return jnp.take(table, ids, axis=0, mode="fill", fill_value=jnp.nan)

    if table.dtype == jnp.float32 or jax.default_backend() != "cpu":
        return look_up()
    # XLA's CPU compiler converts a 16-bit table to float32 to gather from it and, in a loop, keeps that copy of it
    # all. It does not take the conversion out of a branch, where only the rows that are read are converted.
    return lax.cond(
        jnp.any(ids < table.shape[0]), look_up, lambda: jnp.full((*ids.shape, table.shape[1]), jnp.nan, table.dtype)
    )


def precision(dtype) -> lax.Precision | None:
    """Return the precision at which products of this dtype equal torch's: full float32, no TF32 or bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None
