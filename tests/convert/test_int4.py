"""Matrices are rounded to 4 bits, and saved in the format compressed-tensors."""

import json

import flax.traverse_util
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert import CheckpointError, load_hf, save_hf
from convert.__main__ import main
from jaxgen import fuse_projections
from jaxgen.core.model.grouped import Grouped
from jaxgen.core.model.int4 import GROUPS_OF_32, GROUPS_OF_128
from jaxgen.errors import ConfigError, InputError
from tests.convert.test_packed import GPTQ
from tests.support.checkpoints import QWEN2, weights, write
from tests.support.packed import checkpoint, gptq, is_linear, words

CONFIG = QWEN2 | {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
GROUPS = {"int4": 32, "int4-128": 128}


def flat(params) -> dict:
    return flax.traverse_util.flatten_dict(params, sep=".")


def same(left, right) -> bool:
    return jax.tree.structure(left) == jax.tree.structure(right) and jax.tree.all(
        jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), left, right)
    )


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source", CONFIG, weights(CONFIG))


def test_rounding_is_close_and_reaches_the_largest_number_of_a_group():
    matrix = np.random.default_rng(0).normal(size=(50, 256)).astype(np.float32)
    matrix[3], matrix[4, :32] = 0, np.linspace(0, 1e-30, 32)
    errors = []
    for kind in (GROUPS_OF_32, GROUPS_OF_128):
        weight = kind.from_matrix(matrix, np.dtype("float32"))
        assert weight.scales.shape == (50, 256 // kind.group)
        steps = np.repeat(np.abs(weight.scales.astype(np.float32)), kind.group, axis=1)
        assert (
            np.abs(weight.to_matrix() - matrix) <= 2.02 * steps
        ).all()  # only if a group has large entries of both signs
        assert not weight.to_matrix()[3].any()
        errors.append(np.square(weight.to_matrix() - matrix).mean())
    # Rounding to -7..7 with a scale of the largest absolute value / 7 has errors of 0.0094 and 0.0138.
    assert errors[0] < 0.0075
    assert errors[1] < 0.0102
    matrix[7, 9] = np.nan
    with pytest.raises(InputError, match="is not finite"):
        GROUPS_OF_32.from_matrix(matrix, np.dtype("float32"))
    with pytest.raises(InputError, match="has 96 columns, which groups of 128 do not divide: choose quantize='int4'"):
        GROUPS_OF_128.from_matrix(np.zeros((2, 96), np.float32), np.dtype("float32"))
    with pytest.raises(InputError, match="choose quantize='int8'"):
        GROUPS_OF_32.from_matrix(np.zeros((2, 40), np.float32), np.dtype("float32"))


@pytest.mark.parametrize("quantize", GROUPS)
def test_matrices_of_layers_are_rounded_saved_and_loaded(source, tmp_path, quantize):
    params, cfg = load_hf(source, quantize=quantize)
    kind = GROUPS_OF_32 if quantize == "int4" else GROUPS_OF_128
    for name, matrix in weights(CONFIG).items():
        assert isinstance(flat(params)[name], Grouped) == is_linear(name)
        expected = kind.from_matrix(matrix, np.dtype("float32")) if is_linear(name) else matrix
        assert same(jax.tree.map(np.asarray, flat(params)[name]), expected)
    save_hf(fuse_projections(params), cfg, tmp_path / "saved")
    read, read_cfg = load_hf(tmp_path / "saved")
    assert same(read, params)
    assert read_cfg.model == cfg.model
    assert same(load_hf(tmp_path / "saved", quantize=quantize)[0], params)
    assert main([str(source), str(tmp_path / "command"), "--quantize", quantize, "--check"]) == 0
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("saved", "command")]
    assert files[0].keys() == files[1].keys()
    assert all(np.array_equal(files[0][name], files[1][name]) for name in files[0])
    assert main([str(tmp_path / "saved"), str(tmp_path / "again"), "--check"]) == 0
    assert same(load_hf(tmp_path / "again")[0], params)
    described = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("saved", "command", "again")]
    for config in described:
        description = config["quantization_config"]
        assert description["ignore"] == ["lm_head"]
        assert description["config_groups"]["group_0"]["weights"]["group_size"] == GROUPS[quantize]
        assert description["format"] == "pack-quantized"
    for name in ("none", "int8"):
        assert main([str(tmp_path / "saved"), str(tmp_path / name), "--quantize", name, "--check"]) == 0
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())
        assert same(load_hf(tmp_path / name)[0], load_hf(tmp_path / "saved", quantize=name)[0])


def test_codes_in_files_are_in_the_format_of_compressed_tensors(source, tmp_path):
    save_hf(*load_hf(source, quantize="int4"), tmp_path / "saved")
    stored, name = load_file(tmp_path / "saved/model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    matrix = weights(CONFIG)[name]
    meant = GROUPS_OF_32.from_matrix(matrix, np.dtype("float32"))
    scales = np.repeat(stored[f"{name}_scale"].astype(np.float32), 32, axis=1)
    codes = np.rint(meant.to_matrix() / scales).astype(int) + 8
    assert np.array_equal(stored[f"{name}_packed"], words(codes, 4))
    assert stored[f"{name}_shape"].tolist() == list(matrix.shape)
    assert stored[f"{name}_packed"].dtype == np.int32
    assert name not in stored


def test_a_model_of_gptq_is_saved_if_it_has_no_order_and_no_zero_points(tmp_path):
    checkpoint(tmp_path / "x", gptq(), GPTQ)
    params, cfg = load_hf(tmp_path / "x")
    save_hf(params, cfg, tmp_path / "saved")
    assert same(load_hf(tmp_path / "saved")[0], params)
    checkpoint(tmp_path / "order", gptq(act_order=True), GPTQ)
    with pytest.raises(CheckpointError, match="weight is a packed matrix in a form that is not written: load"):
        save_hf(*load_hf(tmp_path / "order"), tmp_path / "again")
    assert main([str(tmp_path / "order"), str(tmp_path / "again")]) != 0
    assert not (tmp_path / "again").exists()


def test_unsupported_uses_are_refused(source, tmp_path):
    narrow = write(tmp_path / "narrow", QWEN2, weights(QWEN2))
    with pytest.raises(CheckpointError, match=r"down_proj.weight has 24 columns, which groups of 32 do not divide"):
        load_hf(narrow, quantize="int4")
    with pytest.raises(ConfigError, match="quantize must be 'int8', 'int4', 'int4-128', 'none', None or a class"):
        load_hf(narrow, quantize="int5")
    params, cfg = load_hf(source, quantize="int4")
    params["model"]["embed_tokens"]["weight"] = params["model"]["layers"]["0"]["self_attn"]["k_proj"]["weight"]
    with pytest.raises(CheckpointError):
        save_hf(params, cfg, tmp_path / "embedding")
