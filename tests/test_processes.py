"""Several processes: the results of one, each reading and writing its own parts, and an end when one is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from convert import load_hf, save_hf
from jaxgen import GenerationConfig, generate, score
from tests.support.models import model_config, random_params
from tests.support.one_of_two import OPTIONS

ROOT = Path(__file__).resolve().parents[1]
MODEL = model_config(vocab_size=96, hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=4)
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


@pytest.mark.parametrize("shape", [(2, 4), (1, 8)])
def test_two_processes(tmp_path, port, environment, shape):
    params = random_params(MODEL, scale=0.2)
    save_hf(params, CFG, tmp_path / "one")
    command = [sys.executable, "-m", "tests.support.one_of_two"]
    both = [
        subprocess.Popen(
            [*command, str(number), str(port), *map(str, shape), str(tmp_path / "one"), str(tmp_path / "two")],
            **{"stdout": subprocess.PIPE, "text": True, "env": environment, "cwd": ROOT},
        )
        for number in range(2)
    ]
    printed = [process.communicate(timeout=400)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    first, second = (json.loads(text.split("RESULT", 1)[1].splitlines()[0]) for text in printed)

    for name, options in OPTIONS.items():
        cfg = CFG.replace(**options)
        out = generate(params, IDS, jax.random.key(4) if cfg.do_sample else None, cfg)
        assert first[name] == second[name] == np.asarray(out.sequences).tolist()
    best = np.asarray(out.scores).max(axis=-1)
    np.testing.assert_allclose(first["best"], best, atol=2e-3)
    again = generate(params, IDS[:, :2], None, CFG, cache=out.cache)
    assert first["again"] == second["again"] == np.asarray(again.sequences).tolist()
    np.testing.assert_allclose(first["score"], score(params, IDS[:2], CFG).logprobs, atol=2e-3)
    assert "max_time cannot stop several processes" in first["max_time"]

    # Each process has one row of the mesh (2, 4), and so the whole model; of (1, 8) it has half. No byte is read twice.
    matrices, others = (
        sum(x.nbytes for x in jax.tree.leaves(params) if (x.ndim > 1) is is_matrix) for is_matrix in (True, False)
    )
    share = matrices + others if shape == (2, 4) else matrices / 2 + others
    assert max(first["read"], second["read"]) <= share
    saved, cfg = load_hf(tmp_path / "two")
    assert cfg == CFG.replace(max_new_tokens=6)
    jax.tree.map(np.testing.assert_array_equal, saved, params)
    assert first["again_saved"] == second["again_saved"] == "CheckpointError"


@pytest.mark.parametrize("lost", [0, 1])
def test_the_command_says_which_process_was_lost(tmp_path, port, environment, lost):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Tell me a story about a fox\n" * 2000)
    command = [sys.executable, "-m", "jaxgen", "--mesh", "2x1", "--coordinator", f"127.0.0.1:{port}"]
    command += ["--processes", "2", "--max-new-tokens", "20", "--input", str(prompts), "--batch-size", "2"]
    logs = [open(tmp_path / str(number), "w+") for number in range(2)]  # noqa: SIM115
    both = [
        subprocess.Popen(
            [*command, "--process", str(number)], stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path
        )
        for number, log in enumerate(logs)
    ]
    started = time.monotonic()
    while not (tmp_path / "0").stat().st_size:  # process 0 prints the answers
        assert time.monotonic() - started < 200
        assert both[0].poll() is None
        time.sleep(0.5)
    children = Path(f"/proc/{both[lost].pid}/task/{both[lost].pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    begin = time.monotonic()
    assert both[1 - lost].wait(timeout=60) == 1
    assert time.monotonic() - begin < 30
    both[lost].wait(timeout=60)
    last = (tmp_path / str(1 - lost)).read_text().splitlines()[-1]
    assert last == f"jaxgen: error: process {lost} was lost: start all processes again"
    for log in logs:
        log.close()
