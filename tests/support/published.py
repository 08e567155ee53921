"""Published configs as facts: the keys that matter for a load, with reduced sizes, and what they mean.

The numbers of heads, RoPE, windows, biases and additional keys are those of the published files, written down by hand.
All other sizes are smaller, in proportion where the proportion matters (`head_dim` beside `hidden_size`).
"""

import dataclasses
from typing import Any

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclasses.dataclass(frozen=True)
class Published:
    """A config.json, and the properties of the model that it describes.

    `biases` names the projections with biases: q (with k and v), o, m (the feed-forward layer).
    """

    config: dict[str, Any]
    kv_heads: int
    theta: float
    length: int
    eps: float
    head_dim: int = 2
    tied: bool = False
    rope: str = "default"
    factor: float | None = None
    window: int | None = None
    biases: str = ""
    ignored: tuple[str, ...] = ()


def _config(model_type: str, heads: int, **keys: Any) -> dict[str, Any]:
    config = {
        "architectures": [_CLASSES.get(model_type, "Other")],
        "model_type": model_type,
        "vocab_size": 24,
        "hidden_size": 2 * heads,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | keys


def _llama(heads: int, kv: int, theta: float | None, length: int, eps: float = 1e-5, more=None, **known) -> Published:
    """Return a Llama of release 4.31 or later; without `theta`, of a time when the file had no such key."""
    keys = {"num_key_value_heads": kv, "max_position_embeddings": length, "rms_norm_eps": eps, "rope_scaling": None}
    keys |= {"pretraining_tp": 1, "tie_word_embeddings": known.get("tied", False)}
    if theta is not None:
        keys |= {"rope_theta": theta, "attention_bias": False, "attention_dropout": 0.0}
    return Published(_config("llama", heads, **keys | (more or {})), kv, theta or 10000.0, length, eps, **known)


def _mistral(heads: int, kv: int, theta: float, length: int, window: int | None, more=None, **known) -> Published:
    keys = {"num_key_value_heads": kv, "max_position_embeddings": length, "rms_norm_eps": 1e-5, "rope_theta": theta}
    keys |= {"sliding_window": window, "tie_word_embeddings": False, "attention_dropout": 0.0}
    return Published(_config("mistral", heads, **keys | (more or {})), kv, theta, length, 1e-5, window=window, **known)


def _qwen2(heads: int, kv: int, theta: float, length: int, eps: float = 1e-6, more=None, **known) -> Published:
    keys = {"num_key_value_heads": kv, "max_position_embeddings": length, "rms_norm_eps": eps, "rope_theta": theta}
    keys |= {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21, "attention_dropout": 0.0}
    keys |= {"tie_word_embeddings": known.get("tied", False)}
    return Published(_config("qwen2", heads, **keys | (more or {})), kv, theta, length, eps, biases="q", **known)


def _qwen3(heads: int, kv: int, theta: float, length: int, more=None, **known) -> Published:
    keys = {"num_key_value_heads": kv, "max_position_embeddings": length, "rms_norm_eps": 1e-6, "rope_theta": theta}
    keys |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 36, "attention_dropout": 0.0}
    keys |= {"tie_word_embeddings": known.get("tied", False), "head_dim": 2, "rope_scaling": None}
    keys |= {"attention_bias": False}
    return Published(_config("qwen3", heads, **keys | (more or {})), kv, theta, length, 1e-6, **known)


def _without(published: Published, *keys: str) -> Published:
    config = {key: value for key, value in published.config.items() if key not in keys}
    return dataclasses.replace(published, config=config)


def _yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_scaling": {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | more
    }


def _old_yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    scaling = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return {"rope_scaling": scaling | more}


def _linear(factor: float) -> dict[str, Any]:
    return {"rope_scaling": {"type": "linear", "factor": factor}}


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_scaling": scaling | {"original_max_position_embeddings": 8192}}


_UNSLOTH = {"unsloth_fixed": True, "unsloth_version": "2025.3.18", "pad_token_id": 11}
_NAMES = tuple(sorted(_UNSLOTH))[1:]
_V1 = ("num_key_value_heads", "rope_scaling", "pretraining_tp")  # keys that release 4.31 added
_SMOL = {"is_llama_config": True, "rope_interleaved": False, "mlp_bias": False}
_JS = {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}}
_CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
_DUAL = {"dual_chunk_attention_config": _CHUNKS}
_R1 = _yarn(4.0, 32768, attn_factor=0.8782488562869419)
_V5 = {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "dtype": "bfloat16"}
_V5 |= {"layer_types": ["full_attention"]}

