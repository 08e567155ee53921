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

_conversing = False  # Ctrl-C does not end the process, except in an answer that it was to end already
_prompt: object | None = None  # where the user types: Ctrl-C raises KeyboardInterrupt
_stop: threading.Event | None = None  # in an answer: Ctrl-C sets it, and the answer ends


def install() -> None:
    """Make Ctrl-C end the process at once."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background, or under nohup
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, _leave_prompt)
    signal.signal(signal.SIGINT, _handle)
    threading.Thread(target=_watch, args=[reading], daemon=True).start()


@contextlib.contextmanager
def conversing() -> Iterator[None]:
    """Ignore Ctrl-C in the block, except in the blocks of `raised` and `postponed`."""
    global _conversing
    _conversing = True
    try:
        yield
    finally:
        _conversing = False


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
    """End the process, as the thread does: other code may have replaced the pipe for a while."""
    if not (_conversing or _prompt or _stop):
        _exit()


def _leave_prompt(number: int, frame: object) -> None:
    global _prompt
    if _prompt is not None:
        _prompt = None
        raise KeyboardInterrupt


def _watch(reading: int) -> None:
    while number := os.read(reading, 1):
        if number[0] == signal.SIGINT:
            _react()


def _react() -> None:
    if (prompt := _prompt) is not None:
        while _prompt is prompt:  # again: a signal just before readline begins to wait does not wake it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            time.sleep(0.05)
    elif (stop := _stop) is not None and not stop.is_set():
        stop.set()
    elif stop is not None or not _conversing:
        _exit()


def _exit() -> None:
    terminal.end_line()
    os._exit(130)
