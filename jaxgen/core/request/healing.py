"""Token healing: remove the last token of each prompt, and make the answer start with that token's text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.request.inputs import mask_of, prompts_of
from jaxgen.core.request.prepare import CallInputs
from jaxgen.core.text.tokenizer import check_tokenizer
from jaxgen.errors import ConfigError, InputError

_LONGEST_CHARACTER = 4  # bytes in UTF-8


def heal(cfg: GenerationConfig, inputs: CallInputs, allowed, tokenizer) -> tuple[CallInputs, TokenAutomaton]:
    """Return the prompts without their last tokens, and an automaton for texts that start with these tokens' bytes.

    If the last token starts in the middle of a character, the earlier tokens of that character are removed too. The
    answer then starts with a whole character. A prompt stays unchanged if its last token has no text (like a special
    token) or is its only token. Columns before the removed tokens move right, so the width does not change.

    `allowed` is the caller's `prefix_allowed_tokens_fn`, and `tokenizer` is a `Tokenizer` or None.

    Raises:
        InputError: the prompts have no ids, there is no tokenizer, or `prefix_allowed_tokens_fn` is also set.
        ConfigError: an option forces tokens at fixed positions.
        TypeError: `tokenizer` is not a `jaxgen.Tokenizer`.
    """
    if tokenizer is None:
        raise InputError("token_healing compares texts: pass the tokenizer too, generate(..., tokenizer=tokenizer)")
    check_tokenizer(tokenizer)
    if allowed is not None:
        raise InputError("token_healing and prefix_allowed_tokens_fn both restrict the first tokens: leave one out")
    if inputs.ids is None and inputs.inputs_embeds is not None:
        raise InputError("token_healing needs the prompts' ids, and only inputs_embeds were given: pass ids too")
    for name in ("forced_bos_token_id", "forced_decoder_ids"):
        if cfg.on(name):
            raise ConfigError(f"token_healing makes the prompt shorter, but {name} counts its tokens: leave one out")
    ids, embeds = prompts_of(inputs.ids, inputs.inputs_embeds, cfg, inputs.cache is not None)
    mask = mask_of(inputs.attention_mask, ids, cfg, embeds is not None)
    vocab, texts = cfg.model.vocab_size, tokenizer.token_bytes()
    filler = tokenizer.padding_id if tokenizer.padding_id < vocab else 0
    column = np.arange(ids.shape[1])[None, :]
    removed, columns, last = [], [], []
    for row, tokens in zip(ids, map(np.flatnonzero, mask), strict=True):
        count, text = _taken_back([texts[token] if token < len(texts) else None for token in row[tokens].tolist()])
        removed.append(text)
        columns.append(tokens[-1] + 1 - tokens[-count] if count else 0)
        last.append(tokens[-1])
    source = column - np.where(column <= np.array(last)[:, None], np.array(columns)[:, None], 0)
    has_token, source = source >= 0, np.maximum(source, 0)
    moved = dataclasses.replace(
        inputs,
        ids=np.where(has_token, np.take_along_axis(ids, source, axis=1), filler),
        attention_mask=np.take_along_axis(mask, source, axis=1) & has_token,
        inputs_embeds=None if embeds is None else np.take_along_axis(embeds, source[:, :, None], axis=1),
    )
    return moved, TokenAutomaton.from_prefixes(removed, tokenizer, vocab_size=vocab)


def _taken_back(texts: Sequence[bytes | None]) -> tuple[int, bytes]:
    """Return the number of tokens to remove from a prompt, and the removed text.

    `texts` contains the text of each token in the prompt. If all removable tokens start in the middle of a character,
    only the last token is removed.
    """
    last = texts[-1]
    if not last or len(texts) == 1:
        return 0, b""
    text = b""
    for count, before in enumerate(texts[:0:-1][:_LONGEST_CHARACTER], start=1):
        if not before:
            break
        text = before + text
        if text[0] & 0xC0 != 0x80:  # the first byte is not a UTF-8 continuation byte
            return count, text
    return 1, last
