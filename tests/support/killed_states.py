"""Kill writers of a training state and check what they leave behind. test_checkpoint.py runs this as a process.

The process itself never starts jax's backends, so that it can fork.
"""

import functools
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.training.checkpoint import intact_steps, read_state, write_state
from tests.support.processes import run_in_child

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir"}


def state(step: int):
    return {"weight": jnp.full((300, 400), step, jnp.float32), "step": jnp.int32(step)}


def save(directory: Path, step: int) -> None:
    write_state(directory, state(step), step, {"step": step}, keep=[step - 1])


def save_until(directory: Path, step: int, last: int) -> None:
    """Save a state, but kill this process at its `last`-th operation on the file system."""
    jax.block_until_ready(state(step))
    count = 0

    def kill(event: str, _) -> None:
        nonlocal count
        if event not in OPERATIONS:
            return
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    save(directory, step)


def check(directory: Path, step: int) -> None:
    """Check that the newest state is complete, and save the state of `step` again."""
    newest = intact_steps(directory)[-1]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state(newest))
    jax.tree.map(np.testing.assert_array_equal, read_state(directory, newest, like), state(newest))
    save(directory, step)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "states").iterdir())


def main(folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    assert not run_in_child(lambda: (save(folder / "start", 1), save(folder / "start", 2)))
    draw, outcomes, kills = random.Random(0), [], 0

    def attempt(work: Callable[[Path], None], after: float | None = None) -> bool:
        directory = folder / str(len(outcomes))
        shutil.copytree(folder / "start", directory)
        killed = run_in_child(lambda: work(directory), after)
        left = intact_steps(directory)
        assert left[-1] in (2, 3), left
        outcomes.append(left[-1])
        assert not run_in_child(lambda: check(directory, 3))
        assert names(directory) == ["2", "3"]
        shutil.rmtree(directory)
        return killed

    while attempt(functools.partial(save_until, step=3, last=kills + 1)):
        kills += 1
    for _ in range(10):
        attempt(lambda directory: save(directory, 3), after=draw.uniform(0.1, 0.6))
    print(kills, len(set(outcomes)))


main(Path(sys.argv[1]))
