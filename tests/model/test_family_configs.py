"""The config.json of each further family: defaults, both spellings, refused values, and what is written."""

import json

import pytest

from jaxgen import ConfigError, ModelConfig, RopeConfig
from jaxgen.core.model.families import FAMILIES
from tests.support.published_families import CONFIGS, FULL, IGNORED, SLIDING

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def read(model_type, **keys):
    return ModelConfig.from_hf({"model_type": model_type, **SIZES, **keys})


def plain(theta):
    return RopeConfig("default", theta)


@pytest.mark.parametrize(
    ("model_type", "kv_heads", "head_dim", "length", "eps", "tied", "windows", "thetas"),
    [
        ("gemma", 16, 256, 8192, 1e-6, True, (None,) * 6, (1e4,)),
        ("gemma2", 4, 256, 8192, 1e-6, True, (4096, None) * 3, (1e4,)),
        ("gemma3_text", 4, 256, 131072, 1e-6, True, (4096,) * 5 + (None,), (1e4, 1e6)),
        ("phi3", 32, 2, 4096, 1e-5, False, (None,) * 6, (1e4,)),
        ("granite", 32, 2, 2048, 1e-6, False, (None,) * 6, (1e4,)),
        ("smollm3", 4, 2, 32768, 1e-6, True, (None,) * 6, (2e6,)),
        ("olmo2", 32, 2, 2048, 1e-5, False, (None,) * 6, (1e4,)),
        ("olmo3", 32, 2, 2048, 1e-5, False, (4096,) * 3 + (None,) + (4096,) * 2, (5e5,)),
    ],
)
def test_a_missing_key_has_the_default_of_its_class(model_type, kv_heads, head_dim, length, eps, tied, windows, thetas):
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    cfg = ModelConfig.from_hf({"model_type": model_type, **sizes, "num_attention_heads": 32, "hidden_size": 64})
    assert cfg.num_key_value_heads == kv_heads
    assert (cfg.head_dim, cfg.max_position_embeddings, cfg.rms_norm_eps) == (head_dim, length, eps)
    assert (cfg.tie_word_embeddings, cfg.windows) == (tied, windows)
    assert cfg.ropes == tuple(map(plain, thetas))
    assert cfg.hidden_act == ("gelu_pytorch_tanh" if model_type.startswith("gemma") else "silu")


def test_default_scalars():
    assert (read("gemma2").attn_logit_softcapping, read("gemma2").final_logit_softcapping) == (50.0, 30.0)
    assert read("gemma2").query_pre_attn_scalar == 256
    assert (read("gemma3_text").attn_logit_softcapping, read("gemma3_text").final_logit_softcapping) == (None, None)
    granite = read("granite")
    assert granite.attention_scale == 1.0  # as in transformers, not head_dim**-0.5
    assert (granite.embedding_multiplier, granite.residual_multiplier, granite.logits_scaling) == (1.0, 1.0, 1.0)
    assert [layer.rope is None for layer in read("smollm3").layers] == [False, False, False, True, False, False]
    assert read("gemma2", attn_logit_softcapping=None).attn_logit_softcapping is None


