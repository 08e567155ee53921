"""Checks of a call that need no weights. A command makes them first, because reading weights can take a long time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxgen.core.config.availability import check_options, refuse_unavailable
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.request.assistant import check_assistant
from jaxgen.core.request.checks import check_room, check_stop_strings
from jaxgen.core.request.inputs import check_vocabulary
from jaxgen.core.request.lengths import Lengths
from jaxgen.core.text.tokenizer import Tokenizer


def check_early(
    cfg: GenerationConfig,
    tokenizer: Tokenizer,
    budgets: Sequence[int] = (),
    *,
    prompts: int = 1,
    allowed: TokenAutomaton | None = None,
    assistant: GenerationConfig | None = None,
) -> None:
    """Raise an error if a call with these options, grammar and assistant cannot work.

    Args:
        cfg: the options.
        tokenizer: the tokenizer for stop strings.
        budgets: the maximum number of new tokens for each prompt; needed with a grammar.
        prompts: the number of prompts in the call.
        allowed: the grammar, or None.
        assistant: the assistant's config, or None.
    """
    refuse_unavailable(cfg)
    check_options(cfg, prompts)
    check_stop_strings(cfg, tokenizer)
    if allowed is not None:
        check_room(allowed, cfg, np.asarray(budgets))
    if assistant is not None:
        check_assistant(assistant, cfg)


def new_tokens(cfg: GenerationConfig, ids: Sequence[int], wanted: int | None, max_length: int | None) -> int:
    """Check a prompt, and return the maximum number of new tokens after it: `wanted`, or as many as fit.

    If `wanted` is None, `max_length` limits the prompt and its answer together, unless it is None.
    """
    check_vocabulary(ids, cfg.model)
    return Lengths(context=cfg.model.context_length, total=max_length).budget(len(ids), wanted)
