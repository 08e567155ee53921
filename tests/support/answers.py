"""Writers of an answer file: alone, in shards, killed at random moments, and on a disk that fills up.

Run this as a separate process, without jax so that it can fork: `python -m tests.support.answers DIRECTORY KILLS`. With
options of `jaxgen`, such as `--input FILE`, this kills `jaxgen` commands instead of writers.
"""

import functools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

from jaxgen.cli.answer_file import WHOLE as ALL, Shard, answer_file
from jaxgen.errors import InputError

RUN = {"--input": "digest", "--temperature": 0.5, "--seed": 3}
PROMPTS = 20
ANSWERS = [
    [{"prompt": "é" * prompt, "index": "own", "sequence": copy} for copy in range(2)] for prompt in range(PROMPTS)
]


def lines(*answers) -> bytes:
    return "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers).encode()


WHOLE = lines(*[answer for answers in ANSWERS for answer in answers])


def summed(*entries) -> bytes:
    """Return lines of a partial file, with their checksums."""
    texts = [line[1:] for line in lines(*entries).splitlines(keepends=True)]
    return b"".join(b'{"crc32": "%08x", %b' % (zlib.crc32(text), text) for text in texts)


def header(run=RUN) -> bytes:
    return summed({"run": run})


def partial(*indices: int, run=RUN) -> bytes:
    """Return the content of the partial file of a writer that has answered these prompts."""
    return header(run) + summed(*[{"index": index, "answers": ANSWERS[index]} for index in indices])


def write(target: Path, seconds: float = 0.0, run=RUN, shard: Shard = ALL, seed: float = 0) -> int:
    """Write the missing answers in random order. Return how many answers the file then contains."""
    indices = list(range(shard.number, PROMPTS, shard.count))
    random.Random(seed).shuffle(indices)
    with answer_file(target, run, prompts=PROMPTS, shard=shard) as file:
        for index in indices:
            if not file.done[index]:
                time.sleep(seconds)
                file.write(index, ANSWERS[index])
        return sum(file.done)


def forked(work) -> int:
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as null:
            sys.stderr = null
            try:
                work()
            except InputError:
                os._exit(9)
            finally:
                os._exit(0)
    return child


def partials(target: Path) -> list[Path]:
    return [path for path in target.parent.iterdir() if path.name.endswith(".partial")]


def kills(target: Path, count: int) -> dict[str, int]:
    """Kill writers at random moments, one or several at a time. Each resumes the work of earlier writers.

    Returns how often each event occurred.
    """
    rng = random.Random(0)
    seen = {"killed": 0, "continued": 0, "complete": 0, "wrong": 0, "refused": 0}
    while seen["killed"] < count:
        shards = rng.choice([1, 1, 2, 3])
        begun = [(Shard(number, shards), rng.random()) for number in range(shards)]
        children = [forked(functools.partial(write, target, 0.002, RUN, shard, seed)) for shard, seed in begun]
        time.sleep(rng.uniform(0, 0.03))
        for child in rng.sample(children, shards):
            os.kill(child, signal.SIGKILL)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        seen["killed"] += statuses.count(signal.SIGKILL)
        if not target.exists() and signal.SIGKILL not in statuses:
            seen["refused"] += any(statuses)
        seen["continued"] += any(path.stat().st_size > len(header()) for path in partials(target))
        if target.exists():
            seen["complete"] += 1
            seen["wrong"] += target.read_bytes() != WHOLE
            for path in target.parent.iterdir():
                path.unlink()
    if not target.exists():
        write(target)
    seen["wrong"] += target.read_bytes() != WHOLE or bool(partials(target))
    return seen


def shards_at_once(target: Path, rounds: int) -> dict[str, int]:
    """Let processes write shards at the same time; the last one merges. Return the number of rounds and of failures."""
    seen = {"rounds": 0, "wrong": 0}
    for number in range(rounds):
        count = 2 + number % 4
        children = [forked(lambda r=r, count=count: write(target, 0.0005, shard=Shard(r, count))) for r in range(count)]
        statuses = {os.waitpid(child, 0)[1] for child in children}
        seen["rounds"] += 1
        seen["wrong"] += statuses != {0} or [path.name for path in target.parent.iterdir()] != [target.name]
        seen["wrong"] += target.read_bytes() != WHOLE
        target.unlink()
    return seen


def full_disk(target: Path) -> dict[str, int]:
    """Write with a limit on the file size, and then without one. Return how often each event occurred."""
    seen = {"refused": 0, "torn": 0, "wrong": 0}
    for limit in range(0, len(WHOLE), 50):

        def limited(limit=limit):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                write(target)
            except InputError as error:
                os._exit(2 if "cannot be written: File too large" in str(error) else 3)

        seen["refused"] += os.waitstatus_to_exitcode(os.waitpid(forked(limited), 0)[1]) == 2
        seen["torn"] += any(not path.read_bytes().endswith(b"\n") for path in partials(target))
        write(target)
        seen["wrong"] += target.read_bytes() != WHOLE
        target.unlink()
    return seen


def kill_commands(options: list[str], target: Path, whole: Path, environment, kills: int) -> dict[str, int]:
    """Kill `jaxgen OPTION...` at random moments, and resume with a random number of shards each time.

    `whole` is the output file of an uninterrupted run.
    """
    rng = random.Random(0)
    seen = {"killed": 0, "continued": 0, "complete": 0, "wrong": 0}

    def started(shard: Shard) -> subprocess.Popen:
        command = [sys.executable, "-m", "jaxgen", *options, "--output", str(target), "--shard", str(shard)]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def size() -> int:
        return sum(path.stat().st_size for path in partials(target))

    while seen["killed"] < kills:
        seen["continued"] += size() > 0
        count = rng.choice([1, 2, 2, 3])
        processes = [started(Shard(number, count)) for number in range(count)]
        enough = size() + rng.uniform(0, 0.7) * whole.stat().st_size
        while not target.exists() and size() < enough and any(process.poll() is None for process in processes):
            time.sleep(0.002)
        time.sleep(rng.choice([0, 0, 0.01, 0.1]))
        for process in rng.sample(processes, count):
            process.kill()
            seen["killed"] += process.wait() == -signal.SIGKILL
            seen["wrong"] += process.returncode not in (0, -signal.SIGKILL)
        if target.exists():
            seen["complete"] += 1
            seen["wrong"] += target.read_bytes() != whole.read_bytes()
            target.unlink()
    seen["wrong"] += started(ALL).wait() != 0 or target.read_bytes() != whole.read_bytes() or bool(partials(target))
    return seen


def main(directory: Path, count: int, *options: str) -> dict[str, dict[str, int]]:
    if options:
        whole = directory / "whole"
        if not whole.exists():
            subprocess.run([sys.executable, "-m", "jaxgen", *options, "--output", str(whole)], check=True)
        return {"commands": kill_commands(list(options), directory / "answers", whole, None, count)}
    folders = [directory / name for name in ("killed", "shards", "full")]
    for folder in folders:
        folder.mkdir()
    killed, shards, full = (folder / "answers" for folder in folders)
    return {"kills": kills(killed, count), "shards": shards_at_once(shards, 20), "disk": full_disk(full)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
