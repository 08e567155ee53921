"""Calls to generate() for prompts that set options of their own, as the lines of --input do."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.config.kinds import Text
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.request.checks import check_adapter, check_grammar, check_lengths, check_room
from jaxgen.core.request.fields import OF_HOST, translated, with_own
from jaxgen.core.request.keys import KEY_IMPL
from jaxgen.core.request.prompt import PromptReader
from jaxgen.core.request.prompt_options import PromptOptions, per_prompt_options
from jaxgen.core.text.tokenizer import Tokenizer

_IN_CALLS = frozenset([*OF_HOST, *(name for name, option in OPTIONS.items() if option.kind.per_prompt)])


@functools.cache
def own_options(slots: bool) -> frozenset[str]:
    """Return the options that a prompt may set for itself in an engine or, if `slots` is False, in a call."""
    return frozenset([*OF_HOST, *per_prompt_options()]) if slots else _IN_CALLS


def engine_reader(
    cfg: GenerationConfig, tokenizer: Tokenizer, width: int, options: Collection[str], entries: int
) -> PromptReader:
    """Return the reader of an engine for prompts of `width` tokens that set `options`; their keys come from seeds."""
    return PromptReader(PromptOptions(cfg, width, options, entries), tokenizer, KEY_IMPL)


@dataclass(frozen=True)
class OwnCall:
    """The config and the grammar of a prompt, or of several prompts that set the same options."""

    cfg: GenerationConfig
    grammar: TokenAutomaton | None = None

    @classmethod
    def read(cls, fields: dict[str, Any], cfg: GenerationConfig, tokenizer: Tokenizer) -> OwnCall:
        """Read a prompt in the format of `Engine.submit`. Raise an error if a field is unknown or invalid."""
        values = translated(fields, tokenizer, cfg.model.vocab_size, None)
        own = {name: value for name, value in values.items() if name in OPTIONS}
        return cls(with_own(cfg, own, _IN_CALLS) if own else cfg, values.get("allowed"))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return Text().sets(self.cfg.stop_strings)[0] or ()

    def check(self, lengths: np.ndarray, budgets: np.ndarray) -> None:
        """Raise an error if prompts without adapters of their own cannot be answered, and warn as `generate` does.

        `lengths` contains the numbers of tokens in the prompts, and `budgets` the maximum numbers of new tokens.
        """
        check_adapter(self.cfg.adapter, 0)
        check_lengths(self.cfg, lengths, budgets)
        if self.grammar is not None:
            check_grammar(self.grammar, self.cfg, len(lengths))
            check_room(self.grammar, self.cfg, budgets)
