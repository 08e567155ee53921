"""Test and benchmark an accelerator quickly, with four commands of at most nine minutes each.

    python -m benchmarks accelerator 1 --results RESULTS

This runs from the source tree, installs nothing, and makes its own checkpoints with random weights. If a step fails or
runs out of time, its completed rounds are kept, and the following steps still run. The exit status is 0 if all steps
passed. The steps of a part share a cache of compiled programs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from benchmarks.program import ROOT

SHAPES = Path(__file__).parent / "shapes"
_STOPPING = 5  # seconds for a step to end after each signal


@dataclasses.dataclass(frozen=True)
class Step:
    """A command that runs in its own process.

    Attributes:
        name: the name in the report and in file names.
        words: the words after `python -m`.
        minutes: the time limit.
    """

    name: str
    words: tuple[str, ...]
    minutes: float


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The shapes of the checkpoints, the numbers of tokens and rows, and the number of rounds per measurement."""

    small: str
    middle: str
    large: str
    prompt: int
    long_prompt: int
    new_tokens: int
    rows: tuple[int, ...]
    rounds: int


SIZES = {
    "full": Sizes("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", 128, 2048, 64, (8, 64, 256), 3),
    "tiny": Sizes("tiny", "tiny", "tiny", 16, 64, 100, (2, 4, 8), 1),
}
PARTS = {
    1: "tests, decoding of one row, profiles",
    2: "beside transformers with torch.compile",
    3: "many rows, 8-bit weights and caches, reserved slots",
    4: "the middle size, beams, drafts, training",
}
_TESTS = ("tests/test_device.py", "tests/parity/test_parity.py")
_CHOSEN = "device or test_greedy_tokens or test_logits"


def steps(part: int, sizes: Sizes, models: Path, results: Path, environments: Path | None = None) -> list[Step]:
    """Return the steps of a part, most valuable first. `environments` contains transformers' environment, if any."""
    count, lengths = ("--rounds", str(sizes.rounds)), ("--new-tokens", str(sizes.new_tokens))
    others = () if environments is None else ("--environments", str(environments))

    def checkpoint(shape: str, minutes: float) -> Step:
        return Step(
            f"checkpoint-{shape}", ("benchmarks", "checkpoint", str(SHAPES / shape), str(models / shape)), minutes
        )

    def suite(name: str, shape: str, minutes: float, *words: str, prompt: int | None = sizes.prompt) -> Step:
        prompts = () if prompt is None else ("--prompt", str(prompt))
        common = ("--model", str(models / shape), "--results", str(results), *count, *prompts, *others)
        return Step(f"{name}-{shape}", ("benchmarks", name, *common, *words), minutes)

    def profile(shape: str, mode: str, form: str, minutes: float = 1) -> Step:
        words = ("--model", str(models / shape), "--results", str(results), "--prompt", str(sizes.prompt))
        return Step(
            f"profile-{shape}-{mode}-{form}",
            ("benchmarks", "profile", *words, *lengths, "--mode", mode, "--form", form),
            minutes,
        )

    tests = (
        "pytest",
        "-o",
        "addopts=",
        "-v",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        "-m",
        "device or not slow",
    )
    ours, beside = ("--programs", "jaxgen", "jaxgen:fused"), ("--programs", "jaxgen:fused", "transformers:compile")
    small, middle, large = sizes.small, sizes.middle, sizes.large
    rows = ("--rows", *map(str, sizes.rows), *lengths)
    greedy_and_qwen = ("--only", "penalty", "--rows", "1", *lengths)
    if part == 1:
        return [
            checkpoint(small, 1),
            suite("sampling", small, 2, *ours, *greedy_and_qwen),
            checkpoint(large, 2),
            suite("sampling", large, 3, *ours, *greedy_and_qwen),
            profile(small, "greedy", "fused"),
            profile(large, "greedy", "fused", 2),
            Step("tests", (*tests, "-k", _CHOSEN, *_TESTS), 4),
            profile(small, "qwen", "fused"),
        ]
    if part == 2:
        return [
            checkpoint(small, 1),
            suite("sampling", small, 3, *beside, *greedy_and_qwen),
            checkpoint(large, 2),
            suite("sampling", large, 4, *beside, *greedy_and_qwen),
            suite("prefill", large, 3, *beside, "--rows", "1", prompt=sizes.long_prompt),
            suite("prefill", small, 3, *beside, "--rows", "1", prompt=sizes.long_prompt),
        ]
    if part == 3:
        kinds = ("--programs", "jaxgen", "jaxgen:int8")
        return [
            checkpoint(small, 1),
            suite("batch", small, 3, *kinds, *rows),
            checkpoint(large, 2),
            suite("batch", large, 3, *kinds, *rows),
            suite("capacity", small, 2, *kinds, *lengths, "--only", "32768"),
            suite("capacity", large, 3, *kinds, *lengths, "--only", "32768"),
        ]
    return [
        checkpoint(middle, 1),
        suite("decode", middle, 2, *ours, *lengths),
        suite("modes", middle, 4, "--programs", "jaxgen"),
        checkpoint(small, 1),
        suite("train", small, 2, "--programs", "jaxgen", "transformers", prompt=None),
    ]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a step: "passed", or what went wrong."""

    name: str
    status: str
    seconds: float

    @property
    def passed(self) -> bool:
        return self.status == "passed"


def run(planned: list[Step], seconds: float, results: Path, programs: Path) -> Iterator[Outcome]:
    """Run steps one after the other, for at most `seconds` in total; yield how each ended.

    The output of each step is a file in `results`; compiled programs are stored in `programs`.
    """
    end = time.monotonic() + seconds
    for number, step in enumerate(planned, 1):
        begin = time.monotonic()
        limit = min(60 * step.minutes, end - begin - 3 * _STOPPING)
        status = "no time was left"
        if limit > 0:
            with (results / f"{number}-{step.name}.log").open("wb") as log:
                status = _status(step, limit, log, programs)
        yield Outcome(step.name, status, time.monotonic() - begin)


def _status(step: Step, limit: float, log: BinaryIO, programs: Path) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {
        "PYTHONPATH": path,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the step's processes share the device
    }
    process = subprocess.Popen(
        [sys.executable, "-m", *step.words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # stop it together with the programs that it starts
    )
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"out of time after {limit:.0f} s"
    finally:
        if process.poll() is None:
            _stop(process)
    return "passed" if status == 0 else f"failed with status {status}"


def _stop(process: subprocess.Popen) -> None:
    """Stop a step and the programs that it started. An interrupt comes first, so that pytest can print its failures."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOPPING)


