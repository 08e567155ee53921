"""The model's config, read from Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxgen.core.model import config_keys
from jaxgen.core.model.config_fields import flag, one_of, positive, read_fields, whole
from jaxgen.core.model.config_keys import DUAL_CHUNK, FIELDS
from jaxgen.core.model.families import FAMILIES, NO_WINDOWS, Family
from jaxgen.errors import ConfigError, one_line, shown, warn

DTYPES = ("float32", "bfloat16", "float16")

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

_DEFAULT_THETA = 10000.0  # in all of transformers' classes of these families, in all releases
# Parameters of RoPE with which some architecture computes something else, with their neutral values. The keys in
# `config_keys.neutral` count here too.
_ROPE_NEUTRAL = {"alpha": (1,)}


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

        A warning names parameters that transformers ignores, such as `attn_factor`.

        Raises:
            ConfigError: the type is not implemented, or parameters are missing or invalid.
        """
        rope, notes = _read_rope(config)
        if notes:
            warn(f"config.json: {'; '.join(notes)}")
        return rope

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
        `dtype`. A file may lack keys for which transformers' class has a default. Biases and the head size are checked
        against the checkpoint's tensors on loading. Sliding windows work as in transformers 5: a token sees at most
        `sliding_window` tokens, including itself (one more in 4.41.1). Qwen models have windows only if
        `use_sliding_window` is true, and only in the layers that `layer_types` or `max_window_layers` selects.
        (transformers 4.41.1 uses windows in all layers.)

        A warning names all keys that are ignored because no architecture is known to use them.

        Raises:
            ConfigError: keys are missing, contradictory or not implemented; the message lists all of them.
        """
        model, notes = read_model(config)
        if notes:
            warn(f"config.json: {'; '.join(notes)}")
        return model

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
            **{name: getattr(self, name) for name in FIELDS if name in names},
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.to_hf(),
            "torch_dtype": self.dtype,
            "use_cache": True,
        }
        if "head_dim" not in family.defaults and self.head_dim * self.num_attention_heads == self.hidden_size:
            del config["head_dim"]
        config |= {rule: getattr(self, name) for name, rule in family.biases.items() if isinstance(rule, str)}
        config |= family.windows.write(config, self.windows)
        if ModelConfig.from_hf(config) != self:
            raise ConfigError(f"a config.json of model_type {self.model_type} cannot express {self}")
        return config


def read_model(config: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
    """Read a config.json as `ModelConfig.from_hf` does; return the model and the content of the warning, in parts."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be the content of a config.json, a dict, got {type(config).__name__}")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type {shown(model_type)} is not implemented; it must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    config = {**family.defaults, **config}
    values, problems = _read(config, family)
    if problems:
        raise ConfigError("; ".join(problems))
    fields = {field.name: values[field.name] for field in dataclasses.fields(ModelConfig) if field.name in values}
    fields |= {name: values[rule] if isinstance(rule, str) else rule for name, rule in family.biases.items()}
    rope, notes = _read_rope(config)
    model = ModelConfig(
        **fields, model_type=model_type, qk_norm=family.qk_norm, rope=rope, windows=family.windows.read(config)
    )
    if unknown := config_keys.unknown(config):
        notes = [f"unknown keys are ignored, as in transformers: {one_line(', '.join(unknown), 500)}", *notes]
    if config.get(DUAL_CHUNK):
        notes.append(_dual_chunk(config[DUAL_CHUNK]))
    if family.windows is NO_WINDOWS and config.get("sliding_window") and config.get("use_sliding_window") is None:
        notes.append(
            f"sliding_window={config['sliding_window']} is ignored, as in transformers: "
            f"model_type {model_type} has no sliding windows"
        )
    return model, notes


