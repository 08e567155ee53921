"""The config.json of published checkpoints of Gemma, Phi, Granite, SmolLM3 and OLMo, with all their sizes.

The values were typed in from memory of the published files; the files themselves are not here. Long lists of factors
are replaced by others of the same length.
"""

from typing import Any

Config = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


def _config(model_type: str, architecture: str, **keys: Any) -> Config:
    common = {"attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
    return {"architectures": [architecture], "model_type": model_type, "torch_dtype": "bfloat16"} | common | keys


def _sizes(width: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, length: int) -> Config:
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": length,
    }


def _gemma(*sizes: int, **keys: Any) -> Config:
    config = _config("gemma", "GemmaForCausalLM", bos_token_id=2, eos_token_id=1, pad_token_id=0, head_dim=256)
    config |= {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0, "hidden_act": "gelu"}
    return config | _sizes(*sizes) | keys


def _gemma2(*sizes: int, **keys: Any) -> Config:
    config = _config("gemma2", "Gemma2ForCausalLM", bos_token_id=2, eos_token_id=1, pad_token_id=0, head_dim=256)
    config |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid"}
    config |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
    config |= {"query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096}
    return config | _sizes(*sizes) | keys


def _gemma3(*sizes: int, **keys: Any) -> Config:
    config = _config("gemma3_text", "Gemma3ForCausalLM", bos_token_id=2, pad_token_id=0, head_dim=256)
    config |= {"attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid"}
    config |= {"eos_token_id": [1, 106], "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
    config |= {"query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_theta": 1000000}
    return config | {"rope_scaling": None, "sliding_window": 512} | _sizes(*sizes) | keys


def _gemma3_multimodal(width: int, mlp: int, layers: int, **text: Any) -> Config:
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "model_type": "gemma3_text"}
    sizes |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    vision = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_attention_heads": 16}
    vision |= {"model_type": "siglip_vision_model", "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": sizes | text,
        "torch_dtype": "bfloat16",
        "vision_config": vision,
    }


def _phi3(*sizes: int, **keys: Any) -> Config:
    config = _config("phi3", "Phi3ForCausalLM", embd_pdrop=0.0, resid_pdrop=0.0, hidden_act="silu", rms_norm_eps=1e-5)
    config |= {"original_max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 10000.0}
    config |= {"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "tie_word_embeddings": False}
    return config | _sizes(*sizes) | keys


def _longrope(pairs: int, name: str = "longrope") -> Config:
    factors = [1.0 + number / 8 for number in range(pairs)]
    return {"type": name, "short_factor": factors, "long_factor": [4 * factor for factor in factors]}


_AUTO_MAP = {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.X"}}
_PHI4_MINI = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False} | _AUTO_MAP
_PHI4_MINI |= {"partial_rotary_factor": 0.75, "rope_scaling": _longrope(48), "tie_word_embeddings": True}
_PHI4_MINI |= {"sliding_window": 262144, "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999}
_PHI4 = {"sliding_window": None, "bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349}


def _granite(*sizes: int, **keys: Any) -> Config:
    config = _config("granite", "GraniteForCausalLM", bos_token_id=0, eos_token_id=0, pad_token_id=0, mlp_bias=False)
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0}
    config |= {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "tie_word_embeddings": True}
    small = {"attention_multiplier": 0.015625, "logits_scaling": 8.0, "attention_dropout": 0.1}
    large = {"attention_multiplier": 0.0078125, "logits_scaling": 16.0, "attention_dropout": 0.1}
    return config | (small if sizes[0] == 2048 else large) | _sizes(*sizes) | keys


def _smollm3(length: int, **keys: Any) -> Config:
    config = _config("smollm3", "SmolLM3ForCausalLM", hidden_act="silu", mlp_bias=False, rms_norm_eps=1e-6)
    config |= {"layer_types": [FULL] * 36, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9}
    config |= {"max_window_layers": 28, "pretraining_tp": 2, "rope_scaling": None, "rope_theta": 5000000.0}
    config |= {"sliding_window": None, "use_sliding_window": False, "eos_token_id": 128012, "pad_token_id": 128004}
    return config | _sizes(2048, 11008, 36, 16, 4, 128256, length) | keys


def _olmo(model_type: str, *sizes: int, **keys: Any) -> Config:
    architecture = {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM"}[model_type]
    config = _config(model_type, architecture, hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False)
    config |= {"rope_scaling": None, "rope_theta": 500000, "eos_token_id": 100257, "pad_token_id": 100277}
    if model_type == "olmo3":
        yarn = {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0}
        config["rope_scaling"] = yarn | {"original_max_position_embeddings": 8192, "rope_type": "yarn"}
        config |= {"sliding_window": 4096, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * (sizes[2] // 4)}
    return config | _sizes(*sizes) | keys


_270M = {"_sliding_window_pattern": 6, "use_bidirectional_attention": False}
_270M |= {"layer_types": ([SLIDING] * 5 + [FULL]) * 3}
_1_1 = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}

CONFIGS: dict[str, Config] = {
    "gemma-2b": _gemma(2048, 16384, 18, 8, 1, 256000, 8192),
    "gemma-2b-it": _gemma(2048, 16384, 18, 8, 1, 256000, 8192, hidden_activation=None),
    "gemma-7b": _gemma(3072, 24576, 28, 16, 16, 256000, 8192),
    "gemma-1.1-2b-it": _gemma(2048, 16384, 18, 8, 1, 256000, 8192, **_1_1),
    "gemma-1.1-7b-it": _gemma(3072, 24576, 28, 16, 16, 256000, 8192, **_1_1),
    "gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4, 256000, 8192, torch_dtype="float32"),
    "gemma-2-2b-it": _gemma2(2304, 9216, 26, 8, 4, 256000, 8192),
    "gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8, 256000, 8192, torch_dtype="float32", sliding_window_size=4096),
    "gemma-2-9b-it": _gemma2(3584, 14336, 42, 16, 8, 256000, 8192, sliding_window_size=4096),
    "gemma-2-27b-it": _gemma2(
        *(4608, 36864, 46, 32, 16, 256000, 8192), head_dim=128, query_pre_attn_scalar=144, sliding_window_size=4096
    ),
    "gemma-3-270m": _gemma3(640, 2048, 18, 4, 1, 262144, 32768, **_270M),
    "gemma-3-270m-it": _gemma3(640, 2048, 18, 4, 1, 262144, 32768, **_270M),
    "gemma-3-1b-pt": _gemma3(1152, 6912, 26, 4, 1, 262144, 32768, sliding_window_pattern=6),
    "gemma-3-1b-it": _gemma3(1152, 6912, 26, 4, 1, 262144, 32768, sliding_window_pattern=6),
    "gemma-3-4b-it": _gemma3_multimodal(2560, 10240, 34),
    "gemma-3-12b-it": _gemma3_multimodal(3840, 15360, 48, num_attention_heads=16, num_key_value_heads=8),
    "gemma-3-27b-it": _gemma3_multimodal(
        *(5376, 21504, 62),
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        query_pre_attn_scalar=168,
    ),
    "Phi-3-mini-4k-instruct": _phi3(3072, 8192, 32, 32, 32, 32064, 4096, sliding_window=2047, **_AUTO_MAP),
    "Phi-3-mini-128k-instruct": _phi3(
        *(3072, 8192, 32, 32, 32, 32064, 131072), sliding_window=262144, rope_scaling=_longrope(48), **_AUTO_MAP
    ),
    "Phi-3-mini-128k-instruct (2024-04)": _phi3(
        *(3072, 8192, 32, 32, 32, 32064, 131072), sliding_window=262144, rope_scaling=_longrope(48, "su"), **_AUTO_MAP
    ),
    "Phi-3-medium-4k-instruct": _phi3(5120, 17920, 40, 40, 10, 32064, 4096, sliding_window=2047, **_AUTO_MAP),
    "Phi-3-medium-128k-instruct": _phi3(
        *(5120, 17920, 40, 40, 10, 32064, 131072), sliding_window=131072, rope_scaling=_longrope(64), **_AUTO_MAP
    ),
    "Phi-3.5-mini-instruct": _phi3(
        *(3072, 8192, 32, 32, 32, 32064, 131072), sliding_window=262144, rope_scaling=_longrope(48), **_AUTO_MAP
    ),
    "phi-4": _phi3(
        5120, 17920, 40, 40, 10, 100352, 16384, rope_theta=250000, original_max_position_embeddings=16384, **_PHI4
    ),
    "Phi-4-reasoning": _phi3(
        5120, 17920, 40, 40, 10, 100352, 32768, rope_theta=500000, original_max_position_embeddings=32768, **_PHI4
    ),
    "Phi-4-mini-instruct": _phi3(3072, 8192, 32, 24, 8, 200064, 131072, **_PHI4_MINI),
    "Phi-4-mini-reasoning": _phi3(3072, 8192, 32, 24, 8, 200064, 131072, **_PHI4_MINI),
    "granite-3.0-2b-instruct": _granite(2048, 8192, 40, 32, 8, 49155, 4096),
    "granite-3.0-8b-instruct": _granite(4096, 12800, 40, 32, 8, 49155, 4096),
    "granite-3.1-2b-instruct": _granite(2048, 8192, 40, 32, 8, 49155, 131072, rope_theta=5000000.0),
    "granite-3.1-8b-instruct": _granite(4096, 12800, 40, 32, 8, 49155, 131072, rope_theta=10000000.0),
    "granite-3.2-8b-instruct": _granite(4096, 12800, 40, 32, 8, 49155, 131072, rope_theta=10000000.0),
    "granite-3.3-2b-instruct": _granite(2048, 8192, 40, 32, 8, 49159, 131072, rope_theta=10000000.0),
    "granite-3.3-8b-instruct": _granite(4096, 12800, 40, 32, 8, 49159, 131072, rope_theta=10000000.0),
    "SmolLM3-3B-Base": _smollm3(65536),
    "SmolLM3-3B": _smollm3(65536, use_cache=False),
    "OLMo-2-0425-1B": _olmo("olmo2", 2048, 8192, 16, 16, 16, 100352, 4096),
    "OLMo-2-1124-7B": _olmo("olmo2", 4096, 11008, 32, 32, 32, 100352, 4096, torch_dtype="float32"),
    "OLMo-2-1124-13B-Instruct": _olmo("olmo2", 5120, 13824, 40, 40, 40, 100352, 4096),
    "OLMo-2-0325-32B-Instruct": _olmo("olmo2", 5120, 27648, 64, 40, 8, 100352, 4096),
    "Olmo-3-7B-Instruct": _olmo("olmo3", 4096, 11008, 32, 32, 32, 100278, 65536),
    "Olmo-3-32B-Think": _olmo("olmo3", 5120, 27648, 64, 40, 8, 100278, 65536),
}

# Keys that one warning names
IGNORED: dict[str, list[str]] = {
    name: sorted({"auto_map", "full_attn_mod", "interpolate_factor", "lm_head_bias"} & set(config))
    for name, config in CONFIGS.items()
}


def sizes_of(config: Config) -> Config:
    """Return the text model's sizes, with the class defaults that the files of Gemma 3 rely on."""
    if "text_config" not in config:
        return config
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208}
    return defaults | config["text_config"]


def tensors_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes in the checkpoint's index (those of a text model, for Gemma 3 with images)."""
    sizes = sizes_of(config)
    kind, width, mlp = sizes["model_type"], sizes["hidden_size"], sizes["intermediate_size"]
    head = sizes.get("head_dim") or width // sizes["num_attention_heads"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    layer = {"self_attn.o_proj": (width, queries), "mlp.down_proj": (width, mlp), "post_attention_layernorm": (width,)}
    if kind == "phi3":
        layer |= {"self_attn.qkv_proj": (queries + 2 * keys, width), "mlp.gate_up_proj": (2 * mlp, width)}
    else:
        layer |= {"self_attn.q_proj": (queries, width), "mlp.gate_proj": (mlp, width), "mlp.up_proj": (mlp, width)}
        layer |= {"self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width)}
    if kind not in ("olmo2", "olmo3"):
        layer["input_layernorm"] = (width,)
    if kind in ("gemma2", "gemma3_text"):
        layer["pre_feedforward_layernorm"] = (width,)
    if kind in ("gemma2", "gemma3_text", "olmo2", "olmo3"):
        layer["post_feedforward_layernorm"] = (width,)
    if kind == "gemma3_text":
        layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    if kind in ("olmo2", "olmo3"):
        layer |= {"self_attn.q_norm": (queries,), "self_attn.k_norm": (keys,)}
    shapes = {"model.embed_tokens.weight": (sizes["vocab_size"], width), "model.norm.weight": (width,)}
    tied = kind.startswith("gemma") or kind == "smollm3" or sizes.get("tie_word_embeddings", False)
    if not tied:
        shapes["lm_head.weight"] = (sizes["vocab_size"], width)
    for number in range(sizes["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
