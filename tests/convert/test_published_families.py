"""Published checkpoints of Gemma, Phi, Granite, SmolLM3 and OLMo are read as transformers reads them."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert import CheckpointError, load_hf
from convert.published import renamed
from jaxgen import ModelConfig, RopeConfig
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.errors import JaxgenWarning
from tests.convert.test_published import noted
from tests.support.goldens import GOLDENS, load
from tests.support.published_families import CONFIGS, IGNORED, sizes_of, tensors_of


def read(name):
    return noted(lambda: ModelConfig.from_hf(CONFIGS[name]), IGNORED[name])


def test_number_of_published_families():
    kinds = [sizes_of(config)["model_type"] for config in CONFIGS.values()]
    assert len(CONFIGS) >= 40
    assert min(map(kinds.count, set(kinds))) >= 2
    assert len(set(kinds)) == 8


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_the_index(name):
    model = read(name)
    assert param_shapes(model) == tensors_of(CONFIGS[name])
    assert model.tie_word_embeddings == ("lm_head.weight" not in tensors_of(CONFIGS[name]))
    sizes = sizes_of(CONFIGS[name])
    assert (model.rms_norm_eps, model.dtype) == (sizes.get("rms_norm_eps", 1e-6), CONFIGS[name]["torch_dtype"])
    assert model.hidden_act == ("gelu_pytorch_tanh" if "gemma" in name else "silu")
    matrices = sum(math.prod(shape) for shape in tensors_of(CONFIGS[name]).values() if len(shape) == 2)
    assert model.matrix_parameters == matrices


PLAIN = RopeConfig("default", 1e4)
GEMMA3 = RopeConfig("default", 1e6)
LINEAR = RopeConfig("linear", 1e6, factor=8.0)
YARN = RopeConfig(
    "yarn", 500000.0, factor=8.0, original_max_position_embeddings=8192, attention_factor=1.2079441541679836,
    beta_fast=32.0, beta_slow=1.0,
)  # fmt: skip
OLMO = RopeConfig("default", 500000.0)


def five_to_one(layers, window, full):
    return [(window, PLAIN) if (layer + 1) % 6 else (None, full) for layer in range(layers)]


# The window and the RoPE of each layer
LAYERS = {
    "gemma-2b": [(None, PLAIN)] * 18,
    "gemma-1.1-7b-it": [(None, PLAIN)] * 28,
    "gemma-2-2b": [(4096, PLAIN), (None, PLAIN)] * 13,
    "gemma-2-9b": [(4096, PLAIN), (None, PLAIN)] * 21,
    "gemma-2-27b-it": [(4096, PLAIN), (None, PLAIN)] * 23,
    "gemma-3-270m": five_to_one(18, 512, GEMMA3),
    "gemma-3-1b-it": five_to_one(26, 512, GEMMA3),
    "gemma-3-4b-it": five_to_one(34, 1024, LINEAR),
    "gemma-3-12b-it": five_to_one(48, 1024, LINEAR),
    "gemma-3-27b-it": five_to_one(62, 1024, LINEAR),
    "Phi-3-mini-4k-instruct": [(2047, PLAIN)] * 32,
    "Phi-3-medium-4k-instruct": [(2047, PLAIN)] * 40,
    "phi-4": [(None, RopeConfig("default", 250000.0))] * 40,
    "granite-3.0-8b-instruct": [(None, PLAIN)] * 40,
    "granite-3.3-2b-instruct": [(None, RopeConfig("default", 1e7))] * 40,
    "SmolLM3-3B": ([(None, RopeConfig("default", 5e6))] * 3 + [(None, None)]) * 9,
    "OLMo-2-0425-1B": [(None, OLMO)] * 16,
    "OLMo-2-0325-32B-Instruct": [(None, OLMO)] * 64,
    "Olmo-3-7B-Instruct": [(4096, OLMO), (4096, OLMO), (4096, OLMO), (None, YARN)] * 8,
    "Olmo-3-32B-Think": [(4096, OLMO), (4096, OLMO), (4096, OLMO), (None, YARN)] * 16,
}


@pytest.mark.parametrize("name", LAYERS)
def test_windows_and_ropes_of_layers(name):
    assert [(layer.window, layer.rope) for layer in read(name).layers] == LAYERS[name]


@pytest.mark.parametrize(
    ("name", "window", "pairs", "partial"),
    [
        ("Phi-3-mini-128k-instruct", 262144, 48, None),
        ("Phi-3-mini-128k-instruct (2024-04)", 262144, 48, None),
        ("Phi-3-medium-128k-instruct", 131072, 64, None),
        ("Phi-3.5-mini-instruct", 262144, 48, None),
        ("Phi-4-mini-instruct", 262144, 48, 0.75),
    ],
)
def test_longrope_of_phi(name, window, pairs, partial):
    model = read(name)
    assert set(model.windows) == {window}
    (rope,) = model.ropes
    assert (rope.type, rope.theta, rope.partial_rotary_factor) == ("longrope", 1e4, partial)
    assert len(rope.short_factor) == len(rope.long_factor) == pairs == rope.width(model.head_dim) // 2
    assert (model.short_length, model.context_length) == (4096, 131072)


NAMES = (
    "attn_logit_softcapping", "final_logit_softcapping", "embedding_multiplier", "residual_multiplier", "logits_scaling"
)  # fmt: skip
SCALARS = {
    "gemma-7b": (None, (None,) * 5),
    "gemma-2-2b-it": (1 / 16, (50.0, 30.0, None, None, None)),
    "gemma-2-9b-it": (1 / 16, (50.0, 30.0, None, None, None)),
    "gemma-2-27b-it": (1 / 12, (50.0, 30.0, None, None, None)),
    "gemma-3-1b-it": (1 / 16, (None,) * 5),
    "gemma-3-4b-it": (1 / 16, (None,) * 5),
    "gemma-3-27b-it": (168**-0.5, (None,) * 5),
    "granite-3.0-2b-instruct": (1 / 64, (None, None, 12.0, 0.22, 8.0)),
    "granite-3.3-8b-instruct": (1 / 128, (None, None, 12.0, 0.22, 16.0)),
    "phi-4": (None, (None,) * 5),
    "SmolLM3-3B": (None, (None,) * 5),
    "Olmo-3-7B-Instruct": (None, (None,) * 5),
}


@pytest.mark.parametrize("name", SCALARS)
def test_scalars(name):
    model = read(name)
    scale, others = SCALARS[name]
    assert model.attention_scale == pytest.approx(scale)
    assert tuple(getattr(model, key) for key in NAMES) == others


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_names_of_gemma3_with_images(prefix):
    text = tensors_of(CONFIGS["gemma-3-4b-it"])
    stored = {name.replace("model.", prefix, 1): shape for name, shape in text.items()}
    vision = ("vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.mm_input_projection_weight")
    vision = [name if prefix.startswith("language") else f"model.{name}" for name in vision]
    own, listed, notes = renamed(stored | dict.fromkeys(vision, (1,)), {*stored, *vision}, "gemma3")
    assert own == text
    assert listed == set(text)
    assert notes == ["only the text part is read; tensors of other parts are ignored (2)"]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_gemma3_loads(tmp_path, prefix):
    source = GOLDENS / "newer" / "checkpoints" / "gemma3"
    text = json.loads((source / "config.json").read_text())
    outer = {key: CONFIGS["gemma-3-4b-it"][key] for key in ("architectures", "model_type", "vision_config")}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"text_config": text, "dtype": text.pop("dtype")}))
    own = load_file(source / "model.safetensors")
    tensors = {name.replace("model.", prefix, 1): array for name, array in own.items()}
    image = {"vision_tower.vision_model.post_layernorm.weight": np.ones(3, np.float32)}
    save_file(tensors | image, tmp_path / "model.safetensors")
    with pytest.warns(JaxgenWarning, match="only the text part is read"):
        params, cfg = load_hf(tmp_path)
    expected, other = load(source)
    assert cfg.model == other.model
    np.testing.assert_array_equal(params["model"]["norm"]["weight"], expected["model"]["norm"]["weight"])
    rest = {name: array for name, array in tensors.items() if "layers.1.mlp" not in name}
    save_file(rest, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp"):
        load_hf(tmp_path)
