"""Long compilations are reported on stderr by default, and progress bars of tqdm work on terminals and in files."""

import logging
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxgen import (
    Engine,
    GenerationConfig,
    InputError,
    generate_many,
    progress,
    score_many,
    warmup,
)
from jaxgen.core import precompile
from jaxgen.core.scoring import score_many as many
from jaxgen.programs import Program
from jaxgen.progress import announced, progress_bar, repeating
from tests.support.models import model_config, random_params

ROOT = Path(__file__).resolve().parents[1]
MODEL = model_config(num_hidden_layers=1)
PARAMS = random_params(MODEL)
CFG = GenerationConfig(model=MODEL)


@pytest.fixture
def soon(monkeypatch):
    """Turn messages on, and report after a hundredth of a second."""
    monkeypatch.setenv("JAXGEN_PROGRESS", "1")
    monkeypatch.setattr(progress, "FIRST", 0.01)
    monkeypatch.setattr(progress, "NEXT", 0.01)


@pytest.fixture
def no_threads(monkeypatch):
    def refuse(self):
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)


class Reports(logging.Handler):
    """Collects messages. `wait_for(n)` returns once there are n of them."""

    def __init__(self):
        super().__init__()
        self.messages: list[str] = []
        self.changed = threading.Condition()

    def emit(self, record):
        with self.changed:
            self.messages.append(record.getMessage())
            self.changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.messages) >= count, timeout=10)


@pytest.fixture
def reports():
    handler = Reports()
    progress.COMPILING.addHandler(handler)
    yield handler
    progress.COMPILING.removeHandler(handler)


