"""Processes that a test starts."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
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
