"""Assemble a checkpoint's quantized weights from tensors, and quantize or dequantize weights as they are read."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.errors import CheckpointError
from convert.experts import Stack, apart
from convert.shards import STEM
from convert.tensors import CHUNK, DTYPES, NAMES, STORED, Tensor
from jaxgen.core.model.weights import Quantized
from jaxgen.errors import InputError

# If these were rounded, tokens would use other experts.
NEVER_QUANTIZED = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")


def tensors_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of `weights`, on disk or in memory, by name; an unquantized weight is a single tensor."""
    tensors: dict[str, Any] = {}
    for name, weight in weights.items():
        suffixes = weight.tensors if isinstance(weight, Quantized) else ("",)
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


def file_stem(kind: type[Quantized] | None) -> str:
    """Return the file-name prefix for a kind of weight; transformers ignores files whose prefix names a kind."""
    return STEM if kind is None else f"{STEM}.{kind.name}"


def kind_in(weights: Mapping[str, Any]) -> type[Quantized] | None:
    """Return the kind of the first quantized weight, or None."""
    return next((type(weight) for weight in weights.values() if isinstance(weight, Quantized)), None)


def remade(weight: Any, arrays: list[Any], dtype: Any) -> Any:
    """Build a weight of the same kind as `weight` from `arrays`; if it is quantized, its dtype is `dtype`."""
    if not isinstance(weight, Quantized):
        return arrays[0]
    return jax.tree.unflatten(jax.tree.structure(_one_row(type(weight), weight.shape[-1], dtype)), arrays)


def converted(name: str, weight: Any, kind: type[Quantized] | None, dtype: np.dtype) -> Any:
    """Return a stored weight that is converted to `kind` when it is read, or to an array if `kind` is None.

    `dtype` is the default dtype of the matrix; the code that reads the weight can choose a different one.
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
    if isinstance(weight, Quantized) and type(weight) is not kind:
        weight = _computed(name, weight, weight.shape, dtype, lambda rows: rows.to_matrix())
    if kind is None or not isinstance(weight, Tensor) or len(weight.shape) != 2 or name.endswith(NEVER_QUANTIZED):
        return weight
    like, tensors = _one_row(kind, weight.shape[1], dtype), []
    for number, (suffix, array) in enumerate(zip(kind.tensors, jax.tree.leaves(like), strict=True)):
        shape, compute = (weight.shape[0], *array.shape[1:]), functools.partial(part, number=number)
        tensors.append(_computed(name + suffix, weight, shape, array.dtype, compute))
    return remade(like, tensors, dtype)


def _one_row(kind: type[Quantized], columns: int, dtype: Any) -> Quantized:
    """Return a one-row weight of this kind, as an example of the dtypes and row shapes of its arrays."""
    return kind.from_matrix(np.zeros((1, columns), np.float32), np.dtype(dtype))


def _computed(name: str, source: Any, shape: tuple[int, ...], dtype: np.dtype, compute: Callable) -> _Computed:
    first, nbytes = jax.tree.leaves(source)[0], math.prod(shape) * dtype.itemsize
    return _Computed(first.file, name, NAMES[dtype], shape, first.offset, nbytes, source, compute)


@dataclasses.dataclass(frozen=True)
class _Computed(Tensor):
    """A tensor computed row by row from `source`; `source` is a tensor, or a weight made of several tensors."""

    source: Any
    compute: Callable[[Any], np.ndarray]

    def read(self, dtype: np.dtype | None = None, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return the values, rounded directly to the final dtype. Whole rows are read, even if `part` is narrower."""
        rows, *columns = part or (slice(None),)

        def read(tensor: Tensor) -> np.ndarray:
            return tensor.read(None, part and (rows, *[slice(None)] * (len(tensor.shape) - 1)))

        source = jax.tree.map(read, self.source)
        largest = max(jax.tree.leaves(source), key=np.size)
        result = np.empty((len(largest), *self.shape[1:]), dtype or STORED[self.dtype])
        step = max(1, CHUNK * len(largest) // largest.size)
        for start in range(0, len(largest), step):
            chunk = slice(start, start + step)
            values = self.compute(jax.tree.map(operator.itemgetter(chunk), source))
            result[chunk] = self.cast(values, result.dtype)
        return np.ascontiguousarray(result[:, *columns])
