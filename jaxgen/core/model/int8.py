"""8-bit weights with one scale per output channel."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxgen.control import alike
from jaxgen.core.model import workarounds
from jaxgen.core.model.context import Context
from jaxgen.core.model.expert_product import product_of_experts
from jaxgen.core.model.weights import product
from jaxgen.errors import InputError
from jaxgen.shapes import at_most

LARGEST = 127  # -128 is not used, so that negation is exact
# The largest number of rows that a CPU converts from 16-bit floats to pairs of 8-bit numbers before a product
_FEW_ROWS = 8
# Since jax 0.11, a product on a CPU takes four times as long if the left operand has more than this many 8-bit numbers.
_LARGEST_LEFT = 2**24 if workarounds.NEW_CPU_PRODUCTS else math.inf


@flax.struct.dataclass
class Int8:
    """The matrix `values * scales[:, None]`.

    Usually, the values are converted to the dtype of the rows, without rounding. For 3 to 8 rows of 16-bit floats on a
    CPU (1 to 8 rows if it has AMX), this conversion would take longer than the product. Instead, the rows are converted
    to 8 bits. Each row becomes one scale and, per channel, a pair of 8-bit numbers. A pair has 15 bits and is more
    precise than bfloat16.

    Attributes:
        values: int8[F, D], from -127 to 127.
        scales: float32[F].
        dtype: the dtype of the represented matrix and of its rows; static.
    """

    name: ClassVar[str] = "int8"
    title: ClassVar[str] = "8-bit"
    tensors: ClassVar[dict[str, str]] = {"": "numbers", "_scale": "one scale for each of their rows"}

    values: jax.Array
    scales: jax.Array
    dtype: Any = flax.struct.field(pytree_node=False)

    @classmethod
    def from_matrix(cls, matrix: np.ndarray, dtype: Any) -> Int8:
        """Quantize a matrix by rounding; the largest absolute value of each row becomes `LARGEST`."""
        scales = np.abs(matrix).max(axis=1) / np.float32(LARGEST)
        if not np.isfinite(scales).all():
            raise InputError("is not finite, so 8-bit numbers cannot represent it: do not quantize")
        values = np.rint(matrix / np.where(scales == 0, 1, scales)[:, None])
        return cls(values.astype(np.int8), scales, dtype)  # pyright: ignore

    def to_matrix(self) -> np.ndarray:
        """Return the matrix as a numpy array, float32[F, D]."""
        return np.asarray(self.values, np.float32) * self.scales[:, None]  # pyright: ignore

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [F, D]."""
        return self.values.shape

    def specs(self, spec: PartitionSpec) -> Int8:
        """Return the `PartitionSpec` of each array, given the matrix's `spec`."""
        return Int8(spec, PartitionSpec(*spec[:-1]), self.dtype)  # pyright: ignore

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Return `rows [n, D]` times the transposed matrix, as float32[n, F]."""
        out: jax.Array = _product(*alike(rows, self.values), context.divided, context.portable)  # pyright: ignore[reportAssignmentType]
        return out * self.scales[None, :]

    def product_of_experts(self, rows: jax.Array, experts: jax.Array, context: Context) -> jax.Array:
        """Return each of the `rows [n, D]` times its own expert's transposed matrix, as float32[n, F].

        The shapes of the arrays are [E, F, D] and [E, F].
        """
        last = self.values.shape[0] - 1
        return product_of_experts(rows, experts, self.values, context) * self.scales[jnp.clip(experts, 0, last)]

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows with the indices `ids int32[B, T]`, as `[B, T, D]`; an id outside [0, F) gives NaN."""
        scales = jnp.where((ids >= 0) & (ids < self.shape[0]), self.scales[ids], jnp.nan)
        return (self.values[ids].astype(jnp.float32) * scales[..., None]).astype(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(rows: jax.Array, values: jax.Array, divided: bool | None, portable: bool) -> jax.Array:
    """Return `rows [n, D]` times the transposed `values int8[F, D]`, as float32[n, F]; differentiable in `rows`."""
    converted = functools.partial(_converted, divided=divided)
    if workarounds.multiplies_in_lanes(rows, "amx_int8", divided, portable):
        on_cpu = workarounds.in_lanes
    elif rows.dtype == jnp.float32 or not at_most(rows.shape[0], _FEW_ROWS):
        on_cpu = functools.partial(workarounds.in_branch, converted)
    else:
        on_cpu = functools.partial(_split, values_first=not divided and values.size <= _LARGEST_LEFT)
    return lax.platform_dependent(rows, values, cpu=on_cpu, default=converted)


def _keep_operands(rows: jax.Array, values: jax.Array, divided: bool | None, portable: bool):
    return _product(rows, values, divided, portable), (values, rows[:0])


def _gradients(divided: bool | None, portable: bool, operands: tuple[jax.Array, jax.Array], change: jax.Array):
    """Differentiate with respect to the rows, in the rows' dtype; the integer `values` have no gradient."""
    values, like = operands
    to_rows = product(change.astype(like.dtype), values.astype(like.dtype).T, Context(divided))
    return to_rows.astype(like.dtype), np.zeros(values.shape, jax.dtypes.float0)


_product.defvjp(_keep_operands, _gradients)


def _converted(rows: jax.Array, values: jax.Array, divided: bool | None) -> jax.Array:
    return product(rows, values.astype(rows.dtype), Context(divided))


def _split(rows: jax.Array, values: jax.Array, values_first: bool) -> jax.Array:
    """Multiply in 8 bits. Each number of a scaled row is split into an integer and a multiple of 1/254.

    With `values_first`, `values` is the left operand.
    """
    rows = rows.astype(jnp.float32)
    scale = jnp.max(jnp.abs(rows), axis=1, keepdims=True) / LARGEST
    scaled = rows / jnp.where(scale == 0, 1, scale)
    whole = jnp.round(scaled)
    pairs = jnp.concatenate([whole, jnp.round((scaled - whole) * 254)]).astype(jnp.int8)
    sums = workarounds.weight_first(_contract, pairs, values) if values_first else _contract(pairs, values)
    whole, parts = jnp.split(sums.astype(jnp.float32), 2)
    return (whole + parts / 254) * scale


def _contract(left: jax.Array, right: jax.Array) -> jax.Array:
    """Contract the last axes of both operands; the result is int32."""
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
