"""Packed checkpoints (FP8, compressed-tensors, GPTQ, AWQ) are read as the matrices that their formulas define."""

import flax.traverse_util
import jax
import ml_dtypes
import numpy as np
import pytest

from convert import load_hf
from convert.hf import load_shapes
from jaxgen import CausalLM, fuse_projections, shard_params
from jaxgen.core.model.fp8 import Fp8
from jaxgen.core.model.grouped import Grouped
from jaxgen.core.model.int8 import Int8
from jaxgen.core.model.weights import Packed
from tests.support.packed import MODEL, awq, checkpoint, floats, gptq, integers, is_linear, scheme, w4a16

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "GEMM"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 16]}
V2 = {"checkpoint_format": "gptq_v2"}
SCALE, INVERSE = "weight_scale", "weight_scale_inv"
INPUTS = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}

# The format's config, the packer, and the dtype to which the matrices are rounded first (None: none)
CASES = {
    "gptq": (GPTQ, gptq(), np.float16),
    "gptq-v2": (GPTQ | V2, gptq(version=2), np.float16),
    "gptq-act-order": (GPTQ | {"desc_act": True}, gptq(act_order=True), np.float16),
    "gptq-asymmetric": (GPTQ | {"sym": False} | V2, gptq(symmetric=False, version=2), np.float16),
    "gptq-8": (GPTQ | {"bits": 8}, gptq(8), np.float16),
    "gptq-8-asymmetric": (GPTQ | {"bits": 8, "sym": False, "desc_act": True}, gptq(8, 8, False, 1, True), np.float16),
    "gptq-row": (GPTQ | {"group_size": -1}, gptq(group=None), np.float16),
    "awq": (AWQ, awq(), np.float16),
    "w4a16": (scheme(group_size=8), w4a16(), ml_dtypes.bfloat16),
    "w4a16-asymmetric": (scheme(group_size=8, symmetric=False), w4a16(symmetric=False), ml_dtypes.bfloat16),
    "w4a16-row": (scheme(strategy="channel"), w4a16(group=None), ml_dtypes.bfloat16),
    "w4a16-act-order": (scheme(group_size=8, actorder="group"), w4a16(act_order=True), ml_dtypes.bfloat16),
    "w8a16": (scheme(bits=8, group_size=8, format="pack-quantized"), w4a16(8), ml_dtypes.bfloat16),
    "w8a8": (scheme(bits=8, strategy="channel"), integers(), ml_dtypes.bfloat16),
    "w8a8-asymmetric": (scheme(bits=8, strategy="channel", symmetric=False), integers(False), ml_dtypes.bfloat16),
    "w8-groups": (scheme(bits=8, group_size=8), integers(group=8), ml_dtypes.bfloat16),
    "float-row": (scheme("float", 8, "channel"), floats((1, 999), SCALE), ml_dtypes.bfloat16),
    "float-tensor": (scheme("float", 8, "tensor"), floats(None, SCALE, shape=(1,)), ml_dtypes.bfloat16),
    "float-block": (
        scheme("float", 8, "block", block_structure=[16, 16]),
        floats((16, 16), SCALE),
        ml_dtypes.bfloat16,
    ),
    "fp8": (FP8, floats((16, 16), INVERSE), None),
    "fp8-wide": (FP8 | {"weight_block_size": [8, 10]}, floats((8, 10), INVERSE, np.float32), None),
    "fp8-tensor": (FP8 | {"weight_block_size": None}, floats(None, INVERSE, shape=()), None),
    "auto-fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
        floats(None, SCALE, np.float32, shape=(1,)),
        None,
    ),
}


def flat(params) -> dict:
    return flax.traverse_util.flatten_dict(params, sep=".")


def on_host(weight):
    return jax.tree.map(np.asarray, weight)


def logits(params, cfg) -> np.ndarray:
    ids = np.arange(3, 11).reshape(2, 4)
    return np.asarray(CausalLM(cfg.model).apply({"params": params}, ids).logits)  # pyright: ignore


def dense(meant: dict, rounded, dtype) -> dict:
    """Return the parameters that a checkpoint means, rounded as the format's reference rounds them."""
    rounds = {name: x.astype(rounded) if rounded and is_linear(name) else x for name, x in meant.items()}
    return {name: x.astype(np.float32).astype(dtype) for name, x in rounds.items()}


