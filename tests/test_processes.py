"""Several processes give the same results as one, access only their own parts of files, and end if one is lost."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import flax.traverse_util
import jax
import numpy as np
import pytest

from convert import load_hf, save_hf
from jaxgen import GenerationConfig, generate, generate_many, score
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.training.loop import TrainBatch, TrainConfig, train
from tests.support.models import model_config, random_params
from tests.support.two_processes import OPTIONS, PROMPTS, grammar

ROOT = Path(__file__).resolve().parents[1]
MODEL = model_config(vocab_size=96, hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=4)
EXPERTS = model_config(
    **{"model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 64, "num_attention_heads": 8, "head_dim": 8},
    **{"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
)
CFG = GenerationConfig(model=MODEL, max_new_tokens=6, pad_token_id=0, eos_token_id=1)
IDS = np.arange(3, 30, dtype=np.int32).reshape(3, 9)

pytestmark = pytest.mark.slow


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def environment(programs):
    return {**os.environ, **programs, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def both(port, environment):
    """Return a function that runs a task of `two_processes` in two processes, and returns what each printed."""

    def both(task: str, shape: tuple[int, int], *paths: Path) -> list[dict]:
        words = [sys.executable, "-m", "tests.support.two_processes", task]
        processes = [
            subprocess.Popen(
                [*words, *map(str, (number, port, *shape, *paths))],
                **{"stdout": subprocess.PIPE, "text": True, "env": environment, "cwd": ROOT},
            )
            for number in range(2)
        ]
        printed = [process.communicate(timeout=400)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        return [json.loads(text.split("RESULT", 1)[1].splitlines()[0]) for text in printed]

    return both


def test_a_process_that_cannot_write_stops_all(tmp_path, both):
    save_hf(random_params(MODEL), CFG, tmp_path / "one")
    first, second = both("fail", (1, 8), tmp_path / "one", tmp_path / "two")
    assert first["error"].startswith("CheckpointError")
    assert "process 1 could not write its parts: see its message" in first["error"]
    assert second["error"] == "OSError no space left"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize(
    ("shape", "model"),
    [((2, 4), MODEL), ((1, 8), MODEL), ((2, 4), EXPERTS), ((1, 8), EXPERTS)],
    ids=["2x4", "1x8", "2x4-experts", "1x8-experts"],
)
def test_two_processes_generate_and_save(tmp_path, both, shape, model):
    params, given = random_params(model, scale=0.2), CFG.replace(model=model)
    save_hf(params, given, tmp_path / "one")
    first, second = both("generate", shape, tmp_path / "one", tmp_path / "two")

    for name, options in OPTIONS.items():
        cfg = given.replace(**options)
        out = generate(params, IDS, jax.random.key(4) if cfg.do_sample else None, cfg)
        assert first[name] == second[name] == np.asarray(out.sequences).tolist()
    best = np.asarray(out.scores).max(axis=-1)
    np.testing.assert_allclose(first["best"], best, atol=2e-3)
    again = generate(params, IDS[:, :2], None, given, cache=out.cache)
    assert first["again"] == second["again"] == np.asarray(again.sequences).tolist()
    np.testing.assert_allclose(first["score"], score(params, IDS[:2], given).logprobs, atol=2e-3)
    assert "max_time cannot stop several processes" in first["max_time"]
    assert "the cache is divided over several processes" in first["to_hf"]

    # On the mesh (2, 4), each process has the whole model; on (1, 8), half of each matrix except the routers', or half
    # of the experts. No byte is read twice.
    flat = flax.traverse_util.flatten_dict(params, sep=".")
    matrices, others = (
        sum(x.nbytes for name, x in flat.items() if (x.ndim > 1 and ".gate." not in name) is is_matrix)
        for is_matrix in (True, False)
    )
    share = matrices + others if shape == (2, 4) else matrices / 2 + others
    assert max(first["read"], second["read"]) <= share
    saved, cfg = load_hf(tmp_path / "two")
    assert cfg == given.replace(max_new_tokens=6)
    jax.tree.map(np.testing.assert_array_equal, saved, params)
    assert first["again_saved"] == second["again_saved"] == "CheckpointError"


@pytest.mark.parametrize("shape", [(2, 4), (1, 8)])
def test_process_0_schedules_the_engine(tmp_path, both, shape):
    params, key, sizes = random_params(MODEL, scale=0.2), jax.random.key(4), {"slots": 3, "prompt_width": 9}
    save_hf(params, CFG, tmp_path / "one")
    first, second = both("engine", shape, tmp_path / "one")
    cfg = CFG.replace(do_sample=True)
    alone = [done.tokens for done in generate_many(params, PROMPTS, key, cfg, ordered=True, **sizes)]
    changed = jax.tree.map(lambda x: x * 1.25, params)
    prompts = [*PROMPTS, {"ids": [5], "allowed": grammar(), "index": 9}]
    *after, only = [done.tokens for done in generate_many(changed, prompts, key, cfg, ordered=True, **sizes)]
    assert first == {"many": alone, "before": alone, "after": after, "grammar": only, "error": DIFFERENT}
    assert alone != after
    assert second["many"] == []
    assert second["error"] == DIFFERENT
    assert second["submit"] == "prompts are submitted in process 0, and this is process 1"


def test_a_new_grammar_sends_only_its_own_part_of_the_table(both):
    first, second = both("tables", (1, 8))
    assert first == second
    assert first["sums"][1] != first["sums"][0]
    assert first["sums"][3] == first["sums"][2] != first["sums"][1]
    nothing, letters, digits, same = first["sent"]
    assert len(nothing) == len(same) == 1  # the plan itself
    assert max(*letters, *digits) * 200 < first["table"]


def test_engine_failure_in_process_0_reaches_all_processes(tmp_path, both):
    save_hf(random_params(MODEL), CFG, tmp_path / "one")
    first, second = both("fail to lead", (1, 8), tmp_path / "one")
    assert first["errors"] == ["division by zero"] * 2
    assert second["errors"] == ["the engine failed in process 0, which reports the reason"]


DIFFERENT = "the processes created the engine with different arguments: they must be the same in all"


@pytest.mark.parametrize("shape", [(2, 4), (1, 8)])
def test_training_resumes(tmp_path, both, shape):
    params = random_params(MODEL, scale=0.2)
    save_hf(params, CFG, tmp_path / "one")
    first, second = both("train", shape, tmp_path / "one", tmp_path / "state")
    assert first == second
    assert (first["seen"], first["same"]) == ([2, 3, 4, 5], True)
    ids = np.random.default_rng(0).integers(2, 90, (6, 4, 12), np.int32)
    batches = [TrainBatch(rows, rows, np.ones_like(rows)) for rows in ids]
    trained = train(params, batches.__getitem__, model=MODEL, cfg=TrainConfig(steps=6, learning_rate=1e-2))
    total = sum(np.abs(leaf).sum(dtype=np.float64) for leaf in jax.tree.leaves(trained))
    np.testing.assert_allclose(first["total"], total, rtol=1e-3)


def test_each_process_stores_only_its_parts(tmp_path, both):
    model = model_config(
        vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=8
    )
    save_hf(random_params(model), CFG.replace(model=model), tmp_path / "one")
    nbytes = {name: 4 * math.prod(shape) for name, shape in param_shapes(model).items()}
    part = sum(nbytes.values()) / 2
    for result in both("load", (1, 8), tmp_path / "one"):
        assert part < result["grown"] < part + 2 * max(nbytes.values()) + 20e6  # 20 MB for jax


@pytest.fixture
def start(tmp_path, port, environment):
    """Return a function that starts the command as process `number` of two, with its output in a file of that name."""
    started = []

    def start(number: int, *options) -> subprocess.Popen:
        command = [sys.executable, "-P", "-m", "jaxgen", "--mesh", "2x1", "--coordinator", f"127.0.0.1:{port}"]
        command += ["--processes", "2", "--process", str(number), *map(str, options)]
        with open(tmp_path / str(number), "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def many(tmp_path) -> list:
    """Return options with which the command runs for a long time."""
    (tmp_path / "prompts.txt").write_text("Tell me a story about a fox\n" * 2000)
    return ["--max-new-tokens", 20, "--input", tmp_path / "prompts.txt", "--slots", 2]


def wait_for_answers(process: subprocess.Popen, file: Path) -> None:
    started = time.monotonic()
    while not (file.exists() and file.stat().st_size):  # process 0 prints the answers
        assert time.monotonic() - started < 200
        assert process.poll() is None
        time.sleep(0.5)


def notes(file: Path) -> list[str]:
    """Return the command's messages, which come after those of jax's runtime."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("{")]
    own = [line for line in lines if line.startswith("jaxgen: ")]
    assert lines[len(lines) - len(own) :] == own
    return own


def assert_lost(file: Path) -> None:
    """Check that the command's only message says that a process was lost."""
    (note,) = notes(file)
    assert re.fullmatch(r"jaxgen: error: .*another process was lost, or failed: start all processes again\)?", note)


def children_of(process: subprocess.Popen) -> list[int]:
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


@pytest.mark.parametrize(("lost", "killed"), [(0, "child"), (1, "child"), (1, "parent")])
def test_command_ends_if_a_process_is_lost(tmp_path, start, many, lost, killed):
    both = [start(number, *many) for number in range(2)]
    wait_for_answers(both[0], tmp_path / "0")
    child = children_of(both[lost])[0]
    os.kill(child if killed == "child" else both[lost].pid, signal.SIGKILL)
    begin = time.monotonic()
    assert both[1 - lost].wait(timeout=60) == 1
    assert time.monotonic() - begin < 30
    assert both[lost].wait(timeout=60) == (128 + signal.SIGKILL if killed == "child" else -signal.SIGKILL)
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() - begin < 30
        time.sleep(0.1)
    assert_lost(tmp_path / str(1 - lost))
    assert notes(tmp_path / str(lost)) == ["jaxgen: error: the command was ended by SIGKILL"] * (killed == "child")


def test_failure_of_one_process_ends_all(tmp_path, start, many):
    both = [start(0, *many), start(1, *many, "--model", "nowhere")]
    begin = time.monotonic()
    assert both[1].wait(timeout=60) == 2
    assert both[0].wait(timeout=60) == 1
    assert time.monotonic() - begin < 60
    assert "nowhere is not a directory" in (tmp_path / "1").read_text()
    assert_lost(tmp_path / "0")


def test_one_process_writes_the_output(tmp_path, start):
    (tmp_path / "prompts.txt").write_text("Tell me a story about a fox\n" * 3)
    (tmp_path / "convert.py").write_text("raise ImportError('not this one')")
    options = ["--max-new-tokens", 5, "--input", tmp_path / "prompts.txt", "--output", tmp_path / "answers"]
    both = [start(number, *options) for number in range(2)]
    assert [process.wait(timeout=200) for process in both] == [0, 0]
    assert len((tmp_path / "answers").read_text().splitlines()) == 3
    again = [start(number, *options) for number in range(2)]
    assert again[0].wait(timeout=200) == 2
    assert "answers exists: choose another name" in (tmp_path / "0").read_text()
    assert again[1].wait(timeout=60) in (1, 2)
