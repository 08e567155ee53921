"""Weights of 4 or 8 bits with a scale for each group of inputs, as in GPTQ, AWQ, compressed-tensors and GGUF."""

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
from jaxgen.errors import InputError

_SUFFIXES = {
    "words": "packed codes",
    "scales": "one scale for each group of inputs",
    "zeros": "one zero point or offset for each group of inputs",
    "order": "the input of each column",
}


@flax.struct.dataclass
class Grouped:
    """A matrix of 4- or 8-bit codes. Each group of adjacent columns of a row has a scale.

    An entry is `scale * (code - zero)` with integer zeros, `scale * code + zero` with zeros of floats, and
    `scale * (code - 2 ** (bits - 1))` without zeros.

    Attributes:
        words: uint32[F, D * bits / 32], the codes; see `pack`.
        scales: float[F, G], where each group has D / G columns.
        zeros: uint8[F, G] or float[F, G], or None.
        order: int32[D], the input that belongs to each column, or None if column i belongs to input i.
        bits: 4 or 8; static.
        dtype: the dtype of the represented matrix and of its rows; static.
    """

    title: ClassVar[str] = "packed"

    words: Any
    scales: Any
    zeros: Any
    order: Any
    bits: int = flax.struct.field(pytree_node=False)
    dtype: Any = flax.struct.field(pytree_node=False)

    @staticmethod
    def pack(codes: np.ndarray, bits: int) -> np.ndarray:
        """Pack codes `uint8[n, D]`, one per byte, into words `uint32[n, D * bits / 32]`; the lowest bits come first."""
        per_word = 32 // bits
        groups = codes.reshape(*codes.shape[:-1], -1, per_word).astype(np.uint32)
        shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
        return np.bitwise_or.reduce(groups << shifts, axis=-1)

    @property
    def tensors(self) -> Mapping[str, str]:
        """The suffix and the description of each array, in the order of `jax.tree.leaves`."""
        return {f"_{name}": text for name, text in _SUFFIXES.items() if getattr(self, name) is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [F, D]."""
        return (*self.words.shape[:-1], self.words.shape[-1] * 32 // self.bits)

    def to_matrix(self) -> np.ndarray:
        """Return the matrix as a numpy array, float32[F, D]."""
        return self._matrix(np)

    def _matrix(self, xp: Any) -> Any:
        shifts = np.arange(32 // self.bits, dtype=np.uint32) * np.uint32(self.bits)
        codes = (self.words[..., None] >> shifts) & np.uint32(2**self.bits - 1)
        codes = codes.reshape(*self.scales.shape, -1).astype(np.float32)
        scales = self.scales.astype(np.float32)[..., None]
        if self.zeros is None:
            values = scales * (codes - np.float32(2 ** (self.bits - 1)))
        elif jnp.issubdtype(self.zeros.dtype, jnp.integer):
            values = scales * (codes - self.zeros.astype(np.float32)[..., None])
        else:
            values = scales * codes + self.zeros.astype(np.float32)[..., None]
        values = values.reshape(self.shape)
        return values if self.order is None else values[..., xp.argsort(self.order)]

    def specs(self, spec: PartitionSpec) -> Grouped:
        """Return the `PartitionSpec` of each array, given the matrix's `spec`."""
        zeros, order = (None if x is None else y for x, y in ((self.zeros, spec), (self.order, PartitionSpec())))
        return Grouped(spec, spec, zeros, order, self.bits, self.dtype)  # pyright: ignore

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Return `rows [n, D]` times the transposed matrix, as float32[n, F]."""
        return product(rows, self._matrix(jnp).astype(rows.dtype), context)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows with the indices `ids int32[B, T]`, as `[B, T, D]`; an id outside [0, F) gives NaN."""
        return look_up(ids, self._matrix(jnp).astype(self.dtype))


def check_groups(columns: int, group: int) -> None:
    """Raise an `InputError` if groups of this many columns do not divide a row."""
    if group < 1 or columns % group:
        raise InputError(f"has {columns} columns, which groups of {group} do not divide")
