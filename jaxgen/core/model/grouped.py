"""Weights of 4 or 8 bits with a scale for each group of inputs, as in GPTQ, AWQ, compressed-tensors and GGUF."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxgen.core.model import workarounds
from jaxgen.core.model.context import Context
from jaxgen.core.model.packed_product import packed_product
from jaxgen.errors import InputError

_SUFFIXES = {
    "words": "packed codes",
    "scales": "one scale for each group of inputs",
    "zeros": "one zero point or offset for each group of inputs",
    "order": "the input of each column",
}
_RUN = 8  # the length of a run is at most this number, which is a vector of float32 numbers with AVX2
_MIDDLE = {4: 8, 8: 0}  # the number that the stored code of `2 ** (bits - 1)` represents


@flax.struct.dataclass
class Grouped:
    """A matrix of 4- or 8-bit codes. Each group of adjacent columns of a row has a scale.

    An entry is `scale * (code - zero)` with integer zeros, `scale * code + zero` with zeros of floats, and
    `scale * (code - 2 ** (bits - 1))` without zeros.

    Attributes:
        words: the codes, as `pack` returns them: uint32[F, D / 8] for 4 bits, and int8[F, D] for 8 bits.
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
        """Pack codes `uint8[n, D]`, one per byte. Every row is packed on its own.

        Codes of 8 bits become `int8[n, D]`, the codes minus 128. Codes of 4 bits become `uint32[n, D / 8]`: the codes
        of a row are divided into blocks of eight runs, where a run has the length `run_length(D)`. Word i of a block
        contains code i of each run, from the lowest bits to the highest. Adjacent words therefore unpack to adjacent
        columns.
        """
        if bits == 8:
            return (codes ^ np.uint8(128)).view(np.int8)
        run = run_length(codes.shape[-1])
        runs = codes.reshape(*codes.shape[:-1], -1, 8, run).astype(np.uint32)
        words = np.bitwise_or.reduce(runs << (np.arange(8, dtype=np.uint32) * np.uint32(4))[:, None], axis=-2)
        return words.reshape(*codes.shape[:-1], -1)

    @property
    def tensors(self) -> Mapping[str, str]:
        """The suffix and the description of each array, in the order of `jax.tree.leaves`."""
        return {f"_{name}": text for name, text in _SUFFIXES.items() if getattr(self, name) is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [F, D]."""
        return (*self.words.shape[:-1], self.words.shape[-1] * (8 if self.bits == 4 else 1))

    def to_matrix(self) -> np.ndarray:
        """Return the matrix as a numpy array, float32[F, D]."""
        values = self._columns(np)
        return values if self.order is None else values[..., np.argsort(self.order)]

    def unpack(self) -> jax.Array:
        """Return the matrix as float32[F, D], with the columns in their stored order."""
        return self._columns(jnp)

    def _columns(self, xp: Any) -> Any:
        """Return the stored columns, as float32[F, D]."""
        codes = self.words
        if self.bits == 4:
            shifts = (np.arange(8, dtype=np.uint32) * np.uint32(4))[:, None]
            words = codes.reshape(*codes.shape[:-1], -1, 1, run_length(self.shape[-1]))
            codes = ((words >> shifts.reshape((1,) * (words.ndim - 2) + (8, 1))) & np.uint32(15)).astype(np.int32)
        codes = codes.reshape(*self.scales.shape, -1).astype(np.float32)
        scales = self.scales.astype(np.float32)[..., None]
        stored = np.float32(2 ** (self.bits - 1) - _MIDDLE[self.bits])  # what was subtracted from the codes
        if self.zeros is None:
            values = scales * (codes - np.float32(_MIDDLE[self.bits]))
        elif jnp.issubdtype(self.zeros.dtype, jnp.integer):
            values = scales * (codes + (stored - self.zeros.astype(np.float32)[..., None]))
        else:
            values = scales * (codes + stored) + self.zeros.astype(np.float32)[..., None]
        return values.reshape(self.shape)

    def specs(self, spec: PartitionSpec) -> Grouped:
        """Return the `PartitionSpec` of each array, given the matrix's `spec`."""
        zeros, order = (None if x is None else y for x, y in ((self.zeros, spec), (self.order, PartitionSpec())))
        return Grouped(spec, spec, zeros, order, self.bits, self.dtype)  # pyright: ignore

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Return `rows [n, D]` times the transposed matrix, as float32[n, F]."""
        if self.order is not None:
            rows = rows[:, self.order]
        weight = self.replace(order=None)  # pyright: ignore[reportAttributeAccessIssue]
        is_row = rows.shape[0] == 1
        in_lanes = _in_lanes if is_row and _fits_lanes(weight) else None
        return packed_product(rows, weight, context, in_lanes, _as_sums if in_lanes else None)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows with the indices `ids int32[B, T]`, as `[B, T, D]`; an id outside [0, F) gives NaN."""
        flat = jnp.clip(ids.reshape(-1), 0, self.shape[0] - 1)
        arrays = self.replace(order=None)  # pyright: ignore[reportAttributeAccessIssue]
        found = jax.tree.map(lambda array: array[flat], arrays).unpack().reshape(*ids.shape, -1)
        if self.order is not None:
            found = found[..., jnp.argsort(self.order)]
        is_row = (ids >= 0) & (ids < self.shape[0])
        return jnp.where(is_row[..., None], found, jnp.nan).astype(self.dtype)


def run_length(columns: int) -> int:
    """Return the length of the runs into which `Grouped.pack` divides the 4-bit codes of a row."""
    return math.gcd(columns // 8, _RUN)


def check_groups(columns: int, group: int) -> None:
    """Raise an `InputError` if groups of this many columns do not divide a row."""
    if group < 1 or columns % group:
        raise InputError(f"has {columns} columns, which groups of {group} do not divide")


# --- Products with one row --------------------------------------------------------------------------------------------


def _step(columns: int) -> int:
    """Return how many columns each lane's term adds up: at most 128, or 0 if the columns do not fit lanes."""
    return next((size for size in (128, 64) if columns % size == 0), 0)


def _fits_lanes(weight: Grouped) -> bool:
    """Return True if one row can be multiplied in vector lanes: groups divide steps, or steps divide groups."""
    columns = weight.shape[-1]
    group, step = columns // weight.scales.shape[-1], _step(columns)
    return step > 0 and group % _RUN == 0 and (step % group == 0 or group % step == 0)


def _terms(pieces: Any, weight: Grouped) -> jax.Array:
    """Return sums of products, as float32[F, steps, 8], whose sum over the last two axes is the product.

    `pieces` are what `_pieces` returns for the row.
    """
    row, sums = pieces
    features, columns = weight.shape
    groups = weight.scales.shape[-1]
    steps, width = row.shape[0], row.shape[1] * _RUN
    parts = max(1, width * groups // columns)  # groups of a step

    def of_step(array: jax.Array) -> jax.Array:
        array = array.astype(jnp.float32).reshape(features, -1, parts)
        return jnp.broadcast_to(array[:, :, None], (features, array.shape[1], steps // array.shape[1], parts)).reshape(
            features, steps, parts
        )

    scales = of_step(weight.scales)
    zeros = None if weight.zeros is None else of_step(weight.zeros)
    codes = _codes(weight, steps)
    each = len(codes) // parts
    total = None
    for part in range(parts):
        out = None
        for place in range(part * each, (part + 1) * each):
            product = codes[place] * row[None, :, place]
            out = product if out is None else out + product
        scale, offset = scales[:, :, part, None], sums[None, :, part]
        if zeros is None:
            out = scale * (out if weight.bits == 8 else out - np.float32(8) * offset)
        elif jnp.issubdtype(weight.zeros.dtype, jnp.integer):
            out = scale * (out + (np.float32(0 if weight.bits == 4 else 128) - zeros[:, :, part, None]) * offset)
        elif weight.bits == 4:
            out = scale * out + zeros[:, :, part, None] * offset
        else:
            out = scale * (out + np.float32(128) * offset) + zeros[:, :, part, None] * offset
        total = out if total is None else total + out
    return total  # pyright: ignore[reportReturnType]


def _codes(weight: Grouped, steps: int) -> list[jax.Array]:
    """Return the codes of every run of a step, each as float32[F, steps, 8]."""
    features = weight.shape[0]
    if weight.bits == 8:
        words = weight.words.reshape(features, steps, -1, _RUN)
        return [words[:, :, place].astype(jnp.float32) for place in range(words.shape[2])]
    words = weight.words.reshape(features, steps, -1, _RUN)
    return [
        _nibble(words[:, :, block], run).astype(jnp.int32).astype(jnp.float32)
        for block in range(words.shape[2])
        for run in range(8)
    ]


def _nibble(words: jax.Array, run: int) -> jax.Array:
    """Return the codes of one run, times `2 ** _shift(run)`."""
    return words & np.uint32(15 << 4 * run) if run < 7 else words >> np.uint32(28)


def _pieces(row: jax.Array, weight: Grouped) -> tuple[jax.Array, jax.Array]:
    """Cut `row [1, D]` into runs.

    Returns:
        The numbers that are multiplied with what `_codes` returns, as float32[steps, runs, 8], and their sums over each
        group's runs, as float32[steps, parts, 8].
    """
    columns = weight.shape[-1]
    width = _step(columns)
    runs = row.astype(jnp.float32).reshape(-1, width // _RUN, _RUN)
    parts = max(1, width * weight.scales.shape[-1] // columns)
    sums = jnp.sum(runs.reshape(runs.shape[0], parts, -1, _RUN), axis=2)
    if weight.bits == 4:
        factors = np.array([2.0 ** (-4 * run) if run < 7 else 1.0 for run in range(8)], np.float32)
        runs = runs * np.tile(factors, width // 64)[None, :, None]
    return runs, sums


def _in_lanes(row: jax.Array, weight: Grouped) -> jax.Array:
    """Multiply one row on a CPU; see `workarounds.in_lanes`. Codes are read once and never stored as floats."""
    # The row's pieces are stored outside of the branch: otherwise, they would be computed again for each output.
    runs, sums = _pieces(row, weight)
    return workarounds.in_branch(_lane_product, runs, sums, weight)


def _lane_product(runs: jax.Array, sums: jax.Array, weight: Grouped) -> jax.Array:
    return workarounds.sum_lanes(_terms((runs, sums), weight))[None]


def _as_sums(row: jax.Array, weight: Grouped) -> jax.Array:
    """Multiply one row on a GPU, in one kernel; see `workarounds.row_sums`."""
    return jnp.sum(_terms(_pieces(row, weight), weight), axis=(1, 2))[None]
