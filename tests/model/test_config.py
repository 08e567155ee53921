import dataclasses
import json
import re

import numpy as np
import pytest

from jaxgen import ConfigError, ModelConfig, RopeConfig
from jaxgen.core.model import config_keys
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.model.config import LayerSpec
from jaxgen.core.model.families import FAMILIES
from jaxgen.core.model.rope import inverse_frequencies
from jaxgen.errors import JaxgenWarning
from tests.support.goldens import GOLDENS
from tests.support.models import CONFIG

LLAMA = {**CONFIG, "model_type": "llama"}
QWEN3 = {**CONFIG, "model_type": "qwen3", "head_dim": 12}
MISTRAL = {**CONFIG, "model_type": "mistral", "sliding_window": 7}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_reads_a_qwen2_config():
    cfg = ModelConfig.from_hf({**CONFIG, "torch_dtype": "bfloat16", "max_window_layers": 1, "sliding_window": 64})
    assert cfg.head_dim == 8
    assert cfg.attention_bias
    assert not cfg.output_bias
    assert cfg.windows == (None, None)
    assert cfg.dtype == "bfloat16"
    assert cfg.layers == (LayerSpec(None, RopeConfig("default", 10000.0)),) * 2
    assert hash(cfg) == hash(ModelConfig.from_hf({**CONFIG, "torch_dtype": "bfloat16"}))


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("key", SIZES)
def test_missing_size_is_refused(key):
    with pytest.raises(ConfigError, match=f"missing: {key}$"):
        ModelConfig.from_hf(without(CONFIG, key))


# The defaults of transformers' classes, which are the same in releases 4.28 to 5.24.
@pytest.mark.parametrize(
    ("model_type", "heads", "length", "head_dim", "windows"),
    [
        ("llama", 64, 2048, 1, (None, None)),
        ("qwen2", 32, 32768, 1, (None, None)),
        ("qwen3", 32, 32768, 128, (None, None)),
        ("mistral", 8, 131072, 1, (4096, 4096)),
    ],
)
def test_a_missing_key_has_the_default_of_its_class(model_type, heads, length, head_dim, windows):
    sizes = {key: CONFIG[key] for key in SIZES} | {"num_attention_heads": 64, "hidden_size": 128}
    cfg = ModelConfig.from_hf({"model_type": model_type, **sizes})
    assert (cfg.num_key_value_heads, cfg.max_position_embeddings, cfg.windows) == (heads, length, windows)
    assert cfg.head_dim == (head_dim if model_type == "qwen3" else 2)
    assert (cfg.hidden_act, cfg.rms_norm_eps, cfg.tie_word_embeddings) == ("silu", 1e-6, False)
    assert cfg.ropes == (RopeConfig("default", 10000.0),)
    assert (cfg.attention_bias, cfg.mlp_bias) == (model_type == "qwen2", False)


def test_null_is_not_replaced_by_the_class_default():
    assert ModelConfig.from_hf(MISTRAL | {"sliding_window": None}).windows == (None, None)
    for config in (CONFIG, LLAMA, QWEN3, MISTRAL):
        assert ModelConfig.from_hf(config | {"num_key_value_heads": None}).num_key_value_heads == 4
        for key in ("hidden_act", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "rope_theta"):
            with pytest.raises(ConfigError, match=f"missing: {key}"):
                ModelConfig.from_hf(config | {key: None})


def test_enabled_windows_have_the_class_defaults():
    cfg = ModelConfig.from_hf(CONFIG | {"use_sliding_window": True, "num_hidden_layers": 30})
    assert cfg.windows == (None,) * 28 + (4096,) * 2
    with pytest.raises(ConfigError, match="use_sliding_window is true, but missing: max_window_layers"):
        ModelConfig.from_hf(CONFIG | {"use_sliding_window": True, "max_window_layers": None})


def test_all_errors_are_reported_at_once():
    with pytest.raises(ConfigError, match=r"missing: vocab_size; rms_norm_eps must .*rope_theta must be > 1"):
        ModelConfig.from_hf(without(CONFIG, "vocab_size") | {"rms_norm_eps": 0, "rope_theta": 1.0})


