"""The state of a training run on the disk: one file, replaced as a whole, so that a kill leaves the one before."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.errors import InputError

_FILE = "state.npz"
State = TypeVar("State")


def write_state(directory: Path, state, settings: str) -> None:
    """Write a tree of float32 and int32 arrays; `settings` says what run it belongs to."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{_FILE}.partial"
    with open(partial, "wb") as stream:
        arrays: dict[str, Any] = {"settings": _digest(settings), **_by_name(state)}
        np.savez(stream, **arrays)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(directory / _FILE)


def read_state(directory: Path, like: State, settings: str) -> State | None:
    """Read what `write_state` wrote into a tree of the form of `like`; None where nothing was written.

    Raises:
        InputError: the file is of a run with other settings, or damaged.
    """
    file = directory / _FILE
    if not file.is_file():
        return None
    try:
        with np.load(file, allow_pickle=False) as arrays:
            stored = {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise InputError(f"{file} is damaged: {error}; remove {directory} to begin anew") from error
    if stored.pop("settings").tobytes() != _digest(settings).tobytes():
        raise InputError(
            f"{directory} holds the state of a run with other settings or data: "
            "give those again to go on with it, or remove it to begin anew"
        )
    leaves = [jnp.asarray(stored[name]) for name in _by_name(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _by_name(tree) -> dict[str, np.ndarray]:
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}


def _digest(settings: str) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(settings.encode()).digest(), np.uint8)
