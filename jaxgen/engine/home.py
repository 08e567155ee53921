"""The process and the thread of an engine, and calls that cannot be made from elsewhere."""

from __future__ import annotations

import os
import threading

from jaxgen.errors import InputError, JaxgenError


class EngineClosed(JaxgenError):
    """The engine is closed, or was closed before the prompt was answered; or it runs in another process."""


def waits(name: str) -> InputError:
    """Return the error of a call in `on_event` that would wait for the engine, which waits for `on_event`."""
    return InputError(f"{name} waits for the engine, so on_event must not call it: call it from another thread")


class Home:
    """The process and the thread in which an engine runs."""

    def __init__(self, thread: threading.Thread):
        self._thread, self._process = thread, os.getpid()

    @property
    def is_this_process(self) -> bool:
        """True unless the current process is a fork of the engine's process."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise an error in a fork of the engine's process, where the engine's thread does not exist."""
        if not self.is_this_process:
            raise EngineClosed(
                f"this engine belongs to process {self._process}, and this is process {os.getpid()}, which was forked "
                "from it: create an engine in each process, and start processes by spawn"
            )

    def check_wait(self, name: str) -> None:
        """Raise an error if the current thread cannot wait for the engine; `name` is the name of the call."""
        self.check()
        if threading.current_thread() is self._thread:
            raise waits(name)
