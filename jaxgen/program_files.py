"""Compiled programs in files, so that other processes need neither trace nor compile them.

jax's compilation cache only saves compilation: its key is the traced and lowered program. Here, the key consists of
everything that a program is made from: jaxgen's source, the versions of jax and jaxlib, jax's settings, the device, the
static arguments, and the shapes and dtypes of the others. A program is therefore stored only if all of these can be
described. The caller's functions cannot, because their code may change.

The files are trusted, like those of jax's cache: they contain a pickle and machine code.
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

_CHANGING = threading.Lock()  # of a setting of jax that all threads share
_BEFORE: list[float] = []  # its values before each compilation that is running
_PLAIN = (str, bytes, int, float, type(None), np.dtype, np.generic)
_KNOWN = {"jaxgen", "builtins", "numpy"}  # packages whose functions and classes are identified by their names


def read_or_compile(
    directory: Path, device: Any, function: Any, made_from: Iterable[Any], args: tuple, kwargs: dict[str, Any]
) -> jax.stages.Compiled | None:
    """Read a program from its file, or compile it and write the file; return None for one that cannot have a file.

    Args:
        directory: an existing directory.
        device: the device on which the program runs.
        function: a result of `jax.jit`.
        made_from: everything that the program depends on, in addition to jaxgen's source and jax: static arguments, the
            structure of the others, their shapes and dtypes, and the compiler's options.
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
    """A value that has no stable description across processes."""


def _described(value: Any) -> str:
    """Return a text that is the same for equal values in all processes, and different for different values."""
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
    return f"{name} {_described(list(value.__reduce_ex__(2)[1:3]))}"  # described by the contents of its pickle


def _name(value: Any) -> str:
    """Return the name of a class or a function; raise `_UnknownError` if its code is not part of the key."""
    name = f"{value.__module__}.{value.__qualname__}"
    if name.partition(".")[0] not in _KNOWN or "<" in name:
        raise _UnknownError(name)
    return name


def _surroundings(device: Any) -> list[Any]:
    """Return everything that a program depends on in addition to its arguments."""
    flags = {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "LIBTPU_"))}
    settings = {name: repr(value) for name, value in jax.config.values.items() if "cache" not in name}
    versions = [jax.__version__, metadata.version("jaxlib"), device.client.platform_version, _source()]
    return [*versions, device.device_kind, device.id, flags, settings]


@functools.cache
def _source() -> str:
    """Return a digest of jaxgen's source, which may be edited without a new version."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(file: Path, arguments: Any, device: Any) -> jax.stages.Compiled | None:
    """Return the program in a file, None if it has to be compiled; `arguments` is their structure."""
    try:
        serialized, results = pickle.loads(zlib.decompress(file.read_bytes()))
    except (OSError, zlib.error):  # a missing or incomplete file; `zlib` has a checksum
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
    """Keep a program out of jax's own cache, because XLA loses functions if it serializes a program twice.

    Seen with jaxlib 0.10.2 on a CPU: "Function gather_bitcast_fusion.2 not found" at the first call.
    """
    setting = "jax_persistent_cache_min_compile_time_secs"
    with _CHANGING:
        _BEFORE.append(jax.config.values[setting])  # infinite if another thread is compiling
        jax.config.update(setting, float("inf"))
    try:
        yield
    finally:
        with _CHANGING:  # the last thread that compiles restores the first value
            jax.config.update(setting, _BEFORE.pop())


def _write(file: Path, program: Any) -> None:
    """Write a program. The file appears atomically, regardless of other processes."""
    serialized, _, structure = serialize_executable.serialize(program)
    results = jax.tree.unflatten(structure, range(structure.num_leaves))  # the structure itself cannot be pickled
    content = zlib.compress(pickle.dumps((serialized, results)), level=1)
    part = None
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as stream:
            part = Path(stream.name)
            stream.write(content)
        part.replace(file)
    except OSError:  # for example a full disk: the next process compiles the program again
        if part is not None:
            part.unlink(missing_ok=True)
