"""The contract of a format of packed checkpoints, and what the formats share."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from convert.tensors import CHUNK, DTYPES, STORED, Tensor, computed
from jaxgen.core.model.fp8 import Fp8
from jaxgen.core.model.grouped import Grouped
from jaxgen.errors import ConfigError, InputError, shown

Parts = Mapping[str, Tensor]  # the tensors of one module by the last part of their names, such as "qweight"
# Notes about what is ignored
NO_INPUTS = "scales of inputs are ignored: matrices are multiplied by inputs that are not rounded"
NO_CACHE = "scales of the cache are ignored: keys and values are not rounded"
# The number of codes to read at a time from files that store the rows of a matrix as columns. A piece of a file's row
# then has a few hundred bytes or more.
TRANSPOSED = 4 * CHUNK


class Format(Protocol):
    """A format, as described by a checkpoint's `quantization_config`.

    Attributes:
        title: the format's name in messages.
        keys: the keys of `quantization_config` that are used, or that have no effect on the weights' values.
        suffixes: the last parts of the names of tensors that belong to packed matrices, except "weight".
        required: one name, or several alternatives, for each tensor that a packed matrix needs.
        ignored: those of `suffixes` that are not read, with the reason.
    """

    title: ClassVar[str]
    keys: ClassVar[Collection[str]]
    suffixes: ClassVar[Collection[str]]
    required: ClassVar[Sequence[Sequence[str]]]
    ignored: ClassVar[Mapping[str, str]]

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about what is ignored."""
        ...

    def is_packed(self, parts: Parts) -> bool:
        """Return True if a module's matrix is packed."""
        ...

    def packs(self, module: str) -> bool | None:
        """Return True if the config says that a module's matrix is packed; None if the config does not say."""
        ...

    def weight(self, name: str, parts: Parts, dtype: Any) -> Any:
        """Return a packed matrix that represents a matrix of `dtype`; its arrays are tensors that are read later.

        Raises:
            InputError: the tensors do not fit together. The message is a predicate.
        """
        ...


def whole(config: Mapping[str, Any], key: str, default: int | None, allowed: Sequence[int] | None = None) -> int:
    """Return a whole number of a config, which must be positive or, if `allowed` is given, one of these numbers."""
    value = config.get(key, default)
    fits = type(value) is int and (value > 0 if allowed is None else value in allowed)
    if not fits:
        what = "a positive whole number" if allowed is None else " or ".join(map(str, allowed))
        raise ConfigError(f"{key} must be {what}, got {shown(value)}")
    return value


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a value of a config that must be true or false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, got {shown(value)}")
    return value


def group_size(config: Mapping[str, Any], key: str, default: int = 128) -> int | None:
    """Return the number of columns that share a scale; None if all columns of a row do (-1 in a config)."""
    return None if config.get(key, default) == -1 else whole(config, key, default)


