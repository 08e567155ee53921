"""Processes that a test starts, and the memory of a process."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Start a process, and kill it if it still runs at the end of the block.

    `Popen` alone waits for the process, so an assertion that fails in the block would never be reported.
    """
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def run_in_child(work: Callable[[], None], after: float | None = None) -> bool:
    """Call `work` in a child process, and kill it after `after` seconds, if set. Return whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def peak_memory() -> int:
    """Return this process's peak memory. (ru_maxrss would include the peak of the process that started it.)"""
    return memory_status("VmHWM")


def memory_status(name: str) -> int:
    """Return one of the sizes that the kernel reports for this process, in bytes."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
