"""The shape and constants of a checkpoint, read from Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxgen.errors import ConfigError

MODEL_TYPES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"}
    | {"mscale", "mscale_all_dim"},
}

# Without these there is no way to know what the checkpoint computes; transformers would fill in a guess.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)

# Keys that say nothing about the numbers which the model computes.
_IRRELEVANT = frozenset(
    # bookkeeping, and how torch should run the model
    "_name_or_path _attn_implementation _attn_implementation_autoset _commit_hash attn_implementation "
    "transformers_version use_cache pretraining_tp torchscript use_bfloat16 return_dict output_attentions "
    "output_hidden_states keys_to_ignore_at_inference chunk_size_feed_forward tokenizer_class name_or_path "
    # other heads and tasks
    "id2label label2id num_labels problem_type finetuning_task task_specific_params prefix tf_legacy_loss "
    # encoder-decoder models
    "decoder_start_token_id cross_attention_hidden_size tie_encoder_decoder "
    # special tokens and generation defaults, which GenerationConfig reads
    "bos_token_id eos_token_id pad_token_id sep_token_id max_length min_length do_sample early_stopping "
    "num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences "
    "output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens".split()
)

# Keys that would change the numbers unless they hold one of these values.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "use_mrope": (False, None),
    "partial_rotary_factor": (1, None),
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "is_causal": (True, None),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its base and, for a stretched context, how it is stretched.

    `type` is one of default, linear, dynamic, llama3 and yarn, as in transformers' `ROPE_INIT_FUNCTIONS`; the
    fields after `theta` belong to some types only and are None for the others.
    """

    type: str
    theta: float
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read `rope_theta` with `rope_scaling`, or `rope_parameters`, from a config.json.

        Raises:
            ConfigError: a type that is not built, or a parameter that is missing, unknown or not a number.
        """
        old, new = config.get("rope_scaling"), config.get("rope_parameters")
        for name, value in (("rope_scaling", old), ("rope_parameters", new)):
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"{name} must be a dict or null, got {value!r}")
        if old is not None and new is not None and old != new:
            raise ConfigError("config has both rope_scaling and rope_parameters, and they differ: keep one")
        source = "rope_parameters" if new is not None else "rope_scaling"
        given = dict(new if new is not None else old or {})
        if any(isinstance(value, Mapping) for value in given.values()):
            raise ConfigError(f"{source} has one entry per layer type; only one RoPE for all layers is built")

        rope_type = given.pop("rope_type", None) or given.pop("type", None) or ("default" if not given or new else None)
        if given.pop("type", rope_type) != rope_type:
            raise ConfigError(f"{source}: type and rope_type differ: keep rope_type")
        if rope_type not in ROPE_TYPES:
            raise ConfigError(f"{source}: rope_type {rope_type!r} is not one of {', '.join(ROPE_TYPES)}")
        theta = given.pop("rope_theta", None)
        theta = config.get("rope_theta") if theta is None else theta
        if theta is None:
            raise ConfigError(
                "config has no rope_theta (the base of the rotary angles): add the value that the model was "
                "trained with; transformers would assume 10000.0"
            )
        if given.pop("partial_rotary_factor", None) not in (None, 1):
            raise ConfigError(f"{source}: partial_rotary_factor other than 1 is not built")
        if rope_type in ("llama3", "yarn") and given.get("original_max_position_embeddings") is None:
            if rope_type == "llama3":
                raise ConfigError(f"{source}: rope_type 'llama3' needs original_max_position_embeddings")
            given["original_max_position_embeddings"] = config.get("max_position_embeddings")

        needed = {"default": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
        for name in needed.get(rope_type, ("factor",)):
            if given.get(name) is None:
                raise ConfigError(f"{source}: rope_type {rope_type!r} needs {name}")
        if rope_type == "default":
            # transformers keeps the original length beside a default RoPE; nothing looks at it
            given.pop("original_max_position_embeddings", None)
        if unknown := sorted(set(given) - _ROPE_FIELDS[rope_type]):
            raise ConfigError(f"{source}: unknown for rope_type {rope_type!r}: {', '.join(unknown)}")
        for name, value in [("rope_theta", theta), *given.items()]:
            if name == "truncate" and isinstance(value, bool | None):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < float("inf")):
                raise ConfigError(f"{source}: {name} must be a number > 0, got {value!r}")
        return cls(type=rope_type, theta=float(theta), **given)

    def to_hf(self) -> dict[str, Any] | None:
        """Return the `rope_scaling` entry of a config.json: None for the default type."""
        if self.type == "default":
            return None
        fields = {k: v for k, v in dataclasses.asdict(self).items() if v is not None and k not in ("type", "theta")}
        # Both names of the key: transformers before 4.43 reads "type" and allows nothing beside it and "factor".
        names = {"type": self.type} if self.type in ("linear", "dynamic") else {"rope_type": self.type}
        return names | fields


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything about a Qwen2 or Llama checkpoint that its weights do not say. Hashable, hence static under jit.

    Fields have the names of config.json. `windows` has, per layer, the number of tokens that attention looks
    back on, itself included, or None for all of them. `dtype` is that of the checkpoint's weights. `cpu_tiles` is not
    part of a checkpoint: whether programs for a CPU use its tile units (AMX), which the platform's name does not tell;
    generate() sets it where it compiles for the machine that it runs on.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    initializer_range: float = 0.02
    attention_dropout: float = 0.0
    dtype: str = "float32"
    cpu_tiles: bool = dataclasses.field(default=False, repr=False)

    @property
    def context_length(self) -> int:
        """How many tokens the positions are made for; a scaled RoPE stretches them."""
        original = self.rope.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, int(original * (self.rope.factor or 1)))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json of `model_type` qwen2 or llama.

        Both spellings of RoPE (`rope_theta` and `rope_scaling`, or `rope_parameters`) and of the dtype (`torch_dtype`,
        or `dtype`) are read. A value that changes numbers has no default, but for what the tensors themselves
        prove when they are read (biases, the head size). A window holds where `use_sliding_window` is on, in
        layers from `max_window_layers` on, as in transformers 5 (4.41.1 applies it to every layer).

        Raises:
            ConfigError: all that is missing, unknown or not built, in one message.
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"config must be the dict that config.json holds, got {type(config).__name__}")
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(f"model_type {model_type!r} is not built; it must be one of {', '.join(MODEL_TYPES)}")
        problems = _problems(config)
        rope = None
        try:
            rope = RopeConfig.from_hf(config)
        except ConfigError as error:
            problems.append(str(error))
        if problems or rope is None:
            raise ConfigError("; ".join(problems))

        heads, width = config["num_attention_heads"], config["hidden_size"]
        qwen2 = model_type == "qwen2"
        bias = qwen2 or bool(config.get("attention_bias", False))
        return cls(
            model_type=model_type,
            vocab_size=config["vocab_size"],
            hidden_size=width,
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or width // heads,
            hidden_act=config["hidden_act"],
            max_position_embeddings=config["max_position_embeddings"],
            rms_norm_eps=float(config["rms_norm_eps"]),
            tie_word_embeddings=config["tie_word_embeddings"],
            rope=rope,
            attention_bias=bias,
            output_bias=bias and not qwen2,
            mlp_bias=bool(config.get("mlp_bias", False)),
            windows=_windows(config),
            initializer_range=float(config.get("initializer_range", 0.02)),
            attention_dropout=float(config.get("attention_dropout", 0.0)),
            dtype=_dtype(config) or "float32",
        )

    def to_hf(self) -> dict[str, Any]:
        """Return a config.json that transformers 4.41.1 and later releases read."""
        config: dict[str, Any] = {
            "architectures": [MODEL_TYPES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "hidden_act": self.hidden_act,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.to_hf(),
            "initializer_range": self.initializer_range,
            "attention_dropout": self.attention_dropout,
            "torch_dtype": self.dtype,
            "use_cache": True,
        }
        if self.head_dim * self.num_attention_heads != self.hidden_size:
            config["head_dim"] = self.head_dim
        if self.model_type == "llama":
            config |= {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        else:
            windowed = [layer for layer, window in enumerate(self.windows) if window is not None]
            config["use_sliding_window"] = bool(windowed)
            config["sliding_window"] = self.windows[windowed[0]] if windowed else self.max_position_embeddings
            config["max_window_layers"] = windowed[0] if windowed else self.num_hidden_layers
            if windowed and windowed != list(range(windowed[0], self.num_hidden_layers)):
                config["layer_types"] = [
                    "full_attention" if window is None else "sliding_attention" for window in self.windows
                ]
        return config


def _dtype(config: Mapping[str, Any]) -> str | None:
    name = config.get("dtype") if config.get("torch_dtype") is None else config["torch_dtype"]
    return None if name is None else str(name).removeprefix("torch.")


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers = config["num_hidden_layers"]
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    window = config["sliding_window"]
    types = config.get("layer_types")
    if types is None:
        first = config["max_window_layers"]
        types = ["full_attention"] * min(first, layers) + ["sliding_attention"] * max(layers - first, 0)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _problems(config: Mapping[str, Any]) -> list[str]:
    """List what is wrong with a config.json, but for its RoPE."""
    problems = []
    if missing := [key for key in _REQUIRED if config.get(key) is None]:
        problems.append(f"missing: {', '.join(missing)}")
    for key in _REQUIRED:
        value, wanted = config.get(key), int
        if key in ("rms_norm_eps", "hidden_act", "tie_word_embeddings"):
            wanted = {"rms_norm_eps": float, "hidden_act": str, "tie_word_embeddings": bool}[key]
        number = wanted is float and isinstance(value, int)
        if value is not None and not number and (not isinstance(value, wanted) or (wanted is int and value is True)):
            problems.append(f"{key} must be of type {wanted.__name__}, got {value!r}")
        elif wanted is int and value is not None and value < 1:
            problems.append(f"{key} must be at least 1, got {value}")
    for key in ("head_dim", "sliding_window", "max_window_layers"):
        value, least = config.get(key), 0 if key == "max_window_layers" else 1
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            problems.append(f"{key} must be a whole number >= {least}, got {value!r}")
    if config.get("head_dim") is not None and not problems and config["head_dim"] % 2:
        problems.append(f"head_dim must be even for RoPE, got {config['head_dim']}")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if not isinstance(config.get(key), bool | None):
            problems.append(f"{key} must be true or false, got {config[key]!r}")
    if not config.get("rms_norm_eps", 1.0) > 0:
        problems.append(f"rms_norm_eps must be > 0, got {config['rms_norm_eps']}")
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list | tuple) or len(types) != config.get("num_hidden_layers")):
        problems.append(f"layer_types must name each of the {config.get('num_hidden_layers')} layers, got {types!r}")
    if None not in (config.get("dtype"), config.get("torch_dtype")) and config["dtype"] != config["torch_dtype"]:
        problems.append(f"dtype {config['dtype']!r} and torch_dtype {config['torch_dtype']!r} differ: keep one")
    for key in ("initializer_range", "attention_dropout"):
        value = config.get(key, 0.0)
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            problems.append(f"{key} must be between 0 and 1, got {value!r}")
    if problems:
        return problems

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads:
        problems.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None and config["hidden_size"] % heads:
        problems.append(
            f"hidden_size {config['hidden_size']} is no multiple of num_attention_heads {heads}: give head_dim"
        )
    if config["hidden_act"] not in ACTIVATIONS:
        problems.append(f"hidden_act {config['hidden_act']!r} is not one of {', '.join(ACTIVATIONS)}")
    dtype = _dtype(config)
    if dtype is not None and dtype not in DTYPES:
        problems.append(f"torch_dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if config["model_type"] == "llama" and config.get("use_sliding_window"):
        problems.append("use_sliding_window belongs to model_type qwen2")
    if config["model_type"] == "qwen2":
        problems += [f"{key} belongs to model_type llama" for key in ("attention_bias", "mlp_bias") if config.get(key)]
    if config.get("use_sliding_window"):
        types = config.get("layer_types")
        needed = ["sliding_window"] if types is not None else ["sliding_window", "max_window_layers"]
        problems += [f"use_sliding_window is true and {key} is missing" for key in needed if config.get(key) is None]
    for kind in set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        problems.append(f"layer_types: {kind!r} is not built")
    if "sliding_attention" in (config.get("layer_types") or ()) and not config.get("use_sliding_window"):
        problems.append("layer_types has sliding_attention, use_sliding_window is not true")
    architectures = config.get("architectures") or []
    if architectures and MODEL_TYPES[config["model_type"]] not in architectures:
        problems.append(f"architectures {architectures} is not {MODEL_TYPES[config['model_type']]}")
    for key, allowed in _MUST_BE.items():
        if key in config and config[key] not in allowed:
            problems.append(f"{key}={config[key]!r} is not built")

    used = {field.name for field in dataclasses.fields(ModelConfig)} | {"rope_theta", "rope_scaling"}
    used |= {"rope_parameters", "torch_dtype", "dtype", "use_sliding_window", "sliding_window", "max_window_layers"}
    used |= {"layer_types", "architectures"}
    used -= {"rope", "windows", "output_bias"}
    if unknown := sorted(set(config) - used - _IRRELEVANT - set(_MUST_BE)):
        problems.append(f"unknown keys, which may change what the model computes: {', '.join(unknown)}")
    return problems
