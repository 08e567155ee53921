"""Several processes: joining them, and one line that says which of them was lost.

jax's runtime ends a process whose partner is lost, in the middle of whatever it does and with a page of text. So the
command runs in a child process, and its parent reads what the runtime says.

Does not import jax before the child joins.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from jaxgen.arguments import FAILED
from jaxgen.errors import InputError

HEARTBEAT = 10  # seconds without a sign of life after which a process counts as lost
_CHILD = "JAXGEN_CHILD"  # in the child's environment: the descriptor of a pipe whose other end its parent has
# What the runtime writes, and how it names the process that was lost. Process 0 coordinates: without it all others end.
_RUNTIME = re.compile(r"[EWIF]\d{4} |\[Gloo\]|\*\*\* ")
# An error of the command that the loss of a process may have caused; it is printed only if none was lost.
_CAUSED = re.compile(r"jaxgen: error: .*(Gloo|NCCL|coordination)")
_LOST = re.compile(r"[Tt]ask (\d+) heartbeat timeout|stopped sending heartbeats\):\s*(\d+)")
_COORDINATOR_LOST = re.compile(r"Socket closed|failed to connect|Connection refused|Connection reset")


def wanted(options: argparse.Namespace) -> bool:
    """Return True if the command line asks for several processes."""
    return options.distributed or options.coordinator is not None


def is_child() -> bool:
    """Return True in the process that does the work."""
    return _CHILD in os.environ


def supervise(argv: Sequence[str]) -> int:
    """Run the command in a child process and return its status; print which process was lost, if one was."""
    # The child must find the same packages, and none in the working directory that the parent does not look for there.
    command = [sys.executable, "-P", "-m", "jaxgen", *argv]
    alive, parent = os.pipe()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), _CHILD: str(alive)}
    child = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, errors="replace", env=environment, pass_fds=[alive]
    )
    os.close(alive)
    assert child.stderr is not None
    runtime: list[str] = []  # from its first line on, but for lines of the command itself
    for line in child.stderr:
        held = runtime and not line.startswith("jaxgen: ")
        if not (held or _RUNTIME.match(line) or _CAUSED.match(line)):
            print(line, end="", file=sys.stderr, flush=True)
        elif not line.startswith("[Gloo]"):
            runtime.append(line)
    status, text = child.wait(), "".join(runtime)
    os.close(parent)
    if status == 0 or "distributed service" not in text:
        print(text, end="", file=sys.stderr)
        if status >= 0:
            return status
        print(f"jaxgen: error: the command was ended by {signal.Signals(-status).name}", file=sys.stderr)
        return 128 - status
    lost = _LOST.search(text)
    name = (lost[1] or lost[2]) if lost else "0" if _COORDINATOR_LOST.search(text) else "of unknown number"
    print(f"jaxgen: error: process {name} was lost: start all processes again", file=sys.stderr)
    return FAILED


def leave(status: int) -> None:
    """End a child that has failed, even if the others continue: jax would wait for them for five minutes.

    If it failed because another process was lost, there is time for the runtime to notice that, and to say so.
    """
    if is_child():
        timer = threading.Timer(1.5 * HEARTBEAT, os._exit, [status])
        timer.daemon = True
        timer.start()


def _end_with_parent() -> None:
    """Wait until the parent has ended, however it did, and end this process too."""
    os.read(int(os.environ[_CHILD]), 1)
    os._exit(FAILED)


def join(options: argparse.Namespace) -> None:
    """Connect to the other processes; only process 0 prints the answers.

    Raises:
        InputError: the environment does not say what the options leave out, or the processes did not meet in time.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import jax

    try:
        jax.distributed.initialize(
            options.coordinator, options.processes, options.process, heartbeat_timeout_seconds=HEARTBEAT
        )
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"the processes could not be joined: {error}; give --coordinator HOST:PORT, --processes N and --process I"
        ) from error
    # What C++ prints on stdout goes to stderr, and is filtered there.
    stdout = os.dup(1) if jax.process_index() == 0 else os.open(os.devnull, os.O_WRONLY)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(stdout, "w", encoding="utf-8", errors="replace")
