import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from convert import CheckpointError, load_hf, save_hf
from convert.hf import float_dtype, open_checkpoint
from jaxgen import ConfigError, GenerationConfig, InputError, KVCache, generate
from jaxgen.request import memory
from jaxgen.request.memory import cache_bytes, check_memory, free_bytes
from tests.support.checkpoints import LLAMA, QWEN2, weights, write
from tests.support.models import model_config, random_params

ROOT = Path(__file__).resolve().parents[2]
CPU = SimpleNamespace(platform="cpu")
WIDE = QWEN2 | {"vocab_size": 4000}  # 0.26 MB of weights


def nbytes(tree) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(tree))


def weights_bytes(path: Path, dtype: str | None = None, quantize: str | None = None) -> int:
    return sum(open_checkpoint(path).quantize(quantize).sizes(float_dtype(dtype)).values())


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return write(tmp_path / "model", WIDE, weights(WIDE))


@pytest.fixture
def refusal(checkpoint, monkeypatch):
    """Check a request of the tiny model with so many bytes free; return what the error says, "" without one."""

    def refusal(free: int | None, *, prompts=1, width=8, max_new_tokens=8, dtype=None, **options) -> str:
        monkeypatch.setattr(memory, "free_bytes", lambda device: free)
        cfg = load_hf(checkpoint)[1].replace(max_new_tokens=max_new_tokens, **options)
        try:
            check_memory(checkpoint, cfg, prompts, width, dtype)
        except InputError as error:
            return str(error)
        return ""

    return refusal


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_weights(tmp_path, stored, dtype):
    path = write(tmp_path / "model", LLAMA, weights(LLAMA, stored), shards=3)
    assert weights_bytes(path, dtype) == nbytes(load_hf(path, dtype=dtype)[0])


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_quantised_weights(tmp_path, dtype):
    path = write(tmp_path / "model", LLAMA, weights(LLAMA))
    params, cfg = load_hf(path, dtype=dtype, quantize="int8")
    assert weights_bytes(path, dtype, "int8") == nbytes(params)
    save_hf(params, cfg, tmp_path / "int8")
    assert weights_bytes(tmp_path / "int8") == nbytes(params)
    assert weights_bytes(tmp_path / "int8", dtype, "none") == weights_bytes(path, dtype)


