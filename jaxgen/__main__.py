"""`jaxgen` and `python -m jaxgen`: run the command as its own process."""

import gc
import io
import os
import sys


def main() -> None:
    """Run the command and exit with its status."""
    gc.disable()  # imports create many objects but no garbage; `cli.main` enables collection again
    try:
        from jaxgen.cli import interrupts

        interrupts.install()
    except KeyboardInterrupt:
        os._exit(130)
    from jaxgen.cli.main import main as run

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal cannot encode
    sys.exit(run())


def _forget_working_directory() -> None:
    """Keep `python -m` from importing the user's files, such as a convert.py, instead of packages."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not sys.flags.safe_path and sys.path[0] == os.getcwd() != package:
        del sys.path[0]


if __name__ == "__main__":
    _forget_working_directory()
    main()
