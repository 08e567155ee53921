"""A training run's states on disk, with checksums. If a write is interrupted, the earlier states are kept.

Each state is a directory, which gets its name once it is complete:
  states/40/arrays/      the arrays of the state after 40 steps; each process writes its part
  states/40/notes.json   what else is needed to continue
  states/40/SHA256SUMS   the checksums of these files, for `sha256sum -c` too; the last line has their number
  states/40.partial/     unfinished or discarded; removed by the next write
Anything else in these directories is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxgen.errors import InputError, warn

_STATES, _ARRAYS, _NOTES, _SUMS = "states", "arrays", "notes.json", "SHA256SUMS"
_STEP, _OWN = re.compile("[0-9]+"), re.compile(r"[0-9]+(\.discarded)?(\.partial)?")  # names of directories
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
        target.parent.mkdir(parents=True, exist_ok=True)
        _make_way(partial)
        partial.mkdir()
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
        writer.save(partial.absolute() / _ARRAYS, args=ocp.args.StandardSave(state), force=True)
    if first:
        (partial / _NOTES).write_text(json.dumps(notes), "utf-8")
        names = sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file())
        sums = [f"{_sha256(partial / name)}  {name}\n" for name in names]
        (partial / _SUMS).write_text(f"{''.join(sums)}{_last_line(len(sums))}\n", "utf-8")
        _make_way(target)
        partial.rename(target)
        kept = {str(number) for number in (step, *keep)}
        for other in _own(target.parent):
            if other.name not in kept:
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
    for folder in _own(directory / _STATES):
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # other files are left
        (directory / _STATES).rmdir()


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
    return sorted(int(path.name) for path in _own(directory / _STATES) if _STEP.fullmatch(path.name))


def _own(states: Path) -> list[Path]:
    """Return the directories that `write_state` makes."""
    found = states.iterdir() if states.is_dir() else ()
    return [path for path in found if _OWN.fullmatch(path.name) and path.is_dir()]


def _make_way(path: Path) -> None:
    """Remove a directory of `write_state`. A file of another program with this name is renamed."""
    if path.is_dir():
        _discard(path)
    elif path.exists():
        path.rename(path.with_name(f"{path.name}.displaced"))


def _discard(folder: Path) -> None:
    """Rename a state before removing it, so that a partly removed state is never read."""
    if _STEP.fullmatch(folder.name):
        folder = folder.rename(folder.with_name(f"{folder.name}.discarded.partial"))
    shutil.rmtree(folder)


def _last_line(files: int) -> str:
    """Return the last line of the checksums, without which a truncated list would look like a short one."""
    return f"# {files} files"


def _fault(folder: Path, names: Collection[str] | None = None) -> str:
    """Return what is wrong with a state's files, or an empty string. Check only the files in `names`, if given.

    Only files with a checksum count; a file system or another program may have added files.
    """
    try:
        *lines, last, end = (folder / _SUMS).read_bytes().decode().split("\n")
    except (OSError, ValueError):
        return f"{_SUMS} cannot be read"
    if last != _last_line(len(lines)) or end:
        return f"{_SUMS} is incomplete"
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if missing := [name for name in (*sums, _NOTES) if name not in sums or not (folder / name).is_file()]:
        return f"{missing[0]} is missing"
    try:
        wrong = [name for name in (names or sums) if _sha256(folder / name) != sums[name]]
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
