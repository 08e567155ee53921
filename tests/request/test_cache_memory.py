"""Calls that do not fit in memory are refused before they are compiled, or before they run."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxgen import Engine, GenerationConfig, InputError, KVCache, generate, programs
from jaxgen.core.request.cache_memory import cache_bytes
from jaxgen.memory import REMEDY
from tests.support.compilations import compilations, listening
from tests.support.models import model_config, random_params

WIDE = model_config(vocab_size=4000, num_hidden_layers=2)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_bytes_equal_the_size_of_the_cache(dtype):
    model = model_config(num_hidden_layers=3, torch_dtype=dtype)
    assert cache_bytes(model, 3, 40) == sum(leaf.nbytes for leaf in jax.tree.leaves(KVCache.create(model, 3, 40)))


@pytest.mark.parametrize(
    ("options", "prompts"),
    [
        ({"num_return_sequences": 10**7, "do_sample": True}, 1),
        ({"num_beams": 10**7}, 1),
        ({"max_new_tokens": 10**9}, 1),
        ({"max_new_tokens": 10**9, "output_scores": True}, 1),
        ({"max_new_tokens": 10**7}, 4000),
    ],
)
def test_oversized_cache_is_refused_before_compiling(options, prompts, monkeypatch):
    monkeypatch.setattr("jaxgen.memory.free_bytes", lambda device: 10**10)
    model = model_config(vocab_size=1000, max_position_embeddings=2 * 10**9)
    cfg = GenerationConfig(model=model, **{"max_new_tokens": 8, "pad_token_id": 0, **options})
    key = jax.random.key(0) if cfg.do_sample else None
    with pytest.raises(InputError, match=f"this call needs .* GB, but only .* is free: try {REMEDY}$"):
        generate(random_params(model), [[3, 4, 5]] * prompts, key, cfg)


@pytest.fixture
def free(monkeypatch):
    """Return a function that sets the number of free bytes and forgets all programs. Small programs are checked too."""
    monkeypatch.setattr(programs, "SMALL", 0)

    def free(size: int):
        monkeypatch.setattr("jaxgen.memory.free_bytes", lambda device: size)
        monkeypatch.setattr(programs, "PROGRAMS", programs.Programs(64))

    return free


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"max_new_tokens": 300, "output_scores": True, "output_logits": True}, 2 * 2 * 300 * 4000 * 4),
        ({"penalty_alpha": 0.6, "top_k": 200}, 2 * 200 * 4000 * 4),
        ({"max_new_tokens": 300, "output_hidden_states": True}, 2 * 3 * 300 * 16 * 4),
    ],
)
def test_oversized_program_is_refused_before_it_runs(options, size, free, monkeypatch):
    """The caches alone would fit, but the options add an array of `size` bytes."""
    cfg = GenerationConfig(model=WIDE, **{"max_new_tokens": 8, "pad_token_id": 0, **options})
    ids = np.full((2, 3), 5)
    params = random_params(WIDE)
    free(size)
    for _ in range(2):
        with pytest.raises(InputError, match=r"^this call needs .*, but only .* is free: try fewer prompts"):
            generate(params, ids, None, cfg)
    monkeypatch.setattr("jaxgen.memory.free_bytes", lambda device: 100 * size)
    with compilations() as count:
        generate(params, ids, None, cfg)
    assert count[0] == 0
    monkeypatch.setattr("jaxgen.memory.free_bytes", lambda device: 0)
    generate(params, ids, None, cfg)  # each program is checked only once


@pytest.mark.slow
def test_memory_of_a_loaded_program_is_checked(free):
    cfg, params, found = GenerationConfig(model=WIDE, max_new_tokens=8, pad_token_id=0), random_params(WIDE), []
    free(10**9)
    generate(params, [[3, 4]], None, cfg)
    free(1000)
    with listening("/jax/compilation_cache/cache_hits", found), pytest.raises(InputError, match="this call needs"):
        generate(params, [[3, 4]], None, cfg)
    assert len(found) == 1


def test_oversized_engine_is_refused(free):
    cfg, params = GenerationConfig(model=WIDE, max_new_tokens=8, pad_token_id=0), random_params(WIDE)
    free(1000)
    with pytest.raises(InputError, match="this call needs"):
        Engine(params, cfg, slots=2, prompt_width=8)


@pytest.mark.slow
def test_import_does_not_initialize_a_device():
    code = (
        "import convert.hub, jaxgen.core.request.cache_memory\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
