"""The model's config, read from Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxgen.errors import ConfigError, shown
from jaxgen.model.config_fields import REQUIRED, Field, flag, fraction, list_of, one_of, positive, read_fields, whole
from jaxgen.model.families import FAMILIES, FULL, SLIDING, Family

DTYPES = ("float32", "bfloat16", "float16")

# The name of the jax.nn function for each `hidden_act`, and its options. Using names avoids importing jax here.
ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "silu": ("silu", {}),
    "relu": ("relu", {}),
    "gelu": ("gelu", {"approximate": False}),
    "gelu_new": ("gelu", {"approximate": True}),
    "gelu_pytorch_tanh": ("gelu", {"approximate": True}),
}

# Most fields that affect results are required, although transformers has defaults for them.
_FIELDS: dict[str, Field] = {
    "vocab_size": whole(1),
    "hidden_size": whole(1),
    "intermediate_size": whole(1),
    "num_hidden_layers": whole(1, most=10_000),  # limits the program's size if a config.json is damaged
    "num_attention_heads": whole(1),
    "num_key_value_heads": whole(1),
    "head_dim": whole(1, None),
    "hidden_act": one_of(ACTIVATIONS),
    "max_position_embeddings": whole(1),
    "rms_norm_eps": positive(),
    "tie_word_embeddings": flag(),
    "attention_bias": flag(False),
    "mlp_bias": flag(False),
    "use_sliding_window": flag(False),
    "sliding_window": whole(1, None),
    "max_window_layers": whole(0, None),
    "layer_types": list_of((FULL, SLIDING)),
    "initializer_range": fraction(0.02),
    "attention_dropout": fraction(0.0),
}

# Required and optional parameters of each type of RoPE
_ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}

# Keys for which only these values are accepted, because any other value would change the results
_CONSTANTS: dict[str, tuple[Any, ...]] = {
    "use_mrope": (False, None),
    "partial_rotary_factor": (1, None),
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "is_causal": (True, None),
}

# Keys that do not affect the model's results
_IRRELEVANT = frozenset(
    # bookkeeping, and settings for running the model in torch
    "_name_or_path _attn_implementation _attn_implementation_autoset _commit_hash attn_implementation "
    "transformers_version use_cache pretraining_tp torchscript use_bfloat16 return_dict output_attentions "
    "output_hidden_states keys_to_ignore_at_inference chunk_size_feed_forward tokenizer_class name_or_path "
    # keys for other heads and tasks
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

# Keys that are handled separately
_SPECIAL = {"model_type", "architectures", "dtype", "torch_dtype", "rope_theta", "rope_scaling", "rope_parameters"}
_KNOWN = frozenset(_SPECIAL | set(_FIELDS) | set(_CONSTANTS) | _IRRELEVANT)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its base and, if the context is extended, the parameters of the scaling method.

    `type` is default, linear, dynamic, llama3 or yarn, as in transformers' `ROPE_INIT_FUNCTIONS`. Each field after
    `theta` applies only to some types and is None for all other types.
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
        """Read RoPE's parameters from `rope_theta` and `rope_scaling`, or from `rope_parameters`, in a config.json.

        Raises:
            ConfigError: the type is not implemented, or parameters are missing, unknown or invalid.
        """
        source, given = _rope_entry(config)
        rope_type = given.pop("rope_type", None)
        theta = given.pop("rope_theta")
        if not isinstance(rope_type, str) or rope_type not in _ROPE_TYPES:
            raise ConfigError(f"{source}: rope_type must be one of {', '.join(_ROPE_TYPES)}, got {shown(rope_type)}")
        if rope_type == "default":  # transformers writes this key for the default type, but ignores it
            given.pop("original_max_position_embeddings", None)
        if rope_type == "yarn":
            given.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))

        required, optional = _ROPE_TYPES[rope_type]
        fields = {name: positive() for name in required} | {name: positive(None) for name in optional}
        if "truncate" in fields:
            fields["truncate"] = flag(None)
        if "original_max_position_embeddings" in fields:
            fields["original_max_position_embeddings"] = whole(1)
        values, problems = read_fields(fields, given)
        if rope_type == "llama3" and not problems and values["low_freq_factor"] >= values["high_freq_factor"]:
            problems.append("low_freq_factor must be less than high_freq_factor")
        if given.pop("partial_rotary_factor", 1) != 1:
            problems.append("partial_rotary_factor other than 1 is not implemented")
        if unknown := sorted(set(given) - set(fields)):
            problems.append(f"unknown: {', '.join(unknown)}")
        problems = [f"{source} (rope_type {rope_type}): {problem}" for problem in problems]
        base, faults = read_fields({"rope_theta": positive(None)}, {"rope_theta": theta})
        problems += faults
        if not faults and theta is not None and theta <= 1:
            problems.append(f"rope_theta must be > 1, got {theta}")
        if theta is None:
            problems.append("missing: rope_theta, the base of the rotary angles; transformers would assume 10000.0")
        if problems:
            raise ConfigError("; ".join(problems))
        return cls(type=rope_type, theta=float(base["rope_theta"]), **values)

    def to_hf(self) -> dict[str, Any] | None:
        """Return the `rope_scaling` entry of a config.json; None for the default type."""
        if self.type == "default":
            return None
        fields = {k: v for k, v in dataclasses.asdict(self).items() if v is not None and k not in ("type", "theta")}
        # transformers before 4.43 reads "type" instead of "rope_type", and accepts only "type" and "factor"
        names = {"type": self.type} if self.type in ("linear", "dynamic") else {"rope_type": self.type}
        return names | fields


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a model, as described by config.json. A `ModelConfig` is hashable, so it can be static under jit.

    Fields that also exist in config.json have the same names there.

    Attributes:
        attention_bias: whether the query, key and value projections have biases.
        output_bias: whether the attention's output projection has a bias.
        qk_norm: whether queries and keys are normalized.
        windows: for each layer, the maximum number of tokens that a token attends to, including itself; None for all.
        dtype: the dtype of the checkpoint's weights.
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
    qk_norm: bool
    windows: tuple[int | None, ...]
    initializer_range: float = 0.02
    attention_dropout: float = 0.0
    dtype: str = "float32"

    @property
    def matrix_parameters(self) -> int:
        """The number of parameters in matrices, computed without tracing the model."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        layer = self.hidden_size * (3 * self.intermediate_size + heads * self.head_dim)
        tables = 1 if self.tie_word_embeddings else 2
        return tables * self.vocab_size * self.hidden_size + self.num_hidden_layers * layer

    @property
    def context_length(self) -> int:
        """The maximum number of tokens that the model supports, including any extension by RoPE scaling."""
        original = self.rope.original_max_position_embeddings or self.max_position_embeddings
        stretched = min(original * (self.rope.factor or 1), 2**31 - 1)
        return max(self.max_position_embeddings, int(stretched))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json whose `model_type` is one of `FAMILIES`.

        RoPE can be given as `rope_theta` and `rope_scaling` or as `rope_parameters`, and the dtype as `torch_dtype` or
        `dtype`. Most values that affect results are required. The biases and the head size are optional (Qwen3
        requires `head_dim`). On loading, they are checked against the checkpoint's tensors. Sliding windows work as in
        transformers 5: a token sees at most `sliding_window` tokens, including itself (one more in 4.41.1). Qwen models
        have windows only if `use_sliding_window` is true, and only in the layers that `layer_types` or
        `max_window_layers` selects. (transformers 4.41.1 uses windows in all layers.)

        Raises:
            ConfigError: keys are missing, unknown, contradictory or not implemented; the message lists all of them.
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"config must be the content of a config.json, a dict, got {type(config).__name__}")
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise ConfigError(
                f"model_type {shown(model_type)} is not implemented; it must be one of {', '.join(FAMILIES)}"
            )
        family = FAMILIES[model_type]
        values, problems = _read(config, family)
        if problems:
            raise ConfigError("; ".join(problems))
        fields = {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}
        fields |= {name: values[rule] if isinstance(rule, str) else rule for name, rule in family.biases.items()}
        return cls(
            **fields,
            model_type=model_type,
            qk_norm=family.qk_norm,
            rope=RopeConfig.from_hf(config),
            windows=family.windows.read(config),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return a config.json that transformers 4.41.1 (if it has the architecture) and later releases can read.

        Raises:
            ConfigError: a config.json of this `model_type` cannot express the fields.
        """
        family = FAMILIES[self.model_type]
        names = {field.name for field in dataclasses.fields(self)} - set(family.biases)
        config: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": self.model_type,
            **{name: getattr(self, name) for name in _FIELDS if name in names},
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.to_hf(),
            "torch_dtype": self.dtype,
            "use_cache": True,
        }
        if "head_dim" not in family.required and self.head_dim * self.num_attention_heads == self.hidden_size:
            del config["head_dim"]
        config |= {rule: getattr(self, name) for name, rule in family.biases.items() if isinstance(rule, str)}
        config |= family.windows.write(config, self.windows)
        if ModelConfig.from_hf(config) != self:
            raise ConfigError(f"a config.json of model_type {self.model_type} cannot express {self}")
        return config


def _read(config: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Read the values of `_FIELDS` and the dtype from a config.json; also return a list of all problems."""
    fields = {
        name: dataclasses.replace(field, default=REQUIRED) if name in family.required else field
        for name, field in _FIELDS.items()
    }
    dtypes = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name) is not None}
    dtypes = {name: value.removeprefix("torch.") if isinstance(value, str) else value for name, value in dtypes.items()}
    fields |= {name: one_of(DTYPES) for name in dtypes}
    values, problems = read_fields(fields, {**config, **dtypes})
    if not problems and len(set(dtypes.values())) > 1:
        problems.append(f"dtype {dtypes['dtype']} and torch_dtype {dtypes['torch_dtype']} differ: keep one")
    if not problems:
        values["dtype"] = next(iter(dtypes.values()), "float32")
        values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        problems += _contradictions(values, config, family)

    architectures = config.get("architectures") or [family.architecture]
    if not isinstance(architectures, list | tuple) or family.architecture not in architectures:
        problems.append(f"architectures must be a list with {family.architecture}, got {shown(architectures)}")
    for key, allowed in _CONSTANTS.items():
        if key in config and not any(_same(config[key], value) for value in allowed):
            problems.append(f"{key}={shown(config[key])} is not implemented")
    for key in sorted(set().union(*(other.keys for other in FAMILIES.values())) - family.keys):
        if config.get(key) not in (None, False):
            readers = [name for name, other in FAMILIES.items() if key in other.keys]
            problems.append(f"{key}={shown(config[key])}: only model_type {', '.join(readers)} can have it")
    if unknown := sorted(set(config) - _KNOWN):
        problems.append(f"unknown keys, which may change what the model computes: {', '.join(unknown)}")
    return values, problems + _errors(RopeConfig.from_hf, config)


