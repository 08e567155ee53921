"""Weights of 8 bits in a checkpoint: a matrix "X.weight" of dtype I8, and "X.weight_scale", float32, one per row.

A checkpoint in this form is in model.int8.safetensors, where transformers, which would read the numbers without their
scales, does not find it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.errors import CheckpointError
from convert.tensors import DTYPES, INT8, Tensor
from jaxgen.errors import ConfigError
from jaxgen.model.int8 import LARGEST

CHOICES = ("int8", "none")
_SCALE = "_scale"
_CHUNK = 1 << 20  # elements converted at once: they stay in the processor's cache


def scale_name(name: str) -> str:
    """Return the name of the tensor with the scales of a matrix."""
    return name + _SCALE


def is_scale(name: str, tensors: Mapping[str, Any]) -> bool:
    """Return True if a tensor has the scales of another one, by the names of all."""
    return name.endswith(_SCALE) and name.removesuffix(_SCALE) in tensors


def split_scales(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return tensors, of files or in memory, without the scales of 8-bit matrices, and what is wrong with those."""
    matrices = {name: tensor for name, tensor in tensors.items() if str(tensor.dtype) in (INT8, "int8")}
    scales = {scale_name(name): matrix.shape for name, matrix in matrices.items()}
    problems = []
    for name, shape in scales.items():
        scale = tensors.get(name)
        found = "missing" if scale is None else f"{scale.dtype}{list(scale.shape)}"
        wanted = [f"{dtype}{list(shape[:1])}" for dtype in ("F32", "float32")]
        if len(shape) != 2 or found not in wanted:
            problems.append(f"{name} is {found}: 8-bit matrices need {wanted[1]}, one scale for each of their rows")
    return {name: tensor for name, tensor in tensors.items() if name not in scales}, problems


def check_quantize(quantize: object) -> None:
    """Raise an error unless `quantize` is None or one of `CHOICES`."""
    if quantize is not None and quantize not in CHOICES:
        raise ConfigError(f"quantize must be 'int8', 'none' or None, got {quantize!r}")


def quantized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name of which each matrix is quantised when it is read."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) != 2 or tensor.dtype == INT8:
            result[name] = tensor
            continue
        file, shape, offset, scales = tensor.file, tensor.shape, tensor.offset, scale_name(name)
        result[name] = _Values(file, name, INT8, shape, offset, math.prod(shape), tensor)
        result[scales] = _Scales(file, scales, "F32", shape[:1], offset, 4 * shape[0], tensor)
    return result


def dequantized(tensors: Mapping[str, Tensor], dtype: np.dtype) -> dict[str, Tensor]:
    """Return tensors by name of which each 8-bit matrix is multiplied with its scales when it is read.

    `dtype`: that of the matrices, if it is not chosen when they are read.
    """
    (name_of_dtype,) = (name for name, other in DTYPES.items() if other == dtype)
    matrices, _ = split_scales(tensors)
    for name, tensor in matrices.items():
        if tensor.dtype == INT8:
            nbytes = math.prod(tensor.shape) * dtype.itemsize
            scales = tensors[scale_name(name)]
            matrices[name] = _Products(
                tensor.file, name, name_of_dtype, tensor.shape, tensor.offset, nbytes, tensor, scales
            )
    return matrices


@dataclasses.dataclass(frozen=True)
class _Products(Tensor):
    """The matrix of 8-bit numbers `source`, multiplied with their `scales`."""

    source: Tensor
    scales: Tensor

    def read(self, dtype: np.dtype | None = None, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return the products, computed in float32 and rounded once."""
        values, scales = self.source.read(None, part), self.scales.read(None, part and part[:1])
        matrix = np.empty(values.shape, DTYPES[self.dtype] if dtype is None else dtype)
        for chunk in _chunks(values):
            matrix[chunk] = self.cast(values[chunk].astype(np.float32) * scales[chunk, None], matrix.dtype)
        return matrix


@dataclasses.dataclass(frozen=True)
class _Values(Tensor):
    """The 8-bit numbers nearest to the matrix `source`, divided by its scales."""

    source: Tensor

    def read(self, dtype: np.dtype | None = None, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return int8 numbers; a part of a row depends on the whole row, which is read."""
        del dtype
        rows, columns = part or (slice(None), slice(None))
        matrix = self.source.read(None, part and (rows, slice(None)))
        scales, values = _scales(matrix, self.source), np.empty(matrix.shape, np.int8)
        divisors = np.where(scales == 0, 1, scales)[:, None]
        for chunk in _chunks(matrix):
            values[chunk] = np.rint(matrix[chunk].astype(np.float32) / divisors[chunk])
        return np.ascontiguousarray(values[:, columns])


@dataclasses.dataclass(frozen=True)
class _Scales(Tensor):
    """The largest absolute value of each row of the matrix `source`, divided by the largest number."""

    source: Tensor

    def read(self, dtype: np.dtype | None = None, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return the scales float32[F]."""
        del dtype
        return _scales(self.source.read(None, part and (*part, slice(None))), self.source)


def _scales(matrix: np.ndarray, source: Tensor) -> np.ndarray:
    largest = np.empty(len(matrix), np.float32)
    for chunk in _chunks(matrix):
        largest[chunk] = np.abs(matrix[chunk].astype(np.float32)).max(axis=1)
    if not np.isfinite(largest).all():
        raise CheckpointError([f"{source.file}: {source.name} is not finite, and 8-bit numbers are: do not quantise"])
    return largest / np.float32(LARGEST)


def _chunks(matrix: np.ndarray) -> list[slice]:
    step = max(1, _CHUNK // matrix.shape[1])
    return [slice(start, start + step) for start in range(0, len(matrix), step)]
