"""Check generate()'s arguments and options, and convert a config to its normal form."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn, ParamSpec, TypeVar

import jax.numpy as jnp

from jaxgen.core.config.constraints import ConstraintKind
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.config.option import MODES
from jaxgen.core.config.tables import eos_list
from jaxgen.core.config.values import is_tracer
from jaxgen.errors import ConfigError, InputError, shown

P = ParamSpec("P")
T = TypeVar("T")
_HOST = tuple(option.name for option in OPTIONS.values() if option.host)
# Arguments of transformers' generate() that do not exist here, and what to do instead.
_ELSEWHERE = {
    "input_ids": "pass the prompts as ids, the second argument",
    "inputs": "pass the prompts as ids, the second argument",
    "generation_config": "pass a jaxgen.GenerationConfig as cfg, the fourth argument",
    "assistant_model": "pass assistant=(params, cfg)",
    "past_key_values": "pass cache=, with only the new tokens as ids",
    "position_ids": "leave it out",
    "synced_gpus": "leave it out",
}


def refuse_unavailable(cfg: GenerationConfig) -> None:
    """Raise an error if a combination of options is not supported.

    As in transformers, an option that the decode mode does not read causes only a warning (see `warn_unused`).
    """
    constrained = [name for name in ("constraints", "force_words_ids") if getattr(cfg, name) is not None]
    if constrained and cfg.num_beams == 1:
        raise ConfigError(f"{constrained[0]} works with beam search only, got num_beams=1: set num_beams to 2 or more")
    if cfg.on("diversity_penalty") and (cfg.num_beams == 1 or cfg.num_beam_groups == 1):
        raise ConfigError(
            f"diversity_penalty={cfg.diversity_penalty} needs groups of beams: set num_beams and num_beam_groups above "
            "1, or leave it out"
        )
    if cfg.prefill_chunk_size is not None:
        for name in ("output_attentions", "output_hidden_states", "output_routed_experts"):
            if getattr(cfg, name):
                raise ConfigError(f"{name} needs the prompt in one piece: leave out prefill_chunk_size")
    if cfg.output_routed_experts and cfg.model is not None and cfg.model.sparse_layers == 0:
        raise ConfigError(f"output_routed_experts is for models with experts, got model_type {cfg.model.model_type}")


def with_hints(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that an error about an unknown keyword says what to write instead."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        for name in named:
            if name not in known:
                refuse_argument(function.__name__, name, known)
        return function(*arguments, **named)

    return call


def refuse_argument(function: str, name: str, known: Collection[str]) -> NoReturn:
    """Raise the error for an argument that a function does not have. `known` contains the arguments that it has."""
    if name in OPTIONS:
        raise TypeError(f"{function}() has no {name}, which is an option of the config: use cfg.replace({name}=...)")
    if name in _ELSEWHERE:
        raise TypeError(f"{function}() has no {name}: {_ELSEWHERE[name]}")
    near = difflib.get_close_matches(name, [*known, *OPTIONS], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
    error = ConfigError if near and near[0] not in known else TypeError
    raise error(f"{function}() has no argument {shown(name)}: {hint}")


def check_options(cfg: GenerationConfig, prompts: int) -> None:
    """Raise an error if an option has the wrong number of values, or contains ids outside the vocabulary."""
    vocab = cfg.model.vocab_size
    for name, option in OPTIONS.items():
        if name not in cfg.enabled:
            continue
        value = getattr(cfg, name)
        values = option.kind.prompt_count(value) if option.kind.per_prompt else None
        if values is not None and values != prompts:
            raise InputError(f"{name} has {values} values for {prompts} prompts: pass one per prompt or one for all")
        largest = max(option.kind.tokens(value), default=0) if option.stage or option.group == MODES else 0
        if largest >= vocab:
            raise ConfigError(f"{name} contains the token {largest}, but the vocabulary is 0 to {vocab - 1}")
        if isinstance(option.kind, ConstraintKind):
            _check_ends(name, option.kind.phrases(value), eos_list(cfg.eos_token_id))
    for name in ("prefill_chunk_size", "slots"):
        if getattr(cfg, name) is not None and cfg.model.has_dynamic_rope:
            raise ConfigError(
                f"{name} is not offered with dynamic RoPE, which depends on the total length: prompts are read in "
                "chunks. Leave it out"
            )
    if cfg.on("exponential_decay_length_penalty") and not cfg.on("eos_token_id"):
        raise ConfigError("exponential_decay_length_penalty raises the scores of eos tokens: set eos_token_id too")
    if cfg.top_logprobs > vocab:
        raise ConfigError(f"top_logprobs={cfg.top_logprobs} exceeds the {vocab} tokens of the vocabulary")


def _check_ends(name: str, phrases: Sequence[tuple[int, ...]], eos: Sequence[int]) -> None:
    for phrase in phrases:
        if ends := set(phrase[:-1]) & set(eos):
            raise ConfigError(
                f"{name} has {list(phrase)}, in which tokens follow the eos token {min(ends)}, but a text ends there: "
                "encode phrases without special tokens"
            )


def normal_form(cfg: GenerationConfig) -> GenerationConfig:
    """Reset options that the compiled loop does not read, so that they do not change the program; set the pad id."""
    cfg = cfg.reset([*_HOST, *[option.name for option in cfg.unread()]])
    if cfg.on("pad_token_id"):
        return cfg
    # The default pad id is the first eos id, or 0 if there is no eos id.
    if not is_tracer(cfg.eos_token_id):
        return cfg.replace(pad_token_id=(eos_list(cfg.eos_token_id) or [0])[0])
    ids = jnp.ravel(cfg.eos_token_id)
    return cfg.replace(pad_token_id=ids[jnp.argmax(ids >= 0)])