def read_with_warning(config):
    """Return the model, and the text of the only warning."""
    with pytest.warns(JaxgenWarning) as seen:
        cfg = ModelConfig.from_hf(config)
    (warning,) = seen
    return cfg, str(warning.message)


def test_unknown_keys_are_named_in_one_warning():
    added = {"unsloth_version": "2025.3.18", "is_llama_config": True, "transformers.js_config": {"dtype": "q4"}}
    cfg, text = read_with_warning(LLAMA | added | {f"key{n}": n for n in range(1000)})
    assert cfg == ModelConfig.from_hf(LLAMA)
    assert text.startswith("config.json: unknown keys are ignored, as in transformers: is_llama_config, key0, key1, ")
    assert len(text) < 600


def test_each_key_belongs_to_one_group():
    groups = [config_keys.FIELDS.keys(), config_keys.SPECIAL, config_keys.IRRELEVANT, config_keys.NEUTRAL.keys()]
    assert len(frozenset().union(*groups)) == sum(map(len, groups))
    names = [name for _, names in config_keys._BY_NEUTRAL_VALUE for name in names.split()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("key", "neutral", "value"),
    [
        ("rope_interleaved", False, True),
        ("embedding_multiplier", 1.0, 12.0),
        ("attention_multiplier", None, 0.0078125),
        ("final_logit_softcapping", None, 30.0),
        ("clip_qkv", 0, 8),
        ("partial_rotary_factor", 1.0, 0.5),
        ("no_rope_layers", [], [1, 1, 1, 0]),
        ("num_local_experts", 0, 8),
        ("num_experts", None, 1),
        ("kv_lora_rank", None, 512),
        ("use_bidirectional_attention", False, True),
        ("is_causal", True, False),
        ("is_decoder", True, 1),
        ("position_embedding_type", "rope", "alibi"),
        ("quant_config", None, {"bits": 4}),
        ("vision_config", {}, {"depth": 2}),
        ("embedding_multiplier", 1, True),
        ("alibi", False, 0),
        ("llama_4_scaling_beta", 0, 0.1),
        ("llama_4_scaling", {}, {"beta": 0.1}),
        ("long_factor", None, [1.0]),
        ("short_factor", None, [1.0]),
        ("long_mscale", None, 1.2),
        ("short_mscale", None, 1.2),
        ("logits_mup_width_multiplier", 1.0, 0.25),
        ("log_scaling_alpha", 0, 0.1),
        ("log_scaling_n_floor", None, 128),
        ("floor_scale", None, 8192),
        ("loop_num_passes", 1, 2),
        ("n_recurrent_layers", 0, 4),
        ("H_cycles", 1, 2),
        ("L_cycles", 1, 2),
        ("total_ut_steps", 1, 4),
        ("_sliding_window_pattern", 1, 6),
        ("window_size", 0, 256),
        ("attention_layers", ["global", "global"], ["global", "local"]),
        ("attention_type", "full", "block_sparse"),
        ("attn_config", {}, {"alibi": True}),
        ("rotary_value", False, True),
        ("rescale_embeddings", False, True),
        ("unpadded_vocab_size", None, 50),
        ("mup_anything", False, True),
        ("mup_width", 1, 0.25),
        ("use_logn_attn", False, True),
        ("use_dynamic_ntk", False, True),
        ("rope_pct", 1.0, 0.25),
        ("rotary_emb_base", 10000, 500000),
        ("interleaved_sliding_window", None, 4096),
        ("language_config", {}, {"hidden_size": 9}),
        ("llm_config", {}, {"hidden_size": 9}),
        ("no_rope_layers", [1, 1], [1, 0]),
        ("no_rope_layers", [], 0),
        ("mlp_only_layers", [], [1]),
        ("swiglu_limits", [], [7.0]),
        ("sliding_window_pattern", 1, 6),
        ("full_attention_interval", 1, 4),
        ("mlp_layer_types", ["dense", "dense"], ["dense", "sparse"]),
        ("layers_block_type", ["attention", "attention"], ["attention", "mamba"]),
        ("activation_sparsity_pattern", [0.0, 0.0], [0.95, 0.0]),
        ("quant_config", {}, {"bits": 8}),
        ("clip_qkv", False, 8.0),
        ("local_attention", False, True),
        # names in no list, which a pattern matches
        ("x_multiplier", 1.0, 0.5),
        ("x_multipliers", [1.0, 1.0], [1.0, 0.5]),
        ("x_logits_scale", 1, 0.5),
        ("rotary_percent", 1, 0.5),
        ("x_softcap", 0.0, 30.0),
        ("x_soft_cap_y", None, 30.0),
        ("x_interleave_y", False, True),
        ("x_mrope_y", False, True),
        ("x_alibi_y", False, True),
        ("is_bidirectional", False, True),
        ("add_unit_offset", False, True),
        ("x_attention_sinks", False, True),
    ],
)
def test_a_key_of_another_architecture_must_be_neutral(key, neutral, value):
    for config in (CONFIG, LLAMA, QWEN3, MISTRAL):
        assert ModelConfig.from_hf(config | {key: neutral}) == ModelConfig.from_hf(config)
        with pytest.raises(ConfigError, match=f"{key}=.* is not implemented"):
            ModelConfig.from_hf(config | {key: value})


