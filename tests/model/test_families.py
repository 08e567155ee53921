"""Each property of a family's record matters: with another value, the logits differ from transformers'."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_hf, save_hf
from jaxgen import GenerationConfig, ModelConfig, RopeConfig, generate
from jaxgen.core.model import layout
from jaxgen.core.model.causal_lm import forward, param_shapes
from jaxgen.core.model.config import LayerSpec
from jaxgen.core.model.config_fields import positive
from jaxgen.core.model.families import ALTERNATING, FAMILIES, Family, NormRule
from jaxgen.core.model.rope_config import by_window
from tests.support.goldens import GOLDENS, load
from tests.support.models import generated, left_pad, random_params, slow


def golden(name):
    with np.load(GOLDENS / "newer" / "logits" / f"{name}.npz") as arrays:
        return arrays["ids_1"], arrays["logits_1"]


def difference(monkeypatch, name, change, dtype="float32"):
    """Return the largest difference of logits from the golden's, divided by the largest logit, after a change.

    `change` is applied to the model's config; the changed family is registered under a new name, as if from outside.
    """
    params, cfg = load(GOLDENS / "newer" / "checkpoints" / name)
    ids, expected = golden(name)
    model = cfg.model if dtype == "float32" else dataclasses.replace(cfg.model, dtype=dtype)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    if dtype != "float32":
        expected = np.asarray(forward(model, params, jnp.asarray(ids)[None]).logits[0])
    logits = forward(change(monkeypatch, model), params, jnp.asarray(ids)[None]).logits[0]
    largest = np.abs(np.asarray(logits) - expected).max() / np.abs(expected).max()
    return np.nan_to_num(largest, nan=np.inf)


def replaced(**fields):
    return lambda monkeypatch, model: dataclasses.replace(model, **fields)


def family(**fields):
    """Return a change of the family's record. `norms` replaces fields of the norm rule."""

    def change(monkeypatch, model):
        record = FAMILIES[model.model_type]
        own = dict(fields)
        if isinstance(norms := own.get("norms"), dict):
            own["norms"] = dataclasses.replace(record.norms, **norms)
        monkeypatch.setitem(FAMILIES, "changed", dataclasses.replace(record, **own))
        return dataclasses.replace(model, model_type="changed")

    return change


def layers(change):
    def changed(monkeypatch, model):
        return dataclasses.replace(model, layers=tuple(map(change, model.layers)))

    return changed


def ropes(change):
    """Return a change of each layer's RoPE; `change` maps a layer to its RoPE."""
    return layers(lambda layer: LayerSpec(layer.window, change(layer)))


def scaled(**fields):
    return ropes(lambda layer: layer.rope and dataclasses.replace(layer.rope, **fields))


WITHOUT_WINDOWS = layers(lambda layer: LayerSpec(None, layer.rope))
WIDER_WINDOWS = layers(lambda layer: LayerSpec(layer.window and layer.window + 1, layer.rope))
LOCAL, GLOBAL = RopeConfig("default", 50.0), RopeConfig("linear", 1e3, factor=8.0)
OLMO, YARN = RopeConfig("default", 100.0), RopeConfig("yarn", 100.0, 4.0, 32)

