"""Ctrl-C at any moment: it ends the process at once (130 in a shell), and there is no other word."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Says when Python has started and our first line comes.
START = "import sys; from jaxgen.__main__ import main; sys.stderr.write('!'); sys.stderr.flush(); main()"


def interrupted(checkpoint, programs, after: float) -> tuple[int, str, str]:
    """Start the command and interrupt it some seconds after its first line; it would take longer."""
    words = ["--model", str(checkpoint), "--input", "-", "--max-new-tokens", "200", "--slots", "1"]
    pipe = subprocess.PIPE
    environment = {**os.environ, **programs, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", START, *words]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
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
        # Half of them while Python imports, where an exception would come from the middle of an extension.
        after = rng.uniform(0, 0.5) if number % 2 else rng.uniform(0, 4)
        status, out, err = interrupted(checkpoint, programs, after)
        assert (status, err) == (-signal.SIGINT, ""), f"after {after:.4f} s: {status} {err}"
        assert all(line.startswith("{") and line.endswith("}") for line in out.splitlines())


@pytest.mark.slow
def test_four_interrupts(checkpoint, programs):
    check(checkpoint, programs, 4, seed=1)


@pytest.mark.slow
def test_fifty_interrupts(checkpoint, programs):
    check(checkpoint, programs, 50, seed=2)
