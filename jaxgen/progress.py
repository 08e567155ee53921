"""Signs of life from calls that take long: messages about compilations, and progress bars.

A compilation of more than two seconds is reported by the logger `jaxgen.compiling`, at the level WARNING, so that
Python prints it on stderr even if logging is not configured:

    jaxgen is compiling generate (the first call with these shapes and options; 2 s so far)
    jaxgen has compiled generate in 14 s

The environment variable `JAXGEN_PROGRESS=0` turns the messages off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxgen.errors import InputError

COMPILING = logging.getLogger("jaxgen.compiling")
FIRST, NEXT = 2.0, 30.0  # seconds until the first report, and between later reports
_REDRAWN = 1.0  # seconds after which a progress bar on a terminal or in a notebook is redrawn
_on_terminal: list[object] = []  # progress bars on a terminal: they count the seconds, and messages would disturb them


def is_on() -> bool:
    """Return True unless the environment variable JAXGEN_PROGRESS turns messages about progress off."""
    return os.environ.get("JAXGEN_PROGRESS", "").lower() not in ("0", "false", "no", "off")


@contextlib.contextmanager
def repeating(report: Callable[[], object], first: float, interval: float) -> Iterator[None]:
    """While the block runs, call `report` in another thread after `first` seconds, then every `interval` seconds."""
    ended = threading.Event()

    def run() -> None:
        wait = first
        while not ended.wait(wait):
            report()
            wait = interval

    thread = threading.Thread(target=run, name="jaxgen progress", daemon=True)
    with contextlib.suppress(RuntimeError):  # Python starts no more threads once the interpreter is shutting down
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None and not sys.is_finalizing():  # Python has already stopped its daemon threads
            thread.join()


@contextlib.contextmanager
def announced(name: str) -> Iterator[None]:
    """Report that the block is compiling a program if it takes long, and finally how long it took.

    A KeyboardInterrupt is raised again without the compiler's traceback. While XLA compiles, Python cannot raise it.
    """
    began, reports = time.monotonic(), 0

    def say(message: str) -> None:
        if not _on_terminal:
            COMPILING.warning(message, name, round(time.monotonic() - began))

    def report() -> None:
        nonlocal reports
        if reports == 0:
            say("jaxgen is compiling %s (the first call with these shapes and options; %d s so far)")
        else:
            say("jaxgen is still compiling %s (%d s so far)")
        reports += 1

    reporting = repeating(report, FIRST, NEXT) if is_on() else contextlib.nullcontext()
    try:
        with reporting:
            yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted while compiling {name}") from None
    if reports:
        say("jaxgen has compiled %s in %d s")


@contextlib.contextmanager
def progress_bar(is_wanted: bool, title: str, total: int | None, unit: str) -> Iterator[Callable[..., object]]:
    """Yield a function that adds a number of units to a tqdm bar, and can set values that are shown after it.

    On a terminal and in a notebook, the bar is redrawn at least every second. In a file, it is a line every 30 seconds.
    If no bar is wanted, the function does nothing.
    """
    if not is_wanted or sys.stderr is None:
        yield lambda count, shown=None: None
        return
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError as error:
        raise InputError("progress=True needs tqdm: pip install tqdm, or leave progress out") from error
    in_notebook = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
    is_file = not (in_notebook or sys.stderr.isatty())
    interval = NEXT if is_file else _REDRAWN
    settings: dict[str, Any] = {"file": _Lines(), "mininterval": NEXT, "maxinterval": NEXT} if is_file else {}
    with tqdm(total=total, desc=title, unit=f" {unit}", **settings) as bar:

        def add(count: int, shown: dict[str, Any] | None = None) -> None:
            if shown is not None:
                bar.set_postfix(shown, refresh=False)
            bar.update(count)

        if not (in_notebook or is_file):
            _on_terminal.append(bar)
        try:
            with repeating(bar.refresh, min(FIRST, interval), interval):
                yield add
        finally:
            if bar in _on_terminal:
                _on_terminal.remove(bar)


class _Lines:
    """A file for a progress bar that writes each state of the bar as a line to stderr, without control characters."""

    encoding = "utf-8"

    def write(self, text: str) -> None:
        """Write a state of the bar."""
        if line := text.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        """Write what is buffered."""
        sys.stderr.flush()
