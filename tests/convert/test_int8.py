import json

import flax.traverse_util
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert import CheckpointError, load_hf, save_hf, shards
from convert.kv_heads import pool_kv_heads
from jaxgen import generate
from jaxgen.core.model.int8 import Int8
from jaxgen.errors import ConfigError
from tests.support.checkpoints import GENERATION, LLAMA, QWEN2, weights, write

FILE, INDEX = "model.int8.safetensors", "model.int8.safetensors.index.json"
QUERY = "model.layers.0.self_attn.q_proj.weight"


def flat(params) -> dict:
    return flax.traverse_util.flatten_dict(params, sep=".")


def same(left, right) -> bool:
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


@pytest.fixture
def int8(qwen2, tmp_path, call):
    assert call(qwen2, tmp_path / "int8", "--quantize", "int8", "--check")[0] == 0
    return tmp_path / "int8"


def problems(path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        load_hf(path)
    return caught.value.problems


def test_each_number_is_rounded_to_nearest(tmp_path):
    tensors = weights(QWEN2)
    tensors[QUERY][3] = 0
    params, cfg = load_hf(write(tmp_path / "x", QWEN2, tensors), quantize="int8")
    for name, weight in flat(params).items():
        matrix = tensors[name]
        assert isinstance(weight, Int8) == (matrix.ndim == 2)
        if matrix.ndim != 2:
            np.testing.assert_array_equal(weight, matrix)
            continue
        values, scales = np.asarray(weight.values), np.asarray(weight.scales)
        assert np.all(np.abs(values).max(axis=1) == np.where(scales == 0, 0, 127))
        assert np.all(np.abs(values * scales[:, None] - matrix) <= 0.50001 * scales[:, None])
    assert cfg.model.dtype == "float32"


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_quantized_directory_loads_like_quantizing_on_load(qwen2, int8, dtype):
    assert (int8 / FILE).is_file()
    assert not list(int8.glob("model.safetensors*"))
    params, cfg = load_hf(int8, dtype=dtype)
    expected, expected_cfg = load_hf(qwen2, dtype=dtype, quantize="int8")
    assert same(params, expected)
    assert cfg == expected_cfg
    assert same(load_hf(int8, quantize="int8", dtype=dtype)[0], expected)


def test_model_dtype_is_the_dtype_of_the_matrices(tmp_path, call):
    mixed = weights(QWEN2, "bfloat16") | {"model.norm.weight": weights(QWEN2)["model.norm.weight"]}
    source = write(tmp_path / "mixed", QWEN2, mixed)
    assert call(source, tmp_path / "int8", "--quantize", "int8")[0] == 0
    for path, quantize in ((source, "int8"), (tmp_path / "int8", None)):
        params, cfg = load_hf(path, quantize=quantize)
        assert cfg.model.dtype == params["model"]["embed_tokens"]["weight"].dtype == "bfloat16"
        assert params["model"]["norm"]["weight"].dtype == "float32"


def test_quantized_model_generates_and_is_saved_again(int8, tmp_path):
    params, cfg = load_hf(int8)
    out = generate(params, [[3, 4, 5]], None, cfg.replace(do_sample=False, temperature=None, max_new_tokens=4))
    assert out.sequences.shape == (1, 7)
    save_hf(params, cfg, tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == (int8 / FILE).read_bytes()
    assert json.loads((tmp_path / "again/config.json").read_text())["torch_dtype"] == "float32"
    with pytest.raises(ConfigError, match="quantized, so their heads cannot be pooled"):
        pool_kv_heads(params, cfg, 1)


def test_shards_and_their_index(tmp_path, call, monkeypatch):
    source = write(tmp_path / "source", LLAMA, weights(LLAMA, "bfloat16"), GENERATION, shards=3)
    params, cfg = load_hf(source, quantize="int8")
    monkeypatch.setattr(shards, "MAX_SHARD", 2000)
    assert call(source, tmp_path / "int8", "--quantize", "int8", "--check")[0] == 0
    save_hf(params, cfg, tmp_path / "saved")
    for path in (tmp_path / "int8", tmp_path / "saved"):
        names = {file.name for file in path.glob("*.safetensors*")}
        assert INDEX in names
        assert all(name.startswith("model.int8") for name in names)
        assert len(names) > 3
        loaded, loaded_cfg = load_hf(path)
        assert same(loaded, params)
        assert loaded_cfg.model.dtype == "bfloat16"


def rounded(path) -> dict:
    """Return a quantized checkpoint's matrices, dequantized to float32, and its other parameters unchanged."""
    arrays = load_file(path / FILE)
    return {
        name: x.astype(np.float32) * arrays[f"{name}_scale"][:, None] if x.dtype == np.int8 else x
        for name, x in arrays.items()
        if not name.endswith("_scale")
    }


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_quantize_none_dequantizes(qwen2, int8, tmp_path, call, dtype):
    expected = {name: x.astype(np.dtype(dtype or "float32")) for name, x in rounded(int8).items()}
    assert (
        call(int8, tmp_path / "back", "--quantize", "none", "--check", *(["--dtype", dtype] if dtype else []))[0] == 0
    )
    for path, quantize in ((int8, "none"), (tmp_path / "back", None), (tmp_path / "back", "none")):
        params, cfg = load_hf(path, dtype=dtype, quantize=quantize)
        assert flat(params).keys() == expected.keys() == weights(QWEN2).keys()
        for name, array in flat(params).items():
            assert array.dtype == expected[name].dtype
            np.testing.assert_array_equal(array, expected[name])
        assert cfg.model.dtype == (dtype or "float32")
    save_hf(params, cfg, tmp_path / "saved")
    assert (tmp_path / "saved/model.safetensors").read_bytes() == (tmp_path / "back/model.safetensors").read_bytes()
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == (dtype or "float32")


def test_dequantized_matrices_have_the_dtype_of_the_config(tmp_path, call):
    source = write(tmp_path / "source", QWEN2, weights(QWEN2, "bfloat16"))
    assert call(source, tmp_path / "int8", "--quantize", "int8")[0] == 0
    params, cfg = load_hf(tmp_path / "int8", quantize="none")
    assert {str(array.dtype) for array in flat(params).values()} == {cfg.model.dtype} == {"bfloat16"}
    assert same(params, load_hf(source, quantize="none")[0]) is False  # the weights stay rounded


def test_dtype_alone_is_ambiguous_for_quantized_weights(int8, tmp_path, call):
    status, out, err = call(int8, tmp_path / "x", "--dtype", "bfloat16")
    assert (status, out) == (2, "")
    assert (
        "add --quantize none to convert them to bfloat16, or --quantize int8 to convert only the other tensors" in err
    )
    assert not (tmp_path / "x").exists()
    assert call(int8, tmp_path / "x", "--dtype", "bfloat16", "--quantize", "int8", "--check")[0] == 0
    params, cfg = load_hf(tmp_path / "x")
    assert isinstance(params["model"]["embed_tokens"]["weight"], Int8)
    assert params["model"]["norm"]["weight"].dtype == cfg.model.dtype == "bfloat16"


def test_dequantized_overflow_is_reported(int8, tmp_path, call):
    arrays = load_file(int8 / FILE)
    arrays[f"{QUERY}_scale"][3] = 1e30
    save_file(arrays, int8 / FILE)
    status, _, err = call(int8, tmp_path / "x", "--quantize", "none", "--dtype", "float16")
    assert status == 2
    assert f"{QUERY}: " in err
    assert "too large for float16" in err


def test_quantized_weights_load_over_a_mesh(qwen2, int8):
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    expected = load_hf(int8)[0]
    for path, quantize in ((int8, None), (qwen2, "int8")):
        params, _ = load_hf(path, quantize=quantize, mesh=mesh)
        assert same(params, expected)
        down = params["model"]["layers"]["0"]["mlp"]["down_proj"]["weight"]
        assert {shard.data.shape for shard in down.values.addressable_shards} == {(16, 12)}
        assert {shard.data.shape for shard in down.scales.addressable_shards} == {(16,)}
    params, _ = load_hf(int8, quantize="none", mesh=mesh)
    assert same(params, load_hf(int8, quantize="none")[0])
    down = params["model"]["layers"]["0"]["mlp"]["down_proj"]["weight"]
    assert {shard.data.shape for shard in down.addressable_shards} == {(16, 12)}


def test_damaged_directories_are_refused(int8, tmp_path):
    good = load_file(int8 / FILE)
    scale = f"{QUERY}_scale"

    def damaged(**changes) -> list[str]:
        save_file({name: x for name, x in (good | changes).items() if x is not None}, int8 / FILE)
        return problems(int8)

    advice = r"8-bit matrices need float32[16], one scale for each of their rows"
    assert damaged(**{scale: None}) == [f"{int8}: {scale} is missing: {advice}"]
    assert damaged(**{scale: good[scale][:5]}) == [f"{int8}: {scale} is F32[5]: {advice}"]
    assert damaged(**{scale: good[scale].astype(np.float16)}) == [f"{int8}: {scale} is F16[16]: {advice}"]
    (problem,) = damaged(**{QUERY: good[QUERY].astype(np.float32)})
    assert f"{scale} [16] is unexpected" in problem
    norm = "model.norm.weight"
    found = damaged(**{norm: good[norm].astype(np.int8), f"{norm}_scale": good[norm]})
    assert f"{norm}_scale is F32[16]: 8-bit matrices need" in found[0]
    save_file(good, int8 / FILE)
    save_file(good, int8 / "model.safetensors")
    assert problems(int8) == [f"{int8} has quantized weights, {FILE}, and others: remove one of the two"]


def test_non_finite_matrix_is_refused(tmp_path):
    tensors = weights(QWEN2)
    tensors[QUERY][2, 5] = np.inf
    path = write(tmp_path / "x", QWEN2, tensors)
    with pytest.raises(CheckpointError, match=f"{QUERY} is not finite"):
        load_hf(path, quantize="int8")


def test_heads_are_pooled_before_quantizing(qwen2, int8, tmp_path, call):
    assert call(qwen2, tmp_path / "pooled", "--kv-heads", 1)[0] == 0
    assert call(qwen2, tmp_path / "both", "--kv-heads", 1, "--quantize", "int8", "--check")[0] == 0
    assert same(load_hf(tmp_path / "both")[0], load_hf(tmp_path / "pooled", quantize="int8")[0])
    status, _, err = call(int8, tmp_path / "x", "--kv-heads", 1)
    assert status == 2
    assert "is quantized, and its heads cannot be pooled" in err
