"""Tensors in safetensors files: check headers, read tensors one at a time, and write files."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from convert.errors import CheckpointError
from jaxgen.errors import ConfigError, shown
from jaxgen.json_file import LARGEST, json_object, kind_of

# The dtypes of weights, by their names in the safetensors format.
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}
# The dtypes in `DTYPES`, the integer dtypes of packed weights (I8, U8, ...), and 8-bit floats
STORED = DTYPES | {f"{sign}{8 * size}": np.dtype(f"{sign}{size}".lower()) for sign in "IU" for size in (1, 2, 4, 8)}
NAMES = {dtype: name for name, dtype in STORED.items()}
STORED["F8_E4M3"] = np.dtype(np.uint8)  # the bits of 8-bit floats

_MAX_NUMBER = 2**63  # upper limit for sizes and offsets
_MAX_TRANSFER = 1 << 30  # maximum bytes read or written per system call
CHUNK = 1 << 20  # number of elements converted at a time; they fit into the CPU's cache


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor on disk: `nbytes` bytes at `offset` in `file`. `dtype` is a safetensors name, such as BF16."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def rows(self, start: int, end: int) -> Tensor:
        """Return a range of rows as a tensor of its own."""
        size = self.nbytes // self.shape[0]
        shape, offset = (end - start, *self.shape[1:]), self.offset + start * size
        return dataclasses.replace(self, shape=shape, offset=offset, nbytes=(end - start) * size)

    def read(self, dtype: np.dtype | None = None, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return the values cast to `dtype`, rounding to nearest; None keeps the file's dtype (one of `STORED`).

        `part` has one slice per axis, without steps. Only the bytes of this part are read.

        Raises:
            CheckpointError: the file was truncated, or a finite value is out of range for `dtype`.
        """
        return self.cast(self._read_part(part or (slice(None),) * len(self.shape)), dtype)

    def _read_part(self, part: tuple[slice, ...]) -> np.ndarray:
        """Read a part row by row, or all at once if the part is contiguous; safetensors would read the whole tensor."""
        shape = [len(range(*axis.indices(size))) for axis, size in zip(part, self.shape, strict=True)]
        result = np.empty(shape, STORED[self.dtype])
        with open(self.file, "rb", buffering=0) as stream:
            for offset, run in self.runs(part, result):
                while run:  # the system may return less than requested
                    count = os.preadv(stream.fileno(), [run[:_MAX_TRANSFER]], offset)
                    if count == 0:
                        raise CheckpointError([f"{self.file}: {self.name}: the file was truncated"])
                    run, offset = run[count:], offset + count
        return result

    def write(self, part: tuple[slice, ...], array: np.ndarray) -> None:
        """Write the values of one part, which have the file's dtype, to a file created by `allocate_file`."""
        with open(self.file, "r+b", buffering=0) as stream:
            for offset, run in self.runs(part, np.ascontiguousarray(array)):
                while run:
                    count = os.pwrite(stream.fileno(), run[:_MAX_TRANSFER], offset)
                    run, offset = run[count:], offset + count

    def runs(self, part: tuple[slice, ...], array: np.ndarray) -> Iterator[tuple[int, memoryview]]:
        """Split a part of the tensor into contiguous pieces; yield each as an offset in the file and a view of `array`.

        `part` has one slice per axis; only the first two can be narrower than the axis. `array` contains the part's
        values and is C-contiguous.
        """
        if not self.shape:
            yield self.offset, array.reshape(1).view(np.ubyte).data
            return
        first = [axis.indices(size)[0] for axis, size in zip(part, self.shape, strict=True)]
        width = math.prod(self.shape[1:]) * array.itemsize
        offset = self.offset + first[0] * width
        if array.shape[1:] == self.shape[1:]:
            pieces = array.reshape(1, -1)
        else:
            pieces = array.reshape(len(array), -1)
            offset += first[1] * math.prod(self.shape[2:]) * array.itemsize
        for number, piece in enumerate(pieces.view(np.ubyte)):
            yield offset + number * width, piece.data

    def cast(self, array: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
        """Cast values of this tensor as in `read`, without full-size temporary arrays."""
        if dtype is None or dtype == array.dtype:
            return array
        result = np.empty(array.shape, dtype)
        source, target = array.reshape(-1), result.reshape(-1)
        lost = 0
        for start in range(0, source.size, CHUNK):
            chunk, cast = source[start : start + CHUNK], target[start : start + CHUNK]
            with np.errstate(over="ignore", invalid="ignore"):  # NaNs stay NaNs
                cast[:] = chunk
                lost += np.count_nonzero(np.isinf(cast) & ~np.isinf(chunk))
        if lost:
            plural = "1 value is" if lost == 1 else f"{lost} values are"
            raise CheckpointError([f"{self.file}: {self.name}: {plural} too large for {dtype}: choose a wider dtype"])
        return result


@dataclasses.dataclass(frozen=True)
class DerivedTensor(Tensor):
    """A tensor that is computed in float32 from a tensor in a file; `shape` and `nbytes` describe the result."""

    source: Tensor
    compute: Callable[[np.ndarray], np.ndarray]

    @property
    def step(self) -> int:
        """The number of rows to read at a time: all."""
        return self.shape[0]

    def read(self, dtype: np.dtype | None = None, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return the values after a single rounding to the final dtype. All of them are computed, even for a `part`."""
        result = self.compute(self.source.read(np.dtype(np.float32)))
        return self.cast(result if part is None else result[part], dtype or DTYPES[self.dtype])


@dataclasses.dataclass(frozen=True)
class Computed(Tensor):
    """A tensor whose rows are computed from other tensors when they are read.

    `file` and `offset` are those of one of the other tensors. `dtype`, `shape` and `nbytes` describe the result.

    Attributes:
        compute: `compute(start, end)` reads what it needs and returns the rows from `start` to `end`. They may have a
            wider dtype than the tensor.
        step: the maximum number of rows to compute at a time, which bounds the memory for temporary arrays.
        first: the first row of this tensor, if it is a part.
        matrix_dtype: if the tensor is an array of a packed weight: the dtype to which the format's reference rounds
            the matrix before casting it to the model's dtype. None if the matrix is rounded only once.
    """

    compute: Callable[[int, int], np.ndarray]
    step: int
    first: int = 0
    matrix_dtype: np.dtype | None = None

    def rows(self, start: int, end: int) -> Computed:
        """Return a range of rows as a tensor of its own."""
        return dataclasses.replace(super().rows(start, end), offset=self.offset, first=self.first + start)  # pyright: ignore

    def read(self, dtype: np.dtype | None = None, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return the values, rounded only to the final dtype. Whole rows are computed, even if `part` is narrower."""
        rows, *columns = part or (slice(None),) * len(self.shape)
        start, end, _ = rows.indices(self.shape[0])
        shape = [len(range(*axis.indices(size))) for axis, size in zip(columns, self.shape[1:], strict=True)]
        result = np.empty((max(0, end - start), *shape), dtype or STORED[self.dtype])
        for begin in range(start, end, self.step):
            stop = min(begin + self.step, end)
            values = self.compute(self.first + begin, self.first + stop)
            result[begin - start : stop - start] = self.cast(values[:, *columns], result.dtype)
        return result


def computed(
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    compute: Callable[[int, int], np.ndarray],
    source: Tensor,
    step: int | None = None,
    matrix_dtype: np.dtype | None = None,
) -> Computed:
    """Return a `Computed` tensor, which errors describe as part of the file of `source`.

    By default, `step` is as many rows as have `CHUNK` numbers.
    """
    dtype, width = np.dtype(dtype), math.prod(shape[1:])
    step = step or max(1, CHUNK // max(1, width))
    nbytes = math.prod(shape) * dtype.itemsize
    return Computed(
        source.file, name, NAMES[dtype], shape, source.offset, nbytes, compute, step, matrix_dtype=matrix_dtype
    )


def read_header(file: Path) -> dict[str, Tensor]:
    """Check a file's header, and return its tensors in the order of their offsets.

    This function first reports what safetensors would not: duplicate names, unknown fields, and which tensors are
    missing from a truncated file. Then safetensors checks dtypes, shapes and offsets.
    """
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # checked first, because opening a pipe would block
            raise CheckpointError([f"{file}: not a regular file: {kind_of(file)}"])
        header, start, size = _parse(file)
        if problems := _faults(file, header, start, size):
            raise CheckpointError(problems)
        with _open(file):
            pass
    except SafetensorError as error:
        raise CheckpointError([f"{file}: damaged: {error}"]) from error
    except OSError as error:
        raise CheckpointError([f"{file}: {error.strerror or error}"]) from error
    spans = sorted((*entry["data_offsets"], name) for name, entry in header.items())
    return {
        name: Tensor(file, name, header[name]["dtype"], tuple(header[name]["shape"]), start + begin, end - begin)
        for begin, end, name in spans
    }


def write_file(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a new file that transformers can load; C-contiguous arrays are not copied."""
    file.touch(exist_ok=False)
    mode = file.stat().st_mode
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}  # safetensors ignores strides
    try:
        save_file(ordered, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    file.chmod(mode)  # safetensors creates files that only their owner can read


def allocate_file(file: Path, arrays: Mapping[str, Any]) -> None:
    """Create a file of zeros with the names, dtypes and shapes of `arrays`, to be filled with `Tensor.write`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Return True if two arrays have the same dtype, shape and bits; NaNs can be equal, but 0.0 differs from -0.0."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    bits = f"u{left.itemsize}"
    return np.array_equal(left.view(bits), right.view(bits))


def _open(file: Path) -> safe_open:
    # Do not map the file: mapped pages count toward memory usage, and truncating the file would crash the process.
    return safe_open(file, framework="numpy", backend="pread")


def _parse(file: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header's entries, the offset of the first tensor, and the size of the file."""
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        start = 8 + length
        if size < 8 or start > size:
            raise CheckpointError([f"{file}: truncated or damaged: {size} bytes cannot contain a header of {length}"])
        if length > LARGEST:
            raise CheckpointError([f"{file}: damaged: a header of {length:,} bytes; at most {LARGEST:,} are read"])
        text = stream.read(length)
    try:
        header = json_object(f"{file}: damaged: its header", text)
    except ConfigError as error:
        raise CheckpointError([str(error)]) from error
    header.pop("__metadata__", None)
    return header, start, size


def _faults(file: Path, header: dict[str, Any], start: int, size: int) -> list[str]:
    """List malformed entries or, if there are none, the tensors that are missing from a truncated file."""
    problems = [
        f"{file}: {name}: damaged header: {shown(entry)} must be dtype, shape and data_offsets, in whole numbers"
        for name, entry in header.items()
        if not _well_formed(entry)
    ]
    if problems:
        return problems
    lost = [name for name, entry in header.items() if start + entry["data_offsets"][1] > size]
    if lost:
        end = start + max(entry["data_offsets"][1] for entry in header.values())
        return [f"{file}: truncated: {size} bytes of {end}; cut off: {', '.join(lost)}"]
    return []


def _well_formed(entry: Any) -> bool:
    match entry:
        case {"dtype": str(), "shape": [*shape], "data_offsets": [begin, end]} if len(entry) == 3:
            return all(type(number) is int and 0 <= number < _MAX_NUMBER for number in (*shape, begin, end))
    return False
