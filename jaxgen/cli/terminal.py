"""Messages on stderr, and the status: what the command is waiting for, and for how many seconds.

On a terminal, the status is redrawn every half second and erased in the end. It has its own line, or follows the text
on the current line. Elsewhere, such as in a log file, it is written as a line if it lasts two seconds, and then every
30 seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from jaxgen import progress

_ERASE = "\r\x1b[K"
_SAVE, _ERASE_REST, _RESTORE = "\x1b7", "\x1b[K", "\x1b8"  # the cursor's position, and the line to its right
_LEAST_ROOM = 20  # minimum number of columns for a status after text
_INTERVAL = 0.5  # seconds between checks whether the status has to be redrawn or written

_lock = threading.RLock()  # guards the variables below, and what is printed
_status: str | Callable[[], str] | None = None
_since = 0.0  # the time at which the status was first shown
_room: int | None = None  # the number of columns after the text on the current line; None if there is no text
_undo = ""  # what removes the status from the screen
_interrupts: int | None = None  # a pipe that can be read once Ctrl-C has been pressed
_written: object = None  # the status that was last written as a line
_last = 0.0  # the time at which the last line was written
_is_ticking = False  # whether `ticking` keeps the status up to date; otherwise, no lines are written


def say(kind: str, text: object) -> None:
    """Print the command's name, `kind` and `text` on one line, joining the text's lines."""
    write(" ".join([f"jaxgen: {kind}:", *(line.strip() for line in str(text).splitlines())]))


def write(text: str) -> None:
    """Print `text` and a newline to stderr. The status stays, and is redrawn below the text."""
    global _last
    with _lock:
        _undraw()
        _print(text + "\n")
        _last = time.monotonic()


def columns() -> int:
    """Return the width of the terminal on stderr, or 80 if it is unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (AttributeError, OSError):  # stderr is closed, or not a terminal
        return 80


def report(text: str) -> None:
    """Print the command's name and `text`, unless messages about progress are turned off."""
    if progress.is_on():
        write(f"jaxgen: {text}")


def show(text: str | Callable[[], str], room: int | None = None) -> None:
    """Show the status until `erase` is called.

    Args:
        text: the status, to which the elapsed seconds are added; or a function that returns the whole line.
        room: None if the cursor is at the beginning of an empty line. If the line contains text, the number of columns
            after it; the status is then drawn after the text, but only if it lasts a second.
    """
    global _status, _since, _room
    with _lock:
        if text == _status:
            return
        _status, _since, _room = text, time.monotonic(), room
    _update()


def is_shown() -> bool:
    """Return True if there is a status."""
    return _status is not None


def erase() -> None:
    """Remove the status."""
    global _status
    with _lock:
        _status = None
        _undraw()


@contextlib.contextmanager
def ticking(text: str | None = None) -> Iterator[None]:
    """While the block runs, keep the status up to date. Remove it in the end.

    Args:
        text: the first status.
    """
    global _written, _last, _is_ticking
    with _lock:  # the first line is due after `FIRST` seconds, even if the status changes before that
        _is_ticking, _written, _last = True, None, time.monotonic() + progress.FIRST - progress.NEXT
    if text is not None:
        show(text)
    try:
        with progress.repeating(_update, _INTERVAL, _INTERVAL):
            yield
    finally:
        erase()
        _is_ticking = False


@contextlib.contextmanager
def showing_interrupts() -> Iterator[None]:
    """In the block, the status shows that Ctrl-C was pressed. The handler itself does not run while XLA compiles."""
    global _interrupts
    _interrupts, theirs = os.pipe()
    os.set_blocking(theirs, False)
    before = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        with _lock:  # not while `_update` is reading it
            mine, _interrupts = _interrupts, None
            os.close(mine)
        os.close(theirs)


def _update() -> None:
    """Redraw the status on a terminal; elsewhere, write it as a line if one is due."""
    global _written
    with _lock:
        status, seconds = _status, time.monotonic() - _since
    if status is None:
        return
    # A function may wait for other locks, so it must not be called while holding this one.
    text = f"{status} ({seconds:.0f} s)" if isinstance(status, str) and seconds >= 1 else status
    line = text if isinstance(text, str) else text()
    with _lock:
        if status != _status:
            return
        if _interrupts is not None and select.select([_interrupts], [], [], 0)[0]:
            line = f"interrupted ({seconds:.0f} s); Ctrl-\\ quits at once"
        if _can_erase():
            _draw(line, seconds)
        elif _is_ticking and progress.is_on() and _is_due(seconds):
            _written = status
            write(f"jaxgen: {line}")


def _draw(line: str, seconds: float) -> None:
    global _undo
    width = columns()
    if _room is None:
        _undo = _ERASE
        _print(_ERASE + line[: width - 1])
    elif seconds >= 1 and _room >= _LEAST_ROOM:
        _undo = _SAVE + _ERASE_REST + _RESTORE
        _print(f"{_SAVE}{_ERASE_REST} {line[: min(_room, width) - 2]}{_RESTORE}")


def _is_due(seconds: float) -> bool:
    """Return True if the status should be written as a line, `seconds` seconds after it was first shown."""
    is_new = _status != _written and seconds >= progress.FIRST
    return is_new or time.monotonic() - _last >= progress.NEXT


def _can_erase() -> bool:
    """Return True if stderr is a terminal that can erase a line."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _undraw() -> None:
    global _undo
    if _undo:
        _print(_undo)
        _undo = ""


def _print(text: str) -> None:
    if sys.stderr is not None:  # print(file=None) would write to stdout
        with contextlib.suppress(OSError):  # a full disk or a closed pipe, which cannot be reported anywhere
            print(text, end="", file=sys.stderr, flush=True)
