"""Published checkpoints load, with what their class in transformers would compute, or are refused with a reason."""

import json
import re
import shutil

import numpy as np
import pytest

from convert import load_hf
from jaxgen import ConfigError, ModelConfig, Tokenizer
from jaxgen.demo import PATH
from jaxgen.errors import JaxgenWarning
from tests.support.checkpoints import weights, write
from tests.support.models import slow
from tests.support.published import BASE_MODELS, LOADED, REFUSED

# One of each form of file; the others differ only in values that `test_published_configs_are_read` compares.
FORMS = (
    "llama-7b-hf (2023-03)", "SmolLM2-360M-Instruct", "granite-8b-code-base", "Mistral-Nemo-Instruct-2407",
    "Yarn-Mistral-7b-128k", "Qwen2.5-7B-Instruct-1M", "Qwen3-Embedding-0.6B", "DeepSeek-R1-0528-Qwen3-8B",
)  # fmt: skip


def noted(call, ignored):
    """Return the result of a call that must emit one warning with these texts, or no warning if there are none."""
    if not ignored:
        return call()
    with pytest.warns(JaxgenWarning) as seen:
        result = call()
    (warning,) = seen
    for text in ignored:
        assert text in str(warning.message)
    return result


def test_number_of_published_configs():
    types = [published.config["model_type"] for published in LOADED.values()]
    assert len(LOADED) >= 60
    assert min(map(types.count, ("llama", "mistral", "qwen2", "qwen3"))) >= 8


@pytest.mark.parametrize("name", LOADED)
def test_published_configs_are_read(name):
    expected = LOADED[name]
    model = noted(lambda: ModelConfig.from_hf(expected.config), expected.ignored)
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (
        expected.config["num_attention_heads"], expected.kv_heads, expected.head_dim
    )  # fmt: skip
    assert (model.rope.type, model.rope.theta, model.rope.factor) == (expected.rope, expected.theta, expected.factor)
    assert (model.max_position_embeddings, model.rms_norm_eps) == (expected.length, expected.eps)
    assert (model.tie_word_embeddings, model.windows) == (expected.tied, (expected.window,))
    biases = zip("qom", (model.attention_bias, model.output_bias, model.mlp_bias), strict=True)
    assert "".join(letter for letter, present in biases if present) == expected.biases
    assert (model.qk_norm, model.dtype) == (model.model_type == "qwen3", "bfloat16")


@pytest.mark.parametrize("name", [*FORMS, *slow(*(name for name in LOADED if name not in FORMS))])
def test_checkpoints_with_published_configs_are_loaded(tmp_path, name):
    expected = LOADED[name]
    filled = {"num_key_value_heads": expected.kv_heads, "tie_word_embeddings": expected.tied}
    tensors = weights(expected.config | filled, "bfloat16")
    tensors |= {name: np.zeros(size, tensors["model.norm.weight"].dtype) for name, size in biases(expected).items()}
    base = name in BASE_MODELS
    stored = {name.removeprefix("model.") if base else name: tensor for name, tensor in tensors.items()}
    path = write(tmp_path / "x", expected.config, stored)
    params, cfg = noted(lambda: load_hf(path), expected.ignored)
    assert (
        params["model"]["layers"]["0"]["self_attn"]["k_proj"]["weight"].shape[0]
        == cfg.model.head_dim * expected.kv_heads
    )
    assert ("lm_head" in params) == (not expected.tied)


def biases(published) -> dict[str, int]:
    """Return the sizes of biases that only some models of a family have."""
    config, name = published.config, "model.layers.0"
    sizes: dict[str, int] = {}
    if "o" in published.biases:
        queries, keys = (heads * published.head_dim for heads in (config["num_attention_heads"], published.kv_heads))
        sizes |= {f"{name}.self_attn.q_proj.bias": queries, f"{name}.self_attn.o_proj.bias": config["hidden_size"]}
        sizes |= {f"{name}.self_attn.{letter}_proj.bias": keys for letter in "kv"}
    if "m" in published.biases:
        sizes |= {f"{name}.mlp.{part}_proj.bias": config["intermediate_size"] for part in ("gate", "up")}
        sizes[f"{name}.mlp.down_proj.bias"] = config["hidden_size"]
    return sizes


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_published_configs_are_refused(name):
    config, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(config)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_keys_of_other_tools_in_a_tokenizer_config(tmp_path):
    shutil.copy(PATH / "tokenizer.json", tmp_path)
    config = json.loads((PATH / "tokenizer_config.json").read_text())
    more = {"unsloth_fixed": True, "padding_side": "left", "backend": "tokenizers", "extra_special_tokens": {}}
    more |= {"legacy": True, "sp_model_kwargs": {}, "processor_class": None, "is_local": True, "pad_to_multiple_of": 8}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | more))
    text = "A fox.<|im_end|>"
    assert Tokenizer.from_pretrained(tmp_path).encode(text) == Tokenizer.from_pretrained(PATH).encode(text)
