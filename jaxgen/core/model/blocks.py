"""Weights in the block formats of GGUF files that `Grouped` cannot represent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxgen.core.model.context import Context
from jaxgen.core.model.weights import look_up, product


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A block format: `size` bytes represent `count` adjacent columns of a row.

    `decode(blocks, xp)` maps `uint8[..., size]` to `float32[..., count]`, with `xp` being numpy or jax.numpy.
    """

    count: int
    size: int
    decode: Callable[[Any, Any], Any]


def _half(blocks: Any, at: int, xp: Any) -> Any:
    """Return the float16 number at a byte of each block, as float32[..., 1]."""
    bits = blocks[..., at : at + 1].astype(np.uint16) | blocks[..., at + 1 : at + 2].astype(np.uint16) << np.uint16(8)
    half = bits.view(np.float16) if xp is np else jax.lax.bitcast_convert_type(bits, jnp.float16)
    return half.astype(np.float32)


def _q6_k(b: Any, xp: Any) -> Any:
    low = xp.concatenate([b[..., 64 * n + 32 * (j % 2) :][..., :32] >> 4 * (j // 2) & 15 for n in (0, 1) for j in range(4)], -1)
    high = xp.concatenate([b[..., 128 + 32 * n :][..., :32] >> 2 * j & 3 for n in (0, 1) for j in range(4)], -1)
    scales = b[..., 192:208].view(np.int8) if xp is np else jax.lax.bitcast_convert_type(b[..., 192:208], jnp.int8)
    q = (low | high << 4).astype(np.float32) - np.float32(32)
    return (_half(b, 208, xp) * scales.astype(np.float32)).repeat(16, -1) * q


FORMATS: dict[str, BlockFormat] = {"Q6_K": BlockFormat(256, 210, _q6_k)}


@flax.struct.dataclass
class Blocks:
    """A matrix in a GGUF block format.

    Attributes:
        data: uint8[F, bytes per row].
        format: a key of `FORMATS`; static.
        dtype: the dtype of the represented matrix and of its rows; static.
    """

    title: ClassVar[str] = "GGUF"
    tensors: ClassVar[Mapping[str, str]] = {"_data": "blocks"}

    data: Any
    format: str = flax.struct.field(pytree_node=False)
    dtype: Any = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [F, D]."""
        form = FORMATS[self.format]
        return (*self.data.shape[:-1], self.data.shape[-1] // form.size * form.count)

    def to_matrix(self) -> np.ndarray:
        """Return the matrix as a numpy array, float32[F, D]."""
        return self._matrix(np)

    def _matrix(self, xp: Any) -> Any:
        form = FORMATS[self.format]
        blocks = self.data.reshape(*self.data.shape[:-1], -1, form.size)
        return form.decode(blocks, xp).reshape(self.shape)

    def specs(self, spec: PartitionSpec) -> Blocks:
        """Return the `PartitionSpec` of each array, given the matrix's `spec`."""
        return Blocks(spec, self.format, self.dtype)  # pyright: ignore

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Return `rows [n, D]` times the transposed matrix, as float32[n, F]."""
        return product(rows, self._matrix(jnp).astype(rows.dtype), context)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows with the indices `ids int32[B, T]`, as `[B, T, D]`; an id outside [0, F) gives NaN."""
        return look_up(ids, self._matrix(jnp).astype(self.dtype))
