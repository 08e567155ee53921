"""Test and benchmark an accelerator quickly, in four parts of at most nine minutes each.

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
_CHOSEN = ("-m", "device or not slow", "-k", "device or test_greedy_tokens or test_logits")
_FILES = ("tests/test_device.py", "tests/parity/test_parity.py")
_TESTS = ("pytest", "-o", "addopts=", "-v", "--tb=short", "-p", "no:cacheprovider", "-W", "default", *_CHOSEN, *_FILES)


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

    def suite(self, name: str, shape: str, minutes: float, *words: str, prompt: int | None = None) -> Step:
        """Return the step that runs a suite, with prompts of `prompt` tokens (default: `sizes.prompt`)."""
        others = () if self.environments is None else ("--environments", str(self.environments))
        rounds = ("--rounds", str(self.sizes.rounds))
        # Training has no prompts.
        prompts = () if name == "train" else ("--prompt", str(prompt or self.sizes.prompt))
        return Step(
            f"{name}-{shape}", ("benchmarks", name, *self._places(shape), *rounds, *prompts, *others, *words), minutes
        )

    def profile(self, shape: str, mode: str, minutes: float = 1) -> Step:
        """Return the step that profiles a mode with fused projections."""
        sizes = ("--prompt", str(self.sizes.prompt), "--new-tokens", str(self.sizes.new_tokens))
        words = ("benchmarks", "profile", *self._places(shape), *sizes, "--mode", mode, "--form", "fused")
        return Step(f"profile-{shape}-{mode}-fused", words, minutes)

    def _places(self, shape: str) -> tuple[str, ...]:
        return ("--model", str(self.models / shape), "--results", str(self.results))

    def steps(self, part: int) -> list[Step]:
        """Return the steps of a part, most valuable first."""
        small, middle, large = self.sizes.small, self.sizes.middle, self.sizes.large
        ours = ("--programs", "jaxgen", "jaxgen:fused")
        beside = ("--programs", "jaxgen:fused", "transformers:compile", "--name", "beside-transformers")
        lengths = ("--new-tokens", str(self.sizes.new_tokens))
        rows = ("--rows", *map(str, self.sizes.rows), *lengths)
        greedy_and_qwen = ("--only", "penalty", "--rows", "1", *lengths)
        long = {"prompt": self.sizes.long_prompt}
        if part == 1:
            return [
                self.checkpoint(small, 1),
                self.suite("sampling", small, 2, *ours, *greedy_and_qwen),
                self.checkpoint(large, 2),
                self.suite("sampling", large, 3, *ours, *greedy_and_qwen),
                self.profile(small, "greedy"),
                self.profile(large, "greedy", 2),
                Step("tests", _TESTS, 4),
                self.profile(small, "qwen"),
            ]
        if part == 2:
            return [
                self.checkpoint(small, 1),
                self.suite("sampling", small, 3, *beside, *greedy_and_qwen),
                self.checkpoint(large, 2),
                self.suite("sampling", large, 4, *beside, *greedy_and_qwen),
                self.suite("prefill", large, 3, *beside, "--rows", "1", **long),
                self.suite("prefill", small, 3, *beside, "--rows", "1", **long),
            ]
        if part == 3:
            kinds = ("--programs", "jaxgen", "jaxgen:int8")
            return [
                self.checkpoint(small, 1),
                self.suite("batch", small, 3, *kinds, *rows),
                self.checkpoint(large, 2),
                self.suite("batch", large, 3, *kinds, *rows),
                self.suite("capacity", small, 2, *kinds, *lengths, "--only", "32768"),
                self.suite("capacity", large, 3, *kinds, *lengths, "--only", "32768"),
            ]
        return [
            self.checkpoint(middle, 1),
            self.suite("decode", middle, 2, *ours, *lengths),
            self.suite("modes", middle, 4, "--programs", "jaxgen"),
            self.checkpoint(small, 1),
            self.suite("train", small, 2, "--programs", "jaxgen", "transformers"),
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
