"""Model families: one record per architecture, with its differences from the shared decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxgen.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"


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
class Family:
    """One architecture. Each bias is present (True), absent (False), or set by a config.json key (a str).

    Attributes:
        architecture: the model class in transformers.
        tokenizer: the tokenizer class in transformers, used if a checkpoint's files do not name one.
        windows: the rule for sliding windows.
        attention_bias: whether the query, key and value projections have biases.
        output_bias: whether the attention's output projection has a bias.
        mlp_bias: whether the feed-forward layer has biases.
        qk_norm: whether each head's queries and keys pass through an RMSNorm before RoPE.
        defaults: values of config.json keys that a file may lack. They are the defaults of transformers' class, which
            have been the same in all releases (4.28 to 5.24).
    """

    architecture: str
    tokenizer: str
    windows: WindowRule
    defaults: Mapping[str, Any]
    attention_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False

    @property
    def biases(self) -> dict[str, bool | str]:
        """The three biases by name."""
        return {"attention_bias": self.attention_bias, "output_bias": self.output_bias, "mlp_bias": self.mlp_bias}

    @property
    def keys(self) -> frozenset[str]:
        """The config.json keys that this family reads for sliding windows and biases."""
        return frozenset(self.windows.keys) | {rule for rule in self.biases.values() if isinstance(rule, str)}


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


SWITCH_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")

# No layer has a window. A config converted from another family may contain `SWITCH_KEYS`, with windows switched off.
NO_WINDOWS = WindowRule(SWITCH_KEYS, _no_windows, lambda config, windows: {})
# If `use_sliding_window` is true, the layers that `layer_types` or `max_window_layers` selects have sliding windows.
SWITCHED_WINDOWS = WindowRule(SWITCH_KEYS, _windows_where_switched_on, _write_switch)
# The same window in every layer, or none if `sliding_window` is null.
ONE_WINDOW = WindowRule(("sliding_window",), _one_window, lambda config, windows: {"sliding_window": windows[0]})

_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN = _DEFAULTS | {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_QWEN |= {"sliding_window": 4096, "max_window_layers": 28}
_MISTRAL = _DEFAULTS | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}

# By `model_type`
FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Tokenizer", SWITCHED_WINDOWS, _QWEN, attention_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "Qwen2Tokenizer",
        SWITCHED_WINDOWS,
        _QWEN | {"head_dim": 128},
        attention_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
    ),
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaTokenizer",
        NO_WINDOWS,
        _DEFAULTS | {"max_position_embeddings": 2048},
        attention_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family("MistralForCausalLM", "LlamaTokenizer", ONE_WINDOW, _MISTRAL),
}