@pytest.mark.parametrize("name", CASES)
def test_packed_matrices_are_those_of_the_formula(name, tmp_path):
    description, packer, rounded = CASES[name]
    meant = checkpoint(tmp_path / "x", packer, description)
    params, cfg = load_hf(tmp_path / "x")
    assert cfg.model.dtype == "float32"
    packed = {name: weight for name, weight in flat(params).items() if isinstance(weight, Packed)}
    assert set(packed) == set(filter(is_linear, meant))
    for key, weight in packed.items():
        assert isinstance(weight, Fp8 if "fp8" in name or "float" in name else Grouped)
        assert weight.dtype == np.float32
        assert np.array_equal(on_host(weight).to_matrix(), meant[key])
    shapes, _ = load_shapes(tmp_path / "x")
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: (x.shape, x.dtype) == (s.shape, s.dtype), params, shapes)))
    matrices, _ = load_hf(tmp_path / "x", quantize="none")
    for key, matrix in dense(meant, rounded, np.float32).items():
        assert np.array_equal(flat(matrices)[key], matrix), key
    for key, weight in flat(load_hf(tmp_path / "x", quantize="int8")[0]).items():
        expected = Int8.from_matrix(meant[key], np.dtype("float32")) if meant[key].ndim == 2 else meant[key]
        assert jax.tree.all(jax.tree.map(np.array_equal, on_host(weight), expected)), key


@pytest.mark.parametrize("name", ["gptq", "awq", "w4a16-asymmetric", "fp8", "float-row"])
def test_matrices_in_bfloat16_are_rounded_as_in_the_reference(name, tmp_path):
    description, packer, rounded = CASES[name]
    meant = checkpoint(tmp_path / "x", packer, description, MODEL | {"torch_dtype": "bfloat16"})
    for wanted in (None, "float16"):
        matrices, cfg = load_hf(tmp_path / "x", quantize="none", dtype=wanted)
        assert cfg.model.dtype == (wanted or "bfloat16")
        for key, matrix in dense(meant, rounded, wanted or ml_dtypes.bfloat16).items():
            assert flat(matrices)[key].dtype == matrix.dtype
            assert np.array_equal(np.asarray(flat(matrices)[key]), matrix), key
    params, cfg = load_hf(tmp_path / "x")
    assert {weight.dtype.name for weight in flat(params).values()} == {"bfloat16"}
    assert cfg.model.dtype == "bfloat16"


@pytest.mark.parametrize("name", ["gptq-asymmetric", "gptq-act-order", "awq", "w8a8", "fp8"])
def test_logits_are_those_of_the_matrices(name, tmp_path):
    description, packer, _ = CASES[name]
    checkpoint(tmp_path / "x", packer, description)
    params, cfg = load_hf(tmp_path / "x")
    matrices, _ = load_hf(tmp_path / "x", quantize="none")
    as_meant = flax.traverse_util.unflatten_dict(
        {key: on_host(w).to_matrix() if isinstance(w, Packed) else w for key, w in flat(params).items()}, sep="."
    )
    expected = logits(as_meant, cfg)
    np.testing.assert_allclose(logits(params, cfg), expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(logits(fuse_projections(params), cfg), expected, atol=1e-4, rtol=1e-4)
    assert np.abs(logits(matrices, cfg) - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["gptq-8-asymmetric", "awq", "w4a16-asymmetric", "fp8"])
def test_packed_matrices_are_divided_over_a_mesh(name, tmp_path):
    description, packer, _ = CASES[name]
    checkpoint(tmp_path / "x", packer, description)
    mesh = jax.make_mesh((1, 2), ("data", "model"), devices=jax.devices()[:2])
    params, cfg = load_hf(tmp_path / "x")
    divided, _ = load_hf(tmp_path / "x", mesh=mesh)
    sharded = shard_params(params, cfg, mesh)
    for other in (divided, sharded):
        assert jax.tree.structure(other) == jax.tree.structure(params)
        assert jax.tree.all(jax.tree.map(np.array_equal, other, params))
    assert [x.sharding for x in jax.tree.leaves(divided)] == [x.sharding for x in jax.tree.leaves(sharded)]
    layer = divided["model"]["layers"]["0"]["mlp"]
    rows = jax.tree.leaves(layer["up_proj"]["weight"])[0].addressable_shards[0].data.shape[0]
    assert rows == MODEL["intermediate_size"] // 2
    # Three groups of inputs cannot be divided by two, so down_proj is divided along its outputs.
    scales = layer["down_proj"]["weight"].scales
    rows, groups = MODEL["hidden_size"], scales.shape[-1]
    assert scales.addressable_shards[0].data.shape == ((rows // 2, groups) if groups % 2 else (rows, groups // 2))
    assert groups == (2 if name == "fp8" else 3)
