"""Directories that are created atomically, even if the writer is killed.

While `out` is being written, or after its writer was killed, its parent directory can also contain:
  .out.<8 hex digits>.partial   unfinished or discarded; locked while its writer runs, removed by the next writer
  .out.replaced                 the previous `out`, complete, while the new one is moved into place
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from convert.errors import CheckpointError


@contextlib.contextmanager
def new_directory(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a hidden directory to fill; rename it to `target` if the block exits without an error.

    After an error, the hidden directory is removed and `target` is unchanged. An existing `target` is replaced only if
    it is an empty directory or, with `overwrite`, a checkpoint or an adapter.

    Raises:
        CheckpointError: `target` exists and cannot be replaced, or its parent directory is missing.
    """
    target = target.resolve()
    if not target.parent.is_dir():
        raise CheckpointError([f"{target.parent} is not a directory: create it first"])
    _clean(target)
    _check_replaceable(target, overwrite)
    partial = _partial(target)
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems do not support locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield partial
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        _check_replaceable(target, overwrite)
        _swap(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def replaced(target: Path) -> Path:
    """Return the path to which the previous directory is moved while a new directory replaces it."""
    return target.with_name(f".{target.name}.replaced")


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")


def _clean(target: Path) -> None:
    """If writers of `target` were killed, restore the previous directory and remove partial directories."""
    old = replaced(target)
    if old.is_dir():
        if target.exists():
            _discard(old, target)
        else:
            old.rename(target)
    ours = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{8}\.partial")
    for leftover in target.parent.iterdir():
        if not ours.fullmatch(leftover.name):
            continue
        with contextlib.suppress(FileNotFoundError):  # the directory's writer has just finished
            lock = os.open(leftover, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # the directory's writer is still running, or the file system does not support locks
            else:
                shutil.rmtree(leftover)
            finally:
                os.close(lock)


def _check_replaceable(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError([f"{target} is a file: pass a directory"])
    inside = list(target.iterdir())
    if not inside:
        return
    if not overwrite:
        raise CheckpointError([f"{target} exists: choose another name, or overwrite=True (--overwrite) to replace it"])
    if not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
        missing = "is neither a checkpoint (no config.json) nor an adapter (no adapter_config.json)"
        raise CheckpointError([f"{target} {missing}, so it is kept: choose another name"])
    if folders := sorted(path.name for path in inside if path.is_dir() and not path.is_symlink()):
        found = ", ".join(folders)
        raise CheckpointError([f"{target} contains folders that would be deleted ({found}): choose another name"])


def _swap(new: Path, target: Path) -> None:
    old = replaced(target)
    occupied = target.is_dir() and any(target.iterdir())
    try:
        if occupied:
            target.rename(old)
        new.rename(target)
    except BaseException:
        if old.is_dir() and not target.exists():
            old.rename(target)
        raise
    _sync(target.parent)
    if occupied:
        _discard(old, target)


def _discard(old: Path, target: Path) -> None:
    """Rename `old` before removing it, so that a partly removed directory is never restored."""
    partial = _partial(target)
    old.rename(partial)
    shutil.rmtree(partial)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
