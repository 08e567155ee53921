"""The status: a line on a terminal, and lines in a file now and then."""

import io
import logging
import os
import re
import signal
import sys
import types

import pytest

from jaxgen.cli import main, many, terminal
from jaxgen.cli.input_file import Line
from jaxgen.cli.printing import Printer
from jaxgen.cli.timing import Stats
from jaxgen.progress import COMPILING
from tests.support.tokenizers import byte_level

ERASE = "\r\x1b[K"


class Screen(io.StringIO):
    """A stderr that records what is written to it since the last call of `new`."""

    is_terminal = False

    def isatty(self):
        return self.is_terminal

    def fileno(self):
        return 2

    def new(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


@pytest.fixture
def screen(monkeypatch):
    """Replace stderr by a file. Nothing redraws the status by itself; `after` does."""
    monkeypatch.setenv("JAXGEN_PROGRESS", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "sys", types.SimpleNamespace(stderr=(screen := Screen())))
    monkeypatch.setattr(os, "get_terminal_size", lambda _: types.SimpleNamespace(columns=60))
    monkeypatch.setattr(terminal, "_INTERVAL", 1000.0)
    return screen


@pytest.fixture
def after(monkeypatch, screen):
    """Return a function that lets the clock advance, updates the status, and returns what was written."""
    now = [1000.0]
    monkeypatch.setattr(terminal, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def after(seconds: float) -> str:
        now[0] += seconds
        terminal._update()
        return screen.new()

    return after


def test_terminal_status_counts_seconds(screen, after):
    screen.is_terminal = True
    with terminal.ticking("starting"):
        assert screen.new() == f"{ERASE}starting"
        assert after(0.5) == f"{ERASE}starting"
        assert after(1) == f"{ERASE}starting (2 s)"
        terminal.show("compiling")
        assert screen.new() == f"{ERASE}compiling"
        assert after(40) == f"{ERASE}compiling (40 s)"
        terminal.say("warning", "a\n b")
        assert screen.new() == f"{ERASE}jaxgen: warning: a b\n"
        assert after(1) == f"{ERASE}compiling (41 s)"  # the status is still there
        terminal.show("compiling")  # not a new status
        assert after(1) == f"{ERASE}compiling (42 s)"
        terminal.erase()
        assert screen.new() == ERASE
        assert after(40) == ""
        terminal.show("a" * 100)
        assert screen.new() == ERASE + "a" * 59
    assert screen.new() == ERASE
    assert after(40) == ""


def test_status_is_drawn_after_text_if_it_fits(screen, after):
    screen.is_terminal = True
    with terminal.ticking():
        for room, drawn, erased in (
            (60, "\x1b7\x1b[K compiling (1 s)\x1b8", "\x1b7\x1b[K\x1b8"),
            (19, "", ""),
        ):
            terminal.show("compiling", room)
            assert screen.new() == after(0.9) == ""  # text usually comes quickly
            assert after(0.1) == drawn
            terminal.erase()
            assert screen.new() == erased
        terminal.show("compiling" * 9, 30)
        assert after(1) == f"\x1b7\x1b[K {('compiling' * 9)[:28]}\x1b8"


@pytest.mark.parametrize(("text", "room"), [("a\nowls", 56), ("a\tb", 50), ("ねこ", 56), ("a" * 70, -10)])
def test_status_is_limited_to_the_space_after_an_answer(screen, monkeypatch, text, room):
    rooms = []
    monkeypatch.setattr(terminal, "show", lambda text, room=None: rooms.append(room))
    monkeypatch.setattr(sys, "stdout", stdout := Screen())
    for stdout.is_terminal in (True, False):
        printer = Printer(types.SimpleNamespace(tokenizer=byte_level(), stats=Stats()))  # pyright: ignore
        printer.on_finalized_text(text[:1])
        printer.on_finalized_text(text[1:])
        assert stdout.new() == text
    assert rooms[1:] == [room, sys.maxsize, sys.maxsize]


def test_interrupt_is_shown(screen, after):
    screen.is_terminal = True
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with terminal.ticking("compiling"), terminal.showing_interrupts():
            assert after(5) == f"{ERASE}compiling{ERASE}compiling (5 s)"
            signal.raise_signal(signal.SIGINT)
            assert after(1) == f"{ERASE}interrupted (6 s); Ctrl-\\ quits at once"
            assert after(1) == f"{ERASE}interrupted (7 s); Ctrl-\\ quits at once"
        with terminal.ticking("compiling"), terminal.showing_interrupts():
            screen.new()
            assert after(5) == f"{ERASE}compiling (5 s)"
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.set_wakeup_fd(-1) == -1


def test_stderr_file_gets_a_line_at_least_every_30_seconds(screen, after):
    with terminal.ticking("starting"):
        assert after(1.9) == ""
        terminal.show("loading")
        assert after(0.1) == "jaxgen: loading\n"  # the first line comes after two seconds
        assert after(29.9) == ""
        assert after(0.1) == "jaxgen: loading (30 s)\n"
        terminal.show("compiling")
        assert after(1.9) == ""
        assert after(0.1) == "jaxgen: compiling (2 s)\n"
        terminal.write("step 1")
        assert screen.new() == "step 1\n"
        assert after(29.9) == ""
        assert after(0.1) == "jaxgen: compiling (32 s)\n"
        terminal.erase()
        assert after(100) == ""
    assert screen.new() == ""


def test_status_may_be_a_function(screen, after):
    done = [1]
    line = types.SimpleNamespace(text=lambda: f"{done[0]} of 9").text
    with terminal.ticking():
        terminal.show(line)
        assert after(2) == "jaxgen: 1 of 9\n"
        done[0] = 5
        terminal.erase()
        terminal.show(line)
        assert after(29) == ""  # a status that was written is not new, even if it was erased
        assert after(1) == "jaxgen: 5 of 9\n"


def test_setting_disables_status_lines(screen, after, monkeypatch):
    monkeypatch.setenv("JAXGEN_PROGRESS", "0")
    with terminal.ticking("starting"):
        assert after(100) == ""
        terminal.report("answered 2 prompts")
        assert screen.new() == ""
        terminal.say("warning", "a")
        assert screen.new() == "jaxgen: warning: a\n"
        screen.is_terminal = True
        assert after(1) == f"{ERASE}starting (101 s)"


def test_nothing_is_written_unless_the_command_runs(screen, after):
    terminal.show("loading")
    assert after(100) == ""
    terminal.erase()


def test_status_is_updated_in_the_background(screen, monkeypatch):
    monkeypatch.setattr(terminal, "_INTERVAL", 0.01)
    monkeypatch.setattr("jaxgen.progress.FIRST", 0.0)
    monkeypatch.setattr("jaxgen.progress.NEXT", 0.0)
    written = []
    with terminal.ticking(lambda: written.append(1) or "waiting"):
        while len(written) < 3:
            pass
    assert screen.new().startswith("jaxgen: waiting\njaxgen: waiting\n")


def test_compilations_are_not_reported_twice(screen):
    with main._log([]), terminal.ticking():
        terminal.show("compiling")
        COMPILING.warning("jaxgen is compiling %s", "generate")
        assert screen.new() == ""
        terminal.erase()
        COMPILING.warning("jaxgen is compiling %s", "score")
        assert screen.new() == "jaxgen is compiling score\n"
    assert COMPILING.propagate
    assert COMPILING.handlers == []
    assert logging.getLogger("jaxgen").handlers == []


@pytest.mark.parametrize("is_on", [True, False])
def test_run_ends_with_a_summary(screen, monkeypatch, is_on, capsys):
    monkeypatch.setenv("JAXGEN_PROGRESS", str(int(is_on)))
    answers = [(0, [{"tokens": 1000}]), (1, [{"tokens": 234}, {"tokens": 0, "error": "e"}])]
    monkeypatch.setattr(many, "_in_batches", lambda *_: answers)
    session = types.SimpleNamespace(stats=Stats())
    lines = [Line({}, [1], 5)] * 3
    many.write_answers(lines, range(3), [0, 0, 1], session, None, slots=None, batch_size=2)  # pyright: ignore
    assert capsys.readouterr().out.count("\n") == 3
    pattern = r"jaxgen: answered 2 prompts: 1,234 tokens in 0:00:0\d, [\d,]+ tokens/s, not counting compilation\n"
    assert re.fullmatch(pattern if is_on else "", screen.new())
