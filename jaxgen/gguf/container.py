"""Read the metadata and the table of tensors of GGUF files, which may be damaged or hostile.

A file begins with a header: the letters GGUF, a version, the numbers of tensors and of metadata pairs, the pairs, and
each tensor's name, dimensions, type and offset. Offsets count from the end of the header, rounded up to a multiple of
`general.alignment`. All numbers are little-endian.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxgen.errors import ConfigError, shown
from jaxgen.json_file import kind_of

LARGEST = 1 << 28  # maximum number of bytes in a header; that of Llama 3 with 128,256 tokens has 8 MB
_FIRST = 1 << 23  # number of bytes read at first
_MOST = {"tensors": 1 << 17, "pairs of metadata": 1 << 16}
_MOST_STRINGS = 1 << 22  # in an array
_LONGEST_NAME = 1 << 16  # in bytes
_MOST_PARTS = 1000  # of a split file
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

# By the number of a tensor's type in files: its name and, if it is implemented, the numbers of elements and of bytes in
# a block
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
_UNSUPPORTED = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"},
    **{40: "NVFP4"},
}

# The struct formats of numbers, by the numbers of their types; bool, string and array are separate.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor in a GGUF file: `nbytes` bytes at `offset` in `file`. `type` is a name in `TYPES`, such as Q4_K.

    The axes of `shape` are in torch's order: rows come first.
    """

    file: Path
    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The content of a GGUF file's header; of all headers if the model is split into several files.

    `metadata` maps keys to numbers, booleans, strings, numpy arrays of numbers, or lists of strings.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the value of a key, or `default` if the key is missing.

        Raises:
            ConfigError: the value is not of the given type.
        """
        value = self.metadata.get(key, default)
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is int)):
            raise ConfigError(f"{self.path}: {key} has the wrong type: {shown(value)}")
        return value


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Return True if a path ends like that of a GGUF file and is not a directory."""
    return os.fspath(path).lower().endswith(".gguf") and not os.path.isdir(path)


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read and check a file's header. The first of several files, such as x-00001-of-00003.gguf, stands for all.

    The last results are cached, until their files change.

    Raises:
        ConfigError: a file is missing, damaged, or has features that are not implemented; the message names it.
    """
    first = Path(path)
    return _read(tuple([(part, *_state(part)) for part in parts_of(first)]))


def parts_of(path: Path) -> list[Path]:
    """Return the paths of all files of a split model, given the first one, or `path` alone if it is not split."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if int(match["number"]) != 1 or not 1 <= count <= _MOST_PARTS:
        raise ConfigError(
            f"{path}: the file is a part of a model: pass the first one, *-00001-of-{match['count']}.gguf"
        )
    return [path.with_name(f"{match['stem']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]


def _state(path: Path) -> tuple[int, ...]:
    """Return what identifies the content of a file."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # checked first, because opening a pipe would block
            raise ConfigError(f"{path}: not a regular file: {kind_of(path)}")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=4)
def _read(files: tuple[tuple[Any, ...], ...]) -> GgufFile:
    parts = [_read_part(path) for path, *_ in files]
    path, metadata, tensors = parts[0].path, dict(parts[0].metadata), {}
    for number, part in enumerate(parts):
        given = [part.metadata.get(f"split.{key}", default) for key, default in (("no", 0), ("count", 1))]
        if given[1] in (0, 1) and len(parts) == 1:
            given[1] = 1
        if given != [number, len(parts)]:
            raise ConfigError(
                f"{part.path}: split.no and split.count say that this is part {given[0]} of {given[1]}, counted from "
                f"0, which its name does not: keep the names of the parts, *-00001-of-0000N.gguf"
            )
        if common := sorted(tensors.keys() & part.tensors.keys()):
            raise ConfigError(f"{part.path}: damaged: {shown(common[0])} is also in {tensors[common[0]].file.name}")
        tensors |= part.tensors
    expected = metadata.get("split.tensors.count")
    if expected is not None and len(parts) > 1 and expected != len(tensors):
        raise ConfigError(f"{path}: damaged: split.tensors.count is {shown(expected)}, the files have {len(tensors)}")
    return GgufFile(path, metadata, tensors)


def _read_part(path: Path) -> GgufFile:
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data = stream.read(_FIRST)
            try:
                return _Header(path, data, size).read()
            except _ReadMoreError:
                data += stream.read(LARGEST - len(data))
            return _Header(path, data, size).read()
    except _ReadMoreError as error:
        raise ConfigError(f"{path}: damaged: its header has more than {LARGEST:,} bytes") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


class _ReadMoreError(Exception):
    """The header does not end within the bytes that were read, but the file has more."""


class _Header:
    """Parses the header of one file, from `data`, its first bytes; `size` is the size of the file."""

    def __init__(self, path: Path, data: bytes, size: int):
        self.path, self.data, self.size, self.at = path, data, size, 0

    def read(self) -> GgufFile:
        """Return the content of the header."""
        if self.data[:4] != b"GGUF":
            raise self._damaged("does not begin with the letters GGUF, so it is not a GGUF file")
        self.at = 4
        version = self._number("I")
        if version not in (2, 3):
            reason = "but only the versions 2 and 3 are read: convert the model again"
            if version & 0xFFFF == 0:
                reason = "so it is big-endian, but only little-endian files are read"
            raise ConfigError(f"{self.path}: the format has version {version}, {reason}")
        tensors, pairs = self._count("tensors"), self._count("pairs of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string("a key")
            if key in metadata:
                raise self._damaged(f"has the key {shown(key)} twice")
            metadata[key] = self._value(key, self._number("I"))
        entries = [self._entry() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & alignment - 1:
            raise self._damaged(f"general.alignment must be a power of two, got {shown(alignment)}")
        return GgufFile(self.path, metadata, self._placed(entries, alignment))

    def _placed(self, entries: list[TensorEntry], alignment: int) -> dict[str, TensorEntry]:
        """Return the tensors by name, with their offsets in the file; check that they lie apart within the file."""
        start = -(-self.at // alignment) * alignment
        found: dict[str, TensorEntry] = {}
        cut_off, end = [], start
        for entry in sorted(entries, key=lambda entry: entry.offset):
            offset = start + entry.offset
            if entry.name in found:
                raise self._damaged(f"has the tensor {shown(entry.name)} twice")
            if entry.offset % alignment:
                raise self._damaged(f"the offset of {shown(entry.name)} is not a multiple of {alignment}")
            if offset < end:
                raise self._damaged(f"{shown(entry.name)} begins within another tensor")
            end = offset + entry.nbytes
            if end > self.size:
                cut_off.append(entry.name)
            found[entry.name] = dataclasses.replace(entry, offset=offset)
        if cut_off:
            names = ", ".join(map(str, map(shown, cut_off[:5]))) + (", ..." if len(cut_off) > 5 else "")
            raise ConfigError(f"{self.path}: truncated: {self.size} bytes of {end}; cut off: {names}")
        return {entry.name: found[entry.name] for entry in entries}

    def _entry(self) -> TensorEntry:
        name = self._string("a tensor's name")
        axes = self._number("I")
        if not 1 <= axes <= 4:
            raise self._damaged(f"{shown(name)} has {axes} dimensions")
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        number, offset = self._number("I"), self._number("Q")
        if number not in TYPES:
            type_name = _UNSUPPORTED.get(number, f"with the number {number}")
            known = ", ".join(name for name, *_ in TYPES.values())
            raise ConfigError(
                f"{self.path}: {shown(name)} has the type {type_name}, which is not implemented: use a file of the "
                f"same model with the types {known}"
            )
        type_name, count, size = TYPES[number]
        if not all(1 <= axis < 1 << 40 for axis in shape) or math.prod(shape) >= 1 << 60 or offset >= 1 << 62:
            raise self._damaged(f"{shown(name)} has the shape {shown(list(shape))} and the offset {offset}")
        if shape[-1] % count:
            raise self._damaged(f"{shown(name)} has rows of {shape[-1]}, which blocks of {count} do not divide")
        return TensorEntry(self.path, name, type_name, shape, offset, math.prod(shape) // count * size)

    def _value(self, key: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _BOOL:
            return self._truth(key, self._number("B"))
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            raise self._damaged(f"{shown(key)} has a value of the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return self._strings(key, count)
        if kind not in _NUMBERS and kind != _BOOL:
            raise self._damaged(
                f"{shown(key)} is an array of the type {kind}: only numbers, booleans and strings are read"
            )
        dtype = np.dtype(np.bool_) if kind == _BOOL else np.dtype("<" + _NUMBERS[kind])
        values = np.frombuffer(self._bytes(count * dtype.itemsize, key), np.uint8 if kind == _BOOL else dtype)
        if kind == _BOOL and values.max(initial=0) > 1:
            raise self._damaged(f"{shown(key)} has booleans that are neither 0 nor 1")
        return values.astype(dtype)  # a copy, so that the header's bytes can be freed

    def _strings(self, key: str, count: int) -> list[str]:
        if count > min(_MOST_STRINGS, self.size // 8):
            raise self._damaged(f"{shown(key)} has {count} strings")
        data, at, end = self.data, self.at, len(self.data)
        unpack, result = struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                if at > end:
                    break
                result.append(str(data[start:at], "utf-8"))
        except struct.error:
            pass
        except UnicodeDecodeError as error:
            raise self._damaged(f"{shown(key)} has text that is not UTF-8: {error}") from error
        if len(result) < count:
            if at <= self.size and len(self.data) < self.size:
                raise _ReadMoreError
            raise self._damaged(f"ends within {shown(key)}", truncated=True)
        self.at = at
        return result

    def _count(self, what: str) -> int:
        count = self._number("Q")
        if count > _MOST[what]:
            raise self._damaged(f"has {count} {what}; at most {_MOST[what]:,} are read")
        return count

    def _string(self, what: str) -> str:
        length = self._number("Q")
        if what in ("a key", "a tensor's name") and length > _LONGEST_NAME:
            raise self._damaged(f"{what} has {length} bytes")
        try:
            return str(self._bytes(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"{shown(what)} is not UTF-8: {error}") from error

    def _truth(self, key: str, value: int) -> bool:
        if value > 1:
            raise self._damaged(f"{shown(key)} is {value}, but a boolean must be 0 or 1")
        return bool(value)

    def _number(self, form: str) -> Any:
        size = struct.calcsize("<" + form)
        return struct.unpack("<" + form, self._bytes(size, "a number"))[0]

    def _bytes(self, count: int, what: str) -> bytes:
        end = self.at + count
        if end > self.size:
            raise self._damaged(f"ends within {shown(what)}", truncated=True)
        if end > len(self.data):
            raise _ReadMoreError
        data = self.data[self.at : end]
        self.at = end
        return data

    def _damaged(self, text: str, truncated: bool = False) -> ConfigError:
        return ConfigError(f"{self.path}: {'truncated or ' if truncated else ''}damaged: {text}")
