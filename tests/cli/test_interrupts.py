"""Ctrl-C ends the process at once (with status 130 in a shell) and without any message, whenever it is pressed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import started

ROOT = Path(__file__).resolve().parents[2]
# Prints "!" just before it calls `main`.
START = "import sys; from jaxgen.__main__ import main; sys.stderr.write('!'); sys.stderr.flush(); main()"


def interrupted(checkpoint, programs, after: float) -> tuple[int, str, str]:
    """Start the command, which would run for a long time, and interrupt it `after` seconds after it prints "!"."""
    words = ["--model", str(checkpoint), "--input", "-", "--max-new-tokens", "200", "--slots", "1"]
    pipe = subprocess.PIPE
    environment = {**os.environ, **programs, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", START, *words]
    with started(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdin.write("A\n" * 5000)
        process.stdin.close()
        assert process.stderr.read(1) == "!"
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
        return process.wait(), out, err


def check(checkpoint, programs, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(count):
        # Half of the interrupts come while Python is importing modules, where an extension could raise the interrupt.
        after = rng.uniform(0, 0.5) if number % 2 else rng.uniform(0, 4)
        status, out, err = interrupted(checkpoint, programs, after)
        assert (status, err) == (-signal.SIGINT, ""), f"after {after:.4f} s: {status} {err}"
        assert all(line.startswith("{") and line.endswith("}") for line in out.splitlines())


@pytest.mark.slow
def test_command_survives_four_interrupts(checkpoint, programs):
    check(checkpoint, programs, 4, seed=1)


@pytest.mark.slow
def test_command_survives_fifty_interrupts(checkpoint, programs):
    check(checkpoint, programs, 50, seed=2)
