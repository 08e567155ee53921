import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze
from flax.traverse_util import flatten_dict

from convert import CheckpointError, load_hf, pool_kv_heads, save_hf
from convert.__main__ import compare
from convert.hf import open_checkpoint
from convert.kv_heads import pool_checkpoint
from jaxgen import CausalLM
from jaxgen.errors import ConfigError
from tests.support.checkpoints import LLAMA, QWEN2, weights, write

HEAD = 4  # head size of these configs
FOUR_HEADS = {"num_key_value_heads": 4}
CONFIGS = [
    pytest.param(QWEN2 | FOUR_HEADS, id="qwen2"),
    pytest.param(LLAMA | FOUR_HEADS, id="llama"),
    pytest.param(QWEN2 | FOUR_HEADS | {"hidden_size": 32, "num_attention_heads": 8}, id="grouped"),
]
FEWER = [
    pytest.param(*param.values, kv_heads, id=f"{param.id}-{kv_heads}", marks=[pytest.mark.slow] if slow else [])
    for param in CONFIGS
    for kv_heads, slow in ((2, False), (1, param.id != "qwen2"))
]
KEYS = "model.layers.1.self_attn.k_proj.weight"


def is_pooled(name: str) -> bool:
    return "k_proj" in name or "v_proj" in name


def pooled(tensors: dict, kv_heads: int, dtype: str | None = None) -> dict[str, np.ndarray]:
    """Return the expected tensors: keys and values are means of groups of heads, summed in order in float32."""
    result = {}
    for name, tensor in tensors.items():
        if is_pooled(name):
            heads = [head.astype(np.float32) for head in np.split(tensor, len(tensor) // HEAD)]
            size = len(heads) // kv_heads
            groups = [heads[start : start + size] for start in range(0, len(heads), size)]
            means = np.concatenate([sum(group[1:], group[0]) / np.float32(size) for group in groups])
            result[name] = means.astype(jnp.dtype(dtype or tensor.dtype))
        else:
            result[name] = tensor.astype(jnp.dtype(dtype or tensor.dtype))
    return result


def bits(tensors: dict) -> dict[str, tuple]:
    return {name: (str(t.dtype), t.shape, np.asarray(t).tobytes()) for name, t in tensors.items()}


def flat(params) -> dict:
    return flatten_dict(params, sep=".")


@functools.partial(jax.jit, static_argnames="model")  # one program per model, not per call
def forward(params, ids, model):
    return CausalLM(model).apply({"params": params}, ids).logits


def logits(path) -> np.ndarray:
    params, cfg = load_hf(path)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 40, (2, 9)), jnp.int32)
    return np.asarray(forward(params, ids, cfg.model))


# The command


@pytest.mark.parametrize(("config", "kv_heads"), FEWER)
def test_heads_are_averaged_and_nothing_else_changes(call, tmp_path, config, kv_heads):
    tensors = weights(config)
    source = write(tmp_path / "x", config, tensors)
    (source / "tokenizer.json").write_text("{}")
    status, out, err = call(source, tmp_path / "out", "--kv-heads", kv_heads, "--check")
    assert status == 0, err
    assert f"{len(tensors)} tensors read again, all equal" in out
    params, cfg = load_hf(tmp_path / "out")
    assert bits(flat(params)) == bits(pooled(tensors, kv_heads))
    assert cfg.model.num_key_value_heads == kv_heads
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"num_key_value_heads": kv_heads}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert np.isfinite(logits(tmp_path / "out")).all()


@pytest.mark.parametrize(("stored", "wanted"), [("bfloat16", None), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_the_mean_is_taken_in_float32_and_rounded_once(call, tmp_path, qwen2, monkeypatch, stored, wanted):
    monkeypatch.setattr("convert.tensors.CHUNK", 50)  # so that a pooled projection takes several chunks
    tensors = weights(QWEN2 | FOUR_HEADS, stored)
    source = write(tmp_path / "x", QWEN2 | FOUR_HEADS, tensors)
    cast = ["--dtype", wanted] if wanted else []
    status, _, err = call(source, qwen2, "--kv-heads", 1, "--overwrite", "--check", *cast)
    assert status == 0, err
    params, cfg = load_hf(qwen2)
    assert bits(flat(params)) == bits(pooled(tensors, 1, wanted))
    assert cfg.model.dtype == (wanted or stored)
    if wanted is None:
        naive = sum(np.split(tensors[KEYS], 4)) / jnp.bfloat16(4)
        assert naive.dtype == jnp.bfloat16
        assert naive.tobytes() != pooled(tensors, 1)[KEYS].tobytes()


def test_groups_of_three_heads_are_averaged(call, tmp_path):
    config = LLAMA | {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 6}
    tensors = weights(config)
    assert call(write(tmp_path / "x", config, tensors), tmp_path / "out", "--kv-heads", 2)[0] == 0
    assert bits(flat(load_hf(tmp_path / "out")[0])) == bits(pooled(tensors, 2))


@pytest.mark.parametrize(("config", "kv_heads"), FEWER)
def test_pooling_equal_heads_preserves_the_model(call, tmp_path, config, kv_heads):
    """The mean of equal heads is the head itself, so if the heads are grouped correctly, the models are equal."""

    def arrange(path, order):
        """Write a model with `kv_heads` different key-value heads, repeated in the given order."""
        tensors = {name: tensor * np.float32(0.3) for name, tensor in weights(config).items()}  # keeps the softmax flat
        for name in filter(is_pooled, tensors):
            heads = np.split(tensors[name], 4)
            tensors[name] = np.concatenate([heads[number] for number in order])
        return write(path, config, tensors)

    groups = arrange(tmp_path / "groups", np.repeat(np.arange(kv_heads), 4 // kv_heads))
    assert call(groups, tmp_path / "out", "--kv-heads", kv_heads)[0] == 0
    np.testing.assert_allclose(logits(tmp_path / "out"), logits(groups), rtol=0, atol=1e-5)
    scattered = arrange(tmp_path / "scattered", [0, 1, 0, 1])
    assert call(scattered, tmp_path / "out", "--kv-heads", kv_heads, "--overwrite")[0] == 0
    assert np.abs(logits(tmp_path / "out") - logits(scattered)).max() > 1e-2


@pytest.mark.parametrize("kv_heads", [3, 0, -2, 4, 8])
def test_indivisible_head_counts_are_refused(call, tmp_path, kv_heads):
    source = write(tmp_path / "x", LLAMA | FOUR_HEADS, weights(LLAMA | FOUR_HEADS))
    status, out, err = call(source, tmp_path / "out", "--kv-heads", kv_heads)
    assert (status, out) == (2, "")
    expected = f"kv_heads must be less than the model's 4 key-value heads and divide them: 1, 2; got {kv_heads}"
    assert err == f"python -m convert: {expected}\n"
    assert not (tmp_path / "out").exists()


def test_single_head_cannot_be_pooled(call, tmp_path):
    config = LLAMA | {"num_key_value_heads": 1}
    status, _, err = call(write(tmp_path / "x", config, weights(config)), tmp_path / "out", "--kv-heads", 1)
    assert status == 2
    assert err == "python -m convert: kv_heads 1: the model has 1 key-value head, which cannot be pooled further\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a", "b", "--kv-heads", "two"], "invalid int value: 'two'"),
        (["a", "--list", "--kv-heads", "0"], "--list needs a source and nothing else"),
    ],
)
def test_bad_arguments_are_refused(call, arguments, expected):
    status, out, err = call(*arguments)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert expected in err


