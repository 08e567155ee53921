"""Test and benchmark an accelerator quickly, in three parts of at most three and a half minutes each.

    python -m benchmarks accelerator 1 --results RESULTS

This runs from the source tree, installs nothing, and makes its own checkpoints with random weights. If a step fails or
runs out of time, the results of its completed rounds are kept, and the following steps still run. The exit status is 0
if all steps passed. The steps of a part share a cache of compiled programs.
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
_STOPPING = 5  # seconds to wait for a step to end after each signal


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
    """The shapes of the checkpoints, and numbers of tokens, rows, slots, and prompts for the slots.

    All time limits are multiplied by `patience`, because a CPU takes longer.
    """

    small: str
    large: str
    prompt: int
    long_prompts: tuple[int, ...]
    new_tokens: int
    rows: tuple[int, ...]
    slots: tuple[int, ...]
    prompts: int
    patience: float = 1


SIZES = {
    "full": Sizes("qwen2.5-0.5b", "qwen2.5-7b", 1000, (2048, 8192, 32768), 64, (1, 8, 64, 256), (64, 256), 512),
    "tiny": Sizes("tiny", "tiny", 16, (64, 128), 32, (1, 2), (2, 4), 8, patience=4),
}
PARTS = {
    1: "attention's kernel, long prompts, many rows",
    2: "slots, the small model, sampling compared with the CPU, a profile",
    3: "beside transformers with torch.compile",
}


def _tests(chosen: str, minutes: float) -> Step:
    options = ("-o", "addopts=", "-v", "--tb=short", "-p", "no:cacheprovider", "-W", "default", "-m", "device")
    return Step(f"tests-{chosen}", ("pytest", *options, "-k", chosen, "tests/test_device.py"), minutes)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings that the steps of all parts share.

    Attributes:
        sizes: the sizes.
        models, results: the directories of the checkpoints and of the results.
        environments: the directory with transformers' environment, if there is one.
    """

    sizes: Sizes
    models: Path
    results: Path
    environments: Path | None = None

    def checkpoint(self, shape: str, minutes: float) -> Step:
        """Return the step that makes a checkpoint."""
        words = ("benchmarks", "checkpoint", str(SHAPES / shape), str(self.models / shape))
        return Step(f"checkpoint-{shape}", words, minutes)

    def suite(self, name: str, shape: str, minutes: float, *words: str) -> Step:
        """Return the step that runs a suite, in one round. The prompts have `sizes.prompt` tokens by default."""
        others = () if self.environments is None else ("--environments", str(self.environments))
        prompts = () if "--prompt" in words else ("--prompt", str(self.sizes.prompt))
        places = (*self._places(shape), "--rounds", "1")
        return Step(f"{name}-{shape}", ("benchmarks", name, *places, *prompts, *others, *words), minutes)

    def profile(self, shape: str, mode: str, minutes: float = 1) -> Step:
        """Return the step that profiles a mode with fused projections."""
        sizes = ("--prompt", str(self.sizes.prompt), "--new-tokens", str(self.sizes.new_tokens))
        words = ("benchmarks", "profile", *self._places(shape), *sizes, "--mode", mode, "--form", "fused")
        return Step(f"profile-{shape}-{mode}-fused", words, minutes)

    def _places(self, shape: str) -> tuple[str, ...]:
        return ("--model", str(self.models / shape), "--results", str(self.results))

    def slots(self, shape: str, count: int, minutes: float) -> Step:
        """Return the step that answers many prompts in `count` slots."""
        sizes = ("--prompts", str(self.sizes.prompts), "--slots", str(count), "--rounds", "1", "--greedy")
        return Step(f"slots-{shape}-{count}", ("benchmarks", "slots", *self._places(shape), *sizes), minutes)

    def steps(self, part: int) -> list[Step]:
        """Return the steps of a part, most valuable first."""
        sizes, small, large = self.sizes, self.sizes.small, self.sizes.large
        ours, beside = ("--programs", "jaxgen:fused"), ("--programs", "jaxgen:fused", "transformers:compile")
        beside += ("--name", "beside-transformers")
        lengths = ("--new-tokens", str(sizes.new_tokens))
        long, rows = ("--prompt", *map(str, sizes.long_prompts)), ("--rows", *map(str, sizes.rows))
        if part == 1:
            return [
                _tests("attention", 0.75),
                self.checkpoint(large, 1),
                self.suite("batch", large, 1.5, *ours, *lengths, *rows),
                self.suite("prefill", large, 1, *ours, "--rows", "1", *long),
            ]
        if part == 2:
            return [
                self.checkpoint(small, 0.5),
                self.suite("batch", small, 1, *ours, *lengths, *rows),
                *[self.slots(small, count, 0.75) for count in sizes.slots],
                _tests("sampling", 1),
                self.profile(small, "greedy"),
            ]
        most = ("--rows", *map(str, sizes.rows[:-1]))
        return [
            self.checkpoint(small, 0.5),
            self.suite("batch", small, 1.5, *beside, *lengths, *most),
            self.checkpoint(large, 1),
            self.suite("batch", large, 1.5, *beside, *lengths, *most),
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
        start_new_session=True,  # so that `_stop` also ends the step's child processes
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
    """Stop a step and the programs that it started. Send SIGINT first, so that pytest can print its failures."""
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
            plan = Plan(SIZES[args.size], Path(models), args.results.resolve(), args.environments)
            planned = plan.steps(part)
            planned = list({step.name: step for step in planned}.values())  # drop repeats: the tiny models are the same
            lines = [f"# Part {part}: {PARTS[part]}", "", "| step | status | seconds |", "|---|---|---:|"]
            logs = args.results / f"part-{part}"
            logs.mkdir(exist_ok=True)
            planned = [dataclasses.replace(step, minutes=step.minutes * plan.sizes.patience) for step in planned]
            for outcome in run(planned, 60 * args.minutes * plan.sizes.patience, logs, Path(models) / "programs"):
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
    parser.add_argument("parts", type=int, nargs="+", choices=PARTS, metavar="PART", help="1 to 3; see below")
    parser.add_argument("--results", type=Path, required=True, help="the directory for logs and results")
    parser.add_argument("--minutes", type=float, default=3.5, help="the time limit for each part")
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
