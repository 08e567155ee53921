"""The metadata of a GGUF file as the content of a config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from convert.gguf.architectures import Architecture, architecture_of
from jaxgen.core.model.families import FAMILIES
from jaxgen.errors import ConfigError, one_line, shown
from jaxgen.gguf.container import GgufFile

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Tensors that hold settings of RoPE
FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"

_REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {"attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta"}
_READ_ELSEWHERE = (
    "vocab_size rope.dimension_count attention.key_length attention.value_length rope.scaling.type "
    "rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor rope.freq_base_swa "
    "attention.sliding_window_pattern expert_weights_norm"
).split()
_IRRELEVANT = ("rope.scaling.finetuned", "tensor_data_layout", "pooling_type", "decoder_start_token_id")
# Other keys with which some architecture computes something else, unless they have one of these values
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_weights_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scale_linear": (0, 1),
    **dict.fromkeys(
        (
            "attention.max_alibi_bias attention.clamp_kqv attention.q_lora_rank attention.kv_lora_rank attention.scale "
            "attention.output_scale attention.temperature_length attention.temperature_scale "
            "attention.shared_kv_layers attention.sliding_window attn_logit_softcapping final_logit_softcapping "
            "router_logit_softcapping logit_scale residual_scale embedding_scale expert_count expert_used_count "
            "leading_dense_block_count expert_shared_count expert_group_count expert_group_used_count "
            "expert_group_scale experts_per_group moe_every_n_layers moe_latent_size nextn_predict_layers "
            "altup.num_inputs embedding_length_per_layer_input swiglu_clamp_exp swiglu_clamp_shexp "
            "interleave_moe_layer_step full_attention_interval activation_sparsity_scale use_parallel_residual "
            "rope.dimension_sections rope.scaling.yarn_log_multiplier rope.scaling.yarn_ext_factor "
            "rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow"
        ).split(),
        (0,),
    ),
}
_LLAMA3_ORIGINAL = 8192  # tokens in the training of Llama 3, which files do not say


def config_of(file: GgufFile, read: Callable[[str], np.ndarray]) -> tuple[dict[str, Any], list[str]]:
    """Return the config.json of a file's model, and notes about ignored metadata; `read` returns a tensor by its name.

    Raises:
        ConfigError: the metadata is incomplete, contradictory, or describes something that is not implemented.
    """
    name, architecture = architecture_of(file)
    family = FAMILIES[architecture.model_type]
    embedding = file.tensors.get(EMBEDDING)
    if embedding is None:
        raise ConfigError(f"{file.path}: {EMBEDDING} is missing")
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": architecture.model_type}
    keys = {**_REQUIRED, **_OPTIONAL, **architecture.keys}
    values = {key: _one(file, f"{name}.{suffix}") for suffix, key in keys.items()}
    if missing := [f"{name}.{suffix}" for suffix, key in _REQUIRED.items() if values[key] is None]:
        raise ConfigError(f"{file.path}: missing: {', '.join(missing)}")
    config |= {"rope_theta": 10_000.0} | {key: value for key, value in values.items() if value is not None}
    if config.get("sliding_window") == 0:  # the converter's way to write that there are no windows
        config["sliding_window"] = None
    config |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": HEAD not in file.tensors}
    config |= _head_size(file, name, architecture, config)
    if isinstance(family.attention_bias, str):
        config[family.attention_bias] = "blk.0.attn_q.bias" in file.tensors
    if isinstance(family.mlp_bias, str):
        config[family.mlp_bias] = "blk.0.ffn_up.bias" in file.tensors
    config |= architecture.entries(file, config)
    config |= _rope(file, name, config, read)
    config |= _special_tokens(file)
    return config, _ignored(file, name, {*keys, *_READ_ELSEWHERE}, config)


def _one(file: GgufFile, key: str) -> Any:
    """Return the value of a key; if it has one for each layer, these must be the same."""
    value = file.metadata.get(key)
    if not isinstance(value, np.ndarray):
        return value
    if len(set(value.tolist())) != 1:
        raise ConfigError(
            f"{file.path}: {key} differs between layers, which is not implemented: {shown(value.tolist())}"
        )
    return value[0].item()


def _head_size(file: GgufFile, name: str, architecture: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """Return the size of a head, and the part of it that is rotated if this can be less."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rotated = file.get(f"{name}.rope.dimension_count", int)
    size = file.get(f"{name}.attention.key_length", int)
    if size is None:
        divides = type(hidden) is int and type(heads) is int and heads > 0
        size = hidden // heads if divides and (architecture.partial or rotated is None) else rotated
    others = {f"{name}.attention.value_length": file.get(f"{name}.attention.value_length", int)}
    if not architecture.partial:
        others[f"{name}.rope.dimension_count"] = rotated
    for key, value in others.items():
        if value not in (None, size):
            raise ConfigError(f"{file.path}: {key}={shown(value)} is not implemented: it must be {size}, a head's size")
    if architecture.partial:
        return {"partial_rotary_factor": rotated / size} if rotated and size and rotated != size else {}
    return {"head_dim": size}