CHANGES = {
    "gemma": {
        "embedding": family(scales_embedding=False),
        "unit offset": family(norms={"unit_offset": False}),
        "activation": replaced(hidden_act="silu"),
        "exact activation": replaced(hidden_act="gelu"),
        "no RoPE": ropes(lambda layer: None),
    },
    "gemma2": {
        "embedding": family(scales_embedding=False),
        "unit offset": family(norms={"unit_offset": False}),
        "norms after": family(norms={"after": False}),
        "norms before": family(norms={"before": False}),
        "activation": replaced(hidden_act="silu"),
        "exact activation": replaced(hidden_act="gelu"),
        "attention scale": replaced(query_pre_attn_scalar=8.0),
        "cap of scores": replaced(attn_logit_softcapping=None),
        "cap of logits": replaced(final_logit_softcapping=None),
        "windows": WITHOUT_WINDOWS,
        "size of windows": WIDER_WINDOWS,
        "other layers": layers(lambda layer: LayerSpec(None if layer.window else 4, layer.rope)),
    },
    "gemma3": {
        "embedding": family(scales_embedding=False),
        "unit offset": family(norms={"unit_offset": False}),
        "norms after": family(norms={"after": False}),
        "norms of queries and keys": family(norms={"queries_keys": None}),
        "exact activation": replaced(hidden_act="gelu"),
        "attention scale": replaced(query_pre_attn_scalar=8.0),
        "cap of logits": replaced(final_logit_softcapping=None),
        "windows": WITHOUT_WINDOWS,
        "size of windows": WIDER_WINDOWS,
        "one RoPE": ropes(lambda layer: GLOBAL),
        "the other RoPE": ropes(lambda layer: LOCAL),
        "no scaling": ropes(lambda layer: LOCAL if layer.window else RopeConfig("default", 1e3)),
        "scaling of both": ropes(lambda layer: RopeConfig("linear", 50.0, factor=8.0) if layer.window else GLOBAL),
    },
    "phi3-window": {
        "windows": WITHOUT_WINDOWS,
        "size of windows": WIDER_WINDOWS,
        "base": scaled(theta=1e4),
        "no RoPE": ropes(lambda layer: None),
    },
    "phi3-longrope-short": {
        "short factors": scaled(short_factor=(1.0, 1.0)),
        "long factors": scaled(original_max_position_embeddings=4),
        "attention factor": scaled(attention_factor=1.0),
        "whole heads": scaled(partial_rotary_factor=None, short_factor=(1.0, 1.5, 2.0, 3.0), long_factor=(1.0,) * 4),
        "not scaled": scaled(type="default"),
    },
    "phi3-longrope-long": {
        "long factors": scaled(long_factor=(1.0, 1.0)),
        "short factors": scaled(original_max_position_embeddings=64),
        "attention factor": scaled(attention_factor=1.0),
        "whole heads": scaled(partial_rotary_factor=None, long_factor=(2.0, 3.0, 4.0, 5.0), short_factor=(1.0,) * 4),
    },
    "granite": {
        "attention scale": replaced(attention_multiplier=8**-0.5),
        "neutral attention scale": replaced(attention_multiplier=1.0),
        "embedding": replaced(embedding_multiplier=1.0),
        "residual": replaced(residual_multiplier=1.0),
        "logits": replaced(logits_scaling=1.0),
    },
    "smollm3": {
        "RoPE in all layers": ropes(lambda layer: RopeConfig("default", 100.0)),
        "no RoPE": ropes(lambda layer: None),
        "RoPE in other layers": ropes(lambda layer: None if layer.rope else RopeConfig("default", 100.0)),
        "windows": WITHOUT_WINDOWS,
        "size of windows": WIDER_WINDOWS,
    },
    "olmo2": {
        "norms after": family(norms={"after": False}),
        "norms of queries and keys": family(norms={"queries_keys": None}),
        "no RoPE": ropes(lambda layer: None),
    },
    "olmo3": {
        "norms after": family(norms={"after": False}),
        "norms of queries and keys": family(norms={"queries_keys": None}),
        "windows": WITHOUT_WINDOWS,
        "size of windows": WIDER_WINDOWS,
        "one RoPE": ropes(lambda layer: YARN),
        "the other RoPE": ropes(lambda layer: OLMO),
        "attention factor": ropes(
            lambda layer: layer.rope if layer.window else dataclasses.replace(layer.rope, attention_factor=1.0)
        ),
    },
}

CASES = [(name, change) for name, changes in CHANGES.items() for change in changes]
IN_DEFAULT_RUN = [("gemma2", "cap of scores"), ("gemma3", "the other RoPE"), ("granite", "logits")]


