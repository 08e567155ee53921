"""Kill writers of a checkpoint and check what they leave behind. test_atomic_directory.py runs this as a process."""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import numpy as np

from convert.atomic_directory import new_directory, replaced
from convert.hf import write_checkpoint
from convert.shards import find_tensors
from tests.support.processes import run_in_child

FLOAT = np.dtype(np.float32)
SIZES = {f"layer.{number}": 10_000 for number in range(4)}
STEPS = {
    "open",
    "os.chmod",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "shutil.rmtree",
    "fcntl.flock",
    "os.scandir",
}


def save(target: Path, version: int) -> None:
    def read(name: str) -> np.ndarray:
        return np.full((50, 50), version, FLOAT)

    with new_directory(target, overwrite=True) as directory:
        write_checkpoint(directory, {"version": version}, None, SIZES, read, max_shard=25_000)


def version(target: Path) -> int | None:
    """Return a checkpoint's version, or None if there is none; fail if it is incomplete."""
    if not target.exists():
        return None
    found = json.loads((target / "config.json").read_text())["version"]
    tensors, _, problems = find_tensors(target)
    assert not problems, problems
    assert tensors.keys() == SIZES.keys()
    assert len({tensor.file for tensor in tensors.values()}) == 2
    assert all((tensor.read() == found).all() for tensor in tensors.values())
    return found


def save_until(target: Path, number: int, last: int) -> None:
    """Save a checkpoint, but kill this process at its `last`-th operation on the file system."""
    steps = 0

    def count(event: str, _) -> None:
        nonlocal steps
        if event not in STEPS:
            return
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(target, number)


def check(target: Path, old: int | None, new: int) -> None:
    left = version(target)
    assert left in (old, new, None), left
    if left is None and old is not None:
        assert version(replaced(target)) == old


def main(folder: Path) -> None:
    target = folder / "out"
    for old in (None, 1):
        step, outcomes = 0, set()
        while True:
            step += 1
            if old is not None:
                save(target, old)
            alive = not run_in_child(lambda: save_until(target, 2, step))  # noqa: B023
            check(target, old, 2)
            outcomes.add(version(target))
            save(target, 3)
            assert [path.name for path in folder.iterdir()] == ["out"]
            assert version(target) == 3
            shutil.rmtree(target)
            if alive:
                break
        assert step >= (12 if old is None else 20), step
        assert outcomes == {None, 2} | {old}, outcomes
    draw = random.Random(0)
    number = 0

    def loop() -> None:
        for later in range(number, number + 1_000_000):
            save(target, later)

    for _ in range(10):
        save(target, number)
        assert run_in_child(loop, after=draw.uniform(0.002, 0.03))
        left = version(target)
        old = version(replaced(target)) if left is None else None
        assert left is not None or old is not None
        number = (old if left is None else left) + 1
    save(target, number)
    assert [path.name for path in folder.iterdir()] == ["out"]
    print("intact")


main(Path(sys.argv[1]))
