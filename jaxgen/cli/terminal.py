"""Messages on stderr and, on a terminal, a status line that shows what the command is waiting for."""

import contextlib
import os
import sys

_ERASE = "\r\x1b[K"
_shown = False


def say(kind: str, text: object) -> None:
    """Print the command's name, `kind` and `text` on one line, joining the text's lines."""
    write(" ".join([f"jaxgen: {kind}:", *(line.strip() for line in str(text).splitlines())]))


def write(text: str) -> None:
    """Print `text` and a newline to stderr."""
    erase()
    _print(text + "\n")


def show(text: str) -> None:
    """Show `text` in the status line if stderr is a terminal that can erase a line."""
    global _shown
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        _shown = True
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        _print(_ERASE + text[: columns - 1])


def erase() -> None:
    """Remove the status line."""
    global _shown
    if _shown:
        _shown = False
        _print(_ERASE)


def _print(text: str) -> None:
    if sys.stderr is not None:  # print(file=None) would write to stdout
        with contextlib.suppress(OSError):  # a full disk or a closed pipe, which cannot be reported anywhere
            print(text, end="", file=sys.stderr, flush=True)