@pytest.mark.parametrize(
    ("name", "change"), [*IN_DEFAULT_RUN, *slow(*(case for case in CASES if case not in IN_DEFAULT_RUN))]
)
def test_each_property_changes_the_logits(monkeypatch, name, change):
    assert difference(monkeypatch, name, CHANGES[name][change]) > 1e-4  # the tolerance of the parity tests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("olmo2", family(rotates_in_float32=False)),
        ("olmo3", family(rotates_in_float32=False)),
        ("olmo2", family(norms={"rounds_last": False})),
        ("olmo3", family(norms={"rounds_last": False})),
        ("gemma", family(norms={"rounds_last": False})),
        ("gemma2", family(norms={"rounds_last": False})),
        ("gemma3", family(norms={"rounds_last": False})),
        ("granite", family(norms={"rounds_last": True})),
    ],
)
def test_the_order_of_rounding_changes_logits_in_bfloat16(monkeypatch, name, change):
    assert difference(monkeypatch, name, lambda monkeypatch, model: model, "bfloat16") == 0
    assert difference(monkeypatch, name, change, "bfloat16") > 1e-4


@pytest.mark.parametrize(
    ("fused", "first", "second"), [("gate_up_proj", "gate_proj", "up_proj"), ("qkv_proj", "k_proj", "v_proj")]
)
def test_the_order_of_fused_projections_matters(fused, first, second):
    params, cfg = load(GOLDENS / "newer" / "checkpoints" / "phi3-window")
    ids, expected = golden("phi3-window")
    apart = layout.separate(params, cfg.model)
    swapped = swap(apart, first, second)
    for tree, equal in ((apart, True), (layout.fused(apart), True), (layout.fused(swapped), False)):
        logits = np.asarray(forward(cfg.model, tree, jnp.asarray(ids)[None]).logits[0])
        assert (np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()) == equal
    assert fused in params["model"]["layers"]["0"]["mlp" if fused == "gate_up_proj" else "self_attn"]


def swap(node, first, second):
    if not isinstance(node, dict):
        return node
    result = {name: swap(child, first, second) for name, child in node.items()}
    if first in node:
        result |= {first: node[second], second: node[first]}
    return result


# All that a new family needs: one record
SEVENTH = Family(
    "SeventhForCausalLM",
    "PreTrainedTokenizerFast",
    ALTERNATING,
    {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "act_fn": "relu"}
    | {"residual_multiplier": 0.5, "local_theta": 50.0, "sliding_window": 4},
    ropes=by_window("local_theta"),
    norms=NormRule(after=True, queries_keys="projection", unit_offset=True),
    fields={"final_logit_softcapping": positive(None), "residual_multiplier": positive()},
    activation="act_fn",
    attention_bias="attention_bias",
    fused=True,
    scales_embedding=True,
)


def test_a_family_is_one_record(monkeypatch, tmp_path):
    monkeypatch.setitem(FAMILIES, "seventh", SEVENTH)
    sizes = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True}
    model = ModelConfig.from_hf({"model_type": "seventh", **sizes, "final_logit_softcapping": 2.0, "rope_theta": 1e3})
    assert model.windows == (4, None, 4)
    assert [rope.theta for rope in model.ropes] == [50.0, 1e3]
    assert (model.hidden_act, model.residual_multiplier, model.attention_bias) == ("relu", 0.5, True)
    layer = {name.split(".", 3)[3] for name in param_shapes(model) if name.startswith("model.layers.0.")}
    norms = "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm"
    weights = f"{norms} self_attn.q_norm self_attn.k_norm self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj"
    assert layer == {f"{name}.weight" for name in f"{weights} mlp.down_proj".split()} | {"self_attn.qkv_proj.bias"}

    params, cfg = random_params(model), GenerationConfig(model=model, max_new_tokens=6, pad_token_id=0)
    save_hf(params, cfg, tmp_path / "x")
    params, cfg = load_hf(tmp_path / "x")
    assert cfg.model == model
    prompts = [[5, 6, 7, 8, 9, 10, 11], [30, 31]]
    ids, mask = left_pad(prompts)
    out = generate(params, ids, None, cfg, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        tokens = prompt + generated(out, row)
        logits = forward(model, params, jnp.asarray([tokens])).logits[0]
        assert np.argmax(logits, axis=-1)[len(prompt) - 1 : -1].tolist() == generated(out, row)