@pytest.mark.parametrize(
    ("keys", "value", "other", "name"),
    [
        ("hidden_activation activation_function", "silu", "gelu", "hidden_act='silu'"),
        ("norm_eps norm_epsilon layer_norm_eps layer_norm_epsilon", 1e-6, 1e-5, "rms_norm_eps=1e-06"),
        ("rotary_emb_base rope_base", 10000, 5e5, "rope_theta=10000.0"),
        ("num_heads n_heads", 4, 8, "num_attention_heads=4"),
        ("num_kv_heads n_kv_heads", 2, 4, "num_key_value_heads=2"),
        ("query_pre_attn_scalar v_head_dim", 8, 256, "head_dim=8"),
        ("attention_multiplier softmax_scale", 0.35355339, 0.0078125, "head_dim**-0.5=0.35355339059327"),
        ("use_qk_norm qk_layernorm qk_norm", False, True, "qk_norm=False"),
        ("unpadded_vocab_size", 97, 96, "vocab_size=97"),
    ],
)
def test_alias_must_equal_the_models_value(keys, value, other, name):
    for key in keys.split():
        assert ModelConfig.from_hf(CONFIG | {key: value}) == ModelConfig.from_hf(CONFIG)
        with pytest.raises(ConfigError, match=re.escape(f"{key}={other!r} is not implemented: it must equal {name}")):
            ModelConfig.from_hf(CONFIG | {key: other})


def test_alias_does_not_replace_a_missing_key():
    for key, other, value in (("rms_norm_eps", "norm_eps", 1e-5), ("hidden_act", "hidden_activation", "gelu")):
        with pytest.raises(ConfigError, match=f"{other}=.* is not implemented: it must equal {key}="):
            ModelConfig.from_hf(without(CONFIG, key) | {other: value})


def test_use_qk_norm_is_accepted_only_for_qwen3():
    assert ModelConfig.from_hf(QWEN3 | {"use_qk_norm": True}) == ModelConfig.from_hf(QWEN3)
    with pytest.raises(ConfigError, match="use_qk_norm=True is not implemented"):
        ModelConfig.from_hf(LLAMA | {"use_qk_norm": True})


def test_numbers_from_which_sizes_were_computed_are_ignored():
    assert ModelConfig.from_hf(LLAMA | {"ffn_dim_multiplier": 1.3, "multiple_of": 256}) == ModelConfig.from_hf(LLAMA)


def test_a_window_that_llama_does_not_have_is_named():
    cfg, text = read_with_warning(LLAMA | {"sliding_window": 4096})
    assert cfg == ModelConfig.from_hf(LLAMA | {"sliding_window": 4096, "use_sliding_window": False})
    assert text.endswith("sliding_window=4096 is ignored, as in transformers: model_type llama has no sliding windows")


def test_attention_in_chunks_is_named_with_the_length_up_to_which_results_agree():
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    cfg, text = read_with_warning(CONFIG | {"dual_chunk_attention_config": chunks})
    assert cfg == ModelConfig.from_hf(CONFIG)
    assert "dual_chunk_attention_config is not implemented: " in text
    assert text.endswith("; up to 262,144 tokens, results are the same")
    _, text = read_with_warning(CONFIG | {"dual_chunk_attention_config": [1]})
    assert text.endswith("; results differ for long texts")


