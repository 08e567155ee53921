"""The tokens that end a conversation's answer."""

from __future__ import annotations

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.tables import eos_list
from jaxgen.text.tokenizer import Tokenizer


def ends_of(cfg: GenerationConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the ids in `cfg.eos_token_id`, and the tokenizer's end-of-sequence token if it is not one of them.

    A checkpoint that was fine-tuned from a base model often names only the base model's token in its generation config.
    Its chat template ends turns with another token, which the tokenizer names. `generate` reads only the config.
    """
    ends, own = eos_list(cfg.eos_token_id), tokenizer.eos_token_id
    is_new = own is not None and own not in ends and cfg.model is not None and own < cfg.model.vocab_size
    return [*ends, own] if is_new and own is not None else ends
