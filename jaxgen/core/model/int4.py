"""Quantization to 4-bit numbers with a scale for each group of adjacent columns."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from jaxgen.core.model.grouped import Grouped
from jaxgen.errors import InputError

_LOWEST, _HIGHEST = -8, 7
_SCALES = np.dtype(ml_dtypes.bfloat16)
# The numbers that a group's entry with the largest absolute value may become, if the range were not limited. For each
# group, the one with the smallest mean squared error is used.
_CANDIDATES = (-8.0, -9.0, 7.0)


@dataclasses.dataclass(frozen=True)
class Int4:
    """Converts matrices to symmetric 4-bit `Grouped` weights; `group` is the number of columns in a group.

    The embedding and the head are not converted. Scales are bfloat16, as in most published models. They may be
    negative, so that a group's largest entry can become -8, whatever its sign.
    """

    group: int

    def from_matrix(self, matrix: np.ndarray, dtype: Any) -> Grouped:
        """Return a weight, stored in numpy arrays, that represents `matrix float32[n, D]` in `dtype`.

        Raises:
            InputError: the matrix is not finite, or groups do not divide its columns. The message is a predicate.
        """
        rows, columns = matrix.shape
        if columns % self.group:
            fits = [size for size in GROUPS if columns % size == 0]
            advice = f"choose quantize='{_name(fits[0])}'" if fits else "choose quantize='int8'"
            raise InputError(f"has {columns} columns, which groups of {self.group} do not divide: {advice}")
        groups = matrix.reshape(rows, -1, self.group)
        largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1, keepdims=True), axis=-1)
        if not np.isfinite(largest).all():
            raise InputError("is not finite, so 4-bit numbers cannot represent it: do not quantize")
        codes, scales, least = np.empty(groups.shape, np.uint8), np.empty_like(largest), np.full(largest.shape, np.inf)
        for number in _CANDIDATES:
            own, wide, error = _rounded(groups, largest / np.float32(number))
            is_better = error < least
            np.copyto(codes, own, where=is_better)
            np.copyto(scales, wide, where=is_better)
            np.minimum(error, least, out=least)
        words: Any = Grouped.pack(codes.reshape(rows, columns), 4)
        return Grouped(words, scales[..., 0].astype(_SCALES), None, None, 4, dtype)

    def represents(self, weight: Any) -> bool:
        """Return True if a weight already has the form that this class makes."""
        if not isinstance(weight, Grouped) or weight.bits != 4 or weight.zeros is not None or weight.order is not None:
            return False
        return weight.scales.shape[-1] * self.group == weight.shape[-1]


GROUPS = (32, 128)  # the first is the default


def _name(group: int) -> str:
    return "int4" if group == GROUPS[0] else f"int4-{group}"


GROUPS_OF_32, GROUPS_OF_128 = map(Int4, GROUPS)


def _rounded(groups: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the codes of `groups float32[n, G, g]` for `scales [n, G, 1]`, the scales as float32, and the errors."""
    scales = scales.astype(_SCALES).astype(np.float32)
    scales[np.abs(scales) < np.finfo(np.float32).tiny] = 0  # their inverse may be infinite
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    numbers = groups * inverse
    np.clip(np.rint(numbers, out=numbers), _LOWEST, _HIGHEST, out=numbers)
    codes = (numbers - _LOWEST).astype(np.uint8)
    np.subtract(np.multiply(numbers, scales, out=numbers), groups, out=numbers)
    return codes, scales, np.einsum("ngi,ngi->ng", numbers, numbers)[..., None]
