"""Adapters in PEFT's format: reading, writing and rejecting them, and comparing their results with peft's."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert import CheckpointError, load_adapter, load_hf, save_adapter, save_hf
from convert.adapter import merge_adapter
from convert.hf import open_checkpoint
from jaxgen import GenerationConfig, InputError, fuse_projections
from jaxgen.core.model.causal_lm import forward
from jaxgen.core.model.lowrank import LowRank
from jaxgen.errors import JaxgenWarning
from tests.support.adapters import factors, merged, write
from tests.support.goldens import GOLDENS
from tests.support.models import model_config, random_params, slow

PEFT = GOLDENS / "peft"
MODEL = model_config(vocab_size=61)
CFG = GenerationConfig(model=MODEL)
PARAMS = random_params(MODEL, scale=0.3)
IDS = jnp.asarray([[5, 3, 8, 13]])


ADAPTERS = sorted((path.parent.name, path.name) for path in (PEFT / "adapters").glob("*/*"))


def logits(params, model=MODEL, ids=IDS):
    return np.asarray(forward(model, params, ids).logits)


def test_all_golden_adapters_are_present():
    assert len(ADAPTERS) == 7


@pytest.mark.parametrize(("checkpoint", "adapter"), [ADAPTERS[1], *slow(ADAPTERS[0], *ADAPTERS[2:])])
def test_logits_match_peft(checkpoint, adapter, tmp_path):
    params, cfg = load_hf(PEFT / "checkpoints" / checkpoint)
    attached = load_adapter(PEFT / "adapters" / checkpoint / adapter, params, cfg)
    with np.load(PEFT / "logits" / f"{checkpoint}.{adapter}.npz") as arrays:
        cases = [(arrays[f"ids_{i}"][None], arrays[f"logits_{i}"]) for i in range(3)]
    for ids, expected in cases:
        np.testing.assert_allclose(logits(attached, cfg.model, ids)[0], expected, atol=1e-4)
    save_adapter(attached, cfg, tmp_path / "saved", base="base")
    again = load_adapter(tmp_path / "saved", params, cfg)
    for ids, expected in cases:
        np.testing.assert_allclose(logits(again, cfg.model, ids)[0], expected, atol=1e-4)


def test_bfloat16_keeps_its_dtype(tmp_path):
    model = model_config(vocab_size=61, torch_dtype="bfloat16")
    attached = load_adapter(write(tmp_path / "a", factors(MODEL, 2, 0)), random_params(model), CFG.replace(model=model))
    weight = attached["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"]
    assert isinstance(weight, LowRank)
    assert {weight.a.dtype, weight.b.dtype} == {jnp.dtype("bfloat16")}


def test_saved_adapter_has_the_format_of_peft(tmp_path):
    updates = factors(MODEL, 3, 0, ("q_proj", "down_proj"))
    attached = load_adapter(write(tmp_path / "given", updates, lora_alpha=6), PARAMS, CFG)
    save_adapter(attached, CFG, tmp_path / "out", base="some/model")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 3, "some/model")
    assert config["target_modules"] == sorted(updates)
    arrays = load_file(tmp_path / "out" / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    np.testing.assert_array_equal(arrays[f"base_model.model.{name}.lora_A.weight"], updates[name][0])
    np.testing.assert_array_equal(arrays[f"base_model.model.{name}.lora_B.weight"], 2 * updates[name][1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', but only LORA"),
        ({"use_dora": True}, "use_dora=True is not offered"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "all"}, "bias='all' trains biases"),
        ({"r": 4}, "model.layers.0.self_attn.q_proj has rank 2, and r and rank_pattern in .* give it rank 4"),
        ({"rank_pattern": {"q_proj": 3}}, "model.layers.0.self_attn.q_proj has rank 2, .* give it rank 3"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters=.* is not offered"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
        ({"init_lora_weights": "OLoRA"}, "changes the model's own weights"),
        ({"alpha_pattern": {"q_proj": "16"}}, "alpha_pattern must be an object whose values"),
        ({"alpha_pattern": {"(": 4}}, "which is not a regular expression"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number above 0"),
        ({"r": 0}, "r must be a number above 0"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
    ],
)
def test_bad_adapter_configs_are_refused(config, message, tmp_path):
    folder = write(tmp_path / "a", factors(MODEL, 2, 0), **config)
    with pytest.raises(CheckpointError, match=message):
        load_adapter(folder, PARAMS, CFG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x | {"model.layers.7.mlp.up_proj": x["model.layers.0.mlp.up_proj"]}, "has no such matrix"),
        (lambda x: x | {"model.layers.0.mlp.up_proj": x["model.layers.0.mlp.down_proj"]}, "is the adapter for another"),
        (lambda x: x | {"model.embed_tokens": x["model.layers.0.mlp.up_proj"]}, "not offered for embeddings"),
        (lambda x: x | {"model.embed_tokens_extra": x["model.layers.0.mlp.up_proj"]}, "has no such matrix"),
    ],
)
def test_mismatched_tensors_are_refused(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load_adapter(write(tmp_path / "a", change(factors(MODEL, 2, 0))), PARAMS, CFG)


def test_fields_that_are_ignored_are_named_in_one_warning(tmp_path):
    updates = factors(MODEL, 2, 0)
    added = {"fan_in_fan_out": True, "unsloth_version": "2025.3", "a_new_field": 3, "another": None}
    folder = write(tmp_path / "a", updates, **added)
    with pytest.warns(JaxgenWarning) as seen:
        attached = load_adapter(folder, PARAMS, CFG)
    assert [str(warning.message) for warning in seen] == [
        f"{folder}/adapter_config.json: fan_in_fan_out=True is ignored, as in PEFT: no matrix of this model is stored "
        "transposed; unknown fields are ignored, as in PEFT: a_new_field, unsloth_version"
    ]
    plain = load_adapter(write(tmp_path / "b", updates), PARAMS, CFG)
    np.testing.assert_array_equal(logits(attached), logits(plain))


def test_adapter_of_a_base_model_is_loaded(tmp_path):
    updates = factors(MODEL, 2, 0)
    plain = load_adapter(write(tmp_path / "a", updates), PARAMS, CFG)
    base = {name.removeprefix("model."): pair for name, pair in updates.items()}
    patterns = {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "bias": None}
    folder = write(tmp_path / "b", base, **patterns)
    add(folder, {"embed_tokens.weight": np.asarray(PARAMS["model"]["embed_tokens"]["weight"])})
    np.testing.assert_array_equal(logits(load_adapter(folder, PARAMS, CFG)), logits(plain))
    both = write(tmp_path / "c", base | dict(list(updates.items())[:1]))
    with pytest.raises(CheckpointError, match=r"layers\.\d.* has an update, and the model has no such matrix"):
        load_adapter(both, PARAMS, CFG)


def add(folder, tensors):
    """Add tensors to an adapter's file; their names lack PEFT's prefix."""
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{name}": array for name, array in tensors.items()}, file)
    return folder


def test_saved_embedding_must_equal_the_models(tmp_path):
    updates = factors(MODEL, 2, 0)
    embedding, head = map(np.asarray, (PARAMS["model"]["embed_tokens"]["weight"], PARAMS["lm_head"]["weight"]))
    expected = logits(load_adapter(write(tmp_path / "a", updates), PARAMS, CFG))
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    folder = add(write(tmp_path / "b", updates), both)
    np.testing.assert_array_equal(logits(load_adapter(folder, PARAMS, CFG)), expected)
    layer = {"lm_head.base_layer.weight": head.astype(np.float16)}  # as PEFT saves targeted ones
    load_adapter(add(write(tmp_path / "c", updates), layer), PARAMS, CFG)
    different = {name: np.concatenate([array[:-1], array[:1]]) for name, array in both.items()}
    with pytest.raises(CheckpointError) as caught:
        load_adapter(add(folder, different), PARAMS, CFG)
    assert len(caught.value.problems) == 2
    assert all("differs from the model's, and cannot replace it" in problem for problem in caught.value.problems)
    longer = {"model.embed_tokens.weight": np.concatenate([embedding, embedding[:1]])}
    with pytest.raises(CheckpointError, match=r"has shape \[62, 32\], and the model's has \[61, 32\]"):
        load_adapter(add(write(tmp_path / "d", updates), longer), PARAMS, CFG)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is not a matrix of a low-rank update"):
        load_adapter(add(folder, {"model.norm.weight": np.ones(32, np.float32)}), PARAMS, CFG)


def test_a_saved_embedding_in_files_and_with_8_bits(tmp_path):
    save_hf(PARAMS, CFG, tmp_path / "model")
    saved = {"model.embed_tokens.weight": np.asarray(PARAMS["model"]["embed_tokens"]["weight"])}
    folder = add(write(tmp_path / "a", factors(MODEL, 2, 0)), saved)
    checkpoint = merge_adapter(open_checkpoint(tmp_path / "model"), folder)
    assert checkpoint.read("lm_head.weight", None).shape == (61, 32)
    params, cfg = load_hf(tmp_path / "model", quantize="int8")
    with pytest.raises(CheckpointError, match="cannot be compared with the model's, which is quantized"):
        load_adapter(folder, params, cfg)


def test_other_files_next_to_an_adapter_are_ignored(tmp_path):
    folder = write(tmp_path / "a", factors(MODEL, 2, 0))
    save_hf(PARAMS, CFG, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(folder / "model.safetensors")
    load_adapter(folder, PARAMS, CFG)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a: no adapter_model\.safetensors: download the weights too$"):
        load_adapter(folder, PARAMS, CFG)
    (folder / "adapter_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin contains pickled .* with PEFT, AutoPeftModel"):
        load_adapter(folder, PARAMS, CFG)


def test_all_problems_of_all_adapters_are_reported(tmp_path):
    folders = [write(tmp_path / "0", factors(MODEL, 2, 0), use_dora=True), tmp_path / "missing"]
    (tmp_path / "missing").mkdir()
    with pytest.raises(CheckpointError) as caught:
        load_adapter(folders, PARAMS, CFG)
    first, second = caught.value.problems
    assert "use_dora=True is not offered" in first
    assert "adapter_config.json is missing" in second


def test_a_tied_head_is_refused(tmp_path):
    model = model_config(vocab_size=61, tie_word_embeddings=True)
    updates = factors(MODEL, 2, 0, ("lm_head",))
    with pytest.raises(CheckpointError, match="this model's head is its embedding"):
        load_adapter(write(tmp_path / "a", updates), random_params(model), CFG.replace(model=model))


def test_adapters_are_refused_for_fused_or_adapted_params(tmp_path):
    folder = write(tmp_path / "a", factors(MODEL, 2, 0))
    with pytest.raises(InputError, match="fused projections"):
        load_adapter(folder, fuse_projections(PARAMS), CFG)
    attached = load_adapter(folder, PARAMS, CFG)
    with pytest.raises(InputError, match="have an adapter already"):
        load_adapter(folder, attached, CFG)
    with pytest.raises(InputError, match="at least one"):
        load_adapter([], PARAMS, CFG)
    with pytest.raises(InputError, match="have no adapter"):
        save_adapter(PARAMS, CFG, tmp_path / "out")
    with pytest.raises(InputError, match="have several adapters"):
        save_adapter(load_adapter([folder], PARAMS, CFG), CFG, tmp_path / "out")
    with pytest.raises(CheckpointError, match="low-rank updates are attached"):
        save_hf(attached, CFG, tmp_path / "out")


def test_adapter_is_loaded_onto_8_bit_weights(tmp_path):
    save_hf(PARAMS, CFG, tmp_path / "model")
    updates = factors(MODEL, 2, 0)
    params, cfg = load_hf(tmp_path / "model", quantize="int8")
    attached = load_adapter(write(tmp_path / "a", updates), params, cfg)
    rounded, _ = load_hf(tmp_path / "model", quantize="int8")
    save_hf(rounded, cfg, tmp_path / "int8")
    plain, _ = load_hf(tmp_path / "int8", quantize="none", dtype="float32")
    np.testing.assert_allclose(logits(attached), logits(merged(plain, updates)), atol=2e-3)
