"""Model families: one record per architecture, with its differences from the shared decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxgen.core.model.config_fields import FULL, SLIDING, Field, only, positive, whole
from jaxgen.core.model.expert_config import MIXTRAL_EXPERTS, QWEN_EXPERTS, QWEN_SHARED, ExpertRule
from jaxgen.core.model.rope_config import LONG_ROPE, ONE_ROPE, SWITCHED_ROPE, RopeRule, by_window, rope_switches
from jaxgen.errors import ConfigError, shown


@dataclasses.dataclass(frozen=True)
class WindowRule:
    """Rule for reading each layer's sliding window from config.json.

    Attributes:
        keys: the config.json keys that the rule reads.
        read: maps a config to each layer's window in tokens, or None. The config's values already have the right types,
            and the family's defaults are filled in. Raises `ConfigError` if values are null or contradict each other.
        write: the inverse of `read`. Given a config (without `keys`) and each layer's window, the function returns the
            config.json entries for these windows.
    """

    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], tuple[int | None, ...]]
    write: Callable[[Mapping[str, Any], tuple[int | None, ...]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class NormRule:
    """Where the RMS norms of a layer are, and what they compute.

    Attributes:
        before: whether the inputs of attention and of the feed-forward layer are normalized.
        after: whether their outputs are normalized.
        queries_keys: "head" if each head's queries and keys are normalized before RoPE, "projection" if all heads
            together are.
        unit_offset: whether the normalized values are multiplied by 1 + the weight.
        rounds_last: whether the multiplication is in float32. If False, the normalized values are rounded before it.
    """

    before: bool = True
    after: bool = False
    queries_keys: str | None = None
    unit_offset: bool = False
    rounds_last: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture. Each bias is present (True), absent (False), or set by a config.json key (a str).

    Attributes:
        architecture: the model class in transformers.
        tokenizer: the tokenizer class in transformers, used if a checkpoint's files do not name one.
        windows: the rule for sliding windows.
        defaults: values of config.json keys that a file may lack. They are the defaults of transformers' class, which
            have been the same in all releases (4.28 to 5.24).
        ropes: the rule for each layer's RoPE.
        norms: the rule for norms.
        experts: the rule for experts; None if no layer has any.
        fields: keys of config.json that only some families read, or that have other valid values than in `FIELDS`. If
            results depend on their values, `ModelConfig` has fields of the same names.
        activation: the key of config.json with the activation function.
        attention_bias: whether the query, key and value projections have biases.
        output_bias: whether the attention's output projection has a bias.
        mlp_bias: whether the feed-forward layer has biases.
        fused: whether checkpoints store the projections of a layer as `qkv_proj` and `gate_up_proj`.
        scales_embedding: whether embeddings of ids are multiplied by the square root of their size.
        rotates_in_float32: whether RoPE is computed in float32 and rounded once.
    """

    architecture: str
    tokenizer: str
    windows: WindowRule
    defaults: Mapping[str, Any]
    ropes: RopeRule = ONE_ROPE
    norms: NormRule = NormRule()
    experts: ExpertRule | None = None
    fields: Mapping[str, Field] = dataclasses.field(default_factory=dict)
    activation: str = "hidden_act"
    attention_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    fused: bool = False
    scales_embedding: bool = False
    rotates_in_float32: bool = False

    @property
    def biases(self) -> dict[str, bool | str]:
        """The three biases by name."""
        return {"attention_bias": self.attention_bias, "output_bias": self.output_bias, "mlp_bias": self.mlp_bias}

    @property
    def keys(self) -> frozenset[str]:
        """The config.json keys that this family reads for sliding windows and biases."""
        return frozenset(self.windows.keys) | {rule for rule in self.biases.values() if isinstance(rule, str)}

    @property
    def own_fields(self) -> dict[str, Field]:
        """`fields`, and those of experts."""
        return {**self.fields, **(self.experts.fields if self.experts else {})}

    @property
    def own_keys(self) -> frozenset[str]:
        """All config.json keys that this family reads and others may not."""
        experts = {*self.experts.keys, *EXPERT_TRAINING} if self.experts else ()
        return self.keys | set(self.own_fields) | set(self.ropes.keys) | {self.activation, *experts}


