import jax
import numpy as np
import pytest

from convert import load_adapter, load_hf, pool_kv_heads, save_hf
from jaxgen import GenerationConfig, InputError, fuse_projections, generate, score, shard_params
from jaxgen.core.model.layout import separate
from jaxgen.training import lora
from tests.support.adapters import factors, write as write_adapter
from tests.support.checkpoints import LLAMA, QWEN2, QWEN3, weights, write
from tests.support.models import model_config, random_params, slow

MODEL = model_config(mlp_bias=True, model_type="llama", attention_bias=True)
IDS = np.arange(1, 13).reshape(2, 6)


def equal(left, right) -> bool:
    return jax.tree.structure(left) == jax.tree.structure(right) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


@pytest.mark.slow
def test_fusing_does_not_change_results():
    params = random_params(MODEL)
    fused = fuse_projections(params)
    assert set(fused["model"]["layers"]["1"]["self_attn"]) == {"qkv_proj", "o_proj"}
    assert set(fused["model"]["layers"]["1"]["mlp"]) == {"gate_up_proj", "down_proj"}
    assert set(params["model"]["layers"]["1"]["mlp"]) == {"gate_proj", "up_proj", "down_proj"}
    cfg = GenerationConfig(model=MODEL, max_new_tokens=8, output_logits=True)
    one, other = (generate(tree, IDS, None, cfg) for tree in (params, fused))
    np.testing.assert_array_equal(one.sequences, other.sequences)
    rounding = 1e-5 * np.abs(one.logits).max()  # wider products sum in a different order
    np.testing.assert_allclose(one.logits, other.logits, atol=rounding)
    np.testing.assert_allclose(score(params, IDS, cfg).logprobs, score(fused, IDS, cfg).logprobs, atol=rounding)


@pytest.mark.parametrize(
    ("config", "quantize"), slow((QWEN2, "int8"), (QWEN2, None), (LLAMA, None), (LLAMA, "int8"), (QWEN3, None))
)
def test_fused_model_is_saved_unfused(tmp_path, config, quantize):
    params, cfg = load_hf(write(tmp_path / "a", config, weights(config)), quantize=quantize)
    save_hf(fuse_projections(params), cfg, tmp_path / "b")
    assert equal(load_hf(tmp_path / "b")[0], params)
    cfg = cfg.replace(max_new_tokens=3, eos_token_id=None)
    one, other = (generate(tree, IDS, None, cfg) for tree in (params, fuse_projections(params)))
    np.testing.assert_array_equal(one.sequences, other.sequences)


def test_donated_arrays_are_deleted():
    params = random_params(MODEL)
    query = params["model"]["layers"]["0"]["self_attn"]["q_proj"]["weight"]
    output = params["model"]["layers"]["0"]["self_attn"]["o_proj"]["weight"]
    fused = fuse_projections(params, donate=True)
    assert query.is_deleted()
    assert not output.is_deleted()
    assert equal(fused, fuse_projections(random_params(MODEL)))
    assert equal(fuse_projections(fused), fused)


@pytest.mark.slow
def test_projections_with_low_rank_updates_are_not_fused():
    params = random_params(MODEL)
    updates = lora.init(params, 2, jax.random.key(0), targets=("q_proj",))
    fused = fuse_projections(lora.attach(params, updates, 1.0))
    assert set(fused["model"]["layers"]["0"]["self_attn"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert set(fused["model"]["layers"]["0"]["mlp"]) == {"gate_up_proj", "down_proj"}
    generate(fused, IDS, None, GenerationConfig(model=MODEL, max_new_tokens=2))


@pytest.mark.slow
def test_adapters_are_fused(tmp_path):
    params, cfg = random_params(MODEL), GenerationConfig(model=MODEL, max_new_tokens=8, adapter=[1, -1, 0])
    updates = [factors(MODEL, 3, seed) for seed in range(2)]
    attached = load_adapter([write_adapter(tmp_path / str(i), own) for i, own in enumerate(updates)], params, cfg)
    fused = fuse_projections(attached)
    assert set(fused["model"]["layers"]["0"]["self_attn"]) == {"qkv_proj", "o_proj"}
    ids = np.tile(IDS[:1], (3, 1))
    one, other = (generate(tree, ids, None, cfg) for tree in (attached, fused))
    np.testing.assert_array_equal(one.sequences, other.sequences)
    assert equal(separate(fused, MODEL), attached)
    few = load_adapter([write_adapter(tmp_path / "few", factors(MODEL, 3, 0, ("q_proj", "v_proj")))], params, cfg)
    assert set(fuse_projections(few)["model"]["layers"]["0"]["self_attn"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_unsupported_uses_of_fused_projections_are_refused(tmp_path):
    params = random_params(MODEL)
    fused = fuse_projections(params)
    mesh = jax.make_mesh((2, 1), ("data", "model"), devices=jax.devices()[:2])
    with pytest.raises(InputError, match="params are divided over a mesh, and fused projections are for one device"):
        fuse_projections(shard_params(params, MODEL, mesh))
    with pytest.raises(InputError, match="params have fused projections"):
        shard_params(fused, MODEL, mesh)
    with pytest.raises(
        InputError, match="params have no q_proj: choose from down_proj, gate_up_proj, o_proj, qkv_proj"
    ):
        lora.init(fused, 2, jax.random.key(0), ("q_proj",))
    cfg = GenerationConfig(model=MODEL)
    assert equal(pool_kv_heads(fused, cfg, 1)[0], pool_kv_heads(params, cfg, 1)[0])


def test_mismatched_fused_tree_is_refused():
    fused = fuse_projections(random_params(MODEL))
    layer = fused["model"]["layers"]["0"]["self_attn"]
    layer["qkv_proj"]["weight"] = layer["qkv_proj"]["weight"][1:]
    with pytest.raises(InputError, match=r"qkv_proj.weight has shape \[63, 32\], wanted \[64, 32\]"):
        generate(fused, IDS, None, GenerationConfig(model=MODEL, max_new_tokens=2))
    del layer["qkv_proj"]["weight"]
    with pytest.raises(InputError, match=r"q_proj.weight is missing"):
        generate(fused, IDS, None, GenerationConfig(model=MODEL, max_new_tokens=2))
