"""The state of a training run on disk: one file, replaced as a whole, so that a kill leaves the previous one."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.errors import InputError

_FILE = "state.npz"
_PARTIAL = f"{_FILE}.partial"
State = TypeVar("State")


def write_state(directory: Path, state, settings: str) -> None:
    """Write a tree of float32 and int32 arrays; `settings` identifies the run that it belongs to."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / _PARTIAL
    with open(partial, "wb") as stream:
        with zipfile.ZipFile(stream, "w") as archive:
            _write_array(archive, "settings", _digest(settings))
            for name, leaf in _by_name(state).items():
                # A copy: a jax array that numpy has viewed cannot be overwritten by the next step.
                _write_array(archive, name, np.asarray(jnp.array(leaf)))
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(directory / _FILE)


def read_state(directory: Path, like: State, settings: str) -> State | None:
    """Read the state that `write_state` wrote into a tree with the structure of `like`; None if there is none.

    Raises:
        InputError: the file belongs to a run with other settings, or is damaged.
    """
    file = directory / _FILE
    if not file.is_file():
        return None
    try:
        with open(file, "rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            if arrays["settings"].tobytes() == _digest(settings).tobytes():
                leaves = [jnp.array(arrays[name]) for name in _by_name(like)]
                return jax.tree.unflatten(jax.tree.structure(like), leaves)
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{file} is damaged: {error}; remove {directory} to start again") from error
    raise InputError(
        f"{directory} has the state of a run with other settings or data: "
        "use those again to resume it, or remove it to start again"
    )


def remove_state(directory: Path) -> None:
    """Remove the state that `write_state` wrote."""
    for name in (_FILE, _PARTIAL):
        (directory / name).unlink(missing_ok=True)


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Prevent other processes from training in `directory`, which is created, and removed if it is empty at the end.

    Raises:
        InputError: another process is training there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another process is training in {directory}: wait for it, or choose another") from error
        except OSError:
            pass  # some network file systems do not support locks
        yield
    finally:
        os.close(lock)
        with contextlib.suppress(OSError):
            directory.rmdir()


def _write_array(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        np.lib.format.write_array(entry, array, allow_pickle=False)


def _by_name(tree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _digest(settings: str) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(settings.encode()).digest(), np.uint8)