def test_a_tied_head_is_counted_once(tmp_path, checkpoint):
    tensors = weights(WIDE)
    twice = write(tmp_path / "twice", WIDE, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert weights_bytes(twice) == weights_bytes(checkpoint) == nbytes(load_hf(twice)[0])


def test_mixed_dtypes(tmp_path):
    mixed = weights(QWEN2, "bfloat16") | {"model.norm.weight": weights(QWEN2)["model.norm.weight"]}
    path = write(tmp_path / "mixed", QWEN2, mixed)
    assert weights_bytes(path) == nbytes(load_hf(path)[0])


def test_what_load_hf_refuses_is_refused(tmp_path, refusal):
    with pytest.raises(CheckpointError, match="is not a directory"):
        check_memory(tmp_path / "absent", GenerationConfig(max_new_tokens=8), prompts=1, prompt_width=8)
    with pytest.raises(ConfigError, match="int8"):
        refusal(10**9, dtype="int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache(dtype):
    model = model_config(num_hidden_layers=3, torch_dtype=dtype)
    assert cache_bytes(model, 3, 40) == nbytes(KVCache.create(model, 3, 40))


def test_enough_or_unknown(refusal):
    assert refusal(10**9) == ""
    assert refusal(None) == ""


def test_what_is_counted_is_needed(checkpoint, refusal):
    """The weights, the cache that `generate` returns and a row of logits; little else for a short prompt."""
    params, cfg = load_hf(checkpoint)
    out = generate(params, [[1, 2, 3]] * 2, None, cfg.replace(max_new_tokens=5))
    needed = nbytes(params) + nbytes(out.cache) + 2 * 4 * WIDE["vocab_size"]
    assert refusal(needed - 1, prompts=2, width=3, max_new_tokens=5)
    attention = 3 * 2 * WIDE["num_attention_heads"] * 32**2 * 4
    assert refusal(needed + attention, prompts=2, width=3, max_new_tokens=5) == ""


def test_the_text(refusal, checkpoint):
    size = weights_bytes(checkpoint) / 1e6
    text = refusal(1000)
    assert text.startswith("this request needs 0.")
    assert f"({size:.1f} MB of weights) and only 0.0 MB is free: try a smaller model or a machine with more" in text
    assert memory._size(31_250_000_000) == "31.2 GB"


@pytest.mark.parametrize(
    ("request_", "remedy"),
    [
        ({"max_new_tokens": 30_000}, "a smaller max_new_tokens"),
        ({"num_return_sequences": 1000, "do_sample": True}, "a smaller num_return_sequences or num_beams"),
        ({"top_k": 1000, "penalty_alpha": 0.6}, "a smaller top_k"),
        ({"prompts": 1000}, "fewer prompts at once"),
        ({"width": 20_000}, "a shorter prompt"),
        ({"max_new_tokens": 30_000, "width": 20_000}, "a smaller max_new_tokens and a shorter prompt"),
        ({"prompts": 8, "width": 64}, "fewer prompts at once or a shorter prompt"),
        ({"max_new_tokens": 300, "output_scores": True, "output_logits": True}, "a smaller max_new_tokens"),
    ],
)
def test_a_remedy_for_what_is_large(refusal, request_, remedy):
    assert refusal(1_000_000) == ""
    assert refusal(1_000_000, **request_).endswith(f": try {remedy}")


@pytest.mark.parametrize(
    ("options", "prompts", "remedy"),
    [
        ({"num_return_sequences": 10**7, "do_sample": True}, 1, "a smaller num_return_sequences or num_beams"),
        ({"num_beams": 10**7}, 1, "a smaller num_return_sequences or num_beams"),
        ({"max_new_tokens": 10**9}, 1, "a smaller max_new_tokens"),
        ({"max_new_tokens": 10**8, "output_scores": True}, 1, "a smaller max_new_tokens"),
        ({"max_new_tokens": 10**7}, 4000, "a smaller max_new_tokens or fewer prompts at once"),
    ],
)
def test_a_call_that_needs_too_much_is_refused_before_it_is_compiled(options, prompts, remedy, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**10)
    model = model_config(vocab_size=1000, max_position_embeddings=2 * 10**9)
    cfg = GenerationConfig(model=model, **{"max_new_tokens": 8, "pad_token_id": 0, **options})
    key = jax.random.key(0) if cfg.do_sample else None
    with pytest.raises(InputError, match=f"this call needs .* GB and only .* is free: try {remedy}$"):
        generate(random_params(model), [[3, 4, 5]] * prompts, key, cfg)


def test_bfloat16_where_it_helps(refusal, checkpoint):
    free = weights_bytes(checkpoint)  # which leaves nothing for the rest
    for dtype in (None, "float32", "float16"):
        assert refusal(free, dtype=dtype).endswith("is free: try --dtype bfloat16 or --quantize int8")
    assert refusal(free, dtype="bfloat16") == ""
    assert "bfloat16" not in refusal(free, dtype="bfloat16", width=20_000)


def test_free_memory_of_an_accelerator():
    def device(statistics):
        return SimpleNamespace(platform="gpu", memory_stats=lambda: statistics)

    assert free_bytes(device({"bytes_limit": 100, "bytes_in_use": 30, "peak_bytes_in_use": 50})) == 70
    for unknown in (None, {}, {"bytes_in_use": 30}, {"bytes_limit": -1, "bytes_in_use": -1}):
        assert free_bytes(device(unknown)) is None


def test_the_accelerator_is_named(checkpoint, monkeypatch):
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 150_000, "bytes_in_use": 50_000}

        def __str__(self):
            return "cuda:0"

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with pytest.raises(InputError, match=r"0\.1 MB is free on cuda:0: try"):
        check_memory(checkpoint, load_hf(checkpoint)[1].replace(max_new_tokens=8), 1, 8)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A made-up /proc and /sys: 4 GB available, and a process in the control group a/b."""
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  8000000 kB\nMemFree: 1000 kB\nMemAvailable:  4000000 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("1:name=systemd:/\n0::/a/b\n")
    (tmp_path / "cgroup" / "a" / "b").mkdir(parents=True)
    return tmp_path


def limit(group: Path, maximum: str, current: int, pages: int = 0):
    (group / "memory.max").write_text(f"{maximum}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 7\nfile {pages}\ninactive_file {pages // 2}\nactive_file {pages // 2}\n")


def test_free_memory_of_the_host(machine):
    assert free_bytes(CPU) == 4_000_000 * 1024
    limit(machine / "cgroup" / "a" / "b", "max", 10**9)
    assert free_bytes(CPU) == 4_000_000 * 1024


@pytest.mark.parametrize("group", [".", "a", "a/b"])
def test_a_control_group_limits(machine, group):
    limit(machine / "cgroup" / group, "1000000", 300_000)
    assert free_bytes(CPU) == 700_000
    limit(machine / "cgroup" / group, "1000000", 300_000, pages=200_000)  # which the kernel gives up when needed
    assert free_bytes(CPU) == 900_000
    limit(machine / "cgroup" / group, "1000000", 1_200_000)
    assert free_bytes(CPU) == 0
    limit(machine / "cgroup" / group, str(10**13), 0)
    assert free_bytes(CPU) == 4_000_000 * 1024


def test_nothing_is_known_without_proc(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_PROC", tmp_path / "absent")
    assert free_bytes(CPU) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells")
def test_free_memory_of_this_machine():
    free = free_bytes(jax.local_devices(backend="cpu")[0])
    assert free is not None
    assert 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_importing_takes_no_device():
    code = (
        "import convert.hub, jaxgen.request.memory\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
