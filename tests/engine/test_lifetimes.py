"""Engines that nobody closes: they are dropped, the process forks, or the interpreter exits."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import jax
import pytest

from jaxgen import generate_many
from jaxgen.engine import runner
from jaxgen.engine.engine import Engine
from jaxgen.engine.home import EngineClosed
from tests.engine.test_engine import KEY, SIMPLE, SMALL
from tests.support.byte_model import PARAMS

ROOT = Path(__file__).resolve().parents[2]


def small() -> tuple[Engine, list[weakref.ref]]:
    """Return an engine, and references to its weights and its state."""
    made = Engine(jax.tree.map(lambda x: jax.numpy.array(x), PARAMS), SIMPLE, KEY, **SMALL)
    arrays = jax.tree.leaves((made._runner.weights, made._runner._device._state.pool.cache))
    return made, [weakref.ref(array) for array in arrays]


def until(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def freed(arrays: list[weakref.ref]) -> bool:
    gc.collect()
    return all(array() is None for array in arrays)


def test_unreferenced_engine_ends(monkeypatch):
    monkeypatch.setattr(runner, "_PULSE", 0.1)
    made, arrays = small()
    thread = made._runner._thread
    assert made.submit([50]).result(60)
    made.pause()
    del made
    thread.join(30)
    assert not thread.is_alive()
    until(lambda: freed(arrays))


def test_prompts_of_an_unreferenced_engine_are_answered(monkeypatch):
    monkeypatch.setattr(runner, "_PULSE", 0.1)
    made, arrays = small()
    thread, heard = made._runner._thread, []
    made.pause()
    handles = [made.submit([50 + number], on_event=heard.append) for number in range(6)]
    cancelled = made.submit([50])
    del made
    cancelled.cancel()
    assert all(handle.result(60)[0].tokens for handle in handles)
    assert cancelled.result(60)
    thread.join(30)
    until(lambda: freed(arrays))  # although the handles are kept
    cancelled.cancel()
    assert sum(event.stop_reason > 0 for event in heard) == 6


def run(program: str) -> subprocess.CompletedProcess:
    """Run a Python program with an engine called `made`, whose process must end within two minutes."""
    start = f"""
import os, sys, threading, time, warnings
import jax, numpy as np
sys.path.insert(0, {str(ROOT)!r})
from jaxgen import Engine, EngineClosed, generate_many
from tests.engine.test_engine import KEY, SIMPLE, SMALL
from tests.support.byte_model import PARAMS
made = Engine(PARAMS, SIMPLE, KEY, **SMALL)
"""
    return subprocess.run(
        [sys.executable, "-c", start + program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_engine_is_unusable_after_a_fork():
    done = run("""
warnings.simplefilter("ignore")  # jax warns about the fork
answers = generate_many(PARAMS, [[50]] * 40, KEY, SIMPLE, **SMALL)
next(answers)
done = made.submit([50])
done.result()
made.pause()
handle = made.submit([50], n=2)

def refused(call, *arguments):
    try:
        call(*arguments)
    except EngineClosed as error:
        assert f"belongs to process {os.getppid()}" in str(error), error
        assert str(os.getpid()) in str(error), error
    else:
        raise AssertionError(call)

calls = [lambda: made.submit([50]), lambda: made.submit([50], timeout=None), made.counts, made.pause, made.resume]
calls += [made.warmup, made.close, lambda: made.close(drain=False), lambda: made.update_params(PARAMS)]
calls += [lambda: made.free_places, handle.result, lambda: next(iter(handle)), handle.cancel, lambda: next(answers)]
calls += [lambda: made.follow({"ids": [50]}, None, 0)]

def hold_locks():  # a thread may hold any lock while the process forks
    with made._changed, handle._results.changed, done._results.changed:
        held.set()
        forked.wait()

held, forked = threading.Event(), threading.Event()
thread = threading.Thread(target=hold_locks)
thread.start()
held.wait()
child = os.fork()
forked.set()
if not child:
    with made:
        assert not made.is_open
        for call in calls:
            refused(call)
        assert done.result()[0].tokens
        assert list(done)
    os._exit(7)  # jax does not support exiting from a fork in any other way
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
made.resume()
assert len(handle.result(60)) == 2
assert len(list(answers)) == 39
made.close()
print("end")
""")
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "",
        "made.submit([50]).result()",
        "handles = [made.submit([50], n=1000) for _ in range(50)]; next(iter(handles[0]))",
        "made.submit([50])",  # the program is being compiled
        "made.pause(); handle = made.submit([50])",
        "made.submit([50], on_event=lambda event: time.sleep(10**6)); time.sleep(20)",
        "del made",
        "answers = generate_many(PARAMS, [[50]] * 1000, KEY, SIMPLE, **SMALL); next(answers)",
    ],
)
def test_the_interpreter_exits_while_an_engine_is_open(program):
    done = run(program)
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr
    assert "terminate" not in done.stderr


@pytest.mark.slow
def test_abandoned_generate_many_ends_its_engine():
    answers = generate_many(PARAMS, ([50] for _ in range(10**6)), KEY, SIMPLE, **SMALL)
    next(answers)
    threads = [thread for thread in threading.enumerate() if thread.name == "jaxgen engine"]
    assert threads
    del answers
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_submit_to_a_closed_engine_is_refused():
    made, arrays = small()
    made.close()
    with pytest.raises(EngineClosed, match="the engine is closed"):
        made.submit([50])
    del made
    until(lambda: freed(arrays))