def patterns(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """Return a config's list of names or regular expressions: the value of the first of the keys that is not null."""
    key, value = next(((key, config[key]) for key in keys if config.get(key) is not None), (keys[0], []))
    if not isinstance(value, list) or not all(isinstance(pattern, str) for pattern in value):
        raise ConfigError(f"{key} must be a list of names, got {shown(value)}")
    for pattern in value:
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise ConfigError(f"{key} has {shown(pattern)}, which is not a regular expression: {error}") from error
    return tuple(value)


def is_excluded(module: str, names: Collection[str]) -> bool:
    """Return True if a module is in a list of modules that are not converted, by transformers' rule.

    A name in the list matches the beginning of a module's name up to a dot, or its end; it may be a regular expression.
    """
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(re.match(rf"(?:{name}){boundary}", module) or module.endswith(name) for name in names)


def check(name: str, tensor: Tensor, dtypes: Collection[str], *shapes: Sequence[int]) -> None:
    """Raise an `InputError` unless a tensor has one of the dtypes and shapes."""
    if tensor.dtype not in dtypes or list(tensor.shape) not in [list(shape) for shape in shapes]:
        wanted = " or ".join(f"{'/'.join(dtypes)}{list(shape)}" for shape in shapes)
        raise InputError(f"has {name} {tensor.dtype}{list(tensor.shape)}, wanted {wanted}")


def matrix_shape(name: str, tensor: Tensor) -> tuple[int, int]:
    """Return the shape of a matrix; raise an `InputError` if a tensor is not a matrix, or is empty."""
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise InputError(f"has {name} {list(tensor.shape)}, wanted a matrix")
    return tensor.shape[0], tensor.shape[1]


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes in `words int32[..., n]`, lowest bits first, as uint8[..., n * 32 / bits]."""
    codes = np.ascontiguousarray(words).view(np.uint8)
    return codes if bits == 8 else np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def rows_of(tensor: Tensor, start: int, end: int) -> np.ndarray:
    """Read a range of a tensor's rows."""
    return tensor.read(None, (slice(start, end), *[slice(None)] * (len(tensor.shape) - 1)))


def columns_of(tensor: Tensor, start: int, end: int) -> np.ndarray:
    """Read a range of a matrix's columns."""
    return tensor.read(None, (slice(None), slice(start, end)))


def grouped(
    name: str,
    shape: tuple[int, int],
    bits: int,
    arrays: Mapping[str, Callable[[int, int], np.ndarray]],
    scales: Tensor,
    groups: int,
    dtype: Any,
    order: np.ndarray | None = None,
    step: int | None = None,
) -> Grouped:
    """Return a `Grouped` weight whose arrays are read later.

    `arrays` has functions that return the rows from `start` to `end` of "codes" (uint8), "scales" and, if there are
    any, "zeros" (uint8). `scales` is the tensor with the scales; the matrix is rounded to its dtype.
    """
    rows, columns = shape
    if columns % (32 // bits):
        raise InputError(f"has {columns} columns, which is not a multiple of {32 // bits}: load another file")
    word, floats = Grouped.pack(np.zeros((1, columns), np.uint8), bits), STORED[scales.dtype]

    def words(start: int, end: int) -> np.ndarray:
        codes, few = arrays["codes"](start, end), max(1, CHUNK // columns)
        return np.concatenate([Grouped.pack(codes[i : i + few], bits) for i in range(0, len(codes), few)])

    def later(suffix: str, width: tuple[int, ...], dtype: Any, compute: Callable[[int, int], np.ndarray]) -> Any:
        return computed(f"{name}_{suffix}", (rows, *width), dtype, compute, scales, step, floats)

    inputs = np.asarray(order, np.int32) if order is not None else np.empty(0, np.int32)
    made: Any = Grouped(
        later("words", word.shape[1:], word.dtype, words),
        later("scales", (groups,), floats, arrays["scales"]),
        later("zeros", (groups,), np.uint8, arrays["zeros"]) if "zeros" in arrays else None,
        None if order is None else computed(f"{name}_order", order.shape, np.int32, lambda i, j: inputs[i:j], scales),
        bits,
        np.dtype(dtype),
    )
    return made


def fp8(
    name: str, values: Tensor, scale: Tensor, block: tuple[int, int], dtype: Any, matrix_dtype: np.dtype | None
) -> Fp8:
    """Return an `Fp8` weight whose arrays are read later.

    Each block of `block[0]` rows and `block[1]` columns has a scale; the last blocks may be smaller.
    """
    rows, columns = matrix_shape("weight", values)
    high, wide = min(block[0], rows), min(block[1], columns)
    check(
        "scales",
        scale,
        DTYPES,
        (-(-rows // high), -(-columns // wide)),
        *[(), (1,)] * ((high, wide) == (rows, columns)),
    )
    width = -(-columns // wide)

    def scales(start: int, end: int) -> np.ndarray:
        if len(scale.shape) < 2:
            return np.full((end - start, 1), scale.read().reshape(()), np.float32)
        blocks = rows_of(scale, start // high, (end - 1) // high + 1).astype(np.float32)
        return blocks[np.arange(start, end) // high - start // high]

    later: Any = Fp8(
        computed(
            f"{name}_values", values.shape, np.uint8, lambda *rows: rows_of(values, *rows), values, None, matrix_dtype
        ),
        computed(f"{name}_scales", (rows, width), np.float32, scales, scale),
        wide,
        np.dtype(dtype),
    )
    return later


def input_order(of_inputs: np.ndarray, groups: int) -> np.ndarray | None:
    """Return the inputs sorted by their groups, given each input's group; None if they are sorted already.

    Raises:
        InputError: the groups do not have the same size.
    """
    size = len(of_inputs) // groups
    is_group = (of_inputs >= 0) & (of_inputs < groups)
    if not is_group.all() or not np.array_equal(np.bincount(of_inputs, minlength=groups), [size] * groups):
        raise InputError(f"has a g_idx that does not assign {size} inputs to each of its {groups} groups")
    return None if (np.diff(of_inputs) >= 0).all() else np.argsort(of_inputs, kind="stable")