def _contradictions(values: Mapping[str, Any], config: Mapping[str, Any], family: Family) -> list[str]:
    """List contradictions between values that are valid individually."""
    problems = []
    heads, kv_heads, layers = values["num_attention_heads"], values["num_key_value_heads"], values["num_hidden_layers"]
    if heads % kv_heads:
        problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None and values["hidden_size"] % heads:
        problems.append(
            f"hidden_size {values['hidden_size']} is not a multiple of num_attention_heads {heads}: add head_dim"
        )
    elif values["head_dim"] % 2:
        problems.append(f"head_dim must be even for RoPE, got {values['head_dim']}")
    types = values["layer_types"]
    if types is not None and len(types) != layers:
        return [*problems, f"layer_types must name each of the {layers} layers, got {shown(types)}"]
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, Mapping) and "dynamic" in (rope.get("type"), rope.get("rope_type")) and values["head_dim"] == 2:
        problems.append("dynamic RoPE needs a head_dim of at least 4")
    return problems + _errors(family.windows.read, config)


def _same(value: Any, known: Any) -> bool:
    return value == known and isinstance(value, bool) == isinstance(known, bool)


def _errors(read: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]) -> list[str]:
    try:
        read(config)
    except ConfigError as error:
        return [str(error)]
    return []


def _rope_entry(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the entry for RoPE: its name, and its content with the newer key names and no nulls, plus `rope_theta`."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    for name, value in (("rope_scaling", old), ("rope_parameters", new)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a dict or null, got {shown(value)}")
    if old is not None and new is not None and old != new:
        raise ConfigError("rope_scaling and rope_parameters differ: keep one")
    source = "rope_scaling" if new is None else "rope_parameters"
    given = {name: value for name, value in (new or old or {}).items() if value is not None}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ConfigError(f"{source} has one entry per layer type; only one RoPE for all layers is implemented")
    old_name = given.pop("type", None)
    if old_name is not None and given.setdefault("rope_type", old_name) != old_name:
        raise ConfigError(f"{source}: type and rope_type differ: keep rope_type")
    if new or not given:
        given.setdefault("rope_type", "default")
    given.setdefault("rope_theta", config.get("rope_theta"))
    return source, given
