"""Messages on stderr and, on a terminal, a status line that shows what the command is waiting for."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

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
        _print(_ERASE + text[: columns() - 1])


def columns() -> int:
    """Return the width of the terminal on stderr, or 80 if it is unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (AttributeError, OSError):  # stderr is closed, or not a terminal
        return 80


@contextlib.contextmanager
def hidden_typing() -> Iterator[Callable[[], None]]:
    """Yield a function that hides typed text, which would appear in the middle of an answer, until the block ends.

    The typed text is not lost; it appears at the next prompt. Signals that end the process show typed text again first,
    because not every shell does so.
    """
    try:
        import termios
    except ImportError:  # not a Unix
        yield lambda: None
        return
    mode, handlers = [], {}

    def in_foreground() -> bool:  # in the background, setting the terminal's mode would stop the process
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()

    def hide() -> None:
        if mode or not in_foreground():
            return
        mode.extend(termios.tcgetattr(sys.stdin))
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
            if signal.getsignal(number) is signal.SIG_DFL:
                handlers[number] = signal.signal(number, end)
        termios.tcsetattr(sys.stdin, termios.TCSANOW, [*mode[:3], mode[3] & ~termios.ECHO, *mode[4:]])

    def show() -> None:
        if mode and in_foreground():
            termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def end(number: int, _: object) -> None:
        show()
        os.kill(os.getpid(), number)

    try:
        yield hide
    finally:
        show()


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
