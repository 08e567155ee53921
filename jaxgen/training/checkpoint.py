"""A training run's state on disk. Each process writes its part. If a write is interrupted, the old state is kept."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxgen.errors import InputError

_STATES = "states"
State = TypeVar("State")


def write_state(directory: Path, state: Any, step: int, settings: str) -> None:
    """Write a tree of arrays, replacing the state of an earlier step. Every process of a mesh must call this function.

    All processes share `directory`. `step` is the number of completed steps. `settings` identifies the run.
    """
    jax.block_until_ready(state)  # on CPUs, two programs that communicate at the same time can deadlock
    with _states(directory) as states:
        items = {"state": ocp.args.StandardSave(state), "settings": ocp.args.JsonSave({"digest": _digest(settings)})}
        states.save(step, args=ocp.args.Composite(**items))


def has_state(directory: Path, settings: str) -> bool:
    """Return True if `write_state` has written a state of this run."""
    if not (directory / _STATES).is_dir():
        return False
    with _states(directory) as states:
        if states.latest_step() is None:
            return False
        if _read(states, "settings", ocp.args.JsonRestore()) == {"digest": _digest(settings)}:
            return True
    raise InputError(
        f"{directory} has the state of a run with other settings or data: "
        "use the same ones to resume it, or remove it to start again"
    )


def read_state(directory: Path, like: State) -> State:
    """Read the state that `write_state` wrote, and place its arrays on the devices given by `like`.

    `like` has the structure of the state, with a `jax.ShapeDtypeStruct` (including a sharding) in place of each array.
    """
    with _states(directory) as states:
        return _read(states, "state", ocp.args.StandardRestore(like))


def remove_state(directory: Path) -> None:
    """Remove the state that `write_state` wrote."""
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


def _states(directory: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, enable_async_checkpointing=False, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager((directory / _STATES).absolute(), options=options)


def _read(states: ocp.CheckpointManager, name: str, how: Any) -> Any:
    try:
        return states.restore(None, args=ocp.args.Composite(**{name: how}))[name]
    except Exception as error:  # orbax raises plain Exception for damaged data
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = str(cause).split("\n")[0]
        raise InputError(f"{states.directory} is damaged: {reason}; remove it to start again") from error


def _digest(settings: str) -> str:
    return hashlib.sha256(settings.encode()).hexdigest()
