"""Sessions in a terminal."""

import re
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support.terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "\r\n> "


@pytest.fixture
def start(request, programs, tmp_path):
    """Return a function that starts the command in a terminal; compilation is slow in tests that interrupt it."""
    slow = {"JAX_ENABLE_COMPILATION_CACHE": "0", "XLA_FLAGS": ""}
    kept = slow if "compiling" in request.node.name else programs

    def start(*arguments, columns=100) -> Terminal:
        command = [sys.executable, "-m", "jaxgen", *map(str, arguments)]
        return Terminal(command, tmp_path, columns, PYTHONPATH=str(ROOT), **kept)

    return start


@pytest.mark.slow
def test_a_conversation(start, talking, tmp_path):
    with start("--model", talking, "--chat", "--max-new-tokens", 400) as terminal:
        shown = terminal.wait_for(PROMPT)
        assert "starting" in shown
        assert f"loading {talking}"[:60] in shown
        terminal.type("/set max_new_tokens 4\n")
        assert "max_new_tokens 4" in terminal.wait_for(PROMPT)
        terminal.type("A\n")
        assert '!"#$' in terminal.wait_for(PROMPT)
        terminal.type("\x1b[A\x1b[A0\n")  # recalls the line before the last and changes 4 to 40
        assert "max_new_tokens 40" in terminal.wait_for(PROMPT)
        terminal.type("/set max_new_tokens 400\n")
        terminal.wait_for(PROMPT)
        terminal.type("B\n")
        terminal.wait_for('!"#$')
        terminal.interrupt()
        assert "The answer was interrupted." in terminal.wait_for(PROMPT)
        terminal.type("unfinished")
        terminal.wait_for("unfinished")
        terminal.interrupt(after=0.1)
        assert "/exit quits" in terminal.wait_for(PROMPT)
        for _ in range(10):
            terminal.interrupt(after=0.1)
            assert "/exit quits" in terminal.wait_for(PROMPT)
        terminal.type("y" * 5000 + "\n")
        assert "this message is too long" in terminal.wait_for(PROMPT)
        terminal.type("/save talk.json\n")
        assert "4 messages were written" in terminal.wait_for(PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0
        assert "loading" not in terminal.screen
        assert "compiling" not in terminal.screen
    text = (tmp_path / "talk.json").read_text()
    assert '{"role": "user", "content": "B"}, {"role": "assistant", "content": "!' in text


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting", "loading"])
def test_interrupts(start, talking, moment):
    with start("--model", talking, "--chat") as terminal:
        terminal.wait_for(moment)
        terminal.interrupt()
        terminal.type("\x04")  # ends the chat if it had already started, as on a busy machine
        status = terminal.end()
        assert status == (0 if "/exit quits" in terminal.output else -signal.SIGINT)
        assert "Traceback" not in terminal.output


@pytest.mark.slow
def test_interrupts_while_compiling(start, talking):
    with start("--model", talking, "--chat", "--max-new-tokens", 400) as terminal:
        for key in (terminal.interrupt, terminal.quit):
            terminal.wait_for(PROMPT)
            terminal.type("A\n")
            terminal.wait_for("compiling")
            time.sleep(0.3)  # so that the compiler is running
            key()
            if key == terminal.interrupt:
                terminal.wait_for("interrupted (")
        assert "the message was dropped" in terminal.output
        assert terminal.end() == -signal.SIGQUIT
        assert "Traceback" not in terminal.output


@pytest.mark.slow
def test_seconds_while_compiling(start, checkpoint):
    with start("--model", checkpoint, "-n", 5, "A") as terminal:
        terminal.wait_for("compiling, and reading the prompt (")
        assert terminal.end() == 0
        assert terminal.screen == "BCDEF\n"
        seconds = [int(text) for text in re.findall(r"reading the prompt \((\d+) s\)", terminal.output)]
        assert seconds[0] >= 1  # on a busy machine, some seconds are not shown
        assert seconds == sorted(seconds)


@pytest.mark.slow
def test_progress_of_a_file(start, checkpoint, tmp_path):
    (tmp_path / "prompts").write_text("A\nB\nC\n")
    options = ("--model", checkpoint, "--input", "prompts", "-n", 3, "--slots", 1)
    with start(*options, "--output", "answers") as terminal:
        assert terminal.end() == 0
        assert "1 of 3 prompts, " in terminal.output
        assert re.search(r" tokens/s, \d+% of 1 slots in use, 0:00:00 left", terminal.output)
        assert terminal.screen.strip() == ""
    assert len((tmp_path / "answers").read_text().splitlines()) == 3
    with start(*options) as terminal:  # the printed answers already show the progress
        assert terminal.end() == 0
        assert " left" not in terminal.output
        assert [line[:2] for line in terminal.screen.splitlines() if line] == ['{"'] * 3


@pytest.mark.slow
def test_one_prompt(start, checkpoint):
    with start("--model", checkpoint, "-n", 5, "A") as terminal:
        assert terminal.end() == 0
        assert "compiling" in terminal.output
        assert terminal.screen == "BCDEF\n"
    with start("--model", checkpoint, "-n", 5, "-") as terminal:
        terminal.type("AB\n\x04")
        assert terminal.end() == 0
        assert terminal.screen.endswith("CDEFG\n")
    with start("--model", checkpoint) as terminal:
        assert terminal.end() == 2
        assert "no prompt: write it at the end, in quotes" in terminal.screen


@pytest.mark.slow
def test_long_lines_are_left_to_the_terminal(start, run):
    story = ("-n", 64, "Tell me a story about an owl")
    status, exact, _ = run(*story)
    assert status == 0
    assert max(map(len, exact.split("\n"))) > 30
    with start(*story, columns=30) as terminal:
        assert terminal.end() == 0
        assert terminal.screen == exact
