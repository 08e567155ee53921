"""Weights of 4 or 8 bits with a scale for each group of inputs, as in GPTQ, AWQ, compressed-tensors and GGUF."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxgen.core.model import workarounds
from jaxgen.core.model.context import Context
from jaxgen.core.model.packed_experts import packed_product_of_experts
from jaxgen.core.model.packed_product import FEW_ROWS, each_row, look_up_packed, packed_product
from jaxgen.errors import InputError
from jaxgen.shapes import at_most

_SUFFIXES = {
    "words": "packed codes",
    "scales": "one scale for each group of inputs",
    "zeros": "one zero point or offset for each group of inputs",
    "order": "the input of each column",
}
_RUN = 8  # the length of a run is at most this number, which is a vector of float32 numbers with AVX2
_MIDDLE = {4: 8, 8: 0}  # the stored number for the code `2 ** (bits - 1)`


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
        runs = codes.reshape(*codes.shape[:-1], -1, 8, run_length(codes.shape[-1]))
        words = np.zeros((*runs.shape[:-2], runs.shape[-1]), np.uint32)
        for run in range(8):
            words |= runs[..., run, :].astype(np.uint32) << np.uint32(4 * run)
        return words.reshape(*codes.shape[:-1], -1)

    @property
    def tensors(self) -> Mapping[str, str]:
        """The suffix and the description of each array, in the order of `jax.tree.leaves`."""
        return {f"_{name}": text for name, text in _SUFFIXES.items() if getattr(self, name) is not None}

    @property
    def has_integer_zeros(self) -> bool:
        """True if the zeros are zero points, and False if they are offsets or None."""
        return self.zeros is not None and jnp.issubdtype(self.zeros.dtype, jnp.integer)

    @property
    def input_unit(self) -> int:
        """The inputs can be split across a mesh at multiples of this number."""
        columns = self.shape[-1]
        if self.order is not None:
            return columns
        packed = 8 * run_length(columns) if self.bits == 4 else 1
        return math.lcm(packed, columns // self.scales.shape[-1])

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
        scales, zeros = (None if x is None else x.astype(np.float32)[..., None] for x in (self.scales, self.zeros))
        return _entries(codes, scales, zeros, self).reshape(self.shape)

    def specs(self, spec: PartitionSpec) -> Grouped:
        """Return the `PartitionSpec` of each array, given the matrix's `spec`."""
        zeros, order = (None if x is None else y for x, y in ((self.zeros, spec), (self.order, PartitionSpec())))
        return Grouped(spec, spec, zeros, order, self.bits, self.dtype)  # pyright: ignore

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Return `rows [n, D]` times the transposed matrix, as float32[n, F]."""
        if self.order is not None:
            rows = rows[:, self.order]
        in_lanes = at_most(rows.shape[0], FEW_ROWS) and _fits_steps(self, _step(self.shape[-1]))
        as_sums = rows.shape[0] == 1 and _fits_steps(self, 8 * _RUN)
        forms = _in_lanes if in_lanes else None, _as_sums if as_sums else None
        return packed_product(rows, self._in_stored_order(), context, *forms)

    def product_of_experts(self, rows: jax.Array, experts: jax.Array, context: Context) -> jax.Array:
        """Return each of the `rows [n, D]` times its own expert's transposed matrix, as float32[n, F].

        The arrays have a first axis for experts, except `order`, which all experts share.
        """
        if self.order is not None:
            rows = rows[:, self.order]
        in_lanes = _in_lanes if _fits_steps(self, _step(self.shape[-1])) else None
        return packed_product_of_experts(rows, experts, self._in_stored_order(), context, in_lanes)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows with the indices `ids int32[B, T]`, as `[B, T, D]`; an id outside [0, F) gives NaN."""
        found = look_up_packed(ids, self._in_stored_order())
        return found if self.order is None else found[..., jnp.argsort(self.order)]

    def _in_stored_order(self) -> Grouped:
        return Grouped(self.words, self.scales, self.zeros, None, self.bits, self.dtype)  # pyright: ignore


