"""Ctrl-C: it ends the process at once with status 130, unless the command asks for something else.

Python calls a handler in the main thread only, after compiled code has returned, and XLA may compile for a minute. So a
thread reacts instead: it reads the pipe to which Python's C code writes the number of each signal.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

from jaxgen.cli import terminal

_prompt: object | None = None  # where the user types: the handler raises KeyboardInterrupt there
_stop: threading.Event | None = None  # in an answer of a conversation: it is set, and the answer ends


def install() -> None:
    """Make Ctrl-C end the process at once."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background, or under nohup
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _handle)
    threading.Thread(target=_watch, args=[reading], daemon=True).start()


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """During the block, raise KeyboardInterrupt for Ctrl-C. It may come from the block's end, too."""
    global _prompt
    _prompt = object()
    try:
        yield
    finally:
        _prompt = None


@contextlib.contextmanager
def postponed() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C in the block sets; the second one ends the process."""
    global _stop
    _stop = threading.Event()
    try:
        yield _stop
    finally:
        _stop = None


def _handle(number: int, frame: object) -> None:
    global _prompt
    if _prompt is not None:
        _prompt = None
        raise KeyboardInterrupt
    if _stop is None:  # the thread has not seen it: other code may have replaced the pipe for a while
        _exit()


def _watch(reading: int) -> None:
    while number := os.read(reading, 1):
        if number[0] != signal.SIGINT:
            continue
        if (prompt := _prompt) is not None:
            time.sleep(0.05)
            if _prompt is prompt:  # the signal came just before readline began to wait, and did not wake it
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif _stop is None or _stop.is_set():
            _exit()
        else:
            _stop.set()


def _exit() -> None:
    terminal.end_line()
    os._exit(130)
