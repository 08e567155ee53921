"""Text that is typed while an answer is printed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

_ENDING = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)


@contextlib.contextmanager
def hidden_typing() -> Iterator[Callable[[], None]]:
    """Yield a function that hides typed text, which would appear in the middle of an answer, until the block ends.

    The typed text is not lost; it appears at the next prompt. Signals that end or stop the process show typed text
    again first, because not every shell does so. When a stopped process continues, typed text is hidden again.
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
        of = {signal.SIGTSTP: stop, signal.SIGCONT: set_echo} | dict.fromkeys(_ENDING, end)
        for number, handler in of.items():
            if signal.getsignal(number) is signal.SIG_DFL:
                handlers[number] = signal.signal(number, handler)
        set_echo()

    def set_echo(*_: object, on: bool = False) -> None:
        if mode and in_foreground():
            flags = mode[3] if on else mode[3] & ~termios.ECHO
            termios.tcsetattr(sys.stdin, termios.TCSANOW, [*mode[:3], flags, *mode[4:]])

    def show() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        set_echo(on=True)

    def end(number: int, _: object) -> None:
        show()
        os.kill(os.getpid(), number)

    def stop(number: int, _: object) -> None:
        set_echo(on=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns when the process continues, and SIGCONT hides typed text again
        signal.signal(number, stop)

    try:
        yield hide
    finally:
        show()
