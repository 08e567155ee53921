"""Packed checkpoints that are not read are refused with the format, the module and what would work."""

import json

import jax
import numpy as np
import pytest

from convert import CheckpointError, load_hf
from jaxgen.core.model.grouped import Grouped
from jaxgen.errors import JaxgenWarning
from tests.convert.test_packed import AWQ, CASES, FP8, GPTQ, flat, on_host
from tests.support.packed import checkpoint, codes_of, is_linear, scheme, words

UP = "model.layers.0.mlp.up_proj"


def weights(**more) -> dict:
    return scheme(group_size=8, **more)


def groups(**more) -> dict:
    return scheme(group_size=8) | more


CONFIGS = {
    "a method": (
        {"quant_method": "hqq"},
        "quant_method 'hqq' is not read, only fp8, compressed-tensors, gptq, awq: load",
    ),
    "no method": ({"bits": 4}, "quant_method None is not read"),
    "no object": ([4], r"quantization_config must be an object, got \[4\]"),
    "gptq bits": (GPTQ | {"bits": 3}, r"\(GPTQ\): bits must be 4 or 8, got 3"),
    "gptq format": (
        GPTQ | {"checkpoint_format": "marlin"},
        "checkpoint_format must be 'gptq' or 'gptq_v2', got 'marlin'",
    ),
    "gptq marlin": (GPTQ | {"is_marlin_format": True}, "checkpoint_format must be"),
    "gptq words": (GPTQ | {"pack_dtype": "int64"}, "pack_dtype must be 'int32', got 'int64'"),
    "gptq groups": (GPTQ | {"group_size": 0}, "group_size must be a positive whole number, got 0"),
    "gptq sym": (GPTQ | {"sym": "yes"}, "sym must be true or false, got 'yes'"),
    "awq bits": (AWQ | {"bits": 3}, r"\(AWQ\): bits must be 4, got 3"),
    "awq version": (AWQ | {"version": "gemv"}, "version must be 'gemm', got 'gemv': load another file"),
    "awq backend": (AWQ | {"backend": "llm-awq"}, "version must be 'gemm', got 'llm-awq'"),
    "awq zeros": (AWQ | {"zero_point": False}, "zero_point must be true"),
    "awq pattern": (
        AWQ | {"modules_to_not_convert": ["("]},
        r"modules_to_not_convert has '\(', which is not a regular",
    ),
    "awq list": (
        AWQ | {"modules_to_not_convert": "lm_head"},
        "modules_to_not_convert must be a list of names, got 'lm_head'",
    ),
    "fp8 format": (FP8 | {"fmt": "e5m2"}, r"\(FP8\): fmt must be 'e4m3', got 'e5m2': load the original model"),
    "fp8 scales": (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt must be 'float', got 'ue8m0'"),
    "fp8 block": (
        FP8 | {"weight_block_size": [128]},
        r"weight_block_size must be null or two positive numbers, got \[128\]",
    ),
    "fp8 scheme": (FP8 | {"activation_scheme": "x"}, "activation_scheme must be 'dynamic' or 'static', got 'x'"),
    "fp8 tables": (FP8 | {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert must be null"),
    "ct groups": (groups(config_groups={}), r"\(compressed-tensors\): config_groups must be an object, got {}"),
    "ct format": (
        groups(format="nvfp4-pack-quantized"),
        "format must be one of .*, got 'nvfp4-pack-quantized': load another",
    ),
    "ct bits": (weights(num_bits=3), "config_groups: group_0: num_bits must be 4 or 8, got 3"),
    "ct type": (weights(type="complex"), "type must be 'int' or 'float', got 'complex'"),
    "ct strategy": (weights(strategy="block"), "strategy must be one of tensor, channel, group, block"),
    "ct dynamic": (weights(dynamic=True), "dynamic must be false for weights, got True"),
    "ct sparse": (groups(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config must be empty or dense"),
    "ct transform": (groups(transform_config={"config_groups": {"a": {}}}), "transform_config must be empty"),
    "ct status": (groups(quantization_status="frozen"), "quantization_status must be 'compressed', got 'frozen'"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_are_not_read_are_refused(name, tmp_path):
    description, message = CONFIGS[name]
    checkpoint(tmp_path / "x", CASES["gptq"][1], description)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_hf(tmp_path / "x")
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{tmp_path}/x/config.json: quantization_config")


def replaced(suffix, change):
    def apply(tensors):
        tensors[f"{UP}.{suffix}"] = change(tensors[f"{UP}.{suffix}"])

    return apply


def dense(tensors):
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{UP}.{suffix}"]
    tensors[f"{UP}.weight"] = np.ones((24, 16), np.float32)


def added(name, array):
    return lambda tensors: tensors.update({name: array})


def zeros_of_15(tensors):
    tensors[f"{UP}.qzeros"] = np.full_like(tensors[f"{UP}.qzeros"], -1)


MODULES = {
    "missing": ("gptq", lambda x: x.pop(f"{UP}.scales"), f"GPTQ: {UP}.scales is missing"),
    "shape": (
        "gptq",
        replaced("scales", lambda x: x[:, :-1]),
        f"GPTQ: {UP} has scales F16\\[2, 23\\], wanted .*\\[2, 24\\]",
    ),
    "groups": ("gptq", replaced("scales", lambda x: x[:1]), f"{UP} has 16 inputs and 1 groups, but group_size is 8"),
    "order": ("gptq", replaced("g_idx", np.zeros_like), "g_idx that does not assign 8 inputs to each of its 2 groups"),
    "dense": ("gptq", dense, f"GPTQ: {UP} is not packed, but quantization_config does not exclude it: correct"),
    "bias": ("gptq", added(f"{UP}.bias", np.ones(24, np.float16)), f"{UP}.bias \\[24\\] is unexpected"),
    "left over": ("gptq", added(f"{UP}.other", np.ones(24, np.float16)), f"{UP}.other \\[24\\] is unexpected"),
    "zeros": (
        "gptq",
        zeros_of_15,
        f"{UP}.weight has stored zero points of 15, which programs read in different ways: load",
    ),
    "sym": (
        "gptq-v2",
        zeros_of_15,
        "has zero points other than 8, although sym is true: set sym to false in the config",
    ),
    "twice": (
        "gptq",
        added(f"{UP}.weight", np.ones((24, 16), np.float32)),
        f"{UP} has both weight and qweight: remove",
    ),
    "awq zeros": (
        "awq",
        replaced("qzeros", lambda x: x[:1]),
        f"AWQ: {UP} has qzeros I32\\[1, 3\\], wanted I32\\[2, 3\\]",
    ),
    "ct shape": ("w4a16", replaced("weight_shape", lambda x: x + 8), f"{UP} has weight_packed I32\\[24, 2\\], wanted"),
    "ct zeros": (
        "w4a16-asymmetric",
        lambda x: x.pop(f"{UP}.weight_zero_point"),
        "has no weight_zero_point, although symm",
    ),
    "ct scale": ("w8a8", replaced("weight_scale", lambda x: x[:, 0]), f"{UP} has weight_scale BF16\\[24\\], wanted"),
    "fp8 scale": ("fp8", replaced("weight_scale_inv", lambda x: x[:1]), f"FP8: {UP} has scales BF16\\[1, 1\\], wanted"),
    "fp8 static": ("fp8", added(f"{UP}.activation_scale", np.ones(1, np.float32)), "has a static activation_scale"),
    "fp8 dtype": (
        "fp8",
        replaced("weight", lambda x: x.view(np.int8)),
        f"FP8: {UP} has a weight of I8, wanted F8_E4M3",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_do_not_fit_are_named(name, tmp_path):
    case, change, message = MODULES[name]
    description, packer, _ = CASES[case]
    checkpoint(tmp_path / "x", packer, description, change=change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_hf(tmp_path / "x")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("case", ["awq", "fp8", "w4a16"])
def test_lists_of_excluded_modules_must_agree_with_the_tensors(case, tmp_path):
    description, packer, _ = CASES[case]
    key = "ignore" if case == "w4a16" else "modules_to_not_convert"
    name = "re:.*up_proj" if case == "w4a16" else "up_proj"
    listed = description | {key: ["lm_head", name]}
    meant = checkpoint(tmp_path / "x", packer, listed, dense=("up_proj",))
    params, _ = load_hf(tmp_path / "x")
    assert np.array_equal(flat(params)[f"{UP}.weight"], meant[f"{UP}.weight"])
    assert isinstance(flat(params)["model.layers.1.mlp.up_proj.weight"], jax.Array)
    checkpoint(tmp_path / "x", packer, listed)
    with pytest.raises(CheckpointError, match=f"{UP} is packed, but quantization_config excludes it: correct"):
        load_hf(tmp_path / "x")
    checkpoint(tmp_path / "x", packer, description, dense=("up_proj",))
    with pytest.raises(
        CheckpointError, match=f"{UP} is not packed, but quantization_config does not exclude it: correct"
    ):
        load_hf(tmp_path / "x")


def test_what_is_ignored_is_named(tmp_path):
    description, packer, _ = CASES["float-row"]
    scales = {
        f"{UP}.input_scale": np.ones(1, np.float32),
        "model.layers.0.self_attn.k_scale": np.ones((), np.float32),
    }
    description = description | {"kv_cache_scheme": {"num_bits": 8}, "new_key": 3}
    checkpoint(tmp_path / "x", packer, description, change=lambda tensors: tensors.update(scales))
    with pytest.warns(JaxgenWarning) as caught:
        params, _ = load_hf(tmp_path / "x")
    (warning,) = [str(one.message) for one in caught]
    for part in (
        "scales of inputs are ignored",
        "scales of the cache are ignored",
        "quantization_config are ignored: new_key",
    ):
        assert warning.count(part) == 1
    checkpoint(tmp_path / "y", packer, CASES["float-row"][0])
    assert jax.tree.all(jax.tree.map(np.array_equal, params, load_hf(tmp_path / "y")[0]))


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(tmp_path):
    biases = {
        f"model.layers.{i}.mlp.{name}_proj.bias": np.zeros(24, np.float16) for i in (0, 1) for name in ("up", "gate")
    }
    checkpoint(tmp_path / "x", CASES["gptq"][1], GPTQ, change=lambda tensors: tensors.update(biases))
    assert not any(name.endswith("up_proj.bias") for name in flat(load_hf(tmp_path / "x")[0]))


def test_config_of_autogptq_beside_config_json(tmp_path):
    meant = checkpoint(tmp_path / "x", CASES["gptq"][1], None)
    (tmp_path / "x/quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 8, "desc_act": False}))
    params, _ = load_hf(tmp_path / "x")
    assert np.array_equal(on_host(flat(params)[f"{UP}.weight"]).to_matrix(), meant[f"{UP}.weight"])


def test_bits_may_differ_between_the_modules_of_gptq(tmp_path):
    def change(tensors):
        codes, scales, zeros, _ = codes_of(matrix, 8, 8, True, np.float16)
        tensors[f"{UP}.qweight"] = np.ascontiguousarray(words(codes, 8).T)
        tensors[f"{UP}.qzeros"] = words((zeros.T - 1).astype(np.uint8), 8)
        tensors[f"{UP}.scales"] = np.ascontiguousarray(scales.T)

    matrix = np.random.default_rng(3).normal(size=(24, 16)).astype(np.float32)
    dynamic = {r"+:.*\.up_proj": {"bits": 8}, "-:.*down": {}}
    checkpoint(tmp_path / "x", CASES["gptq"][1], GPTQ | {"dynamic": dynamic}, dense=("down",), change=change)
    weight = on_host(flat(load_hf(tmp_path / "x")[0])[f"{UP}.weight"])
    assert weight.bits == 8
    assert np.array_equal(weight.to_matrix(), codes_of(matrix, 8, 8, True, np.float16)[3])


def test_several_groups_of_modules_in_compressed_tensors(tmp_path):
    (group,) = CASES["w4a16"][0]["config_groups"].values()
    other = group | {"targets": ["re:.*down_proj$"], "weights": group["weights"] | {"symmetric": False}}
    description = CASES["w4a16"][0] | {"config_groups": {"group_0": group, "group_1": other}}
    draws = {"down": CASES["w4a16-asymmetric"][1], "": CASES["w4a16"][1]}

    def change(tensors):
        own = {name: array for name, array in stored.items() if "down" in name}
        for name in [name for name in tensors if "down" in name]:
            del tensors[name]
        tensors.update(own)

    stored = {}
    asymmetric = checkpoint(tmp_path / "x", draws["down"], CASES["w4a16-asymmetric"][0], change=stored.update)
    meant = checkpoint(tmp_path / "x", draws[""], description, change=change)
    params = flat(load_hf(tmp_path / "x")[0])
    for name in filter(is_linear, meant):
        expected = asymmetric if "down" in name else meant
        assert isinstance(params[name], Grouped)
        assert (params[name].zeros is None) == ("down" not in name)
        assert np.array_equal(on_host(params[name]).to_matrix(), expected[name])


def test_a_damaged_file_is_reported_once(tmp_path):
    checkpoint(tmp_path / "x", CASES["gptq"][1], GPTQ)
    file = tmp_path / "x/model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="truncated") as caught:
        load_hf(tmp_path / "x")
    assert len(caught.value.problems) == 1
