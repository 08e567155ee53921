"""A training run's states on disk, with checksums. If a write is interrupted, the earlier states are kept.

Each state is a directory, which gets its name once it is complete:
  states/40/arrays/      the arrays of the state after 40 steps; each process writes its part
  states/40/notes.json   what else is needed to continue
  states/40/SHA256SUMS   the checksums of the other files, for `sha256sum -c` too
  states/40.partial/     unfinished or discarded; removed by the next write
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxgen.errors import InputError, warn

_STATES, _ARRAYS, _NOTES, _SUMS = "states", "arrays", "notes.json", "SHA256SUMS"
State = TypeVar("State")


def write_state(directory: Path, state: Any, step: int, notes: Mapping[str, Any], keep: Collection[int] = ()) -> None:
    """Write a tree of arrays, and then remove the states of all steps except `step` and those in `keep`.

    All processes share `directory`, and every process of a mesh must call this function. `step` is the number of
    completed steps, and `notes` is JSON that is needed to continue.
    """
    jax.block_until_ready(state)  # on CPUs, two programs that communicate at the same time can deadlock
    target = _folder(directory, step)
    partial, first = target.with_name(f"{step}.partial"), jax.process_index() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
        writer.save(partial.absolute() / _ARRAYS, args=ocp.args.StandardSave(state), force=True)
    if first:
        (partial / _NOTES).write_text(json.dumps(notes), "utf-8")
        sums = [f"{_sha256(partial / name)}  {name}\n" for name in _files(partial)]
        (partial / _SUMS).write_text("".join(sums), "utf-8")
        if target.exists():
            _discard(target)
        partial.rename(target)
        kept = {str(number) for number in (step, *keep)}
        for other in [folder for folder in target.parent.iterdir() if folder.name not in kept]:
            _discard(other)
    multihost_utils.sync_global_devices(f"state {step}")  # so that every process sees the same states


def newest_notes(directory: Path) -> dict[str, Any] | None:
    """Return the notes of the newest state whose notes are undamaged, or None if there are no states.

    Raises:
        InputError: the notes of all states are damaged.
    """
    steps = _steps(directory)
    for step in reversed(steps):
        if not _fault(_folder(directory, step), [_NOTES]):
            return read_notes(directory, step)
    if steps:
        raise _all_damaged(directory, steps)
    return None


def intact_steps(directory: Path) -> list[int]:
    """Return the steps of the undamaged states, in order. Warn about each state that is damaged.

    Raises:
        InputError: all states are damaged.
    """
    steps = _steps(directory)
    faults = {step: fault for step in steps if (fault := _fault(_folder(directory, step)))}
    if steps and len(faults) == len(steps):
        raise _all_damaged(directory, steps)
    for step, fault in faults.items():
        warn(f"the state of step {step} in {directory} is damaged and will not be used: {fault}")
    return [step for step in steps if step not in faults]


def read_notes(directory: Path, step: int) -> dict[str, Any]:
    """Return the notes of an undamaged state."""
    return json.loads((_folder(directory, step) / _NOTES).read_text("utf-8"))


def read_state(directory: Path, step: int, like: State) -> State:
    """Read an undamaged state, and place its arrays on the devices given by `like`.

    `like` has the structure of the state, with a `jax.ShapeDtypeStruct` (including a sharding) in place of each array.
    """
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        return reader.restore(_folder(directory, step).absolute() / _ARRAYS, args=ocp.args.StandardRestore(like))


def remove_states(directory: Path) -> None:
    """Remove the states that `write_state` wrote."""
    shutil.rmtree(directory / _STATES, ignore_errors=True)


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Create `directory` and keep other processes from training in it; remove it at the end if it is empty."""
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


def _folder(directory: Path, step: int) -> Path:
    return directory / _STATES / str(step)


def _steps(directory: Path) -> list[int]:
    states = directory / _STATES
    return sorted(int(path.name) for path in states.iterdir() if path.name.isdecimal()) if states.is_dir() else []


def _discard(folder: Path) -> None:
    """Rename a state before removing it, so that a partly removed state is never read."""
    if folder.name.isdecimal():
        folder = folder.rename(folder.with_name(f"{folder.name}.discarded.partial"))
    shutil.rmtree(folder)


def _files(folder: Path) -> list[str]:
    """Return the names of all files of a state, except that of its checksums."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return sorted(names - {_SUMS})


def _fault(folder: Path, names: Collection[str] | None = None) -> str:
    """Return what is wrong with a state's files, or an empty string. Check only the files in `names`, if given."""
    try:
        lines = (folder / _SUMS).read_bytes().decode().split("\n")[:-1]
    except (OSError, UnicodeError):
        return f"{_SUMS} cannot be read"
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    found = _files(folder)
    if changed := sorted(set(found) ^ sums.keys()):
        return f"{changed[0]} is {'not listed in ' + _SUMS if changed[0] in found else 'missing'}"
    try:
        wrong = [name for name in (names or found) if _sha256(folder / name) != sums[name]]
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    return f"{wrong[0]} differs from its checksum" if wrong else ""


def _all_damaged(directory: Path, steps: list[int]) -> InputError:
    fault = _fault(_folder(directory, steps[-1]))
    states = "the only saved state is damaged" if len(steps) == 1 else f"all {len(steps)} saved states are damaged"
    return InputError(f"{directory}: {states} (step {steps[-1]}: {fault}); remove it to start again")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