def _no_windows(config: Mapping[str, Any]) -> tuple[None, ...]:
    if config.get("use_sliding_window") or SLIDING in (config.get("layer_types") or ()):
        raise ConfigError(
            f"model_type {config['model_type']} has no sliding windows: use_sliding_window must be false, "
            f"layer_types may contain only {FULL}"
        )
    return (None,) * config["num_hidden_layers"]


def _windows_where_switched_on(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window; `layer_types` or, if missing, `max_window_layers` says which layers have windows."""
    layers, types = config["num_hidden_layers"], config.get("layer_types")
    if not config.get("use_sliding_window"):
        if SLIDING in (types or ()):
            raise ConfigError(f"layer_types contains {SLIDING}, but use_sliding_window is not true")
        return (None,) * layers
    needed = ["sliding_window"] if types else ["sliding_window", "max_window_layers"]
    if missing := [key for key in needed if config.get(key) is None]:
        raise ConfigError(f"use_sliding_window is true, but missing: {', '.join(missing)}")
    if not types:
        types = [FULL if layer < config["max_window_layers"] else SLIDING for layer in range(layers)]
    return tuple(config["sliding_window"] if kind == SLIDING else None for kind in types)


def _write_switch(config: Mapping[str, Any], windows: tuple[int | None, ...]) -> dict[str, Any]:
    windowed = [layer for layer, window in enumerate(windows) if window is not None]
    entries = {
        "use_sliding_window": bool(windowed),
        "sliding_window": windows[windowed[0]] if windowed else config["max_position_embeddings"],
        "max_window_layers": windowed[0] if windowed else len(windows),
    }
    if windowed and windowed != list(range(windowed[0], len(windows))):
        entries["layer_types"] = [FULL if window is None else SLIDING for window in windows]
    return entries


def _one_window(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    return (config["sliding_window"],) * config["num_hidden_layers"]


def _by_type(derived: Callable[[Mapping[str, Any]], list[bool]], *keys: str) -> WindowRule:
    """Return a rule for windows in the layers that `layer_types` names or, if it is missing, `derived` selects.

    `derived` returns for each layer whether it has a window; `keys` are the keys that it reads.
    """

    def read(config: Mapping[str, Any]) -> tuple[int | None, ...]:
        types, window = config.get("layer_types"), config.get("sliding_window")
        windowed = [kind == SLIDING for kind in types] if types else derived(config)
        if window is None and any(windowed):
            raise ConfigError("missing: sliding_window, the size of the windows that some layers have")
        return tuple([window if has_window else None for has_window in windowed])

    def write(config: Mapping[str, Any], windows: tuple[int | None, ...]) -> dict[str, Any]:
        switch = {"use_sliding_window": any(windows)} if "use_sliding_window" in keys else {}
        types = [FULL if window is None else SLIDING for window in windows]
        return switch | {"sliding_window": next(filter(None, windows), None), "layer_types": types}

    return WindowRule(("sliding_window", "layer_types", *keys), read, write)


def _all_but_each(interval: Any, layers: int) -> list[bool]:
    if type(interval) is not int or interval < 1:
        raise ConfigError(f"sliding_window_pattern must be a whole number >= 1, got {shown(interval)}")
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def _every_other(config: Mapping[str, Any]) -> list[bool]:
    if config.get("sliding_window_size") not in (None, config.get("sliding_window")):
        raise ConfigError("sliding_window_size, an older name of sliding_window, differs from it: keep one")
    return [layer % 2 == 0 for layer in range(config["num_hidden_layers"])]


def _gemma3_windows(config: Mapping[str, Any]) -> list[bool]:
    patterns = [config.get(key) for key in ("sliding_window_pattern", "_sliding_window_pattern")]
    given = [pattern for pattern in patterns if pattern is not None] or [6]
    if len(set(map(str, given))) > 1:
        raise ConfigError("sliding_window_pattern and _sliding_window_pattern differ: keep one")
    return _all_but_each(given[0], config["num_hidden_layers"])


def _windows_without_rope(config: Mapping[str, Any]) -> list[bool]:
    active = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    return [active and not has_rope for has_rope in rope_switches(config, config["num_hidden_layers"])]


def _write_no_windows(config: Mapping[str, Any], windows: tuple[int | None, ...]) -> dict[str, Any]:
    return {"use_sliding_window": False, "sliding_window": None}


# Keys of models with experts that only affect training in transformers
EXPERT_TRAINING = ("output_router_logits", "router_jitter_noise")

SWITCH_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

# No layer has a window. A config converted from another family may contain `SWITCH_KEYS`, with windows switched off.
NO_WINDOWS = WindowRule(SWITCH_KEYS, _no_windows, lambda config, windows: {})
# The same for classes that have windows. transformers 4.41.1 uses `sliding_window` even where it is switched off.
WINDOWS_OFF = WindowRule(SWITCH_KEYS, _no_windows, _write_no_windows)
# If `use_sliding_window` is true, the layers that `layer_types` or `max_window_layers` selects have sliding windows.
SWITCHED_WINDOWS = WindowRule(SWITCH_KEYS, _windows_where_switched_on, _write_switch)
# The same window in every layer, or none if `sliding_window` is null.
ONE_WINDOW = WindowRule(("sliding_window",), _one_window, lambda config, windows: {"sliding_window": windows[0]})
# Windows in every other layer, from the first
ALTERNATING = _by_type(_every_other, "sliding_window_size")
GEMMA3_WINDOWS = _by_type(_gemma3_windows, "sliding_window_pattern", "_sliding_window_pattern")
# Three layers with windows, then one without
THREE_OF_FOUR = _by_type(lambda config: _all_but_each(4, config["num_hidden_layers"]))
WINDOWS_WITHOUT_ROPE = _by_type(_windows_without_rope, "use_sliding_window", "max_window_layers")

_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN = _DEFAULTS | {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_QWEN |= {"sliding_window": 4096, "max_window_layers": 28}
_MISTRAL = _DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}

_MIXTRAL = _DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": None}
_MIXTRAL |= {"rms_norm_eps": 1e-5}

# transformers 5 writes a window of 0 where windows are switched off.
_NO_WINDOW_SIZE = {"sliding_window": whole(0, None)}

_TANH = "gelu_pytorch_tanh"
_GEMMA = _DEFAULTS | {"head_dim": 256, "max_position_embeddings": 8192, "hidden_act": _TANH}
_GEMMA |= {"num_key_value_heads": 16, "tie_word_embeddings": True}
_GEMMA2 = _GEMMA | {"num_key_value_heads": 4, "hidden_activation": _TANH, "query_pre_attn_scalar": 256}
_GEMMA2 |= {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = _GEMMA2 | {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
_GEMMA3 |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
# In the first files, "gelu" means the approximation by tanh, as in transformers.
_GEMMA_ACTIVATION = Field(f"gelu or {_TANH}", lambda value: value in ("gelu", _TANH), read=lambda value: _TANH)
_GEMMA_NORMS = NormRule(unit_offset=True, rounds_last=True)
_GEMMA2_FIELDS = {"query_pre_attn_scalar": whole(1), "final_logit_softcapping": positive(None)}
_GRANITE_FIELDS: dict[str, Field] = dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), positive()
)
_OLMO2 = _DEFAULTS | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_OLMO_NORMS = NormRule(before=False, after=True, queries_keys="projection", rounds_last=True)
_SMOLLM3 = _DEFAULTS | {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True}
_SMOLLM3 |= {"rope_theta": 2e6, "no_rope_layer_interval": 4}
# transformers drops outputs of layers at random in training; `embd_pdrop` has no effect.
_NO_DROPOUT = Field("0", lambda value: type(value) in (int, float) and value == 0, 0.0)
_PHI3 = _DEFAULTS | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None}

# Models for images and text, by `model_type`: the family of their text part, whose config is `text_config`, and class
# defaults of sizes that published files lack.
TEXT_PARTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gemma3": ("gemma3_text", {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}),
}

# By `model_type`
FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Tokenizer", SWITCHED_WINDOWS, _QWEN, attention_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "Qwen2Tokenizer",
        SWITCHED_WINDOWS,
        _QWEN | {"head_dim": 128},
        norms=NormRule(queries_keys="head"),
        attention_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaTokenizer",
        NO_WINDOWS,
        _DEFAULTS | {"max_position_embeddings": 2048},
        mlp_bias="mlp_bias",
        attention_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "mistral": Family("MistralForCausalLM", "LlamaTokenizer", ONE_WINDOW, _MISTRAL),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "Qwen2Tokenizer",
        WINDOWS_OFF,
        _QWEN | {"num_key_value_heads": 16},
        experts=QWEN_SHARED,
        fields=_NO_WINDOW_SIZE | {"qkv_bias": only(True)},
        attention_bias=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen2Tokenizer",
        WINDOWS_OFF,
        _QWEN | {"num_key_value_heads": 4},
        norms=NormRule(queries_keys="head"),
        experts=QWEN_EXPERTS,
        fields=_NO_WINDOW_SIZE,
        attention_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "mixtral": Family("MixtralForCausalLM", "LlamaTokenizer", ONE_WINDOW, _MIXTRAL, experts=MIXTRAL_EXPERTS),
    "phi3": Family(
        "Phi3ForCausalLM",
        "LlamaTokenizer",
        ONE_WINDOW,
        _PHI3,
        ropes=LONG_ROPE,
        fields={"resid_pdrop": _NO_DROPOUT, "embd_pdrop": _NO_DROPOUT},
        fused=True,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        "GPT2Tokenizer",
        NO_WINDOWS,
        _DEFAULTS | {"max_position_embeddings": 2048} | dict.fromkeys(_GRANITE_FIELDS, 1.0),
        fields=_GRANITE_FIELDS,
        mlp_bias="mlp_bias",
        attention_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        "PreTrainedTokenizerFast",
        WINDOWS_WITHOUT_ROPE,
        _SMOLLM3,
        ropes=SWITCHED_ROPE,
        mlp_bias="mlp_bias",
        attention_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        "GemmaTokenizer",
        NO_WINDOWS,
        _GEMMA,
        norms=_GEMMA_NORMS,
        fields={"hidden_act": _GEMMA_ACTIVATION},
        scales_embedding=True,
        attention_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "GemmaTokenizer",
        ALTERNATING,
        _GEMMA2,
        norms=dataclasses.replace(_GEMMA_NORMS, after=True),
        fields=_GEMMA2_FIELDS | {"attn_logit_softcapping": positive(None)},
        activation="hidden_activation",
        scales_embedding=True,
        attention_bias="attention_bias",
        output_bias="attention_bias",
    ),
    # `attn_logit_softcapping` has no effect in transformers' class, so only null is allowed.
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        "GemmaTokenizer",
        GEMMA3_WINDOWS,
        _GEMMA3,
        ropes=by_window("rope_local_base_freq"),
        norms=dataclasses.replace(_GEMMA_NORMS, after=True, queries_keys="head"),
        fields=_GEMMA2_FIELDS,
        activation="hidden_activation",
        scales_embedding=True,
        attention_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        "GPT2Tokenizer",
        NO_WINDOWS,
        _OLMO2,
        norms=_OLMO_NORMS,
        rotates_in_float32=True,
        attention_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        "GPT2Tokenizer",
        THREE_OF_FOUR,
        _OLMO2 | {"rope_theta": 500000.0, "sliding_window": 4096},
        ropes=by_window(None, only_theta=500000.0),
        norms=_OLMO_NORMS,
        rotates_in_float32=True,
        attention_bias="attention_bias",
        output_bias="attention_bias",
    ),
}