def _read(config: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Read the values of `FIELDS` and the dtype from a config.json; also return a list of all problems."""
    dtypes = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name) is not None}
    dtypes = {name: value.removeprefix("torch.") if isinstance(value, str) else value for name, value in dtypes.items()}
    fields = FIELDS | {name: one_of(DTYPES) for name in dtypes}
    values, problems = read_fields(fields, {**config, **dtypes})
    if not problems and len(set(dtypes.values())) > 1:
        problems.append(f"dtype {dtypes['dtype']} and torch_dtype {dtypes['torch_dtype']} differ: keep one")
    if not problems:
        values["dtype"] = next(iter(dtypes.values()), "float32")
        values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
        values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        problems += _contradictions(values, config, family)

    # A base model is saved under its own class, as in "Qwen3Model".
    known = (family.architecture, family.architecture.replace("ForCausalLM", "Model"))
    architectures = config.get("architectures") or [family.architecture]
    if not isinstance(architectures, list | tuple) or not any(name in architectures for name in known):
        problems.append(f"architectures must be a list with {' or '.join(known)}, got {shown(architectures)}")
    rope = _errors(_read_rope, config)
    model = (
        None if problems or rope else values | {"qk_norm": family.qk_norm, "rope_theta": _read_rope(config)[0].theta}
    )
    problems += config_keys.refused(config, model)
    for key in sorted(set().union(*(other.keys for other in FAMILIES.values())) - family.keys):
        if config.get(key) not in (None, False):
            readers = [name for name, other in FAMILIES.items() if key in other.keys]
            problems.append(f"{key}={shown(config[key])}: only model_type {', '.join(readers)} can have it")
    return values, problems + rope


def _dual_chunk(chunks: Any) -> str:
    """Return the part of the warning for attention in chunks, which transformers does not implement either."""
    names = ("chunk_size", "original_max_position_embeddings")
    lengths = [chunks[name] for name in names if type(chunks.get(name)) is int] if isinstance(chunks, Mapping) else []
    same = f"up to {min(lengths):,} tokens, results are the same" if lengths else "results differ for long texts"
    return f"{DUAL_CHUNK} is not implemented: attention is computed over the whole text, as in transformers; {same}"


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


def _errors(read: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]) -> list[str]:
    try:
        read(config)
    except ConfigError as error:
        return [str(error)]
    return []


def _read_rope(config: Mapping[str, Any]) -> tuple[RopeConfig, list[str]]:
    """Read RoPE's parameters; also return the content of a warning about the parameters that are ignored."""
    source, given = _rope_entry(config)
    rope_type, theta = given.pop("rope_type"), given.pop("rope_theta")
    if not isinstance(rope_type, str) or rope_type not in _ROPE_TYPES:
        raise ConfigError(f"{source}: rope_type must be one of {', '.join(_ROPE_TYPES)}, got {shown(rope_type)}")
    required, optional = _ROPE_TYPES[rope_type]
    fields = {name: positive() for name in required} | {name: positive(None) for name in optional}
    if "truncate" in fields:
        fields["truncate"] = flag(None)
    if "original_max_position_embeddings" in fields:
        fields["original_max_position_embeddings"] = whole(1)
    values, problems = read_fields(fields, given)
    if rope_type == "llama3" and not problems and values["low_freq_factor"] >= values["high_freq_factor"]:
        problems.append("low_freq_factor must be less than high_freq_factor")
    others = {name: _ROPE_NEUTRAL.get(name) or config_keys.neutral(name) for name in sorted(set(given) - set(fields))}
    problems += [
        f"{name}={shown(given[name])} is not implemented"
        for name, neutral in others.items()
        if neutral is not None and not config_keys.is_neutral(given[name], neutral)
    ]
    problems = [f"{source} (rope_type {rope_type}): {problem}" for problem in problems]
    base, faults = read_fields({"rope_theta": positive()}, {"rope_theta": theta})
    problems += faults
    if not faults and base["rope_theta"] <= 1:
        problems.append(f"rope_theta must be > 1, got {theta}")
    if problems:
        raise ConfigError("; ".join(problems))
    ignored = [name for name, neutral in others.items() if neutral is None]
    if rope_type == "default" and "original_max_position_embeddings" in ignored:
        ignored.remove("original_max_position_embeddings")  # transformers writes it
    notes = (
        [f"{source} (rope_type {rope_type}): ignored, as in transformers: {one_line(', '.join(ignored), 500)}"]
        if ignored
        else []
    )
    return RopeConfig(type=rope_type, theta=base["rope_theta"], **values), notes


def _rope_entry(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of the entry for RoPE, and its content with the newer key names, no nulls and `rope_theta`."""
    entries = {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name) is not None}
    read = {name: _normal_rope(name, entry, config) for name, entry in entries.items()}
    if len(read) == 2 and read["rope_scaling"] != read["rope_parameters"]:
        raise ConfigError("rope_scaling and rope_parameters differ: keep one")
    source = next(reversed(read), "rope_scaling")
    return source, read[source] if read else _normal_rope(source, {}, config)


def _normal_rope(source: str, entry: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `rope_scaling` or `rope_parameters`, with what other keys of the config.json contribute."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{source} must be a dict or null, got {shown(entry)}")
    given = {name: value for name, value in entry.items() if value is not None}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ConfigError(f"{source} has one entry per layer type; only one RoPE for all layers is implemented")
    old_name = given.pop("type", None)
    if old_name is not None and given.setdefault("rope_type", old_name) != old_name:
        raise ConfigError(f"{source}: type and rope_type differ: keep rope_type")
    given.setdefault("rope_type", None if source == "rope_scaling" and given else "default")
    given.setdefault("rope_theta", config.get("rope_theta", _DEFAULT_THETA))
    name = "original_max_position_embeddings"
    if given["rope_type"] in ("llama3", "yarn") and config.get(name) is not None:
        if given.get(name, config[name]) != config[name]:
            raise ConfigError(f"{name} differs in {source} and beside it: keep one")
        given[name] = config[name]
    if given["rope_type"] == "yarn":
        given.setdefault(name, config.get("max_position_embeddings"))
    return given
