"""The model's config, read from Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxgen.core.model import config_keys
from jaxgen.core.model.config_fields import one_of, read_fields
from jaxgen.core.model.config_keys import DUAL_CHUNK, FIELDS
from jaxgen.core.model.families import FAMILIES, NO_WINDOWS, TEXT_PARTS, Family
from jaxgen.core.model.rope_config import RopeConfig
from jaxgen.errors import ConfigError, one_line, shown, warn

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer: what may differ between the layers of a model.

    Attributes:
        window: the maximum number of tokens that a token attends to, including itself; None for all.
        rope: the RoPE of queries and keys; None if they are not rotated.
        experts: whether the feed-forward layer consists of experts, a few of which are used for each token.
    """

    window: int | None
    rope: RopeConfig | None
    experts: bool = False


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of a model, as described by config.json. A `ModelConfig` is hashable, so it can be static under jit.

    Fields that also exist in config.json have the same names there.

    Attributes:
        attention_bias: whether the query, key and value projections have biases.
        output_bias: whether the attention's output projection has a bias.
        layers: what differs between layers.
        dtype: the dtype of the checkpoint's weights.
        query_pre_attn_scalar: queries are divided by its square root. The scalars and caps of this group are None in
            families that do not have them.
        attn_logit_softcapping: the soft cap of attention scores.
        final_logit_softcapping: the soft cap of logits.
        attention_multiplier: the factor of attention scores, in place of one over the square root of `head_dim`.
        embedding_multiplier: the factor of the token embeddings.
        residual_multiplier: the factor of what a layer adds to its input.
        logits_scaling: the divisor of logits.
        num_experts: the number of experts in each layer that has them; None in families without experts. The same
            applies to the following fields.
        num_experts_per_tok: the number of experts that are used for a token.
        moe_intermediate_size: the width of an expert.
        shared_expert_intermediate_size: the width of the shared expert; None if there is none.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        router_aux_loss_coef: the factor of the router's loss in training.
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
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    layers: tuple[LayerSpec, ...]
    initializer_range: float = 0.02
    attention_dropout: float = 0.0
    dtype: str = "float32"
    query_pre_attn_scalar: int | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    attention_multiplier: float | None = None
    embedding_multiplier: float | None = None
    residual_multiplier: float | None = None
    logits_scaling: float | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    router_aux_loss_coef: float | None = None

    @property
    def family(self) -> Family:
        """The record of the architecture."""
        return FAMILIES[self.model_type]

    @property
    def sparse_layers(self) -> int:
        """The number of layers with experts."""
        return sum(layer.experts for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple([layer.window for layer in self.layers])

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different RoPEs of the layers, in the order of their first layers."""
        return tuple(dict.fromkeys([layer.rope for layer in self.layers if layer.rope is not None]))

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """The number of outputs of the query, key and value projections."""
        keys = self.num_key_value_heads * self.head_dim
        return self.num_attention_heads * self.head_dim, keys, keys

    @property
    def attention_scale(self) -> float | None:
        """The factor of attention scores before the softmax; None means that they are divided by sqrt(`head_dim`)."""
        if self.query_pre_attn_scalar is not None:
            return self.query_pre_attn_scalar**-0.5
        return self.attention_multiplier

    @property
    def has_dynamic_rope(self) -> bool:
        """True if the angles of a token's RoPE depend on the number of tokens in its row."""
        return any(rope.type == "dynamic" for rope in self.ropes)

    @property
    def short_length(self) -> int | None:
        """The number of tokens up to which longrope uses its short factors; None for other types of RoPE."""
        return next((rope.original_max_position_embeddings for rope in self.ropes if rope.type == "longrope"), None)

    def first_layers(self, count: int) -> ModelConfig:
        """Return the config of the model that consists of the first `count` layers."""
        return dataclasses.replace(self, num_hidden_layers=count, layers=self.layers[:count])

    @property
    def matrix_parameters(self) -> int:
        """The number of parameters in matrices, computed without tracing the model."""
        heads = (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        count, shared = self.num_experts or 0, self.shared_expert_intermediate_size or 0
        experts = count * (1 + 3 * (self.moe_intermediate_size or 0)) + 3 * shared + bool(shared)
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size
        outputs = [heads + (experts if layer.experts else 3 * self.intermediate_size) for layer in self.layers]
        return self.hidden_size * (tables + sum(outputs))

    @property
    def context_length(self) -> int:
        """The maximum number of tokens that the model supports, including any extension by RoPE scaling."""
        longest = self.max_position_embeddings
        stretched = [(rope.original_max_position_embeddings or longest) * (rope.factor or 1) for rope in self.ropes]
        return max(longest, *(int(min(length, 2**31 - 1)) for length in stretched), 0)

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
        family = self.family
        names = {field.name for field in dataclasses.fields(self)} - set(family.biases)
        config: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": self.model_type,
            **{name: getattr(self, name) for name in (*FIELDS, *family.own_fields) if name in names},
            family.activation: self.hidden_act,
            "torch_dtype": self.dtype,
            "use_cache": True,
        }
        if "head_dim" not in family.defaults and self.head_dim * self.num_attention_heads == self.hidden_size:
            del config["head_dim"]
        config |= {rule: getattr(self, name) for name, rule in family.biases.items() if isinstance(rule, str)}
        config |= family.windows.write(config, self.windows)
        config |= family.ropes.write(tuple([layer.rope for layer in self.layers]), self.windows)
        if family.experts:
            config |= family.experts.write(self.num_experts, tuple([layer.experts for layer in self.layers]))
        if ModelConfig.from_hf(config) != self:
            raise ConfigError(f"a config.json of model_type {self.model_type} cannot express {self}")
        return config


def read_model(config: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
    """Read a config.json as `ModelConfig.from_hf` does; return the model and the content of the warning, in parts."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be the content of a config.json, a dict, got {type(config).__name__}")
    if config.get("model_type") in TEXT_PARTS:
        config = _text_part(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join((*FAMILIES, *TEXT_PARTS))
        raise ConfigError(f"model_type {shown(model_type)} is not implemented; it must be one of {known}")
    family = FAMILIES[model_type]
    config = {**family.defaults, **config}
    if family.activation != "hidden_act":
        config["hidden_act"] = config.pop(family.activation)
    values, problems = _read(config, family)
    if problems:
        raise ConfigError("; ".join(problems))
    fields = {field.name: values[field.name] for field in dataclasses.fields(ModelConfig) if field.name in values}
    fields |= {name: values[rule] if isinstance(rule, str) else rule for name, rule in family.biases.items()}
    windows = family.windows.read(config)
    ropes, notes = family.ropes.read(config, windows)
    experts = (False,) * len(windows)
    if family.experts:
        sizes, experts = family.experts.read(config)
        fields |= sizes
    layers = tuple([LayerSpec(*parts) for parts in zip(windows, ropes, experts, strict=True)])
    model = ModelConfig(**fields, model_type=model_type, layers=layers)
    if unknown := config_keys.unknown(config, family.own_keys):
        notes = [f"unknown keys are ignored, as in transformers: {one_line(', '.join(unknown), 500)}", *notes]
    if config.get(DUAL_CHUNK):
        notes.append(_dual_chunk(config[DUAL_CHUNK]))
    if family.windows is NO_WINDOWS and config.get("sliding_window") and config.get("use_sliding_window") is None:
        notes.append(
            f"sliding_window={config['sliding_window']} is ignored, as in transformers: "
            f"model_type {model_type} has no sliding windows"
        )
    return model, notes


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text part of a model for images and text."""
    family, sizes = TEXT_PARTS[config["model_type"]]
    text = config.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", family) != family:
        raise ConfigError(f"text_config must be the config of a {family} model, got {shown(text)}")
    outer = {key: config[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if key in config}
    inner = {key: value for key, value in text.items() if value is not None or key not in sizes}
    return {**sizes, **outer, **inner, "model_type": family, "architectures": None}


def _read(config: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Read the values of `FIELDS` and the dtype from a config.json; also return a list of all problems."""
    dtypes = {name: config[name] for name in ("dtype", "torch_dtype") if config.get(name) is not None}
    dtypes = {name: value.removeprefix("torch.") if isinstance(value, str) else value for name, value in dtypes.items()}
    fields = FIELDS | {name: one_of(DTYPES) for name in dtypes} | family.own_fields
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
    windows = (None,) if problems else family.windows.read(config)
    rope = _errors(lambda config: family.ropes.read(config, windows), config)
    model = None
    if not problems and not rope:
        ropes = [rope for rope in family.ropes.read(config, windows)[0] if rope is not None]
        rope = [fault for one in dict.fromkeys(ropes) for fault in _unfit(one, values["head_dim"])]
        theta = ropes[0].theta if ropes else None
        model = values | {"qk_norm": family.norms.queries_keys is not None, "rope_theta": theta}
    problems += config_keys.refused(config, model, family.own_keys)
    for key in sorted(set().union(*(other.keys for other in FAMILIES.values())) - family.keys):
        if config.get(key) not in (None, False) and config_keys.neutral(key) is None:
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
    problems += _errors(family.windows.read, config)
    return problems + (_errors(family.experts.read, config) if family.experts else [])


def _unfit(rope: RopeConfig, head_dim: int) -> list[str]:
    """List the parameters of a RoPE that do not fit the head size."""
    width, problems = rope.width(head_dim), []
    if width % 2 or width < 2:
        problems.append(f"partial_rotary_factor must rotate an even number of dimensions, got {width} of {head_dim}")
    for name in ("short_factor", "long_factor"):
        factors = getattr(rope, name)
        if factors is not None and len(factors) != width // 2:
            problems.append(f"{name} must have {width // 2} numbers, half the rotated dimensions, got {len(factors)}")
    return problems


def _errors(read: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]) -> list[str]:
    try:
        read(config)
    except ConfigError as error:
        return [str(error)]
    return []