@pytest.mark.parametrize(
    ("model_type", "one", "other"),
    [
        ("gemma", {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None}),
        ("gemma2", {"hidden_act": "silu"}, {"layer_types": [SLIDING, FULL] * 3, "sliding_window_size": 4096}),
        ("gemma3_text", {"sliding_window_pattern": 3}, {"_sliding_window_pattern": 3}),
        ("gemma3_text", {"sliding_window_pattern": 3}, {"layer_types": [SLIDING, SLIDING, FULL] * 2}),
        (
            "gemma3_text",
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 50.0},
            {
                "rope_parameters": {
                    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    SLIDING: {"rope_type": "default", "rope_theta": 50.0},
                }
            },
        ),
        ("smollm3", {"no_rope_layer_interval": 3}, {"no_rope_layers": [1, 1, 0, 1, 1, 0, 1]}),
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 5},
            {"use_sliding_window": True, "sliding_window": 5, "layer_types": [FULL] * 3 + [SLIDING] + [FULL] * 2},
        ),
        ("olmo3", {}, {"rope_theta": 500000, "layer_types": [SLIDING] * 3 + [FULL] + [SLIDING] * 2}),
        (
            "phi3",
            {"rope_scaling": LONG, "original_max_position_embeddings": 64},
            {"rope_scaling": LONG | {"rope_type": "su", "original_max_position_embeddings": 64}},
        ),
        (
            "phi3",
            {"rope_scaling": LONG, "original_max_position_embeddings": 64},
            {"rope_scaling": LONG | {"rope_type": "yarn"}, "original_max_position_embeddings": 64},
        ),
        (
            "phi3",
            {"partial_rotary_factor": 0.5},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ),
        ("phi3", {"partial_rotary_factor": 1.0, "resid_pdrop": 0}, {"embd_pdrop": 0.0, "sliding_window": None}),
    ],
)
def test_spellings_with_the_same_meaning(model_type, one, other):
    assert read(model_type, **one) == read(model_type, **other)


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("gemma", {"hidden_act": "silu"}, "hidden_act must be gelu or gelu_pytorch_tanh, got 'silu'"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation='silu' is not implemented"),
        ("gemma", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not implemented"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be a number > 0"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping must be a number > 0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a whole number >= 1"),
        ("gemma2", {"sliding_window_size": 5}, "sliding_window_size.* differs"),
        ("gemma2", {"layer_types": [SLIDING]}, "layer_types must name each of the 6 layers"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not implemented"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not implemented"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not implemented"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number >= 1"),
        ("gemma3_text", {"sliding_window_pattern": 3, "_sliding_window_pattern": 6}, "differ: keep one"),
        ("gemma3_text", {"rope_local_base_freq": 0.5}, "rope_theta must be > 1"),
        ("gemma3_text", {"sliding_window": None}, "missing: sliding_window"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop must be 0, got 0.1"),
        ("phi3", {"embd_pdrop": 0.1}, "embd_pdrop must be 0, got 0.1"),
        (
            "phi3",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_type must be one of default, longrope",
        ),
        ("phi3", {"rope_scaling": LONG}, "missing: original_max_position_embeddings"),
        (
            "phi3",
            {"rope_scaling": LONG | {"long_factor": [1.0]}, "original_max_position_embeddings": 64},
            "long_factor must have 4 numbers, half the rotated dimensions, got 1",
        ),
        ("phi3", {"partial_rotary_factor": 0.4}, "must rotate an even number of dimensions, got 3 of 8"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be at most 1"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier must be a number > 0"),
        ("granite", {"logits_scaling": "8"}, "logits_scaling must be a number > 0"),
        ("granite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not implemented"),
        ("granitemoe", {}, "model_type 'granitemoe' is not implemented"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must have 0 or 1 for each of the 6 layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1, 1, 1]}, "no_rope_layers must have 0 or 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a whole number >= 1"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not implemented"),
        ("olmo2", {"sliding_window": 5, "use_sliding_window": True}, "olmo2 has no sliding windows"),
        ("olmo3", {"rope_theta": 1e4}, "rope_theta=10000.0: transformers would use it in layers without a window only"),
        ("llama", {"sliding_window_pattern": 6}, "sliding_window_pattern=6 is not implemented"),
        ("llama", {"no_rope_layers": [1, 0]}, "no_rope_layers=.* is not implemented"),
        ("llama", {"query_pre_attn_scalar": 7}, "query_pre_attn_scalar=7 is not implemented"),
        ("gemma3", {}, "text_config must be the config of a gemma3_text model, got None"),
        ("gemma3", {"text_config": {"model_type": "gemma2"}}, "text_config must be the config of a gemma3_text model"),
    ],
)
def test_values_that_are_refused(model_type, keys, message):
    with pytest.raises(ConfigError, match=message):
        read(model_type, **keys)


def test_the_text_part_of_gemma3_is_a_gemma3_text():
    text = {**SIZES, "vocab_size": 97, "model_type": "gemma3_text", "num_attention_heads": None}
    cfg = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"})
    assert (cfg.model_type, cfg.dtype, cfg.num_attention_heads) == ("gemma3_text", "bfloat16", 8)
    assert cfg.to_hf()["architectures"] == ["Gemma3ForCausalLM"]


@pytest.mark.filterwarnings("ignore:.*unknown keys are ignored")
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_of_published_configs(name):
    cfg = ModelConfig.from_hf(CONFIGS[name])
    written = json.loads(json.dumps(cfg.to_hf()))
    assert ModelConfig.from_hf(written) == cfg
    assert written["architectures"] == [FAMILIES[cfg.model_type].architecture]
    config = CONFIGS[name].get("text_config", CONFIGS[name])
    unread = {"rope_scaling", "sliding_window", "hidden_act", "use_cache", *IGNORED[name]}
    same = config.keys() & written.keys() - unread
    assert {key: written[key] for key in same} == {key: config[key] for key in same}
