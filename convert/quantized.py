"""Assemble a checkpoint's quantized weights from tensors, and quantize or dequantize weights as they are read."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.errors import CheckpointError
from convert.experts import Stack, apart
from convert.shards import STEM
from convert.tensors import CHUNK, DTYPES, STORED, Computed, DerivedTensor, Tensor, computed
from jaxgen.core.model.weights import Packed, Quantized, map_rows
from jaxgen.errors import InputError

# If these were rounded, tokens would use other experts.
NEVER_QUANTIZED = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")


def tensors_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of `weights`, on disk or in memory, by name; an unpacked weight is a single tensor."""
    tensors: dict[str, Any] = {}
    for name, weight in weights.items():
        suffixes = weight.tensors if isinstance(weight, Packed) else ("",)
        tensors |= zip((name + suffix for suffix in suffixes), jax.tree.leaves(weight), strict=True)
    return tensors


def weights_of(
    tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], kinds: Iterable[type[Quantized]], dtype: Any
) -> tuple[dict[str, Any], list[str]]:
    """Assemble weights from tensors on disk or in memory; return the weights by name, and a list of problems.

    A weight is quantized if its first tensor has the dtype of one of the `kinds`. `dtype` is the dtype of the matrix
    that a quantized weight represents. `shapes` are the shapes of the model's parameters.
    """
    weights, problems = dict(tensors), []
    for name in [name for name in shapes if name in tensors and _dtype(tensors[name]) not in DTYPES.values()]:
        likes = (_one_row(kind, shapes[name][-1], dtype) for kind in kinds)
        like = next((like for like in likes if jax.tree.leaves(like)[0].dtype == _dtype(tensors[name])), None)
        if like is not None:
            parts = {name + suffix: weights.pop(name + suffix, None) for suffix in like.tensors}
            faults = _faults(like, parts)
            problems += faults
            if len(tensors[name].shape) in (2, 3):
                weights[name] = remade(like, [*parts.values()], dtype)
            else:
                weights[name] = jax.ShapeDtypeStruct(tensors[name].shape, dtype) if faults else tensors[name]
    return weights, problems


def _faults(like: Quantized, parts: Mapping[str, Any]) -> list[str]:
    """List problems with the second and later tensors in `parts`. `like` is an example weight with one row."""
    (_, first), *others = parts.items()
    faults = []
    for (name, part), array, text in zip(others, jax.tree.leaves(like)[1:], [*like.tensors.values()][1:], strict=True):
        shape = [*first.shape[:-1], *array.shape[1:]]
        if part is None or len(first.shape) not in (2, 3) or (_dtype(part), list(part.shape)) != (array.dtype, shape):
            found = "missing" if part is None else f"{part.dtype}{list(part.shape)}"
            faults.append(f"{name} is {found}: {like.title} matrices need {array.dtype}{shape}, {text}")
    return faults


def _dtype(tensor: Any) -> Any:
    """Return the numpy dtype of a tensor in a file or in memory."""
    return STORED.get(tensor.dtype, tensor.dtype)


def stored_kind(path: Path, kinds: Iterable[type[Quantized]]) -> type[Quantized] | None:
    """Return the first kind of weight whose name occurs in a directory's file names, or None."""
    return next((kind for kind in kinds if any(path.glob(f"{file_stem(kind)}[-.]*"))), None)


def file_stem(kind: type[Packed] | None) -> str:
    """Return the file-name prefix for a kind of weight; transformers ignores files whose prefix names a kind."""
    name = getattr(kind, "name", None)
    return STEM if name is None else f"{STEM}.{name}"


def kind_in(weights: Mapping[str, Any]) -> type[Packed] | None:
    """Return the kind of the first packed weight, or None."""
    return next((type(weight) for weight in weights.values() if isinstance(weight, Packed)), None)


def remade(weight: Any, arrays: list[Any], dtype: Any) -> Any:
    """Build a weight like `weight` from `arrays`, in the order of `tensors_of`; if it is packed, its dtype is `dtype`.

    All other static fields are those of `weight`.
    """
    if not isinstance(weight, Packed):
        return arrays[0]
    made: Any = jax.tree.unflatten(jax.tree.structure(weight), arrays)
    return dataclasses.replace(made, dtype=np.dtype(dtype))


def converted(name: str, weight: Any, kind: type[Quantized] | None, dtype: np.dtype) -> Any:
    """Return a stored weight that is converted to `kind` when it is read, or to an array if `kind` is None.

    `dtype` is the default dtype of the matrix; the code that reads the weight can choose a different one. An array that
    is made from a packed weight is first rounded to the weight's `Computed.matrix_dtype`, if there is one.
    """

    def part(matrix: np.ndarray, number: int) -> np.ndarray:
        assert kind is not None
        try:
            return jax.tree.leaves(kind.from_matrix(matrix.astype(np.float32), dtype))[number]
        except InputError as error:
            raise CheckpointError([f"{weight.file}: {name} {error}"]) from error

    if len(weight.shape) == 3:
        experts = [converted(name, expert, kind, dtype) for expert in apart(weight)]
        return jax.tree.map(Stack.of, *experts)
    if isinstance(weight, Packed) and type(weight) is not kind:
        weight = _matrix(name, weight, dtype, is_rounded=kind is None)
    if kind is None or not isinstance(weight, Tensor) or len(weight.shape) != 2 or name.endswith(NEVER_QUANTIZED):
        return weight
    like, tensors = _one_row(kind, weight.shape[1], dtype), []
    for number, (suffix, array) in enumerate(zip(like.tensors, jax.tree.leaves(like), strict=True)):
        shape, compute = (weight.shape[0], *array.shape[1:]), functools.partial(part, number=number)
        tensors.append(_from_rows(name + suffix, weight, shape, array.dtype, compute))
    return remade(like, tensors, dtype)


def _matrix(name: str, weight: Any, dtype: np.dtype, is_rounded: bool) -> Computed:
    """Return the matrix that a packed weight represents, as a tensor that is computed when it is read."""
    rounded = getattr(jax.tree.leaves(weight)[0], "matrix_dtype", None) if is_rounded else None

    def compute(rows: Any) -> np.ndarray:
        matrix = rows.to_matrix()
        return matrix if rounded is None else matrix.astype(rounded)

    return _from_rows(name, weight, weight.shape, dtype, compute)


def _one_row(kind: type[Quantized], columns: int, dtype: Any) -> Quantized:
    """Return a one-row weight of this kind, as an example of the dtypes and row shapes of its arrays."""
    return kind.from_matrix(np.zeros((1, columns), np.float32), np.dtype(dtype))


def _from_rows(name: str, source: Any, shape: tuple[int, ...], dtype: np.dtype, compute: Callable) -> Computed:
    """Return a tensor that `compute` makes from rows of `source`, a tensor or a weight made of several tensors."""
    tensors, few = jax.tree.leaves(source), max(1, CHUNK // source.shape[-1])
    steps = [tensor.step for tensor in tensors if isinstance(tensor, Computed | DerivedTensor)]

    def rows(start: int, end: int) -> np.ndarray:
        def read(tensor: Tensor) -> np.ndarray:
            return tensor.read(None, (slice(start, end), *[slice(None)] * (len(tensor.shape) - 1)))

        parts = map_rows(read, source)
        parts = jax.tree.map(lambda x: x.read() if isinstance(x, Tensor) else x, parts)
        pieces = [slice(first, first + few) for first in range(0, end - start, few)]
        return np.concatenate([compute(map_rows(operator.itemgetter(piece), parts)) for piece in pieces])

    return computed(name, shape, dtype, rows, tensors[0], max(few, *steps, 0))
