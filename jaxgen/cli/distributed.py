"""Connect the processes of a run, and exit if one of them is lost.

This module imports jax only after forking: jax starts threads, and a process with threads cannot be forked safely.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from typing import Any

from jaxgen.arguments import FAILED
from jaxgen.cli import terminal
from jaxgen.errors import InputError

HEARTBEAT = 10  # seconds without a heartbeat after which a process is considered lost
LOST = "another process was lost, or failed: start all processes again"


def wanted(options: argparse.Namespace) -> bool:
    """Return True if the command line asks for several processes."""
    return options.distributed or options.coordinator is not None


def supervise() -> int | None:
    """Fork the process. Return None in the child; in the parent, wait for the child and return its exit status.

    If another process is lost, jax's runtime prints a page of text and aborts the child; the parent adds an error line.
    """
    alive, parent = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(parent)
        threading.Thread(target=_end_with_parent, args=[alive], daemon=True).start()
        return None
    os.close(alive)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status >= 0:
        return status
    if status == -signal.SIGABRT:
        terminal.say("error", LOST)
        return FAILED
    terminal.say("error", f"the command was ended by {signal.Signals(-status).name}")
    return 128 - status


def _end_with_parent(alive: int) -> None:
    """Wait until the parent exits for any reason, then exit too."""
    os.read(alive, 1)
    os._exit(FAILED)


def is_joined() -> bool:
    """Return True if this process is one of several in a run."""
    return sys.excepthook is _end


def _end(*error: Any) -> None:
    """End the process after an unexpected error; otherwise, jax would wait five minutes for the other processes."""
    sys.__excepthook__(*error)
    os._exit(FAILED)


def join(options: argparse.Namespace) -> None:
    """Connect to the other processes; only process 0 prints the answers.

    Raise an `InputError` if a setting is in neither the options nor the environment, or if connecting takes too long.
    """
    import jax

    try:
        jax.distributed.initialize(
            options.coordinator, options.processes, options.process, heartbeat_timeout_seconds=HEARTBEAT
        )
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"the processes could not be connected: {error}; set --coordinator HOST:PORT, --processes N and --process I"
        ) from error
    sys.excepthook = _end
    # Only answers may reach stdout, so discard what C++ code prints to it, such as Gloo's connection messages.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    stdout = os.dup(1) if jax.process_index() == 0 else nowhere
    os.dup2(nowhere, 1)
    sys.stdout = os.fdopen(stdout, "w", encoding="utf-8", errors="replace")
