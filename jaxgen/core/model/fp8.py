"""8-bit floats (e4m3) with a scale for each block of inputs, as in the FP8 checkpoints of Qwen and DeepSeek."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxgen.core.model.context import Context
from jaxgen.core.model.weights import look_up, product


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

    def to_matrix(self) -> np.ndarray:
        """Return the matrix as a numpy array, float32[F, D]."""
        values = self.values.view(jnp.float8_e4m3fn).astype(np.float32)
        return values * np.repeat(self.scales, self.block, axis=-1)[..., : self.shape[-1]]

    def _matrix(self) -> jax.Array:
        values = jax.lax.bitcast_convert_type(self.values, jnp.float8_e4m3fn).astype(jnp.float32)
        return values * jnp.repeat(self.scales, self.block, axis=-1)[..., : self.shape[-1]]

    def specs(self, spec: PartitionSpec) -> Fp8:
        """Return the `PartitionSpec` of each array, given the matrix's `spec`."""
        return Fp8(spec, spec, self.block, self.dtype)  # pyright: ignore

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Return `rows [n, D]` times the transposed matrix, as float32[n, F]."""
        return product(rows, self._matrix().astype(rows.dtype), context)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows with the indices `ids int32[B, T]`, as `[B, T, D]`; an id outside [0, F) gives NaN."""
        return look_up(ids, self._matrix().astype(self.dtype))