def test_overflowing_mean_is_refused(call, tmp_path):
    config = LLAMA | FOUR_HEADS
    tensors = weights(config)
    tensors[KEYS][:2, 0] = 1e5, 1e30
    tensors[KEYS][HEAD, 0] = -1e5  # its mean with row 0 is in range
    status, _, err = call(
        write(tmp_path / "x", config, tensors), tmp_path / "out", "--kv-heads", 2, "--dtype", "float16"
    )
    assert status == 2
    assert f"{KEYS}: 1 value is too large for float16" in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_check_compares_pooled_tensors(call, tmp_path):
    config = QWEN2 | FOUR_HEADS
    source = write(tmp_path / "x", config, weights(config))
    assert call(source, tmp_path / "out", "--kv-heads", 2)[0] == 0
    before, after = pool_checkpoint(open_checkpoint(source), 2), open_checkpoint(tmp_path / "out")
    assert compare(before, after, None) == []
    assert compare(open_checkpoint(source), after, None) == [name for name in before.tensors if is_pooled(name)]
    file = tmp_path / "out" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[after.tensors[KEYS].offset + 5] ^= 1
    file.write_bytes(content)
    assert compare(before, after, None) == [KEYS]


# The function


def to_numpy(params):
    return jax.tree.map(np.asarray, params)


@pytest.mark.parametrize("form", [dict, to_numpy, freeze])
def test_pooling_loaded_parameters(tmp_path, form):
    tensors = weights(QWEN2 | FOUR_HEADS, "bfloat16")
    params, cfg = load_hf(write(tmp_path / "x", QWEN2 | FOUR_HEADS, tensors))
    params = form(params)
    result, smaller = pool_kv_heads(params, cfg, np.int64(2))
    assert type(result) is type(params)
    assert bits(flat(result)) == bits(pooled(tensors, 2))
    assert bits(flat(params)) == bits(tensors)
    assert result["model"]["norm"]["weight"] is params["model"]["norm"]["weight"]
    assert smaller.model.num_key_value_heads == 2
    assert smaller.replace(model=cfg.model) == cfg
    save_hf(result, smaller, tmp_path / "out")
    assert load_hf(tmp_path / "out")[1] == smaller


def test_pooling_under_jit(tmp_path):
    tensors = weights(LLAMA | FOUR_HEADS)
    params, cfg = load_hf(write(tmp_path / "x", LLAMA | FOUR_HEADS, tensors))
    result = jax.jit(lambda params: pool_kv_heads(params, cfg, 2)[0])(params)
    assert bits(flat(result)) == bits(pooled(tensors, 2))


def test_mismatched_parameters_are_refused(tmp_path):
    params, cfg = load_hf(write(tmp_path / "x", LLAMA | FOUR_HEADS, weights(LLAMA | FOUR_HEADS)))
    with pytest.raises(CheckpointError, match=r"variables\['params'\]"):
        pool_kv_heads({"params": params}, cfg, 2)
    result, new = pool_kv_heads(params, cfg, 2)
    with pytest.raises(CheckpointError, match=r"k_proj.weight has shape \[8, 16\], the config needs \[16, 16\]"):
        pool_kv_heads(result, cfg, 2)
    with pytest.raises(ConfigError, match="less than the model's 2 key-value heads and divide them: 1; got 2"):
        pool_kv_heads(result, new, 2)
    with pytest.raises(ConfigError, match=r"cfg\.model is None"):
        pool_kv_heads(params, cfg.replace(model=None), 2)
    with pytest.raises(TypeError, match="cfg must be a GenerationConfig, got ModelConfig"):
        pool_kv_heads(params, cfg.model, 2)
    for wrong in (2.0, True, "2", None):
        with pytest.raises(TypeError, match="kv_heads must be a whole number"):
            pool_kv_heads(params, cfg, wrong)
