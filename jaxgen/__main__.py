"""`jaxgen` and `python -m jaxgen`: the command in a process of its own."""

import io
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn


def _exit_on_interrupt() -> None:
    """Make Ctrl-C end the process at once with status 130.

    Python's own handler waits until compiled code returns, then raises wherever the program happens to be.
    Here a thread waits for the signal as well, and runs while XLA works.
    """

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        os._exit(130)

    def wait() -> NoReturn:
        os.read(reader, 1)
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background, or under nohup
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGINT, leave)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()


def main() -> NoReturn:
    """Run the command and end the process with its status."""
    _exit_on_interrupt()
    from jaxgen.cli.main import main as run

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the text
    sys.exit(run())


if __name__ == "__main__":
    main()