@pytest.mark.parametrize(
    ("scaling", "ignored"),
    [
        (YARN | {"attn_factor": 0.878}, "attn_factor"),
        (YARN | {"finetuned": True, "type": "yarn"}, "finetuned"),
        ({"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "low_freq_factor"),
        ({"rope_type": "default", "factor": 2.0}, "factor"),
    ],
)
def test_parameters_of_rope_that_transformers_ignores(scaling, ignored):
    for key in ("rope_scaling", "rope_parameters"):
        cfg, text = read_with_warning(CONFIG | {key: scaling})
        assert cfg == ModelConfig.from_hf(CONFIG | {key: without(scaling, ignored)})
        kind = scaling.get("rope_type", scaling.get("type"))
        assert text == f"config.json: {key} (rope_type {kind}): ignored, as in transformers: {ignored}"


def test_neutral_parameters_of_rope_are_ignored():
    neutral = {"llama_4_scaling_beta": 0, "partial_rotary_factor": 1.0, "alpha": 1.0, "mrope_interleaved": False}
    neutral |= {"long_factor": None, "short_factor": None}
    assert ModelConfig.from_hf(CONFIG | {"rope_scaling": YARN | neutral}) == ModelConfig.from_hf(
        CONFIG | {"rope_scaling": YARN}
    )


def test_rope_may_be_given_under_both_names_if_equal():
    old = {"type": "linear", "factor": 2.0}
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    expected = ModelConfig.from_hf(CONFIG | {"rope_scaling": old})
    assert (
        ModelConfig.from_hf(without(CONFIG, "rope_theta") | {"rope_scaling": old, "rope_parameters": new}) == expected
    )
    with pytest.raises(ConfigError, match="rope_scaling and rope_parameters differ"):
        ModelConfig.from_hf(CONFIG | {"rope_scaling": old, "rope_parameters": new | {"rope_theta": 5e5}})


def test_the_original_length_may_be_beside_rope_scaling():
    scaling = without(YARN, "original_max_position_embeddings")
    cfg = ModelConfig.from_hf(CONFIG | {"rope_scaling": scaling, "original_max_position_embeddings": 128})
    assert cfg == ModelConfig.from_hf(CONFIG | {"rope_scaling": YARN})
    assert ModelConfig.from_hf(CONFIG | {"original_max_position_embeddings": 128}) == ModelConfig.from_hf(CONFIG)
    with pytest.raises(ConfigError, match="original_max_position_embeddings differs in rope_scaling and beside it"):
        ModelConfig.from_hf(CONFIG | {"rope_scaling": YARN, "original_max_position_embeddings": 64})


BOTH_SPELLINGS = [
    ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
    ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5}}),
    (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2}},
    ),
    ({"rope_theta": 5e5, "rope_scaling": YARN}, {"rope_parameters": {"rope_theta": 5e5, **YARN}}),
    ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}),
]


@pytest.mark.parametrize(("old", "new"), BOTH_SPELLINGS)
def test_both_spellings_of_rope(old, new):
    base = without(LLAMA, "rope_theta")
    assert ModelConfig.from_hf(base | old) == ModelConfig.from_hf(base | new)