def run_script(script: str, **environment: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", f"from jaxgen import progress\nprogress.FIRST = 0.01\n{script}"]
    done = subprocess.run(
        command, cwd=ROOT, env={"JAXGEN_PROGRESS": "1", **environment}, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout, done.stderr


class TestCompilations:
    def test_slow_compilation_is_reported(self, soon, reports):
        def slow(x):
            reports.wait_for(3)  # while the function is traced
            return x + 1

        Program(slow, "slow")(1.0)
        first, *others, last = reports.messages
        assert first == "jaxgen is compiling slow (the first call with these shapes and options; 0 s so far)"
        assert set(others) == {"jaxgen is still compiling slow (0 s so far)"}
        assert last == "jaxgen has compiled slow in 0 s"

    def test_a_warm_call_starts_no_thread(self, soon, request):
        run = Program(lambda x: x + 1, "plus")
        run(1.0)
        request.getfixturevalue("no_threads")
        assert run(2.0) == 3.0

    def test_a_quick_compilation_is_not_reported(self, monkeypatch, reports):
        monkeypatch.setenv("JAXGEN_PROGRESS", "1")
        before = threading.active_count()
        with announced("quick"):
            pass
        assert reports.messages == []
        assert threading.active_count() == before

    @pytest.mark.parametrize("value", ["0", "false", "OFF", "no"])
    def test_setting_disables_reports(self, soon, no_threads, reports, monkeypatch, value):
        monkeypatch.setenv("JAXGEN_PROGRESS", value)
        with announced("slow"):
            time.sleep(0.05)
        assert reports.messages == []

    def test_interrupt_is_reported_in_one_line(self, soon):
        def interrupted(x):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt, match=r"^interrupted while compiling slow$") as caught:
            Program(interrupted, "slow")(1.0)
        assert caught.value.__suppress_context__
        assert "jax/_src" not in "".join(str(entry.path) for entry in caught.traceback)

    def test_an_error_is_raised_unchanged(self, soon, reports):
        def wrong(x):
            reports.wait_for(1)
            raise ValueError("wrong")

        with pytest.raises(ValueError, match="wrong"):
            Program(wrong, "slow")(1.0)
        assert not any("has compiled" in message for message in reports.messages)


class TestProcesses:
    SLOW = "import time\nwith progress.announced('slow'):\n    time.sleep(0.1)"

    def test_stderr_without_any_configuration(self):
        lines = [
            "jaxgen is compiling slow (the first call with these shapes and options; 0 s so far)",
            "jaxgen has compiled slow in 0 s",
        ]
        assert run_script(self.SLOW) == (0, "", "\n".join([*lines, ""]))
        assert run_script(self.SLOW, JAXGEN_PROGRESS="0") == (0, "", "")

    def test_reports_are_logged(self):
        status, out, err = run_script(f"import logging\nlogging.basicConfig()\n{self.SLOW}")
        assert (status, out) == (0, "")
        assert err.startswith("WARNING:jaxgen.compiling:jaxgen is compiling slow")
        quiet = "import logging\nlogging.getLogger('jaxgen').setLevel(logging.ERROR)\n"
        assert run_script(quiet + self.SLOW) == (0, "", "")

    def test_process_may_end_or_fork_while_compiling(self):
        end = "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()\n"
        end += "never_left = progress.announced('slow')\nnever_left.__enter__()\ntime.sleep(0.1)\n"
        status, out, err = run_script(end)
        assert (status, out) == (0, "")
        assert err.startswith("jaxgen is compiling slow")
        assert err.count("\n") == 1
        fork = "import os, warnings\nwarnings.simplefilter('ignore')\nwith progress.announced('slow'):\n"
        fork += "    child = os.fork()\nif child == 0:\n    os._exit(3)\n"
        fork += "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3"
        assert run_script(fork)[::2] == (0, "")

    def test_a_process_that_is_ending_starts_no_thread(self, soon, monkeypatch):
        def refuse(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with announced("slow"):
            done = True
        assert done


class TestBars:
    def test_progress_in_a_file_is_written_as_lines(self, monkeypatch, capsys):
        redrawn = threading.Event()
        monkeypatch.setattr(progress, "NEXT", 0.01)
        write = progress._Lines.write

        def written(self, text):
            write(self, text)
            if "0/3" in text and written.count:
                redrawn.set()
            written.count += 1

        written.count = 0
        monkeypatch.setattr(progress._Lines, "write", written)
        with progress_bar(True, "scoring", 3, "requests") as add:
            assert redrawn.wait(10)  # although nothing has been completed
            add(1)
            add(2, {"tokens": 7})
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert out == ""
        assert "\r" not in err
        assert lines[0].startswith("scoring:   0%|")
        assert lines[-1].startswith("scoring: 100%|")
        assert " 3/3 " in lines[-1]
        assert lines[-1].endswith("tokens=7]")

    def test_progress_bar_in_a_terminal(self, soon, monkeypatch, capsys, reports):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        with progress_bar(True, "scoring", 2, "requests") as add:
            Program(lambda x: time.sleep(0.05) or x + 1, "slow")(1.0)
            add(2)
        err = capsys.readouterr().err
        assert err.startswith("\rscoring:   0%|")
        assert err.count("\n") == 1
        assert reports.messages == []  # they would be written in the middle of the bar
        Program(lambda x: reports.wait_for(1) or x + 1, "slow")(1.0)

    def test_no_progress_is_written_if_disabled(self, no_threads, capsys):
        with progress_bar(False, "scoring", 2, "requests") as add:
            add(2)
        assert capsys.readouterr().err == ""

    def test_missing_tqdm_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
        with (
            pytest.raises(InputError, match="progress=True needs tqdm: pip install tqdm, or leave progress out"),
            progress_bar(True, "scoring", 2, "requests"),
        ):
            pass

    def test_texts_that_are_scored(self, monkeypatch, capsys):
        def score(params, batch, cfg, mesh):
            return {
                number: many.TokenScores(np.zeros(1), np.ones(1)) for group in batch for number in group.continuations
            }

        monkeypatch.setattr(many, "_score", score)
        requests = [([1, 2], [3]), ([1, 2], [4, 5]), ([6], [7])]
        assert len(score_many(PARAMS, iter(requests), CFG, progress=True)) == 3
        assert re.match("scoring: 100%.* 3/3 ", capsys.readouterr().err.splitlines()[-1])
        score_many(PARAMS, requests, CFG)
        assert capsys.readouterr().err == ""

    def test_programs_that_are_compiled(self, monkeypatch, capsys):
        monkeypatch.setattr(precompile, "compile_for", lambda *_: None)
        assert warmup(PARAMS, CFG, widths=[3, 300], lengths=[4], progress=True) == 2
        assert re.match("compiling: 100%.* 2/2 ", capsys.readouterr().err.splitlines()[-1])
        warmup(PARAMS, CFG, widths=[3], lengths=[4])
        assert capsys.readouterr().err == ""

    @pytest.mark.slow
    def test_prompts_that_are_answered(self, capsys):
        cfg = CFG.replace(max_new_tokens=2, pad_token_id=0)
        sizes = {"slots": 2, "prompt_width": 8, "prompt_options": ()}
        prompts = [[1, 2], [3], {"ids": [4], "n": 2, "do_sample": True}, [99999]]  # the last two are not answered
        assert len(list(generate_many(PARAMS, prompts, None, cfg, **sizes, progress=True))) == 4
        assert re.match("answering: 100%.* 4/4 .*tokens=4]", capsys.readouterr().err.splitlines()[-1])
        assert len(list(generate_many(PARAMS, iter(prompts), None, cfg, **sizes, progress=True))) == 4
        assert "answering: 4 prompts" in capsys.readouterr().err.splitlines()[-1]
        with Engine(PARAMS, cfg, **sizes) as engine:
            engine.warmup(progress=True)
            assert re.match("compiling the engine: 100%.* 1/1 ", capsys.readouterr().err.splitlines()[-1])
            engine.warmup()
        assert capsys.readouterr().err == ""


def test_nothing_is_reported_after_the_block():
    reports, called = [], threading.Event()

    def report():
        reports.append(1)
        called.set()

    with repeating(report, 0, 0):
        assert called.wait(10)
    count = len(reports)
    assert called.is_set()
    assert "jaxgen progress" not in [thread.name for thread in threading.enumerate()]
    assert len(reports) == count
