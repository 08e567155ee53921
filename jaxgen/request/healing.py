"""Token healing: the last token of each prompt is taken back, and the answer spells its text again."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxgen.config.generation_config import GenerationConfig, model_of
from jaxgen.errors import ConfigError, InputError
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.request.inputs import mask_of, prompts_of
from jaxgen.request.prepare import CallInputs
from jaxgen.text.tokenizer import Tokenizer

# Options that force tokens at places counted from the prompt's first token.
_PLACED = ("forced_bos_token_id", "forced_decoder_ids")


def heal(cfg: GenerationConfig, inputs: CallInputs, allowed, tokenizer) -> tuple[CallInputs, TokenAutomaton]:
    """Return the prompts without their last tokens, and the automaton of texts that begin with those tokens' bytes.

    A prompt is left as it is if its last token has no text, as special tokens, or if it is the only token. Columns
    before a removed token move to the right by one, so the width is unchanged.

    Args:
        cfg: the config.
        inputs: the concrete arrays of an eager call.
        allowed: the caller's `prefix_allowed_tokens_fn`, which must be None.
        tokenizer: the model's `Tokenizer`.

    Raises:
        InputError: prompts without ids, no tokenizer, or another rule for the tokens that may follow.
        ConfigError: an option that forces tokens.
        TypeError: `tokenizer` is not a `jaxgen.Tokenizer`.
    """
    if tokenizer is None:
        raise InputError("token_healing compares texts: pass the tokenizer too, generate(..., tokenizer=tokenizer)")
    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"token_healing needs a jaxgen.Tokenizer, got {type(tokenizer).__name__}")
    if allowed is not None:
        raise InputError("token_healing and prefix_allowed_tokens_fn both restrict the first tokens: leave one out")
    if inputs.ids is None and inputs.inputs_embeds is not None:
        raise InputError("token_healing needs the prompts' ids, and only inputs_embeds were given: pass ids too")
    for name in _PLACED:
        if cfg.on(name):
            raise ConfigError(f"token_healing makes the prompt shorter, and {name} counts its tokens: leave one out")
    ids, embeds = prompts_of(inputs.ids, inputs.inputs_embeds, cfg, inputs.cache is not None)
    mask = mask_of(inputs.attention_mask, ids, cfg, embeds is not None)
    vocab, texts = model_of(cfg).vocab_size, tokenizer.token_bytes()
    filler = tokenizer.padding_id if tokenizer.padding_id < vocab else 0
    column = np.arange(ids.shape[1])[None, :]
    last = np.max(np.where(mask, column, 0), axis=1, keepdims=True)
    tokens = np.take_along_axis(ids, last, axis=1)[:, 0].tolist()
    removed = [texts[token] or b"" if token < len(texts) else b"" for token in tokens]
    removed = [text if own.sum() > 1 else b"" for text, own in zip(removed, mask, strict=True)]
    source = column - ((np.array([len(text) for text in removed])[:, None] > 0) & (column <= last))
    kept, source = source >= 0, np.maximum(source, 0)
    moved = dataclasses.replace(
        inputs,
        ids=np.where(kept, np.take_along_axis(ids, source, axis=1), filler),
        attention_mask=np.take_along_axis(mask, source, axis=1) & kept,
        inputs_embeds=None if embeds is None else np.take_along_axis(embeds, source[:, :, None], axis=1),
    )
    return moved, TokenAutomaton.from_prefixes(removed, tokenizer, vocab_size=vocab)