def test_both_spellings_of_the_dtype():
    for name in ("float32", "bfloat16", "float16"):
        assert ModelConfig.from_hf(CONFIG | {"dtype": name}) == ModelConfig.from_hf(CONFIG | {"torch_dtype": name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"model_type": None}, "model_type"),
        ({"compression_config": {"bits": 4}}, "compression_config"),
        ({"use_mrope": True}, "use_mrope"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "head_dim"),
        ({"vocab_size": "97"}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"head_dim": "8"}, "head_dim"),
        ({"attention_dropout": "x"}, "attention_dropout"),
        ({"attention_bias": True}, "attention_bias"),
        ({**QWEN3, "mlp_bias": True}, "mlp_bias=True: only model_type llama, .* can have it"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window must be a whole number >= 1 and < 2\\*\\*31, got 0"),
        ({**MISTRAL, "attention_bias": True}, "attention_bias=True: only model_type qwen3, llama, .* can have it"),
        ({**MISTRAL, "use_sliding_window": True}, "use_sliding_window=True"),
        ({**MISTRAL, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"model_type": "llama", "use_sliding_window": True}, "llama has no sliding windows"),
        ({"model_type": "llama", "layer_types": ["sliding_attention"] * 2}, "llama has no sliding windows"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
        ({"architectures": 1}, "architectures must be a list"),
        ({"rope_scaling": ["linear"]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "differ"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"use_sliding_window": "yes"}, "use_sliding_window"),
        ({"model_type": "llama", "attention_bias": "false"}, "attention_bias"),
        ({"head_dim": 7}, "even"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "differ"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {**YARN, "alpha": 1000.0}}, "alpha=1000.0 is not implemented"),
        ({"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta=0.1 is not implemented"),
        ({"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta=0.1 is not implemented"),
        ({"rope_scaling": {**YARN, "long_factor": [1.0]}}, "long_factor=.* is not implemented"),
        ({"rope_scaling": {**YARN, "short_factor": [1.0]}}, "short_factor=.* is not implemented"),
        ({"rope_scaling": {**YARN, "long_mscale": 1.2}}, "long_mscale=1.2 is not implemented"),
        ({"rope_scaling": {**YARN, "short_mscale": 1.2}}, "short_mscale=1.2 is not implemented"),
        ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section=.* is not implemented"),
        ({"rope_scaling": without(LLAMA3, "low_freq_factor")}, "low_freq_factor"),
        ({"rope_scaling": without(LLAMA3, "original_max_position_embeddings")}, "original_max_position_embeddings"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4, **LLAMA3}}, "differ"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
    ],
)
def test_unimplemented_features_are_named_in_the_error(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(CONFIG | change)


def test_faults_of_every_kind_are_reported_together():
    wrong = {"vocab_size": 0, "use_mrope": True, "typo": 1, "architectures": ["Other"], "mlp_bias": True}
    wrong["rope_scaling"] = {"type": "linear", "factor": -1, "typo": 2}
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(without(CONFIG, "hidden_size") | wrong)
    assert str(caught.value).split("; ") == [
        "missing: hidden_size",
        "vocab_size must be a whole number >= 1 and < 2**31, got 0",
        "architectures must be a list with Qwen2ForCausalLM or Qwen2Model, got ['Other']",
        "use_mrope=True is not implemented",
        "mlp_bias=True: only model_type llama, granite, smollm3 can have it",
        "rope_scaling (rope_type linear): factor must be a number > 0 that fits into float32, got -1",
    ]


@pytest.mark.parametrize(
    ("config", "biases", "qk_norm", "windows"),
    [
        (CONFIG, (True, False, False), False, (None, None)),
        (CONFIG | {"attention_bias": False, "sliding_window": 7}, (True, False, False), False, (None, None)),
        (LLAMA, (False, False, False), False, (None, None)),
        (LLAMA | {"attention_bias": True}, (True, True, False), False, (None, None)),
        (
            LLAMA | {"mlp_bias": True, "sliding_window": 7, "use_sliding_window": False},
            (False, False, True),
            False,
            (None, None),
        ),
        (QWEN3, (False, False, False), True, (None, None)),
        (
            QWEN3 | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
            (True, True, False),
            True,
            (None, 7),
        ),
        (MISTRAL, (False, False, False), False, (7, 7)),
        (MISTRAL | {"sliding_window": None, "attention_bias": False}, (False, False, False), False, (None, None)),
    ],
)
def test_families_differ_in_biases_norms_and_windows(config, biases, qk_norm, windows):
    cfg = ModelConfig.from_hf(config)
    assert (cfg.attention_bias, cfg.output_bias, cfg.mlp_bias) == biases
    assert cfg.family.norms.queries_keys == ("head" if qk_norm else None)
    assert cfg.windows == windows
    shapes = param_shapes(cfg)
    norms = {name: shapes.get(f"model.layers.1.self_attn.{name}_norm.weight") for name in "qk"}
    assert norms == dict.fromkeys("qk", (cfg.head_dim,) if qk_norm else None)


def test_a_config_that_its_family_cannot_express_is_not_written():
    cfg = ModelConfig.from_hf(MISTRAL)
    layer, other = cfg.layers[0], RopeConfig("default", 5.0)
    for change in (LayerSpec(None, layer.rope), LayerSpec(layer.window, None), LayerSpec(layer.window, other)):
        with pytest.raises(ConfigError, match="model_type mistral cannot express"):
            dataclasses.replace(cfg, layers=(layer, change)).to_hf()
    with pytest.raises(ConfigError, match="model_type mistral cannot express"):
        dataclasses.replace(cfg, attention_bias=True).to_hf()


PUBLISHED = {
    "Qwen3-0.6B": """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
    "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936}""",
    "Mistral-7B-v0.1": """{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": true,
    "vocab_size": 32000}""",
    "Mistral-Nemo-Base-2407": """{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 128000, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
    "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.43.0",
    "use_cache": true, "vocab_size": 131072}""",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    config = json.loads(PUBLISHED[name])
    written = ModelConfig.from_hf(config).to_hf()
    unread = {"bos_token_id", "eos_token_id", "transformers_version"}
    if name == "Qwen3-0.6B":
        unread.add("sliding_window")  # has no effect while use_sliding_window is false
    for key in config.keys() - unread:
        assert written[key] == config[key], key


def test_irrelevant_fields_are_ignored():
    irrelevant = {"pretraining_tp": 2, "use_cache": False, "transformers_version": "9", "id2label": {"0": "a"}}
    assert ModelConfig.from_hf(LLAMA | irrelevant) == ModelConfig.from_hf(LLAMA)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        QWEN3 | {"attention_bias": True},
        QWEN3 | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "head_dim": 8},
        MISTRAL | {"head_dim": 10},
        MISTRAL | {"sliding_window": None},
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 20}},
        {"model_type": "llama", "rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "dynamic", "factor": 3.0}},
        {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "hidden_act": "gelu_pytorch_tanh"},
    ],
)
def test_round_trip(change):
    cfg = ModelConfig.from_hf(CONFIG | change)
    written = json.loads(json.dumps(cfg.to_hf()))
    assert ModelConfig.from_hf(written) == cfg