def run_length(columns: int) -> int:
    """Return the length of the runs into which `Grouped.pack` divides the 4-bit codes of a row."""
    return math.gcd(columns // 8, _RUN)


def _subtracted(bits: int) -> int:
    """Return the number that `Grouped.pack` subtracts from the codes."""
    return 2 ** (bits - 1) - _MIDDLE[bits]


def _entries(codes: Any, scales: Any, zeros: Any, weight: Grouped) -> Any:
    """Return the entries with these stored codes, scales and zeros, which are float32 arrays of the same rank."""
    if zeros is None:
        return scales * (codes - np.float32(_MIDDLE[weight.bits]))
    subtracted = np.float32(_subtracted(weight.bits))
    if weight.has_integer_zeros:
        return scales * (codes + (subtracted - zeros))
    return scales * (codes + subtracted) + zeros


def check_groups(columns: int, group: int) -> None:
    """Raise an `InputError` if groups of this many columns do not divide a row."""
    if group < 1 or columns % group:
        raise InputError(f"has {columns} columns, which groups of {group} do not divide")


# --- Products with few rows -------------------------------------------------------------------------------------------


def _step(columns: int) -> int:
    """Return how many columns each term adds up in a lane: at most 128, or 0 if the columns do not fit lanes."""
    return next((size for size in (128, 64) if columns % size == 0), 0)


def _fits_steps(weight: Grouped, step: int) -> bool:
    """Return True if the columns can be added up in steps of this many: groups divide steps, or steps divide groups."""
    columns = weight.shape[-1]
    group = columns // weight.scales.shape[-1]
    return step > 0 and columns % step == 0 and group % _RUN == 0 and (step % group == 0 or group % step == 0)


def _of_steps(array: jax.Array, steps: int) -> list[jax.Array]:
    """Return the scales or zeros `array [F, G]` of each part of a step; each part is float32[F, steps, 1]."""
    features, groups = array.shape
    parts = max(1, groups // steps)
    array = array.astype(jnp.float32).reshape(features, -1, 1, parts)
    array = jnp.broadcast_to(array, (features, array.shape[1], steps * parts // groups, parts))
    array = array.reshape(features, steps, parts)
    return [array[:, :, part, None] for part in range(parts)]


def _terms(weight: Grouped, steps: int, multiply: Callable, sums: Callable) -> jax.Array:
    """Return sums of products, as float32[F, steps, 8], whose sum over the last two axes is the product.

    Args:
        weight: the matrix.
        steps: the number of steps into which its columns are cut.
        multiply: a function of the number of a run in a step, and of its words, float32[F, steps, 8]. It returns the
            products of the run's codes with the row.
        sums: a function of the number of a part. It returns the sums of the row over the runs of this part.
    """
    scales = _of_steps(weight.scales, steps)
    zeros = None if weight.zeros is None else _of_steps(weight.zeros, steps)
    words = weight.words.reshape(weight.shape[0], steps, -1, _RUN)
    per_word = 8 if weight.bits == 4 else 1
    each = words.shape[2] * per_word // len(scales)
    total = None
    for part, scale in enumerate(scales):
        runs = range(part * each, (part + 1) * each)
        out = functools.reduce(jnp.add, [multiply(run, words[:, :, run // per_word]) for run in runs])
        if zeros is None:
            out = scale * (out - np.float32(_MIDDLE[weight.bits]) * sums(part) if weight.bits == 4 else out)
        elif weight.has_integer_zeros:
            out = scale * (out + (np.float32(_subtracted(weight.bits)) - zeros[part]) * sums(part))
        else:
            out = scale * (out + np.float32(_subtracted(weight.bits)) * sums(part)) + zeros[part] * sums(part)
        total = out if total is None else total + out
    return total  # pyright: ignore[reportReturnType]


def _in_lanes(rows: jax.Array, weight: Grouped) -> jax.Array:
    """Multiply few rows on a CPU, one by one; see `workarounds.in_lanes`. Codes are never stored as floats.

    A 4-bit code is not shifted to the lowest bits. Instead, the row's number is divided by a power of two.
    """
    width = _step(weight.shape[-1])
    # The pieces are computed outside of the branch; otherwise, they would be computed again for each output.
    pieces = rows.astype(jnp.float32).reshape(rows.shape[0], -1, width // _RUN, _RUN)
    parts = max(1, width * weight.scales.shape[-1] // weight.shape[-1])
    sums = jnp.sum(pieces.reshape(*pieces.shape[:2], parts, -1, _RUN), axis=3)
    if weight.bits == 4:
        factors = np.array([2.0 ** (-4 * run) if run < 7 else 1.0 for run in range(8)], np.float32)
        pieces = pieces * np.tile(factors, width // 64)[None, None, :, None]
    return each_row(_lane_product, (pieces, sums), _with_wide_scales(rows, weight))


def _with_wide_scales(rows: jax.Array, weight: Grouped) -> Grouped:
    """Convert scales and zeros from float16 to float32, all at once: a CPU takes long to convert single numbers.

    In a branch, XLA cannot convert them before a loop and store them for its duration.
    """
    halves = {name: getattr(weight, name) for name in ("scales", "zeros")}
    halves = {name: array for name, array in halves.items() if array is not None and array.dtype == jnp.float16}
    if not halves:
        return weight

    def convert(rows: jax.Array, halves: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: array.astype(jnp.float32) for name, array in halves.items()}

    return dataclasses.replace(weight, **workarounds.in_branch(convert, rows, halves))


def _lane_product(pieces: tuple[jax.Array, jax.Array], weight: Grouped) -> jax.Array:
    row, sums = pieces

    def multiply(run: int, words: jax.Array) -> jax.Array:
        if weight.bits == 4:
            words = words & np.uint32(15 << 4 * (run % 8)) if run % 8 < 7 else words >> np.uint32(28)
            words = words.astype(jnp.int32)
        return words.astype(jnp.float32) * row[None, :, run]

    return workarounds.sum_lanes(_terms(weight, row.shape[0], multiply, lambda part: sums[None, :, part]))


def _as_sums(row: jax.Array, weight: Grouped) -> jax.Array:
    """Multiply one row on a GPU as sums of products, which are fused into one kernel; see `workarounds.row_sums`.

    Sums of the row's numbers would be computed in a kernel of their own, so entries are computed instead.
    """
    row = row.astype(jnp.float32).reshape(-1, 8, _RUN)
    steps = row.shape[0]
    scales = _of_steps(weight.scales, steps)
    zeros = None if weight.zeros is None else _of_steps(weight.zeros, steps)
    words = weight.words.reshape(weight.shape[0], steps, -1, _RUN)
    terms = []
    for run in range(8):
        codes = words[:, :, run if weight.bits == 8 else 0]
        if weight.bits == 4:
            codes = ((codes >> np.uint32(4 * run)) & np.uint32(15)).astype(jnp.int32)
        part = run * len(scales) // 8
        entries = _entries(codes.astype(jnp.float32), scales[part], None if zeros is None else zeros[part], weight)
        terms.append(entries * row[None, :, run])
    return jnp.sum(functools.reduce(jnp.add, terms), axis=(1, 2))[None]
