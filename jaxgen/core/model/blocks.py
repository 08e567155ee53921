"""Weights in the block formats of GGUF files, as they are in the files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxgen.core.model.context import Context
from jaxgen.core.model.packed_experts import packed_product_of_experts
from jaxgen.core.model.packed_product import look_up_packed, packed_product

# The values of 4-bit codes: of IQ4_NL, and of MXFP4 (twice the number that a code represents)
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A block format: `size` bytes represent `count` adjacent columns of a row.

    `decode(blocks, xp)` maps `uint8[..., size]` to `float32[..., count]`, with `xp` being numpy or jax.numpy. In numpy,
    the results have the same bits as those of llama.cpp's package gguf.
    """

    count: int
    size: int
    decode: Callable[[Any, Any], Any]


def _bits_as(bits: Any, dtype: Any, xp: Any) -> Any:
    return bits.view(dtype) if xp is np else lax.bitcast_convert_type(bits, dtype)


def _half(blocks: Any, at: int, xp: Any) -> Any:
    """Return the float16 number at a byte of each block, as float32[..., 1]."""
    bits = blocks[..., at : at + 1].astype(np.uint16) | blocks[..., at + 1 : at + 2].astype(np.uint16) << np.uint16(8)
    return _bits_as(bits, np.float16, xp).astype(np.float32)


def _fields(data: Any, width: int, xp: Any, groups: int = 1) -> Any:
    """Split bytes into numbers of `width` bits: first the lowest bits of all bytes in a group, then the next ones."""
    size = data.shape[-1] // groups
    parts = [data[..., size * n : size * (n + 1)] for n in range(groups)]
    mask = np.uint8(2**width - 1)
    return xp.concatenate([part >> np.uint8(shift) & mask for part in parts for shift in range(0, 8, width)], -1)


def _bits(data: Any, xp: Any) -> Any:
    """Return the bits of adjacent bytes, the lowest of each byte first."""
    bits = xp.stack([data >> np.uint8(shift) & np.uint8(1) for shift in range(8)], -1)
    return bits.reshape(*data.shape[:-1], -1)


def _floats(codes: Any, minus: int = 0) -> Any:
    return codes.astype(np.float32) - np.float32(minus) if minus else codes.astype(np.float32)


def _fifth(codes: Any, bits: Any) -> Any:
    return codes | bits << np.uint8(4)


def _q4_0(b: Any, xp: Any) -> Any:
    return _half(b, 0, xp) * _floats(_fields(b[..., 2:18], 4, xp), 8)


def _q4_1(b: Any, xp: Any) -> Any:
    return _half(b, 0, xp) * _floats(_fields(b[..., 4:20], 4, xp)) + _half(b, 2, xp)


def _q8_0(b: Any, xp: Any) -> Any:
    return _half(b, 0, xp) * _bits_as(b[..., 2:34], np.dtype("i1"), xp).astype(np.float32)


def _q5_0(b: Any, xp: Any) -> Any:
    codes = _fifth(_fields(b[..., 6:22], 4, xp), _bits(b[..., 2:6], xp))
    return _half(b, 0, xp) * _floats(codes, 16)


def _q5_1(b: Any, xp: Any) -> Any:
    codes = _fifth(_fields(b[..., 8:24], 4, xp), _bits(b[..., 4:8], xp))
    return _half(b, 0, xp) * _floats(codes) + _half(b, 2, xp)


def _iq4_nl(b: Any, xp: Any) -> Any:
    return _half(b, 0, xp) * xp.take(xp.asarray(_IQ4_NL), _fields(b[..., 2:18], 4, xp).astype(np.int32))


def _mxfp4(b: Any, xp: Any) -> Any:
    exponents = b[..., :1].astype(np.uint32)
    tiny = np.uint32(0x00200000) << exponents  # below the smallest normal number
    normal = (exponents - np.uint32(1)) << np.uint32(23)
    scales = _bits_as(xp.where(exponents < np.uint32(2), tiny, normal), np.float32, xp)
    return scales * xp.take(xp.asarray(_MXFP4), _fields(b[..., 1:17], 4, xp).astype(np.int32))


