"""Writers of a file of answers: whole, killed at random moments, and on a disk that fills up.

A process of its own, without jax, so that it can fork: `python -m tests.support.answers DIRECTORY KILLS`.
"""

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

from jaxgen.cli.answer_file import answer_file
from jaxgen.errors import InputError

RUN = {"--input": "digest", "--temperature": 0.5, "--seed": 3}
PROMPTS, COPIES, BATCH = 20, 2, 3
LINES = [{"prompt": "é" * prompt, "sequence": copy} for prompt in range(PROMPTS) for copy in range(COPIES)]
WHOLE = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES).encode()


def write(target: Path, seconds: float = 0.0, run=RUN) -> int:
    """Write what is missing, batch by batch; return the number of prompts that were there."""
    with answer_file(target, run, prompts=PROMPTS, copies=COPIES, batch_size=BATCH) as file:
        for first in range(file.done, PROMPTS, BATCH):
            time.sleep(seconds)
            file.write(LINES[first * COPIES : (first + BATCH) * COPIES])
        return file.done


def forked(work) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def kills(target: Path, count: int) -> dict[str, int]:
    """Kill writers at random moments, each of which continues; return how often that happened, and what came of it."""
    random.seed(0)
    seen = {"killed": 0, "continued": 0, "complete": 0, "wrong": 0}
    while seen["killed"] < count:
        child = forked(lambda: write(target, 0.002))
        time.sleep(random.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        seen["killed"] += os.waitpid(child, 0)[1] == signal.SIGKILL
        partial = target.with_name(target.name + ".partial")
        seen["continued"] += partial.exists() and partial.stat().st_size > 0
        seen["wrong"] += partial.exists() and not WHOLE.startswith(partial.read_bytes())
        if target.exists():
            seen["complete"] += 1
            seen["wrong"] += target.read_bytes() != WHOLE
            target.unlink()
    write(target)
    seen["wrong"] += target.read_bytes() != WHOLE
    return seen


def full_disk(target: Path) -> dict[str, int]:
    """Write under limits of the size of a file, and then without; return what happened."""
    seen = {"refused": 0, "torn": 0, "wrong": 0}
    for limit in range(0, len(WHOLE), 50):

        def limited(limit=limit):
            resource.setrlimit(resource.RLIMIT_FSIZE, (max(limit, len(json.dumps(RUN))), resource.RLIM_INFINITY))
            try:
                write(target)
            except InputError as error:
                os._exit(2 if "cannot be written: File too large" in str(error) else 3)

        seen["refused"] += os.waitstatus_to_exitcode(os.waitpid(forked(limited), 0)[1]) == 2
        partial = target.with_name(target.name + ".partial")
        seen["torn"] += partial.exists() and not partial.read_bytes().endswith(b"\n")
        write(target)
        seen["wrong"] += target.read_bytes() != WHOLE
        target.unlink()
    return seen


if __name__ == "__main__":
    directory, count = Path(sys.argv[1]), int(sys.argv[2])
    print(json.dumps({"kills": kills(directory / "killed", count), "disk": full_disk(directory / "full")}))
