"""The architectures of GGUF files: how their metadata and tensors differ from transformers' checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxgen.core.model.config_fields import FULL, SLIDING
from jaxgen.errors import ConfigError
from jaxgen.gguf.container import GgufFile

# The names of a layer's tensors in files and in transformers, without the suffixes .weight and .bias
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2 = _LAYER | _NORMS_AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_EXPERTS = _LAYER | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
TABLES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture, as llama.cpp's converter writes it.

    Attributes:
        model_type: the key of `FAMILIES`.
        keys: keys of config.json by the metadata keys (without the architecture's name) that only some have.
        entries: entries of config.json that depend on other values; the arguments are the file and the entries so far.
        layer: the names of a layer's tensors in transformers, by their names in files.
        pairs: whether the rows of queries and keys are ordered by pairs that RoPE rotates, not by halves of a head.
        adds_one: whether 1 was added to the weights of norms.
        partial: whether `rope.dimension_count` may be less than the size of a head.
    """

    model_type: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    entries: Callable[[GgufFile, Mapping[str, Any]], dict[str, Any]] = lambda file, config: {}
    layer: Mapping[str, str] = dataclasses.field(default_factory=lambda: _LAYER)
    pairs: bool = False
    adds_one: bool = False
    partial: bool = False


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """Return the name of a file's architecture, which is the prefix of its keys, and its record.

    Raises:
        ConfigError: the architecture is not implemented.
    """
    name = file.get("general.architecture", str)
    key = name
    if name == "llama" and file.get("llama.expert_count", int):
        key = "mixtral"
    if name == "olmo2" and file.get("olmo2.attention.sliding_window", int):
        key = "olmo3"
    if name is None or key not in _ARCHITECTURES:
        names = ", ".join(sorted(_ARCHITECTURES.keys() - {"mixtral", "olmo3"}))
        given = "general.architecture is missing" if name is None else f"the architecture {name!r} is not implemented"
        raise ConfigError(f"{file.path}: {given}; it must be one of {names}")
    return name, _ARCHITECTURES[key]


def _gemma2(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"query_pre_attn_scalar": _query_scalar(config, layers_of_27b=46)}


def _gemma3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    local = file.get("gemma3.rope.freq_base_swa", float, 10_000.0)
    scalar = _query_scalar(config, layers_of_27b=62)
    return {"query_pre_attn_scalar": scalar, "rope_local_base_freq": local, "sliding_window_pattern": 6}


def _query_scalar(config: Mapping[str, Any], layers_of_27b: int) -> int:
    """Return `query_pre_attn_scalar`, which files lack: the size of a head, except for the models of 27B, as in
    llama.cpp.
    """
    if config["num_hidden_layers"] == layers_of_27b:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _olmo3(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    pattern, layers = file.metadata.get("olmo2.attention.sliding_window_pattern"), config["num_hidden_layers"]
    if pattern is None or isinstance(pattern, int):
        return {}
    if len(pattern) != layers:
        raise ConfigError(f"{file.path}: sliding_window_pattern must have a value for each of the {layers} layers")
    return {"layer_types": [SLIDING if windowed else FULL for windowed in pattern]}


def _qwen3_moe(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"norm_topk_prob": file.get("qwen3moe.expert_weights_norm", bool, True)}


_GEMMA_CAPS = {
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
}
_QWEN_MOE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", pairs=True),
    "mixtral": Architecture(
        "mixtral",
        {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        layer=_EXPERTS,
        pairs=True,
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _QWEN_MOE | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        layer=_EXPERTS,
    ),
    "qwen3moe": Architecture("qwen3_moe", _QWEN_MOE, _qwen3_moe, layer=_EXPERTS),
    "gemma": Architecture("gemma", adds_one=True),
    "gemma2": Architecture(
        "gemma2",
        _GEMMA_CAPS | {"attn_logit_softcapping": "attn_logit_softcapping"},
        _gemma2,
        layer=_GEMMA2,
        adds_one=True,
    ),
    "gemma3": Architecture("gemma3_text", _GEMMA_CAPS, _gemma3, layer=_GEMMA2, adds_one=True),
    "phi3": Architecture(
        "phi3",
        {"attention.sliding_window": "sliding_window"},
        layer=_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        partial=True,
    ),
    "granite": Architecture("granite", _GRANITE, pairs=True),
    "smollm3": Architecture("smollm3", pairs=True),
    "olmo2": Architecture("olmo2", layer=_LAYER | _NORMS_AFTER),
    "olmo3": Architecture("olmo3", {"attention.sliding_window": "sliding_window"}, _olmo3, layer=_LAYER | _NORMS_AFTER),
}