def _q2_k(b: Any, xp: Any) -> Any:
    scales = _half(b, 80, xp) * _floats(b[..., :16] & np.uint8(15))
    offsets = _half(b, 82, xp) * _floats(b[..., :16] >> np.uint8(4))
    codes = _fields(b[..., 16:80], 2, xp, groups=2)
    return scales.repeat(16, -1) * _floats(codes) - offsets.repeat(16, -1)


def _q3_k(b: Any, xp: Any) -> Any:
    scales = _fifth(_fields(b[..., 96:104], 4, xp), _fields(b[..., 104:108], 2, xp))
    codes = _fields(b[..., 32:96], 2, xp, groups=2) | _fields(b[..., :32], 1, xp) << np.uint8(2)
    return (_half(b, 108, xp) * _floats(scales, 32)).repeat(16, -1) * _floats(codes, 4)


def _scales_and_offsets(b: Any, xp: Any) -> tuple[Any, Any]:
    """Return the scales and offsets of 32 columns each in Q4_K and Q5_K, as float32[..., 256]."""
    first, second, third = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    six, four, high = np.uint8(63), np.uint8(15), np.uint8(6)
    scales = xp.concatenate([first & six, _fifth(third & four, first >> high)], -1)
    offsets = xp.concatenate([second & six, _fifth(third >> np.uint8(4), second >> high)], -1)
    return (
        (_half(b, 0, xp) * _floats(scales)).repeat(32, -1),
        (_half(b, 2, xp) * _floats(offsets)).repeat(32, -1),
    )


def _q4_k(b: Any, xp: Any) -> Any:
    scales, offsets = _scales_and_offsets(b, xp)
    return scales * _floats(_fields(b[..., 16:144], 4, xp, groups=4)) - offsets


def _q5_k(b: Any, xp: Any) -> Any:
    scales, offsets = _scales_and_offsets(b, xp)
    codes = _fifth(_fields(b[..., 48:176], 4, xp, groups=4), _fields(b[..., 16:48], 1, xp))
    return scales * _floats(codes) - offsets


def _q6_k(b: Any, xp: Any) -> Any:
    codes = _fifth(_fields(b[..., :128], 4, xp, groups=2), _fields(b[..., 128:192], 2, xp, groups=2))
    scales = _bits_as(b[..., 192:208], np.dtype("i1"), xp).astype(np.float32)
    return (_half(b, 208, xp) * scales).repeat(16, -1) * _floats(codes, 32)


FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "IQ4_NL": BlockFormat(32, 18, _iq4_nl),
    "MXFP4": BlockFormat(32, 17, _mxfp4),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
}


@flax.struct.dataclass
class Blocks:
    """A matrix in a GGUF block format.

    Attributes:
        data: uint8[F, bytes per row]; with experts, uint8[E, F, bytes per row].
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

    @property
    def input_unit(self) -> int:
        """The inputs can be split at multiples of this number: the columns of a block."""
        return FORMATS[self.format].count

    def to_matrix(self) -> np.ndarray:
        """Return the matrix as a numpy array, float32[F, D]."""
        return self._decoded(np.asarray(self.data), np)

    def _decoded(self, data: Any, xp: Any) -> Any:
        """Return the numbers, as float32[..., D], that bytes uint8[..., bytes per row] represent."""
        form = FORMATS[self.format]
        blocks = data.reshape(*data.shape[:-1], -1, form.size)
        return form.decode(blocks, xp).reshape(*data.shape[:-1], -1)

    def specs(self, spec: PartitionSpec) -> Blocks:
        """Return the `PartitionSpec` of each array, given the matrix's `spec`."""
        return Blocks(spec, self.format, self.dtype)  # pyright: ignore

    def unpack(self) -> jax.Array:
        """Return the matrix as float32[F, D]."""
        return self._decoded(self.data, jnp)

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Return `rows [n, D]` times the transposed matrix, as float32[n, F]."""
        return packed_product(rows, self, context)

    def product_of_experts(self, rows: jax.Array, experts: jax.Array, context: Context) -> jax.Array:
        """Return each of the `rows [n, D]` times its own expert's transposed matrix, as float32[n, F]."""
        return packed_product_of_experts(rows, experts, self, context, None)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows with the indices `ids int32[B, T]`, as `[B, T, D]`; an id outside [0, F) gives NaN."""
        return look_up_packed(ids, self)
