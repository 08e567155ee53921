"""`jaxgen` and `python -m jaxgen`: run the command as its own process."""

import io
import os
import signal
import sys
import threading
from typing import NoReturn


def _exit_on_interrupt() -> None:
    """Make Ctrl-C end the process at once with status 130.

    Python's own handler waits until compiled code returns, then raises wherever the program happens to be. Here a
    thread waits for the signal, and threads run while the main thread is in XLA.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background, or under nohup
        return
    if sys.platform == "win32":  # cannot block signals
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        return

    def wait() -> NoReturn:
        signal.sigwait({signal.SIGINT})
        os._exit(130)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # in this thread and those it starts
    threading.Thread(target=wait, daemon=True).start()


def main() -> NoReturn:
    """Run the command and end the process with its status."""
    _exit_on_interrupt()
    from jaxgen.cli.main import main as run

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks must not abort the output
    sys.exit(run())


if __name__ == "__main__":
    main()