def main() -> None:
    """Run the requested parts, and write how each step ended."""
    args = _arguments()
    args.results.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    passed = True
    for part in args.parts:
        with tempfile.TemporaryDirectory() as models:
            planned = steps(part, SIZES[args.size], Path(models), args.results.resolve(), args.environments)
            planned = list({step.name: step for step in planned}.values())  # all sizes of the tiny model are the same
            lines = [f"# Part {part}: {PARTS[part]}", "", "| step | status | seconds |", "|---|---|---:|"]
            logs = args.results / f"part-{part}"
            logs.mkdir(exist_ok=True)
            for outcome in run(planned, 60 * args.minutes, logs, Path(models) / "programs"):
                passed &= outcome.passed
                lines.append(f"| {outcome.name} | {outcome.status} | {outcome.seconds:.0f} |")
                print(lines[-1], flush=True)
                (logs / "steps.md").write_text("\n".join(lines) + "\n", "utf-8")
    if not passed:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks accelerator",
        usage="%(prog)s PART ... [options]",
        description=(__doc__ or "").splitlines()[0],
        epilog="; ".join(f"{part}: {title}" for part, title in PARTS.items()),
    )
    parser.add_argument("parts", type=int, nargs="+", choices=PARTS, metavar="PART", help="1 to 4; see below")
    parser.add_argument("--results", type=Path, required=True, help="the directory for logs and results")
    parser.add_argument("--minutes", type=float, default=9, help="the time limit for each part")
    parser.add_argument(
        "--environments",
        type=Path,
        metavar="DIR",
        help="the directory with transformers' environment, if it is not this one",
    )
    parser.add_argument("--size", choices=SIZES, default="full", help="tiny: rehearse with a tiny model")
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {args.minutes:g}")
    if args.environments is not None and not args.environments.is_dir():
        parser.error(f"--environments {args.environments} is not a directory")
    return args


if __name__ == "__main__":
    main()
