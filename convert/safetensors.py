"""The safetensors file format: the length of a JSON header, the header, then the tensors' bytes.

`safetensors.safe_open` maps files into memory, and mapped pages count as the process's own: with it the peak
of loading is twice the checkpoint. Here a tensor is read into the buffer that it stays in.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxgen.errors import JaxgenError

# The weights that are read, in the order in which a file holds them.
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}

_ITEMSIZE = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
_ITEMSIZE |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8}
_MAX_HEADER = 100_000_000  # bytes, as in the reference implementation
_CHUNK = 1 << 20  # elements: what is cast or compared at once stays in the processor's cache
_ALIGNMENT = 64  # bytes: jax takes over a host buffer that is so aligned, and copies any other


class CheckpointError(JaxgenError):
    """A checkpoint that cannot be read or written; `problems` lists all that is wrong, one line each."""

    def __init__(self, problems: list[str]):
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n  - ".join([f"{len(self.problems)} problems:", *self.problems])


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `nbytes` from `offset` in `file`. `dtype` is the format's name, such as BF16."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield the elements in order, flat, at most 2**20 at a time; a chunk is overwritten by the next."""
        size = math.prod(self.shape)
        buffer = np.empty(min(size, _CHUNK), DTYPES[self.dtype])
        with open(self.file, "rb", buffering=0) as stream:
            stream.seek(self.offset)
            for start in range(0, size, _CHUNK):
                chunk = buffer[: size - start]
                unread = chunk.view(np.uint8).data
                while unread:
                    if not (count := stream.readinto(unread)):
                        raise CheckpointError([f"{self.file}: {self.name}: the file was cut while it was read"])
                    unread = unread[count:]
                yield chunk

    def cast_chunks(self, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Yield `chunks()` as `dtype`, rounded to the nearest value.

        Raises:
            CheckpointError: a finite value lies outside the range of `dtype`.
        """
        return self.cast(self.chunks(), dtype)

    def cast(self, chunks: Iterable[np.ndarray], dtype: np.dtype) -> Iterator[np.ndarray]:
        """Yield `chunks` as `dtype`, each in the place of the one before; errors as in `cast_chunks`."""
        buffer = np.empty(min(math.prod(self.shape), _CHUNK), dtype)
        for chunk in chunks:
            cast = buffer[: chunk.size]
            with np.errstate(over="ignore", invalid="ignore"):  # NaNs are cast as they are
                cast[:] = chunk
                infinite = np.isinf(cast)
                lost = int((infinite & ~np.isinf(chunk)).sum()) if infinite.any() else 0
            if lost:
                fault = f"{lost} or more values are too large for {dtype}: choose a wider dtype"
                raise CheckpointError([f"{self.file}: {self.name}: {fault}"])
            yield cast

    def read(self, dtype: np.dtype) -> np.ndarray:
        """Return the tensor as `dtype` in a buffer of its own, which jax on the CPU takes over uncopied."""
        size = math.prod(self.shape)
        raw = np.empty(size * dtype.itemsize + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        flat = raw[start : start + size * dtype.itemsize].view(dtype)
        done = 0
        for chunk in self.chunks() if dtype == DTYPES[self.dtype] else self.cast_chunks(dtype):
            flat[done : done + chunk.size] = chunk
            done += chunk.size
        return flat.reshape(self.shape)


def split(flat: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the elements of a flat array as `Tensor.chunks` does."""
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK]


def read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, in its order, after checking that the file holds exactly them.

    Raises:
        CheckpointError: what is wrong with the file.
    """
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        start = 8 + length
        if size < 8 or length > _MAX_HEADER or start > size:
            raise CheckpointError([f"{file}: truncated or damaged: {size} bytes cannot hold a header of {length}"])
        text = stream.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError([f"{file}: damaged: its header cannot be read: {error}"]) from error
    header.pop("__metadata__", None)

    tensors, problems = [], []
    for name, entry in header.items():
        if fault := _fault(entry):
            problems.append(f"{file}: {name}: damaged header: {fault}")
        else:
            begin, end = entry["data_offsets"]
            tensors.append(Tensor(file, name, entry["dtype"], tuple(entry["shape"]), start + begin, end - begin))
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    if not problems:
        problems = _misplaced(file, tensors, start, size)
    if problems:
        raise CheckpointError(problems)
    return {tensor.name: tensor for tensor in tensors}


def write_file(
    file: Path, layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]], read: Callable[[str], np.ndarray]
) -> None:
    """Write the tensors of `layout`, which `read` returns by name, to a new file, one at a time.

    The bytes are those that the safetensors library writes with the metadata {"format": "pt"}, which
    transformers asks for.
    """
    ranks = list(DTYPES.values())
    names = {dtype: name for name, dtype in DTYPES.items()}
    order = sorted(layout, key=lambda name: (ranks.index(layout[name][0]), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape = layout[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            array = read(name)
            if (array.dtype, array.shape) != layout[name]:
                raise CheckpointError([f"{file}: {name}: {array.dtype}{array.shape} where {layout[name]} was declared"])
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"twice there: {', '.join(sorted({name for name in names if names.count(name) > 1}))}")
    return result


def _fault(entry: Any) -> str | None:
    """Say what is wrong with a tensor's entry in a header, as far as the entry alone tells."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return f"{entry!r} does not consist of dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEMSIZE:
        return f"unknown dtype {dtype!r}"
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
            return f"shape {shape!r} and data_offsets {offsets!r} must be lists of whole numbers"
    needed = math.prod(shape) * _ITEMSIZE[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != needed:
        return f"data_offsets {offsets} do not span the {needed} bytes of {dtype} {shape}"
    return None


def _misplaced(file: Path, tensors: list[Tensor], start: int, size: int) -> list[str]:
    """List tensors that overlap, leave a gap or lie outside the file; `tensors` are sorted by offset."""
    problems, end = [], start
    for tensor in tensors:
        if tensor.offset != end:
            fault = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            problems.append(f"{file}: {tensor.name}: damaged header: {fault}")
        end = max(end, tensor.offset + tensor.nbytes)
    if end > size:
        lost = [tensor.name for tensor in tensors if tensor.offset + tensor.nbytes > size]
        problems.append(f"{file}: truncated: {size} bytes of {end}; cut off: {', '.join(lost)}")
    if end < size:
        problems.append(f"{file}: damaged: {size - end} bytes follow the last tensor")
    return problems