LOADED: dict[str, Published] = {
    # Llama 1 and 2, and their time: no rope_theta, some without num_key_value_heads
    "Llama-2-7b-hf": _llama(32, 32, None, 4096),
    "Llama-2-7b-chat-hf": _llama(32, 32, None, 4096),
    "Llama-2-13b-chat-hf": _llama(40, 40, None, 4096),
    "Llama-2-70b-hf": _llama(64, 8, None, 4096),
    "LlamaGuard-7b": _llama(32, 32, None, 4096),
    "vicuna-7b-v1.5": _llama(32, 32, None, 4096),
    "vicuna-7b-v1.5-16k": _llama(32, 32, None, 4096, more=_linear(4.0), rope="linear", factor=4.0),
    "vicuna-7b-v1.3": _without(
        _llama(32, 32, None, 2048, 1e-6), "num_key_value_heads", "rope_scaling", "pretraining_tp"
    ),
    "open_llama_7b": _without(
        _llama(32, 32, None, 2048, 1e-6), "num_key_value_heads", "rope_scaling", "pretraining_tp"
    ),
    "llama-68m": _without(_llama(12, 12, None, 2048, 1e-6), *_V1),
    "llama-7b-hf (2023-03)": _without(
        _llama(32, 32, None, 2048, 1e-6, {"max_sequence_length": 2048}, ignored=("max_sequence_length",)),
        *_V1,
        "max_position_embeddings",
    ),
    "Sheared-LLaMA-1.3B": _llama(16, 16, None, 4096),
    "LLaMA-2-7B-32K": _llama(32, 32, None, 32768, more=_linear(8.0), rope="linear", factor=8.0),
    "Yarn-Llama-2-7b-64k": _llama(
        *(32, 32, None, 65536),
        more=_old_yarn(16.0, 4096, finetuned=True),
        rope="yarn",
        factor=16.0,
        ignored=("finetuned",),
    ),
    "deepseek-llm-7b-chat": _llama(30, 30, None, 4096, 1e-6),
    "deepseek-coder-6.7b-instruct": _llama(32, 32, 100000.0, 16384, 1e-6, more=_linear(4.0), rope="linear", factor=4.0),
    "CodeLlama-7b-hf": _llama(32, 32, 1000000.0, 16384),
    "CodeLlama-34b-Instruct-hf": _llama(64, 8, 1000000.0, 16384),
    "Phind-CodeLlama-34B-v2": _llama(64, 8, 1000000.0, 16384),
    "TinyLlama-1.1B-Chat-v1.0": _llama(32, 4, 10000.0, 2048),
    "SOLAR-10.7B-v1.0": _llama(32, 8, 10000.0, 4096),
    "Yi-1.5-6B-Chat": _llama(32, 4, 5000000.0, 4096, 1e-6),
    "Yi-34B": _llama(56, 8, 5000000.0, 4096),
    "granite-8b-code-base": _llama(
        32, 8, 10000.0, 4096, more={"attention_bias": True, "mlp_bias": True}, tied=True, biases="qom"
    ),
    # Llama 3
    "Meta-Llama-3-8B-Instruct": _llama(32, 8, 500000.0, 8192),
    "Llama-3-8B-Instruct-Gradient-1048k": _llama(32, 8, 3580165449.0, 1048576),
    "Llama-3.1-8B-Instruct": _llama(32, 8, 500000.0, 131072, more=_llama3(8.0), rope="llama3", factor=8.0),
    "Llama-3.2-1B": _llama(
        32, 8, 500000.0, 131072, more=_llama3(32.0) | {"head_dim": 2}, tied=True, rope="llama3", factor=32.0
    ),
    "Llama-3.2-3B-Instruct": _llama(
        24, 8, 500000.0, 131072, more=_llama3(32.0) | {"head_dim": 2}, tied=True, rope="llama3", factor=32.0
    ),
    "Llama-3.3-70B-Instruct": _llama(64, 8, 500000.0, 131072, more=_llama3(8.0), rope="llama3", factor=8.0),
    "Llama-Guard-3-8B": _llama(32, 8, 500000.0, 131072, more=_llama3(8.0), rope="llama3", factor=8.0),
    "Hermes-3-Llama-3.1-8B": _llama(32, 8, 500000.0, 131072, more=_llama3(8.0), rope="llama3", factor=8.0),
    "DeepSeek-R1-Distill-Llama-8B": _llama(32, 8, 500000.0, 131072, more=_llama3(8.0), rope="llama3", factor=8.0),
    "unsloth/Meta-Llama-3.1-8B-Instruct": _llama(
        32, 8, 500000.0, 131072, more=_llama3(8.0) | _UNSLOTH, rope="llama3", factor=8.0, ignored=_NAMES
    ),
    "unsloth/Llama-3.2-1B-Instruct": _llama(
        *(32, 8, 500000.0, 131072),
        more=_llama3(32.0) | _UNSLOTH | {"head_dim": 2},
        tied=True,
        rope="llama3",
        factor=32.0,
        ignored=_NAMES,
    ),
    "Falcon3-7B-Instruct": _llama(
        12,
        4,
        1000042.0,
        32768,
        1e-6,
        more={"head_dim": 4, "hidden_size": 48, "activation": "swiglu"},
        head_dim=4,
        ignored=("activation",),
    ),
    # SmolLM
    "SmolLM-135M": _llama(9, 3, 10000.0, 2048, tied=True),
    "SmolLM2-135M": _llama(9, 3, 100000.0, 8192, more=_SMOL, tied=True, ignored=("is_llama_config",)),
    "SmolLM2-360M-Instruct": _llama(
        15, 5, 100000.0, 8192, more=_SMOL | _JS, tied=True, ignored=("is_llama_config", "transformers.js_config")
    ),
    "SmolLM2-1.7B-Instruct": _llama(32, 32, 130000.0, 8192, more=_JS, tied=True, ignored=("transformers.js_config",)),
    # Mistral
    "Mistral-7B-v0.1": _without(_mistral(32, 8, 10000.0, 32768, 4096), "attention_dropout"),
    "Mistral-7B-Instruct-v0.2": _mistral(32, 8, 1000000.0, 32768, None),
    "Mistral-7B-Instruct-v0.3": _mistral(32, 8, 1000000.0, 32768, None),
    "Mistral-Nemo-Instruct-2407": _mistral(
        32, 8, 1000000.0, 131072, None, more={"head_dim": 4, "hidden_size": 160}, head_dim=4
    ),
    "Mistral-Small-24B-Instruct-2501": _mistral(
        32, 8, 100000000.0, 32768, None, more={"head_dim": 4, "hidden_size": 160}, head_dim=4
    ),
    "Ministral-8B-Instruct-2410": _mistral(32, 8, 100000000.0, 32768, 32768, more={"head_dim": 2}),
    "Codestral-22B-v0.1": _mistral(48, 8, 1000000.0, 32768, None),
    "Mathstral-7B-v0.1": _mistral(32, 8, 1000000.0, 32768, None),
    "zephyr-7b-beta": _mistral(32, 8, 10000.0, 32768, 4096, more={"pad_token_id": 2}),
    "OpenHermes-2.5-Mistral-7B": _mistral(32, 8, 10000.0, 32768, 4096),
    "openchat-3.5-0106": _mistral(32, 8, 10000.0, 8192, 4096),
    "Yarn-Mistral-7b-128k": _mistral(
        *(32, 8, 10000.0, 32768, 131072),
        more=_old_yarn(16.0, 8192, finetuned=True) | {"auto_map": {"AutoConfig": "configuration_mistral.X"}},
        rope="yarn",
        factor=16.0,
        ignored=("auto_map", "finetuned"),
    ),
    "a Mistral saved without sliding_window": _without(_mistral(32, 8, 10000.0, 32768, 4096), "sliding_window"),
    # Qwen 1.5, 2 and 2.5
    "Qwen1.5-0.5B-Chat": _qwen2(16, 16, 1000000.0, 32768, tied=True),
    "Qwen1.5-7B": _qwen2(32, 32, 1000000.0, 32768),
    "Qwen2-0.5B-Instruct": _qwen2(14, 2, 1000000.0, 32768, tied=True),
    "Qwen2-7B-Instruct": _qwen2(28, 4, 1000000.0, 32768),
    "Qwen2.5-0.5B-Instruct": _qwen2(14, 2, 1000000.0, 32768, tied=True),
    "Qwen2.5-7B-Instruct": _qwen2(28, 4, 1000000.0, 32768),
    "Qwen2.5-7B-Instruct with the model card's YaRN": _qwen2(
        28, 4, 1000000.0, 32768, more=_old_yarn(4.0, 32768), rope="yarn", factor=4.0
    ),
    "Qwen2 with windows switched on": _qwen2(
        *(28, 4, 1000000.0, 32768),
        more={"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0},
        window=4096,
    ),
    "Qwen2.5-72B-Instruct": _qwen2(64, 8, 1000000.0, 32768),
    "Qwen2.5-Coder-7B-Instruct": _qwen2(28, 4, 1000000.0, 32768),
    "Qwen2.5-Math-7B": _qwen2(28, 4, 10000.0, 4096, more={"use_mrope": False}),
    "Qwen2.5-7B-Instruct-1M": _qwen2(
        28, 4, 10000000.0, 1010000, 1e-5, more=_DUAL, ignored=("up to 262,144 tokens, results are the same",)
    ),
    "Qwen2.5-14B-Instruct-1M": _qwen2(
        40, 8, 10000000.0, 1010000, 1e-5, more=_DUAL, ignored=("up to 262,144 tokens, results are the same",)
    ),
    "QwQ-32B": _qwen2(40, 8, 1000000.0, 131072, 1e-5),
    "DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(12, 2, 10000.0, 131072, more={"use_mrope": False}),
    "DeepSeek-R1-Distill-Qwen-7B": _qwen2(28, 4, 10000.0, 131072, more={"use_mrope": False}),
    "unsloth/Qwen2.5-7B-Instruct": _qwen2(28, 4, 1000000.0, 32768, more=_UNSLOTH, ignored=_NAMES),
    "Qwen2.5-7B-Instruct as transformers 5 saves it": _without(
        _qwen2(28, 4, 1000000.0, 32768, more=_V5), "rope_theta", "torch_dtype"
    ),
    # Qwen 3
    "Qwen3-0.6B": _qwen3(16, 8, 1000000.0, 40960, tied=True),
    "Qwen3-8B": _qwen3(32, 8, 1000000.0, 40960),
    "Qwen3-8B with the model card's YaRN": _qwen3(
        32, 8, 1000000.0, 40960, more=_yarn(4.0, 32768), rope="yarn", factor=4.0
    ),
    "Qwen3-4B-Instruct-2507": _qwen3(32, 8, 5000000.0, 262144, tied=True),
    "Qwen3-Reranker-0.6B": _qwen3(16, 8, 1000000.0, 40960, tied=True),
    "Qwen3-Embedding-0.6B": _qwen3(16, 8, 1000000.0, 32768, tied=True),
    "Qwen3-Embedding-4B": _qwen3(32, 8, 1000000.0, 40960, tied=True),
    "DeepSeek-R1-0528-Qwen3-8B": _qwen3(
        32, 8, 1000000.0, 131072, more=_R1, rope="yarn", factor=4.0, ignored=("attn_factor",)
    ),
    "unsloth/Qwen3-8B": _qwen3(32, 8, 1000000.0, 40960, more=_UNSLOTH, ignored=_NAMES),
}

# Saved from `AutoModel`: the tensors' names lack the prefix "model.", and there is no head.
BASE_MODELS = ("Qwen3-Embedding-0.6B", "Qwen3-Embedding-4B")

_LONGROPE = {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}

# Refused rightly: the config, and the reason
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mlx-community/Qwen3-8B-4bit": (
        LOADED["Qwen3-8B"].config | {"quantization": {"group_size": 64, "bits": 4}},
        "quantization=.*not implemented",
    ),
    "a Llama with interleaved RoPE": (
        LOADED["SmolLM2-135M"].config | {"rope_interleaved": True},
        "rope_interleaved=True is not implemented",
    ),
    "a Llama with Granite's factors": (
        LOADED["granite-8b-code-base"].config | {"embedding_multiplier": 12.0, "logits_scaling": 16.0},
        "embedding_multiplier=12.0 is not implemented; logits_scaling=16.0 is not implemented",
    ),
    "a Llama with longrope": (LOADED["Llama-2-7b-hf"].config | _LONGROPE, "rope_type must be one of .*got 'longrope'"),
    "Skywork-Reward-Llama-3.1-8B": (
        LOADED["Llama-3.1-8B-Instruct"].config | {"architectures": ["LlamaForSequenceClassification"]},
        "architectures must be a list with LlamaForCausalLM or LlamaModel",
    ),
    "Qwen2.5-Math-RM-72B": (
        LOADED["Qwen2.5-72B-Instruct"].config | {"architectures": ["Qwen2ForRewardModel"]},
        "architectures must be a list with Qwen2ForCausalLM or Qwen2Model",
    ),
    "Qwen2-VL-7B-Instruct, renamed to qwen2": (
        LOADED["Qwen2-7B-Instruct"].config
        | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {"depth": 32}},
        "vision_config=.*not implemented.*rope_type must be one of .*got 'mrope'",
    ),
}
