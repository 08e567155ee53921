"""The tokens that end an answer in a conversation."""

from __future__ import annotations

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.tables import eos_list
from jaxgen.core.text.tokenizer import Tokenizer


def end_of_turn(cfg: GenerationConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the tokenizer's end-of-sequence id in a list, or an empty list if `cfg.eos_token_id` has this id.

    A checkpoint that was fine-tuned from a base model often names only the base model's token in its generation config.
    Its chat template ends turns with another token, which the tokenizer names. `generate` reads only the config.
    """
    own = tokenizer.eos_token_id
    is_new = own is not None and own not in eos_list(cfg.eos_token_id)
    return [own] if is_new and own is not None and (cfg.model is None or own < cfg.model.vocab_size) else []


def with_end_of_turn(cfg: GenerationConfig, tokenizer: Tokenizer) -> GenerationConfig:
    """Return a config with which the tokenizer's end-of-sequence token also ends an answer; see `end_of_turn`."""
    if not (own := end_of_turn(cfg, tokenizer)):
        return cfg
    known = [token for token in eos_list(cfg.eos_token_id) if cfg.model is None or token < cfg.model.vocab_size]
    return cfg.replace(eos_token_id=[*known, *own])
