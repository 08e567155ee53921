"""A family whose checkpoints store fused projections: adapters, fewer heads, int8 and meshes."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

from convert import load_adapter, load_hf, pool_kv_heads, save_adapter, save_hf
from convert.__main__ import main
from jaxgen import GenerationConfig, InputError, fuse_projections, generate
from jaxgen.core.model.causal_lm import forward
from jaxgen.core.model.layout import fused, separate
from jaxgen.errors import ConfigError
from jaxgen.training import lora
from tests.support.adapters import factors, merged, write
from tests.support.families import family_config
from tests.support.models import model_config, random_params

MODEL = family_config("phi3", vocab_size=64)
CFG = GenerationConfig(model=MODEL)
PARAMS = random_params(MODEL)
IDS = np.arange(12, dtype=np.int32)[None] + 3
TARGETS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def logits(params, model=MODEL):
    return np.asarray(forward(model, params, IDS).logits)


def bits(params):
    return {str(path): np.asarray(array).tobytes() for path, array in jax.tree_util.tree_leaves_with_path(params)}


def test_adapters_update_the_fused_matrices(tmp_path):
    updates = factors(MODEL, 2, 0, TARGETS)
    attached = load_adapter(write(tmp_path / "a", updates), PARAMS, CFG)
    expected = logits(merged(PARAMS, updates))
    assert np.abs(expected - logits(PARAMS)).max() > 0.1
    np.testing.assert_allclose(logits(attached), expected, atol=2e-4)
    save_adapter(attached, CFG, tmp_path / "saved")
    np.testing.assert_array_equal(logits(load_adapter(tmp_path / "saved", PARAMS, CFG)), logits(attached))
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in saved} == set(TARGETS)


def test_a_stack_of_adapters(tmp_path):
    folders = [write(tmp_path / str(rank), factors(MODEL, rank, rank, TARGETS[:rank])) for rank in (1, 3)]
    cfg = CFG.replace(max_new_tokens=5, adapter=[0, 1, -1])
    out = generate(load_adapter(folders, PARAMS, CFG), np.repeat(IDS, 3, axis=0), None, cfg)
    for row, params in enumerate([*(load_adapter(folder, PARAMS, CFG) for folder in folders), PARAMS]):
        alone = generate(params, IDS, None, cfg.replace(adapter=-1))
        np.testing.assert_array_equal(out.sequences[row], alone.sequences[0])


def test_adapters_of_separate_projections(tmp_path):
    """On a mesh, projections are separate; an adapter's fused updates are split."""
    folder = write(tmp_path / "a", factors(MODEL, 2, 0, TARGETS))
    attached = load_adapter(folder, separate(PARAMS, MODEL), CFG)
    np.testing.assert_allclose(logits(attached), logits(load_adapter(folder, PARAMS, CFG)), atol=1e-4)
    with pytest.raises(InputError, match="phi3 stores this projection in a fused matrix"):
        save_adapter(attached, CFG, tmp_path / "saved")


def test_updates_of_fused_params_are_saved_for_the_original_matrices(tmp_path):
    model = model_config(vocab_size=61)
    cfg, params = GenerationConfig(model=model), random_params(model)
    updates = jax.tree.map(lambda x: x + 0.1, lora.init(fuse_projections(params), 2, jax.random.key(0)))
    attached = lora.attach(fuse_projections(params), updates, 0.5)
    save_adapter(attached, cfg, tmp_path / "saved")
    np.testing.assert_allclose(
        logits(load_adapter(tmp_path / "saved", params, cfg), model), logits(attached, model), atol=1e-4
    )


def test_targets_of_training():
    assert lora.targets_of(MODEL) == ("o_proj", "down_proj", "qkv_proj", "gate_up_proj")
    assert lora.targets_of(model_config()) == lora.TARGETS[:7]
    updates = flatten_dict(lora.init(PARAMS, 2, jax.random.key(0)))
    assert {path[-2] for path in updates} == set(TARGETS)
    with pytest.raises(InputError, match="params have no q_proj: choose from down_proj, gate_up_proj, o_proj, qkv_pr"):
        lora.init(PARAMS, 2, jax.random.key(0), ("q_proj", "o_proj"))
    with pytest.raises(ConfigError, match="unknown projections 'q_proj': choose from o_proj, down_proj, qkv_proj"):
        lora.check_targets(("q_proj",), lora.targets_of(MODEL))


def test_fewer_key_value_heads(tmp_path):
    save_hf(PARAMS, CFG, tmp_path / "all")
    assert main([str(tmp_path / "all"), str(tmp_path / "one"), "--kv-heads", "1", "--check"]) == 0
    read, cfg = load_hf(tmp_path / "one")
    pooled, pooled_cfg = pool_kv_heads(PARAMS, CFG, 1)
    assert cfg.model == pooled_cfg.model
    assert bits(read) == bits(fused(pooled))
    parts = separate(PARAMS, MODEL)["model"]["layers"]["0"]["self_attn"]
    expected = np.asarray(parts["k_proj"]["weight"]).reshape(2, 8, 32).mean(axis=0)
    np.testing.assert_allclose(pooled["model"]["layers"]["0"]["self_attn"]["k_proj"]["weight"], expected, atol=1e-6)


def test_norms_of_all_keys_are_pooled():
    """If the heads of each group are equal, the model stays the same; OLMo's norm has a weight for each key."""
    model = family_config("olmo3")
    params = random_params(model)
    for layer in params["model"]["layers"].values():
        for name in ("k_proj", "v_proj", "k_norm"):
            weight = layer["self_attn"][name]["weight"]
            layer["self_attn"][name]["weight"] = np.concatenate([weight[: len(weight) // 2]] * 2)
    pooled, cfg = pool_kv_heads(params, GenerationConfig(model=model), 1)
    np.testing.assert_allclose(logits(pooled, cfg.model), logits(params, model), atol=1e-4)


def test_int8_on_disk_and_in_memory(tmp_path):
    save_hf(PARAMS, CFG, tmp_path / "a")
    quantized, cfg = load_hf(tmp_path / "a", quantize="int8")
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--quantize", "int8", "--check"]) == 0
    save_hf(quantized, cfg, tmp_path / "c")
    for folder in ("b", "c"):
        assert bits(load_hf(tmp_path / folder)[0]) == bits(quantized)
    # Scales belong to rows, so the parts have the same values.
    np.testing.assert_allclose(logits(separate(quantized, MODEL)), logits(quantized), atol=1e-5)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_meshes(tmp_path, quantize):
    save_hf(PARAMS, CFG, tmp_path / "a")
    mesh = jax.make_mesh((1, 2), ("data", "model"), devices=jax.devices()[:2])
    alone, cfg = load_hf(tmp_path / "a", quantize=quantize)
    divided, _ = load_hf(tmp_path / "a", quantize=quantize, mesh=mesh)
    layer = divided["model"]["layers"]["0"]
    assert {"q_proj", "k_proj", "v_proj"} <= layer["self_attn"].keys()
    np.testing.assert_allclose(logits(divided), logits(alone), atol=1e-4)
    save_hf(divided, cfg, tmp_path / "b")
    assert bits(load_hf(tmp_path / "b")[0]) == bits(alone)
    if quantize is None:
        folder = write(tmp_path / "adapter", factors(MODEL, 2, 0, TARGETS))
        np.testing.assert_allclose(
            logits(load_adapter(folder, divided, CFG)), logits(load_adapter(folder, PARAMS, CFG)), atol=2e-4
        )
