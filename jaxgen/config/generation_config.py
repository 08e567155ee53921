"""GenerationConfig: every option of transformers 4.41.1's generate(), under its name and with its default.

The config is a pytree. Its numbers are leaves, so that changing a value compiles nothing; everything that shapes the
program (the mode, the model, which options are on) is its structure. An option at its neutral value is off and has
no leaf: a config's structure alone says which processors exist, also inside the caller's own jit.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxgen.config.options import TRACED, Number, frozen, thawed
from jaxgen.errors import ConfigError, JaxgenWarning
from jaxgen.model.config import ModelConfig

# Written by transformers beside the options; they decide nothing.
_BOOKKEEPING = ("transformers_version", "_from_model_config", "_commit_hash")


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class GenerationConfig:
    """How to generate. Fields, meanings and defaults are those of transformers 4.41.1's `GenerationConfig`.

    Fields that came with later releases are None, off. Most options take one value for all prompts or one for each:
    OPTIONS.md has the forms. An option that jaxgen knows but cannot do yet is accepted here, so that every
    checkpoint's config can be read, and refused by `generate`.

    `model` is the checkpoint's `ModelConfig`; `generate` needs it.

    >>> cfg = GenerationConfig(do_sample=True, temperature=0.7)
    >>> cfg.replace(temperature=1).temperature
    1.0

    Raises:
        ConfigError: a value that is not allowed, or options that contradict each other.
        TypeError: a value of the wrong type.
    """

    # Length
    max_length: int = 20
    max_new_tokens: Number | None = None
    min_length: Number = 0
    min_new_tokens: Number | None = None
    early_stopping: bool | str = False
    max_time: float | None = None
    stop_strings: str | tuple[str, ...] | None = None
    # Strategy
    do_sample: bool = False
    num_beams: int = 1
    num_beam_groups: int = 1
    penalty_alpha: Number | None = None
    use_cache: bool = True
    # Logits
    temperature: Number = 1.0
    top_k: Number | None = 50
    top_p: Number = 1.0
    min_p: Number | None = None
    typical_p: Number = 1.0
    epsilon_cutoff: Number = 0.0
    eta_cutoff: Number = 0.0
    diversity_penalty: Number = 0.0
    repetition_penalty: Number = 1.0
    encoder_repetition_penalty: Number = 1.0
    length_penalty: Number = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: Any = None
    force_words_ids: tuple | None = None
    constraints: tuple | None = None
    renormalize_logits: bool = False
    forced_bos_token_id: Number | None = None
    forced_eos_token_id: Any = None
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple | None = None
    suppress_tokens: Any = None
    begin_suppress_tokens: Any = None
    forced_decoder_ids: Any = None
    sequence_bias: Any = None
    guidance_scale: Number | None = None
    low_memory: bool | None = None
    watermarking_config: Any = None
    # Output
    num_return_sequences: int = 1
    output_attentions: bool = False
    output_hidden_states: bool = False
    output_scores: bool = False
    output_logits: bool | None = None
    return_dict_in_generate: bool = False
    # Special tokens
    pad_token_id: Number | None = None
    bos_token_id: int | None = None
    eos_token_id: Any = None
    # Encoder-decoder models
    decoder_start_token_id: int | None = None
    # Assisted generation
    num_assistant_tokens: int = 5
    num_assistant_tokens_schedule: str = "heuristic"
    prompt_lookup_num_tokens: int | None = None
    max_matching_ngram_size: int | None = None
    # Cache, and what is left
    cache_implementation: str | None = None
    generation_kwargs: Mapping | None = None
    # Later releases
    assistant_confidence_threshold: float | None = None
    assistant_early_exit: int | None = None
    assistant_lookbehind: int | None = None
    target_lookbehind: int | None = None
    cache_config: Any = None
    compile_config: Any = None
    disable_compile: bool | None = None
    dola_layers: Any = None
    is_assistant: bool | None = None
    max_cache_len: int | None = None
    prefill_chunk_size: int | None = None
    return_legacy_cache: bool | None = None
    token_healing: bool | None = None
    top_h: Number | None = None
    # jaxgen's own
    output_logprobs: str | None = None
    top_logprobs: int = 0
    # The checkpoint
    model: ModelConfig | None = None

    def __post_init__(self):
        for name, option in TRACED.items():
            object.__setattr__(self, name, option.normal(name, getattr(self, name)))
        for name in _STATIC:
            object.__setattr__(self, name, frozen(getattr(self, name)))
        if self.max_length is None:
            object.__setattr__(self, "max_length", GenerationConfig.max_length)
        if self.model is not None and not isinstance(self.model, ModelConfig):
            raise TypeError(f"model must be a ModelConfig, got {type(self.model).__name__}")
        _check(self)

    def replace(self, **fields: Any) -> GenerationConfig:
        """Return a copy with other values for some fields.

        Raises:
            ConfigError: an unknown field, with the nearest known one, or a value that is not allowed.
        """
        _known(fields)
        return dataclasses.replace(self, **fields)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], model: ModelConfig | None = None) -> GenerationConfig:
        """Read the dict of a generation_config.json. What transformers adds for its own book-keeping is left out.

        Raises:
            ConfigError: an unknown field, or a value that is not allowed.
        """
        fields = {name: value for name, value in config.items() if name not in _BOOKKEEPING}
        _known(fields)
        return cls(**fields, model=model)

    def to_hf(self) -> dict[str, Any]:
        """Return what differs from the defaults, as generation_config.json holds it.

        Raises:
            ConfigError: a field that has one value per prompt, which transformers cannot express.
        """
        fields = {}
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name in TRACED and TRACED[name].prompts(value) is not None:
                raise ConfigError(f"{name} has one value per prompt; generation_config.json holds a single one")
            if name in TRACED:
                value = TRACED[name].normal(name, jax.tree.map(_on_host, value))
            if name not in _OWN and value != field.default:
                fields[name] = thawed(value)
        return fields

    def on(self, name: str) -> bool:
        """Whether an option is on: not at the value that leaves everything as it is."""
        value = getattr(self, name)
        return not TRACED[name].is_off(value) if name in TRACED else bool(value)

    @property
    def mode(self) -> str:
        """The decode mode: `GenerationMode` of transformers, chosen as `get_generation_mode` does."""
        if self.constraints is not None or self.force_words_ids is not None:
            return "constrained_beam_search"
        if self.num_beams == 1:
            if self.do_sample:
                mode = "sample"
            elif self.on("penalty_alpha") and (not isinstance(self.top_k, int) or self.top_k > 1):
                mode = "contrastive_search"
            else:
                mode = "greedy_search"
        elif self.num_beam_groups > 1:
            mode = "group_beam_search"
        else:
            mode = "beam_sample" if self.do_sample else "beam_search"
        if self.prompt_lookup_num_tokens is not None:
            if mode not in ("greedy_search", "sample"):
                raise ConfigError(f"prompt_lookup_num_tokens works with greedy search and sampling, not with {mode}")
            return "assisted_generation"
        return mode

    def tree_flatten(self):
        """Split into the traced numbers and the static rest."""
        leaves = tuple(option.leaf(getattr(self, name)) for name, option in TRACED.items())
        return leaves, tuple(getattr(self, name) for name in (*_STATIC, "model"))

    @classmethod
    def tree_unflatten(cls, static, leaves):
        """Build from what `tree_flatten` gave; values may be anything that jax puts there and are not checked."""
        config = object.__new__(cls)
        for name, value in zip((*_STATIC, "model"), static, strict=True):
            object.__setattr__(config, name, value)
        for (name, option), leaf in zip(TRACED.items(), leaves, strict=True):
            object.__setattr__(config, name, option.off if leaf is None else leaf)
        return config

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GenerationConfig):
            return NotImplemented
        (mine, structure), (theirs, other_structure) = jax.tree.flatten(self), jax.tree.flatten(other)
        return structure == other_structure and all(map(np.array_equal, mine, theirs))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), np.ndarray | jax.Array)
            or getattr(self, field.name) != field.default
        ]
        return f"GenerationConfig({', '.join(shown)})"


def _on_host(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, jax.Array) else value


_NAMES = tuple(field.name for field in dataclasses.fields(GenerationConfig))
_STATIC = tuple(name for name in _NAMES if name not in (*TRACED, "model"))
_OWN = ("model", "output_logprobs", "top_logprobs")  # what transformers does not have
_BOOLEANS = (
    "do_sample use_cache renormalize_logits remove_invalid_values output_attentions output_hidden_states output_scores "
    "output_logits return_dict_in_generate"
).split()
# Static options that are whole numbers, with their least values; those that are needed cannot be None.
_WHOLE_NUMBERS = {
    **{"max_length": 1, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "top_logprobs": 0},
    **{"bos_token_id": 0, "decoder_start_token_id": 0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0},
    **{"prefill_chunk_size": 1, "num_assistant_tokens": 1, "max_matching_ngram_size": 1, "prompt_lookup_num_tokens": 1},
}
_NEEDED = ("max_length", "num_beams", "num_beam_groups", "num_return_sequences", "top_logprobs")
WARPERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")


def warn_unused(cfg: GenerationConfig) -> None:
    """Warn of options that the decode mode does not look at, as `GenerationConfig.validate` does.

    Of a traced value it is not known whether it is the default.
    """
    if not cfg.do_sample:
        looked_at = ("top_k",) if cfg.on("penalty_alpha") else ()
        _warn_of_others([name for name in WARPERS if name not in looked_at], cfg, "do_sample=False")
    if cfg.on("min_new_tokens") and cfg.on("min_length"):
        warn("min_new_tokens and min_length are both set: min_new_tokens holds, min_length does not")
    if cfg.num_beams == 1:
        beams = ("early_stopping", "num_beam_groups", "diversity_penalty", "length_penalty")
        _warn_of_others(beams, cfg, "num_beams=1")


def _warn_of_others(names: Iterable[str], cfg: GenerationConfig, mode: str) -> None:
    given = {name: getattr(cfg, name) for name in names if not isinstance(getattr(cfg, name), Tracer)}
    defaults = {name: getattr(GenerationConfig, name) for name in given}
    unused = [
        f"{name}={value}"
        for name, value in given.items()
        if value is not None
        and (isinstance(value, np.ndarray | jax.Array) or (value != defaults[name] and (name, value) != ("top_k", 0)))
    ]
    if unused:
        warn(f"{', '.join(unused)} given with {mode}, which does not look at it")


def warn(message: str) -> None:
    """Emit jaxgen's category of warning, on behalf of the line outside of jaxgen that called it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "jaxgen":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, JaxgenWarning, stacklevel=level)


