"""The tensors of a GGUF file as weights, under transformers' names. Nothing is read before it is needed."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.experts import Stack
from convert.gguf.architectures import TABLES, Architecture
from convert.tensors import CHUNK, DTYPES, NAMES, STORED, Tensor, computed
from jaxgen.core.model.blocks import Blocks
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.grouped import Grouped
from jaxgen.gguf.container import TYPES, TensorEntry

_NAME = re.compile(r"(?:blk\.(?P<layer>0|[1-9]\d{0,4})\.)?(?P<own>\w+)\.(?P<suffix>weight|bias)", re.ASCII)
_BYTES, _HALF = np.dtype(np.uint8), np.dtype(np.float16)
_GROUP = 32  # columns that share a scale in the formats below
_SIZES = {name: (count, size) for name, count, size in TYPES.values()}


@dataclasses.dataclass(frozen=True)
class _Groups:
    """A format whose blocks are groups of codes with a scale. Each field but `bits` maps blocks to a part of them.

    Attributes:
        bits: the number of bits of a code.
        codes: returns `uint8[..., 32]` for `uint8[..., bytes per block]`.
        scales: returns `float16[..., 1]`.
        offsets: the same; None if the format has no offsets.
    """

    bits: int
    codes: Callable[[np.ndarray], np.ndarray]
    scales: Callable[[np.ndarray], np.ndarray]
    offsets: Callable[[np.ndarray], np.ndarray] | None = None


def _nibbles(at: int) -> Callable[[np.ndarray], np.ndarray]:
    def codes(blocks: np.ndarray) -> np.ndarray:
        data = blocks[..., at:]
        result = np.empty((*data.shape[:-1], _GROUP), np.uint8)
        np.bitwise_and(data, 15, out=result[..., : _GROUP // 2])
        np.right_shift(data, 4, out=result[..., _GROUP // 2 :])
        return result

    return codes


def _halves(at: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: np.ascontiguousarray(blocks[..., at : at + 2]).view(_HALF)


# Codes of 8 bits have a sign in files; `Grouped` subtracts 128.
_GROUPED = {
    "Q4_0": _Groups(4, _nibbles(2), _halves(0)),
    "Q4_1": _Groups(4, _nibbles(4), _halves(0), _halves(2)),
    "Q8_0": _Groups(8, lambda blocks: blocks[..., 2:] ^ 128, _halves(0)),
}


def name_of(name: str, architecture: Architecture) -> str | None:
    """Return the name of a parameter whose name in a GGUF file is `name`; None if there is no such parameter."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    names = TABLES if match["layer"] is None else architecture.layer
    if match["own"] not in names:
        return None
    layer = "" if match["layer"] is None else f"model.layers.{int(match['layer'])}."
    return f"{layer}{names[match['own']]}.{match['suffix']}"


def weight_of(entry: TensorEntry, name: str, architecture: Architecture, model: ModelConfig) -> Any:
    """Return the weight with this name (see `name_of`): a tensor, or a packed weight that consists of tensors."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    if len(entry.shape) == 3:  # experts
        experts, size = entry.shape[0], entry.nbytes // entry.shape[0]
        parts = [
            dataclasses.replace(entry, shape=entry.shape[1:], offset=entry.offset + number * size, nbytes=size)
            for number in range(experts)
        ]
        return jax.tree.map(Stack.of, *[_matrix(part, name, 0, model, experts=True) for part in parts])
    if name.endswith("shared_expert_gate.weight") and len(entry.shape) == 1:
        entry = dataclasses.replace(entry, shape=(1, *entry.shape))
    head = model.head_dim if architecture.pairs and module in ("q_proj", "k_proj") else 0
    weight = _matrix(entry, name, head, model)
    if architecture.adds_one and module.endswith("norm"):
        weight = _one_less(weight)
    return weight


def plain(entry: TensorEntry) -> Tensor:
    """Return a tensor of floats as it is in the file."""
    return Tensor(entry.file, entry.name, entry.type, entry.shape, entry.offset, entry.nbytes)


def _matrix(entry: TensorEntry, name: str, head: int, model: ModelConfig, experts: bool = False) -> Any:
    """Return a matrix or vector; `head` is the size of heads whose rows are ordered by pairs, or 0."""
    if entry.type in DTYPES:
        return _in_halves(plain(entry), head)
    rows, columns = math.prod(entry.shape[:-1]), entry.shape[-1]
    count, size = _SIZES[entry.type]
    width = columns // count * size
    data = _in_halves(Tensor(entry.file, entry.name, NAMES[_BYTES], (rows, width), entry.offset, entry.nbytes), head)
    if experts or entry.type not in _GROUPED:  # `Grouped` cannot represent experts
        return Blocks(data, entry.type, np.dtype(model.dtype))  # pyright: ignore[reportCallIssue]
    return _grouped(name, data, _GROUPED[entry.type], columns, size, np.dtype(model.dtype))


def _grouped(name: str, data: Tensor, form: _Groups, columns: int, size: int, dtype: np.dtype) -> Grouped:
    rows, step = data.shape[0], max(1, CHUNK // columns)

    def blocks(start: int, end: int) -> np.ndarray:
        return data.read(None, (slice(start, end), slice(None))).reshape(end - start, -1, size)

    def words(start: int, end: int) -> np.ndarray:
        return Grouped.pack(form.codes(blocks(start, end)).reshape(end - start, columns), form.bits)

    def halves(read: Callable[[np.ndarray], np.ndarray], start: int, end: int) -> np.ndarray:
        return read(blocks(start, end))[..., 0]

    def part(suffix: str, read: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        compute = functools.partial(halves, read)
        return computed(f"{name}_{suffix}", (rows, columns // _GROUP), _HALF, compute, data, step)

    like = Grouped.pack(np.zeros((1, columns), np.uint8), form.bits)
    codes = computed(f"{name}_words", (rows, *like.shape[1:]), like.dtype, words, data, step)
    offsets = None if form.offsets is None else part("zeros", form.offsets)
    return Grouped(codes, part("scales", form.scales), offsets, None, form.bits, dtype)  # pyright: ignore


def _in_halves(tensor: Tensor, head: int) -> Tensor:
    """Return a tensor whose rows are in transformers' order: first those of all first elements of a head's pairs."""
    if not head:
        return tensor

    def compute(start: int, end: int) -> np.ndarray:
        first, last = start // head * head, -(-end // head) * head
        rows = tensor.read(None, (slice(first, last), *[slice(None)] * (len(tensor.shape) - 1)))
        pairs = rows.reshape(-1, head // 2, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)[start - first : end - first]

    width = math.prod(tensor.shape[1:])
    step = max(1, CHUNK // (width * head)) * head
    return computed(tensor.name, tensor.shape, STORED[tensor.dtype], compute, tensor, step)


def _one_less(tensor: Any) -> Any:
    """Return the weight of a norm to which the converter added 1."""
    if not isinstance(tensor, Tensor) or len(tensor.shape) != 1:
        return tensor  # its shape or kind is reported with those of all others

    def compute(start: int, end: int) -> np.ndarray:
        return tensor.read(np.dtype(np.float32), (slice(start, end),)) - np.float32(1)

    return computed(tensor.name, tensor.shape, jnp.float32, compute, tensor)
