"""The command rejects requests that do not fit in memory, before it reads the weights."""

from pathlib import Path

import jax
import pytest

from convert import CheckpointError, load_hf, save_hf
from convert.hf import float_dtype, open_checkpoint
from jaxgen import ConfigError, GenerationConfig, InputError, generate, memory
from jaxgen.cli.memory_check import check_memory
from tests.support.checkpoints import LLAMA, QWEN2, weights, write

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
    """Return a function that checks a request with `free` bytes of memory, and returns the error or ""."""

    def refusal(free: int | None, *, prompts=1, width=8, max_new_tokens=8, dtype=None, **options) -> str:
        monkeypatch.setattr(memory, "free_bytes", lambda device: free)
        cfg = load_hf(checkpoint)[1].replace(max_new_tokens=max_new_tokens, **options)
        try:
            check_memory(checkpoint, cfg, prompts, width, dtype=dtype)
        except InputError as error:
            return str(error)
        return ""

    return refusal


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_weights_bytes_equal_the_loaded_size(tmp_path, stored, dtype):
    path = write(tmp_path / "model", LLAMA, weights(LLAMA, stored), shards=3)
    assert weights_bytes(path, dtype) == nbytes(load_hf(path, dtype=dtype)[0])


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_quantized_weights_bytes_equal_the_loaded_size(tmp_path, dtype):
    path = write(tmp_path / "model", LLAMA, weights(LLAMA))
    params, cfg = load_hf(path, dtype=dtype, quantize="int8")
    assert weights_bytes(path, dtype, "int8") == nbytes(params)
    save_hf(params, cfg, tmp_path / "int8")
    assert weights_bytes(tmp_path / "int8") == nbytes(params)
    assert weights_bytes(tmp_path / "int8", dtype, "none") == weights_bytes(path, dtype)


def test_tied_head_is_counted_once(tmp_path, checkpoint):
    tensors = weights(WIDE)
    twice = write(tmp_path / "twice", WIDE, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert weights_bytes(twice) == weights_bytes(checkpoint) == nbytes(load_hf(twice)[0])


def test_mixed_dtypes(tmp_path):
    mixed = weights(QWEN2, "bfloat16") | {"model.norm.weight": weights(QWEN2)["model.norm.weight"]}
    path = write(tmp_path / "mixed", QWEN2, mixed)
    assert weights_bytes(path) == nbytes(load_hf(path)[0])


def test_inputs_that_load_hf_refuses_are_refused(tmp_path, refusal):
    with pytest.raises(CheckpointError, match="is not a directory"):
        check_memory(tmp_path / "absent", GenerationConfig(max_new_tokens=8), prompts=1, width=8)
    with pytest.raises(ConfigError, match="int8"):
        refusal(10**9, dtype="int8")


def test_sufficient_or_unknown_memory_is_accepted(refusal):
    assert refusal(10**9) == ""
    assert refusal(None) == ""


def test_estimate_equals_the_memory_of_weights_and_cache(checkpoint, refusal):
    """The estimate counts the weights and the cache that `generate` returns."""
    params, cfg = load_hf(checkpoint)
    out = generate(params, [[1, 2, 3]] * 4, None, cfg.replace(max_new_tokens=5))
    needed = nbytes(params) + nbytes(out.cache.kv)
    assert refusal(needed - 1, prompts=4, width=3, max_new_tokens=5)
    lengths = 4 * 4  # the cache's lengths are stored once for the prompts and once for the rows
    assert refusal(needed + lengths, prompts=4, width=3, max_new_tokens=5) == ""


def test_refusal_names_sizes_and_remedies(refusal, checkpoint):
    size = weights_bytes(checkpoint) / 1e6
    text = refusal(1000)
    assert text.startswith("this request needs 0.")
    assert f"({size:.1f} MB of weights), but only 0.0 MB is free: try fewer prompts" in text


@pytest.mark.parametrize(
    "request_",
    [
        {"max_new_tokens": 30_000},
        {"num_return_sequences": 1000, "do_sample": True},
        {"prompts": 1000},
        {"width": 20_000},
    ],
)
def test_each_part_of_a_request_is_counted(refusal, request_):
    assert refusal(1_000_000) == ""
    assert refusal(1_000_000, **request_).endswith("--quantize, or a smaller model")


def test_16_bit_dtypes_halve_the_estimate(refusal, checkpoint):
    free = weights_bytes(checkpoint)  # leaves nothing for the cache
    for dtype in (None, "float32"):
        assert refusal(free, dtype=dtype)
    assert refusal(free, dtype="bfloat16") == refusal(free, dtype="float16") == ""


def test_refusal_names_the_accelerator(checkpoint, monkeypatch):
    class Device:
        platform, process_index, id = "gpu", 0, 0

        def memory_stats(self):
            return {"bytes_limit": 150_000, "bytes_in_use": 50_000}

        def __str__(self):
            return "cuda:0"

    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [Device()])
    with pytest.raises(InputError, match=r"0\.1 MB is free on cuda:0: try"):
        check_memory(checkpoint, load_hf(checkpoint)[1].replace(max_new_tokens=8), 1, 8)
