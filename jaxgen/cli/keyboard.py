"""Text that is typed while an answer is printed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator


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