def test_real_configs(data):
    for path in sorted((data / "configs").glob("*/config.json")):
        held = json.loads(path.read_text())
        written = ModelConfig.from_hf(held).to_hf()
        same = set(held) & set(written) - {"sliding_window", "max_window_layers"}
        assert {key: written[key] for key in same} == {key: held[key] for key in same}
        assert ModelConfig.from_hf(written) == ModelConfig.from_hf(held)


def test_configs_of_the_goldens():
    paths = sorted(GOLDENS.glob("*/checkpoints/*/config.json"))
    assert len({json.loads(path.read_text())["model_type"] for path in paths}) == len(FAMILIES)
    for path in paths:
        config = json.loads(path.read_text())
        cfg = ModelConfig.from_hf(config)
        written = cfg.to_hf()
        assert ModelConfig.from_hf(written) == cfg
        # Keys in which the same layers can be written in several ways
        several = {"sliding_window", "max_window_layers", "rope_scaling", "mlp_only_layers", "decoder_sparse_step"}
        same = config.keys() & written.keys() - several
        assert {key: written[key] for key in same} == {key: config[key] for key in same}, path


def test_yarn_keeps_short_wavelengths_and_divides_long_ones():
    rope = RopeConfig("yarn", 1e4, factor=4.0, original_max_position_embeddings=128)
    plain, _ = inverse_frequencies(RopeConfig("default", 1e4), 64)
    stretched, scale = inverse_frequencies(rope, 64)
    np.testing.assert_allclose(stretched[0], plain[0])
    np.testing.assert_allclose(stretched[-1], plain[-1] / 4, rtol=1e-6)
    assert scale == pytest.approx(0.1 * np.log(4) + 1)


def test_model_without_rope_is_written():
    smollm3 = CONFIG | {"model_type": "smollm3", "no_rope_layers": [0, 0]}
    model = ModelConfig.from_hf(smollm3)
    assert model.ropes == ()
    assert ModelConfig.from_hf(model.to_hf()) == model
