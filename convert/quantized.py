"""Assemble a checkpoint's quantized weights from tensors, and quantize or dequantize weights as they are read."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.errors import CheckpointError
from convert.experts import Stack, apart, file_of
from convert.packed.writing import InFiles
from convert.shards import STEM
from convert.tensors import CHUNK, DTYPES, STORED, Computed, DerivedTensor, Tensor, computed
from jaxgen.core.model.int4 import Int4
from jaxgen.core.model.weights import Packed, Quantized, map_rows
from jaxgen.errors import InputError

# If these were rounded, tokens would use other experts.
NEVER_QUANTIZED = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
TABLES = ("embed_tokens.weight", "lm_head.weight")  # not quantized to 4 bits, as usual


def tensors_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of `weights`, on disk or in memory, by name; an unpacked weight is a single tensor."""
    tensors: dict[str, Any] = {}
    for name, weight in weights.items():
        suffixes = weight.tensors if isinstance(weight, Packed | InFiles) else ("",)
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


def converted(name: str, weight: Any, kind: type[Quantized] | Int4 | None, dtype: np.dtype) -> Any:
    """Return a stored weight that is converted to `kind` when it is read, or to an array if `kind` is None.

    `dtype` is the default dtype of the matrix; the code that reads the weight can choose a different one. An array that
    is made from a packed weight is first rounded to the weight's `Computed.matrix_dtype`, if there is one.
    """

    if len(weight.shape) == 3:
        experts = [converted(name, expert, kind, dtype) for expert in apart(weight)]
        return jax.tree.map(Stack.of, *experts)
    is_kept = name.endswith((*NEVER_QUANTIZED, *TABLES) if isinstance(kind, Int4) else NEVER_QUANTIZED)
    if isinstance(weight, Packed) and (is_kept or not _is_of(kind, weight)):
        weight = _matrix(name, weight, dtype, is_rounded=kind is None or is_kept)
    if not isinstance(weight, Tensor) or kind is None or is_kept or len(weight.shape) != 2:
        return weight

    def compute(matrix: np.ndarray) -> list[np.ndarray]:
        return jax.tree.leaves(made(matrix.astype(np.float32)))

    def made(matrix: np.ndarray) -> Any:
        try:
            return kind.from_matrix(matrix, np.dtype(dtype))
        except InputError as error:
            raise CheckpointError([f"{weight.file}: {name} {error}"]) from error

    like = made(np.zeros((1, weight.shape[1]), np.float32))
    names = [name + suffix for suffix in like.tensors]
    return remade(like, _from_rows(names, weight, jax.tree.leaves(like), compute), dtype)


def _matrix(name: str, weight: Any, dtype: np.dtype, is_rounded: bool) -> Computed:
    """Return the matrix that a packed weight represents, as a tensor that is computed when it is read."""
    rounded = getattr(jax.tree.leaves(weight)[0], "matrix_dtype", None) if is_rounded else None

    def compute(rows: Any) -> list[np.ndarray]:
        matrix = rows.to_matrix()
        return [matrix if rounded is None else matrix.astype(rounded)]

    (matrix,) = _from_rows([name], weight, [np.empty((1, weight.shape[1]), dtype)], compute)
    return matrix


def _is_of(kind: type[Quantized] | Int4 | None, weight: Any) -> bool:
    """Return True if a packed weight does not need to be converted."""
    return kind.represents(weight) if isinstance(kind, Int4) else type(weight) is kind


def _one_row(kind: type[Quantized] | Int4, columns: int, dtype: Any) -> Any:
    """Return a one-row weight of this kind, as an example of the dtypes and row shapes of its arrays."""
    return kind.from_matrix(np.zeros((1, columns), np.float32), np.dtype(dtype))


def _from_rows(
    names: Sequence[str], source: Any, likes: Sequence[np.ndarray], compute: Callable[[Any], list[np.ndarray]]
) -> list[Computed]:
    """Return the tensors that `compute` makes from rows of `source`, a tensor or a weight made of several tensors.

    `likes` has one row of each tensor. The rows of the second and later tensors, which are small, are kept until they
    are read if they were computed along with another tensor.
    """
    tensors, few = jax.tree.leaves(source), max(1, CHUNK // source.shape[-1])
    steps = [tensor.step for tensor in tensors if isinstance(tensor, Computed | DerivedTensor)]
    known: dict[tuple[int, int, int], np.ndarray] = {}

    def rows(start: int, end: int, number: int) -> np.ndarray:
        def read(tensor: Tensor) -> np.ndarray:
            return tensor.read(None, (slice(start, end), *[slice(None)] * (len(tensor.shape) - 1)))

        found = known.pop((start, end, number), None)
        if found is not None:
            return found
        parts = map_rows(read, source)
        parts = jax.tree.map(lambda x: x.read() if isinstance(x, Tensor) else x, parts)
        pieces = [slice(first, first + few) for first in range(0, end - start, few)]
        made = [compute(map_rows(operator.itemgetter(piece), parts)) for piece in pieces]
        arrays = [np.concatenate(array) for array in zip(*made, strict=True)]
        known.update({(start, end, other): array for other, array in enumerate(arrays) if other not in (0, number)})
        return arrays[number]

    def tensor(number: int) -> Computed:
        shape, compute = (source.shape[0], *likes[number].shape[1:]), functools.partial(rows, number=number)
        return computed(names[number], shape, likes[number].dtype, compute, tensors[0], max(few, *steps, 0))

    return [tensor(number) for number in range(len(names))]


def without_products(weights: Mapping[str, Any]) -> list[str]:
    """List the experts whose packed matrices cannot be multiplied in this form."""
    problems = []
    for name, weight in weights.items():
        if not isinstance(weight, Packed) or len(weight.shape) < 3:
            continue
        of_rows = jax.tree.leaves(map_rows(lambda _: None, weight))
        if of_rows or not hasattr(weight, "product_of_experts"):
            fault = (
                f"{name}: experts are not multiplied as {weight.title} matrices: load with quantize='none' or 'int8'"
            )
            problems.append(f"{file_of(weight)}: {fault}")
    return problems