def _known(fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            raise ConfigError(f"unknown option {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))


def _check(cfg: GenerationConfig) -> None:
    """Refuse what `GenerationConfig.validate` of transformers refuses, and static values of the wrong type."""
    for name in _BOOLEANS:
        value = getattr(cfg, name)
        if not isinstance(value, bool) and not (value is None and name in ("output_logits", "use_cache")):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    for name, least in _WHOLE_NUMBERS.items():
        value = getattr(cfg, name)
        if value is None and name not in _NEEDED:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if not least <= value <= np.iinfo(np.int32).max:
            raise ConfigError(f"{name} must be >= {least} and fit into 32 bits, got {value}")
    _check_more(cfg)
    if not (isinstance(cfg.early_stopping, bool) or cfg.early_stopping == "never"):
        raise ConfigError(f"early_stopping must be True, False or 'never', got {cfg.early_stopping!r}")
    if cfg.num_beams > 1:
        _check_beams(cfg)
    elif cfg.num_return_sequences > 1 and not cfg.do_sample:
        raise ConfigError(
            f"num_return_sequences={cfg.num_return_sequences}: greedy search has one result per prompt; "
            "set do_sample=True, or num_beams"
        )


def _check_more(cfg: GenerationConfig) -> None:
    """Refuse wrong values of the static options that no release of transformers checks, or that are jaxgen's own."""
    strings = cfg.stop_strings
    listed = isinstance(strings, tuple) and all(isinstance(string, str) for string in strings)
    if not (strings is None or isinstance(strings, str) or listed):
        raise TypeError(f"stop_strings must be a string or a list of them, got {strings!r}")
    if strings is not None and (not strings or "" in ([strings] if isinstance(strings, str) else strings)):
        raise ConfigError(f"stop_strings must not be empty, got {strings!r}: leave it out to stop at none")
    if cfg.max_time is not None:
        if isinstance(cfg.max_time, bool) or not isinstance(cfg.max_time, int | float):
            raise TypeError(f"max_time must be a number of seconds, got {cfg.max_time!r}")
        if not cfg.max_time >= 0:
            raise ConfigError(f"max_time must be >= 0 seconds, got {cfg.max_time}")
    if cfg.output_logprobs not in (None, "logits", "scores"):
        raise ConfigError(
            "output_logprobs must be 'logits', for the model's own distribution, 'scores', for the one that is chosen "
            f"from, or None, got {cfg.output_logprobs!r}"
        )
    if cfg.top_logprobs and cfg.output_logprobs is None:
        raise ConfigError(f"top_logprobs={cfg.top_logprobs} needs output_logprobs='logits' or 'scores'")


def _check_beams(cfg: GenerationConfig) -> None:
    if cfg.constraints is not None or cfg.force_words_ids is not None:
        name = "constraints" if cfg.constraints is not None else "force_words_ids"
        if cfg.do_sample or cfg.num_beam_groups != 1:
            raise ConfigError(f"{name} works with plain beam search: set do_sample=False and num_beam_groups=1")
    if cfg.on("diversity_penalty") or cfg.num_beam_groups != 1:
        if cfg.do_sample:
            raise ConfigError("num_beam_groups and diversity_penalty need do_sample=False")
        if cfg.num_beams % cfg.num_beam_groups:
            raise ConfigError(f"num_beams={cfg.num_beams} must be a multiple of num_beam_groups={cfg.num_beam_groups}")
        if not cfg.on("diversity_penalty"):
            raise ConfigError("num_beam_groups > 1 needs diversity_penalty > 0, or all groups are the same")
    if cfg.num_return_sequences > cfg.num_beams:
        raise ConfigError(f"num_return_sequences={cfg.num_return_sequences} must be <= num_beams={cfg.num_beams}")
