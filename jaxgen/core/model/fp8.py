"""8-bit floats (e4m3) with a scale for each block of inputs, as in the FP8 checkpoints of Qwen and DeepSeek."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxgen.core.model import workarounds
from jaxgen.core.model.context import Context
from jaxgen.core.model.packed_experts import packed_product_of_experts
from jaxgen.core.model.packed_product import FEW_ROWS, each_row, look_up_packed, packed_product
from jaxgen.shapes import at_most

_RUN = 8  # columns per vector, as in `Grouped`


@flax.struct.dataclass
class Fp8:
    """The matrix `float8 * scale`, where each row has a scale for every `block` columns; the last block may be shorter.

    Attributes:
        values: uint8[F, D], the bits of float8_e4m3fn numbers.
        scales: float32[F, ceil(D / block)].
        block: the number of columns for each scale; static.
        dtype: the dtype of the represented matrix and of its rows; static.
    """

    title: ClassVar[str] = "FP8"
    tensors: ClassVar[Mapping[str, str]] = {"_values": "8-bit floats", "_scales": "scales of their blocks"}

    values: Any
    scales: Any
    block: int = flax.struct.field(pytree_node=False)
    dtype: Any = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [F, D]."""
        return self.values.shape

    @property
    def input_unit(self) -> int:
        """The inputs can be split across a mesh at multiples of this number."""
        return self.block if self.shape[-1] % self.block == 0 else self.shape[-1]

    def to_matrix(self) -> np.ndarray:
        """Return the matrix as a numpy array, float32[F, D]."""
        values = self.values.view(jnp.float8_e4m3fn).astype(np.float32)
        return values * np.repeat(self.scales, self.block, axis=-1)[..., : self.shape[-1]]

    def unpack(self) -> jax.Array:
        """Return the matrix as float32[F, D]."""
        values = lax.platform_dependent(self.values, cpu=_floats, default=_floats_of_platform)
        if self.shape[-1] % self.block:
            return values * jnp.repeat(self.scales, self.block, axis=-1)[..., : self.shape[-1]]
        return (values.reshape(*self.scales.shape, -1) * self.scales[..., None]).reshape(self.shape)

    def specs(self, spec: PartitionSpec) -> Fp8:
        """Return the `PartitionSpec` of each array, given the matrix's `spec`."""
        return Fp8(spec, spec, self.block, self.dtype)  # pyright: ignore

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Return `rows [n, D]` times the transposed matrix, as float32[n, F]."""
        in_lanes = _in_lanes if at_most(rows.shape[0], FEW_ROWS) and _step(self) else None
        return packed_product(rows, self, context, in_lanes, _as_sums if rows.shape[0] == 1 else None)

    def product_of_experts(self, rows: jax.Array, experts: jax.Array, context: Context) -> jax.Array:
        """Return each of the `rows [n, D]` times its own expert's transposed matrix, as float32[n, F].

        The arrays have a first axis for experts.
        """
        return packed_product_of_experts(rows, experts, self, context, _in_lanes if _step(self) else None)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows with the indices `ids int32[B, T]`, as `[B, T, D]`; an id outside [0, F) gives NaN."""
        return look_up_packed(ids, self)


def _floats_of_platform(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32)


def _floats(values: jax.Array) -> jax.Array:
    """Convert the bits of float8_e4m3fn numbers to float32, with few instructions of a CPU.

    Moved to the places of float16's exponent and mantissa, the bits are a float16 number that is smaller by `2 ** 8`.
    """
    wide = lax.bitcast_convert_type(values, jnp.int8).astype(jnp.int16)
    bits = (wide << np.int16(7)) & np.int16(-0x4001)  # the sign is also in the highest bit of the exponent
    is_nan = (wide & np.int16(0x7F)) == np.int16(0x7F)
    half = lax.bitcast_convert_type(jnp.where(is_nan, np.int16(0x7FFF), bits), jnp.float16)
    return half.astype(jnp.float32) * np.float32(256)


def _step(weight: Fp8) -> int:
    """Return how many columns each term adds up in a lane, or 0 if the columns do not fit lanes."""
    columns = weight.shape[-1]
    return next((size for size in (128, 64) if columns % size == 0 and weight.block % size == 0), 0)


def _in_lanes(rows: jax.Array, weight: Fp8) -> jax.Array:
    """Multiply few rows on a CPU, one by one; see `workarounds.in_lanes`."""
    pieces = rows.astype(jnp.float32).reshape(rows.shape[0], -1, _step(weight) // _RUN, _RUN)
    return each_row(_lane_product, (pieces,), weight)


def _lane_product(pieces: tuple[jax.Array], weight: Fp8) -> jax.Array:
    (row,) = pieces
    steps, runs, _ = row.shape
    values = weight.values.reshape(weight.shape[0], steps, runs, _RUN)
    terms = [_floats(values[:, :, run]) * row[None, :, run] for run in range(runs)]
    each = min(steps, weight.block // (runs * _RUN))
    scales = jnp.broadcast_to(weight.scales[:, :, None], (*weight.scales.shape, each))
    scales = scales.reshape(weight.shape[0], -1)[:, :steps, None]
    return workarounds.sum_lanes(functools.reduce(jnp.add, terms) * scales)


def _as_sums(row: jax.Array, weight: Fp8) -> jax.Array:
    return jnp.sum(weight.unpack() * row.astype(jnp.float32), axis=1)[None]