def _rope(file: GgufFile, name: str, config: dict[str, Any], read: Callable[[str], np.ndarray]) -> dict[str, Any]:
    """Return the entries for the scaling of RoPE."""
    prefix = f"{name}.rope.scaling"
    kind, factor = file.get(f"{prefix}.type", str), file.get(f"{prefix}.factor", (float, int))
    original = file.get(f"{prefix}.original_context_length", int)
    attention = file.get(f"{prefix}.attn_factor", (float, int))
    if LONG in file.tensors and SHORT in file.tensors:
        return _long_rope(config, original, attention, read)
    if FREQUENCIES in file.tensors:
        if kind not in (None, "none"):
            raise ConfigError(
                f"{file.path}: {FREQUENCIES} and {prefix}.type={shown(kind)} are not implemented together"
            )
        return _llama3(file, config, original or _LLAMA3_ORIGINAL, read(FREQUENCIES))
    if kind in (None, "none") or factor in (None, 0, 1):
        if kind not in (None, "none", "linear", "yarn"):
            raise ConfigError(f"{file.path}: {prefix}.type={shown(kind)} is not implemented without factors")
        return {}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{file.path}: {prefix}.type={shown(kind)} is not implemented; it must be linear or yarn")
    entry: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if original is not None:
            entry["original_max_position_embeddings"] = original
        usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        if attention is not None and not any(math.isclose(attention, x, rel_tol=1e-5) for x in (1.0, usual)):
            raise ConfigError(f"{file.path}: {prefix}.attn_factor={attention} is not implemented: it must be 1")
    return {"rope_scaling": entry}


def _long_rope(
    config: dict[str, Any], given: int | None, attention: float | None, read: Callable[[str], np.ndarray]
) -> dict[str, Any]:
    """Return the entries for factors of each frequency, one list for short texts and one for long ones."""
    longest = config["max_position_embeddings"]
    original = longest if given is None else given
    if original < 2:
        raise ConfigError(f"rope.scaling.original_context_length must be at least 2, got {original}")
    entry: dict[str, Any] = {"type": "longrope"}
    entry |= {"short_factor": read(SHORT).tolist(), "long_factor": read(LONG).tolist()}
    stretch = longest / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    if attention is not None and not math.isclose(attention, usual, rel_tol=1e-5):
        entry["attention_factor"] = attention
    return {"rope_scaling": entry, "original_max_position_embeddings": original}


def _llama3(file: GgufFile, config: dict[str, Any], original: int, divisors: np.ndarray) -> dict[str, Any]:
    """Return the entry for Llama 3's scaling, of which the file has only the divisor of each frequency.

    The divisors follow from four numbers, of which three are the same in all models.
    """
    factor, size = float(divisors.max()), config["head_dim"]
    if np.allclose(divisors, 1):
        return {}
    theta = config["rope_theta"]
    turns = original * theta ** -(np.arange(0, size, 2) / size) / (2 * math.pi)
    blend = np.clip((turns - 1) / (4 - 1), 0, 1)
    expected = 1 / ((1 - blend) / factor + blend)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ConfigError(f"{file.path}: {FREQUENCIES} is not Llama 3's scaling, and no other one is implemented")
    entry = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_scaling": entry | {"original_max_position_embeddings": original}}


def _special_tokens(file: GgufFile) -> dict[str, Any]:
    """Return the entries for the ids of special tokens; all tokens that end a text or a turn are EOS."""
    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("bos", "eos", "eot", "eom", "padding")}
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    entries = {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"]}
    entries["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    return {key: value for key, value in entries.items() if value is not None}


def _ignored(file: GgufFile, name: str, used: set[str], config: dict[str, Any]) -> list[str]:
    """Return a note that names unknown keys; raise an error for keys that change what is computed."""
    problems, unknown = [], []
    for key, value in file.metadata.items():
        prefix, _, suffix = key.partition(".")
        if prefix != name or suffix in used or suffix in _IRRELEVANT:
            continue
        if suffix not in _NEUTRAL:
            unknown.append(key)
        elif isinstance(value, np.ndarray | list) or value not in _NEUTRAL[suffix]:
            is_whole_text = suffix == "attention.sliding_window" and value >= config["max_position_embeddings"]
            if not is_whole_text:
                problems.append(f"{key}={shown(value)} is not implemented")
    if problems:
        raise ConfigError(f"{file.path}: {'; '.join(problems)}")
    unknown += [key for key in file.metadata if key.startswith("general.sampling.")]
    return [f"unknown metadata is ignored: {one_line(', '.join(unknown), 500)}"] if unknown else []
