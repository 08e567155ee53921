"""Entry point of the commands `jaxgen` and `python -m jaxgen`."""

import gc
import io
import os
import signal
import sys


def main() -> None:
    """Run the command, and exit with its status."""
    gc.disable()  # garbage collection would slow down the imports and free little memory; `cli.main` re-enables it
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # background jobs of a script must still ignore SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would not run while XLA compiles
    from jaxgen.cli.main import main as run

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal cannot encode
    sys.exit(run())


if __name__ == "__main__":
    # Remove the directory that `python -m` adds to `sys.path`, so that a user's convert.py does not hide a package.
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and sys.path[0] == os.getcwd() != package:
        del sys.path[0]
    main()
