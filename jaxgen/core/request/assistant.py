"""The draft model of assisted generation: a call's `assistant`, or the first layers of the model itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.modes import mode_of
from jaxgen.core.decoding.run import Run
from jaxgen.core.request.checks import check_call
from jaxgen.errors import ConfigError, InputError

_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
_UNUSED = ("guidance_scale", "eos_token_id", "output_scores", "output_logits", "output_logprobs", "top_logprobs")
_UNUSED += ("output_hidden_states", "output_attentions", "output_routed_experts", "assistant_early_exit")
# The fraction by which the vocabulary sizes of two models with the same tokenizer may differ, because of padding.
_PADDING = 0.01


@flax.struct.dataclass
class Assistant:
    """A draft model: its parameters and config. Only the config's model and drafting settings are used."""

    params: Any
    cfg: GenerationConfig


def open_assistant(assistant, cfg: GenerationConfig) -> tuple[Assistant, GenerationConfig]:
    """Check `assistant`. Return the assistant with the call's drafting settings, and `cfg` without these settings.

    Raises:
        InputError: the assistant's parameters do not match its config, or its vocabulary differs from the model's.
        ConfigError: the decode mode does not support an assistant, or the assistant's config has no model.
        TypeError: the assistant is not `(params, cfg)`.
    """
    if not isinstance(assistant, tuple | list) or len(assistant) != 2:
        raise TypeError(f"assistant must be (params, cfg), as load_hf returns, got {type(assistant).__name__}")
    params, draft_cfg = assistant
    try:
        check_call(params, draft_cfg)
    except (InputError, ConfigError, TypeError) as error:
        raise type(error)(f"assistant: {error}") from error
    check_assistant(draft_cfg, cfg)
    settings = {name: getattr(cfg, name) for name in _SETTINGS if OPTIONS[name].is_given(getattr(cfg, name))}
    without = cfg.replace(**{name: OPTIONS[name].default for name in _SETTINGS})
    return Assistant(params, draft_cfg.replace(**settings)), without


def check_assistant(draft_cfg: GenerationConfig, cfg: GenerationConfig) -> None:
    """Raise an error if a model with the config `draft_cfg` cannot draft for a call with the config `cfg`."""
    mode = mode_of(cfg)
    if mode.drafts:
        raise ConfigError("assistant, prompt_lookup_num_tokens and assistant_early_exit exclude each other: choose one")
    if not mode.takes_draft:
        raise ConfigError(f"assistant works with greedy search and sampling, not with {cfg.mode}: leave it out")
    theirs, ours = draft_cfg.model.vocab_size, cfg.model.vocab_size
    if abs(theirs - ours) > _PADDING * max(theirs, ours):
        raise InputError(
            f"the assistant has a vocabulary of {theirs} tokens, but the model's has {ours}: use an assistant with the "
            "model's tokenizer"
        )


def check_drafting(cfg: GenerationConfig, assistant: Assistant | None, prompts: int, has_ids: bool) -> None:
    """Raise an error if a call cannot use drafts. `has_ids` is True if the ids of all tokens are known."""
    threshold = OPTIONS["assistant_confidence_threshold"]
    values = None if assistant is None else threshold.kind.prompt_count(assistant.cfg.assistant_confidence_threshold)
    if values not in (None, prompts):
        raise InputError(
            f"{threshold.name} has {values} values for {prompts} prompts: pass one per prompt or one for all"
        )
    if cfg.num_return_sequences > 1:
        raise ConfigError(
            f"assisted generation returns one sequence per prompt, got num_return_sequences={cfg.num_return_sequences}:"
            " repeat the prompts instead"
        )
    layers, early = cfg.model.num_hidden_layers, cfg.assistant_early_exit
    if early is not None and early >= layers:
        raise ConfigError(f"assistant_early_exit={early} must be less than the model's {layers} layers")
    if (early is not None or assistant is not None) and not has_ids:
        raise InputError(
            "a draft model reads the ids of all tokens, but the ids of embedded or cached tokens are not known: "
            "pass ids, or leave the draft model out"
        )


def with_draft(run: Run, assistant: Assistant | None) -> Run:
    """Return `run` with its `draft` set. The draft model is the assistant, if any, or the model's first layers."""
    early = run.cfg.assistant_early_exit
    if assistant is not None:
        params = assistant.params
        model = assistant.cfg.model
        settings = {name: getattr(assistant.cfg, name) for name in _SETTINGS}
    else:
        assert early is not None
        params, settings = run.params, {}
        model = run.model.first_layers(early)
    cfg = run.cfg.replace(model=model, **settings, **{name: OPTIONS[name].default for name in _UNUSED})
    return dataclasses.replace(run, draft=dataclasses.replace(run, params=params, cfg=cfg, extensions=Extensions()))
