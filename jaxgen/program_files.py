"""Store compiled programs in files, so that other processes do not have to trace or compile them.

jax's compilation cache saves only the compile time: its key is the lowered program, so programs must still be traced
and lowered. Here, the key consists of everything that determines a program: jaxgen's source, the versions of jax and
jaxlib, jax's settings, the device, the static arguments, and the shapes and dtypes of the other arguments. A program is
stored only if every value in its key has a description that is the same in all processes. Programs that use the
caller's functions are not stored, because the code of these functions may change.

The files must be trusted, like those in jax's cache, because they contain pickles and machine code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import os
import pickle
import tempfile
import threading
import types
import warnings
import zlib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import serialize_executable

from jaxgen.errors import JaxgenWarning
from jaxgen.recompilation import LOG

_CHANGING = threading.Lock()  # guards a jax setting that all threads share
# Saved values of `jax_persistent_cache_min_compile_time_secs`, one for each running compilation.
_BEFORE: list[float] = []
_PLAIN = (str, bytes, int, float, type(None), np.dtype, np.generic)
_KNOWN = {"jaxgen", "builtins", "numpy"}  # packages whose functions and classes are identified by their names


def read_or_compile(
    directory: Path, device: Any, function: Any, made_from: Iterable[Any], args: tuple, kwargs: dict[str, Any]
) -> jax.stages.Compiled | None:
    """Read a program from its file, or compile it and write the file. Return None if the program cannot be stored.

    Args:
        directory: an existing directory.
        device: the device on which the program runs.
        function: a function returned by `jax.jit`.
        made_from: everything that determines the program in addition to `_surroundings`: the static arguments, the
            structure, shapes and dtypes of the other arguments, and the compiler options.
        args, kwargs: the arguments.
    """
    try:
        key = " ".join([_name(function), _described([*made_from, *_surroundings(device)])])
    except _UnknownError:
        return None
    file = directory / f"{hashlib.sha256(key.encode()).hexdigest()}.program"
    found = _read(file, jax.tree.structure((args, kwargs)), device)
    if found is None:
        with _compiling_anew():
            found = function.lower(*args, **kwargs).compile()
        _write(file, found)
    return found


class _UnknownError(Exception):
    """Raised for a value whose description is not stable across processes."""


def _described(value: Any) -> str:
    """Return a string that is the same in all processes for equal values, and different for different values."""
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))} {value.name}"
    if isinstance(value, _PLAIN):
        return f"{_name(type(value))} {value!r}"
    if isinstance(value, tuple | list):
        return f"{_name(type(value))} [{', '.join(map(_described, value))}]"
    if isinstance(value, dict):
        return _described([[key, value[key]] for key in sorted(value, key=repr)])
    if isinstance(value, set | frozenset):
        return f"set {sorted(map(_described, value))}"
    if isinstance(value, jax.tree_util.PyTreeDef):
        node = value.node_data()
        return "*" if node is None else _described([*node, *value.children()])
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return _name(value)
    name = _name(type(value))
    if dataclasses.is_dataclass(value):
        return f"{name} {_described([getattr(value, field.name) for field in dataclasses.fields(value)])}"
    return f"{name} {_described(list(value.__reduce_ex__(2)[1:3]))}"  # the data that pickle would store for `value`


def _name(value: Any) -> str:
    """Return the name of a class or function; raise `_UnknownError` if its code is not part of the key."""
    name = f"{value.__module__}.{value.__qualname__}"
    if name.partition(".")[0] not in _KNOWN or "<" in name:
        raise _UnknownError(name)
    return name


def _surroundings(device: Any) -> list[Any]:
    """Return the values in a program's key that are not from the call: versions, source, device, flags and settings."""
    flags = {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "LIBTPU_"))}
    settings = {name: repr(value) for name, value in jax.config.values.items() if "cache" not in name}
    versions = [jax.__version__, metadata.version("jaxlib"), device.client.platform_version, _source()]
    return [*versions, device.device_kind, device.id, flags, settings]


@functools.cache
def _source() -> str:
    """Return a digest of jaxgen's source, which may change without a new version number."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path, arguments: Any, device: Any) -> jax.stages.Compiled | None:
    """Return the program in a file, or None if it must be compiled. `arguments` is the program's argument structure."""
    try:
        serialized, results = pickle.loads(zlib.decompress(file.read_bytes()))
    except (OSError, zlib.error):  # the file is missing or incomplete; `zlib` verifies a checksum
        return None
    LOG.info("reading it from %s", file)
    results = jax.tree.structure(results)
    try:
        return serialize_executable.deserialize_and_load(serialized, arguments, results, device.client, [device])
    except JaxRuntimeError as error:
        warnings.warn(f"{file} cannot be loaded and is compiled again: {error}", JaxgenWarning, stacklevel=2)
        return None


@contextlib.contextmanager
def _compiling_anew() -> Iterator[None]:
    """Keep programs out of jax's own cache: XLA loses functions when it serializes a program loaded from that cache.

    Seen with jaxlib 0.10.2 on a CPU: "Function gather_bitcast_fusion.2 not found" on the first call.
    """
    setting = "jax_persistent_cache_min_compile_time_secs"
    with _CHANGING:
        _BEFORE.append(jax.config.values[setting])  # the setting is already infinite if another thread is compiling
        jax.config.update(setting, float("inf"))
    try:
        yield
    finally:
        with _CHANGING:  # the last thread to finish restores the original value
            jax.config.update(setting, _BEFORE.pop())


def _write(file: Path, program: Any) -> None:
    """Write a program to a file atomically, because several processes may write the same file."""
    serialized, _, structure = serialize_executable.serialize(program)
    results = jax.tree.unflatten(structure, range(structure.num_leaves))  # the structure itself cannot be pickled
    content = zlib.compress(pickle.dumps((serialized, results)), level=1)
    part = None
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as stream:
            part = Path(stream.name)
            stream.write(content)
        part.replace(file)
    except OSError:  # for example, the disk is full; the next process will compile the program again
        if part is not None:
            part.unlink(missing_ok=True)
