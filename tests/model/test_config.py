import json

import numpy as np
import pytest

from jaxgen import ConfigError, ModelConfig, RopeConfig
from jaxgen.model.rope import inverse_frequencies
from tests.support.models import CONFIG

LLAMA = {**CONFIG, "model_type": "llama"}
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
    assert cfg.rope == RopeConfig("default", 10000.0)
    assert hash(cfg) == hash(ModelConfig.from_hf({**CONFIG, "torch_dtype": "bfloat16"}))


@pytest.mark.parametrize("key", [key for key in CONFIG if key != "model_type"])
def test_a_value_that_changes_numbers_has_no_default(key):
    with pytest.raises(ConfigError, match=key):
        ModelConfig.from_hf(without(CONFIG, key))


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError, match=r"missing: vocab_size, rms_norm_eps; .*rope_theta"):
        ModelConfig.from_hf(without(CONFIG, "vocab_size", "rms_norm_eps", "rope_theta"))


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
        ({"model_type": "mistral"}, "mistral"),
        ({"model_type": None}, "model_type"),
        ({"unknown_key": 1}, "unknown_key"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
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
        ({"use_sliding_window": True}, "sliding_window"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
        ({"rope_scaling": ["linear"]}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "factor"),
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
        ({"rope_scaling": {**YARN, "typo": 1}}, "typo"),
        ({"rope_scaling": without(LLAMA3, "low_freq_factor")}, "low_freq_factor"),
        ({"rope_scaling": without(LLAMA3, "original_max_position_embeddings")}, "original_max_position_embeddings"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4, **LLAMA3}}, "differ"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
    ],
)
def test_what_is_not_built_or_not_known_is_an_error_that_names_it(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(CONFIG | change)


def test_what_does_not_matter_is_passed_over():
    irrelevant = {"pretraining_tp": 2, "use_cache": False, "transformers_version": "9", "id2label": {"0": "a"}}
    assert ModelConfig.from_hf(LLAMA | irrelevant) == ModelConfig.from_hf(LLAMA)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
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


def test_yarn_leaves_short_wavelengths_and_divides_long_ones():
    rope = RopeConfig("yarn", 1e4, factor=4.0, original_max_position_embeddings=128)
    plain, _ = inverse_frequencies(RopeConfig("default", 1e4), 64)
    stretched, scale = inverse_frequencies(rope, 64)
    np.testing.assert_allclose(stretched[0], plain[0])
    np.testing.assert_allclose(stretched[-1], plain[-1] / 4, rtol=1e-6)
    assert scale == pytest.approx(0.1 * np.log(4) + 1)
