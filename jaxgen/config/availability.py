"""The options that generate() offers, and its errors about the others, all derived from the options' records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxgen.config.constraints import ConstraintTable
from jaxgen.config.generation_config import GenerationConfig, model_of, refuse_values
from jaxgen.config.kinds import is_tracer
from jaxgen.config.options import CONSTRAINED, GROUP_BEAM, MODES, OPTIONS, TRACED
from jaxgen.config.tables import eos_list
from jaxgen.errors import ConfigError, InputError


def refuse_unavailable(cfg: GenerationConfig) -> None:
    """Raise an error for an option that is not offered, or not with the others, by its name.

    Options that only other decode modes read cause a warning, as in transformers: see `warn_unused`.
    """
    refuse_values(cfg)
    mode = cfg.mode
    if mode == CONSTRAINED and cfg.num_beams == 1:
        name = "constraints" if cfg.on("constraints") else "force_words_ids"
        raise ConfigError(f"{name} works with beam search only, got num_beams=1: set num_beams to 2 or more")
    if cfg.on("diversity_penalty") and mode != GROUP_BEAM:
        raise ConfigError(
            f"diversity_penalty={cfg.diversity_penalty} needs groups of beams: set num_beams and num_beam_groups above "
            "1, or leave it out"
        )
    if cfg.prefill_chunk_size is not None:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(cfg, name):
                raise ConfigError(f"{name} needs the prompt in one piece: leave out prefill_chunk_size")


def refuse_options(options: dict[str, Any]) -> None:
    """Raise an error for keyword arguments that `generate` does not have."""
    for name in options:
        if name in GenerationConfig.__dataclass_fields__:
            raise TypeError(f"generate() reads {name} from the config: use cfg.replace({name}=...)")
        if name in ("synced_gpus", "position_ids"):
            raise TypeError(f"generate() does not offer {name}: leave it out")
        if name == "assistant_model":
            raise TypeError("generate() has no assistant_model: pass assistant=(params, cfg)")
        if name == "past_key_values":
            raise TypeError("generate() has no past_key_values: pass cache=, with only the new tokens as ids")
        GenerationConfig().replace(**{name: None})  # an unknown name: raises and offers the nearest


def check_options(cfg: GenerationConfig, prompts: int) -> None:
    """Raise an error for values for another number of prompts, or ids that are not in the vocabulary."""
    vocab = model_of(cfg).vocab_size
    for name, option in TRACED.items():
        value = getattr(cfg, name)
        if not option.is_on(value):
            continue
        values = option.kind.prompt_count(value)
        if values is not None and values != prompts:
            raise InputError(f"{name} has {values} values for {prompts} prompts: pass one per prompt or one for all")
        largest = max(option.kind.tokens(value), default=0) if option.stage or option.group == MODES else 0
        if largest >= vocab:
            raise ConfigError(f"{name} has the token {largest}, but the vocabulary is 0 to {vocab - 1}")
        if isinstance(option.kind, ConstraintTable):
            _check_ends(name, option.kind.phrases(value), eos_list(cfg.eos_token_id))
    if cfg.prefill_chunk_size is not None and model_of(cfg).rope.type == "dynamic":
        raise ConfigError("prefill_chunk_size is not offered with dynamic RoPE, which depends on the total length")
    if cfg.on("exponential_decay_length_penalty") and not cfg.on("eos_token_id"):
        raise ConfigError("exponential_decay_length_penalty makes an end more likely: set eos_token_id too")
    if cfg.top_logprobs > vocab:
        raise ConfigError(f"top_logprobs={cfg.top_logprobs} exceeds the {vocab} tokens of the vocabulary")


def _check_ends(name: str, phrases: Sequence[tuple[int, ...]], eos: Sequence[int]) -> None:
    for phrase in phrases:
        if ends := set(phrase[:-1]) & set(eos):
            raise ConfigError(
                f"{name} has {list(phrase)}, in which the eos token {min(ends)} is not the last: a text ends "
                "there. Encode phrases without special tokens"
            )


def normal_form(cfg: GenerationConfig) -> GenerationConfig:
    """Reset options that the compiled loop does not read, so that they do not change the program."""
    unread = [*cfg.unread(), *(option for option in OPTIONS.values() if option.host)]
    unread = {option.name: option.kind.neutral for option in unread}
    fields = {name: neutral for name, neutral in unread.items() if getattr(cfg, name) is not neutral}
    if cfg.pad_token_id is None and not is_tracer(cfg.eos_token_id):
        # As in the loop; set here so that the program is the same as with an explicit pad id.
        fields["pad_token_id"] = (eos_list(cfg.eos_token_id) or [0])[0]
    return cfg.replace(**fields)
