"""The tokens that end an answer in a conversation."""

from __future__ import annotations

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.tables import eos_list
from jaxgen.core.text.tokenizer import Tokenizer


def with_end_of_turn(cfg: GenerationConfig, tokenizer: Tokenizer) -> GenerationConfig:
    """Return a config with which the tokenizer's end-of-sequence token also ends an answer.

    A checkpoint that was fine-tuned from a base model often names only the base model's token in its generation config.
    Its chat template ends turns with another token, which the tokenizer names. `generate` reads only the config.
    """
    own, ends = tokenizer.eos_token_id, eos_list(cfg.eos_token_id)
    size = float("inf") if cfg.model is None else cfg.model.vocab_size
    if own is None or own in ends or own >= size:
        return cfg
    return cfg.replace(eos_token_id=[*(token for token in ends if token < size), own])
