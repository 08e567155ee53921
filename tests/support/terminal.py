"""A process in its own terminal, into which a test types as a user would."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

# A session's leader must open the terminal; otherwise, Ctrl-C interrupts nothing.
TAKE = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execv(sys.argv[1], sys.argv[1:])"
STATUS_AFTER_TEXT = re.compile(r"\x1b7.*?\x1b8")
ESCAPES = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


class Terminal:
    """A pseudo-terminal with a process, for use in a `with` block.

    Attributes:
        output: everything that the process wrote, including escape sequences, but without a status that follows text.
    """

    def __init__(self, command, cwd=None, columns=100, **environment):
        self.output = ""
        self.own, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, columns))
        env = {**os.environ, "TERM": "xterm", "JAX_PLATFORMS": "cpu", **environment}
        command = [sys.executable, "-c", TAKE, *map(str, command)]
        streams = dict.fromkeys(["stdin", "stdout", "stderr"], theirs)
        self.process = subprocess.Popen(command, cwd=cwd, env=env, start_new_session=True, **streams)
        os.close(theirs)
        self._read = 0  # how many characters of the output `wait_for` has read

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Wait until the process writes a text. Return what it wrote since the last call, including that text."""
        end = time.monotonic() + seconds
        while (at := self.output.find(text, self._read)) < 0:
            if not self._receive(end - time.monotonic()):
                raise AssertionError(f"{text!r} did not come: {self.output[self._read :]!r}")
        begin, self._read = self._read, at + len(text)
        return self.output[begin : self._read]

    def type(self, text: str) -> None:
        """Type a text."""
        data = text.encode()
        while data:
            data = data[os.write(self.own, data) :]
            self._receive(0)  # reads its echo, because the terminal's buffer is small

    def interrupt(self, after: float = 0) -> None:
        """Press Ctrl-C, `after` seconds after the text that the test waited for.

        At a prompt, `after` must not be 0: CPython's input() can miss a signal that comes just as it begins to wait.
        """
        time.sleep(after)
        self.type("\x03")

    def quit(self) -> None:
        """Press Ctrl-\\."""
        self.type("\x1c")

    def end(self, seconds: float = 60) -> int:
        """Wait until the process ends, and return its status."""
        end = time.monotonic() + seconds
        while self._receive(end - time.monotonic()):
            pass
        return self.process.wait(timeout=seconds)

    @property
    def screen(self) -> str:
        """Return the output that is still visible on the screen, without lines that were erased."""
        lines = self.output.replace("\r\n", "\n").split("\n")
        return "\n".join(ESCAPES.sub("", line.rpartition("\x1b[K")[2]).rpartition("\r")[2] for line in lines)

    def _receive(self, seconds: float) -> bool:
        if not select.select([self.own], [], [], max(seconds, 0))[0]:
            return False
        try:
            data = os.read(self.own, 65536)
        except OSError:  # on Linux, this means that the other end is closed
            return False
        self.output = STATUS_AFTER_TEXT.sub("", self.output + data.decode("utf-8", "replace"))
        return bool(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.own)
