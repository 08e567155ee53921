"""Declarations of the decode modes, so that the trunk need not know them by name."""

from __future__ import annotations

import dataclasses

from jaxgen.config.generation_config import GenerationConfig


@dataclasses.dataclass(frozen=True)
class Needs:
    """Requirements of a decode mode with the options of a config; all of them static.

    Attributes:
        sequences: rows in the loop per prompt.
        candidates: tokens that it reads per row and step, to choose one of them.
        heads: how often it applies the model's head per row and step.
        layer_states: it reads the hidden states of all layers at each row's last token.
        final_states: it reads the last layer's normed hidden states of all tokens.
    """

    sequences: int = 1
    candidates: int = 1
    heads: int = 1
    layer_states: bool = False
    final_states: bool = False


class Declared:
    """Base of the decode modes, with the properties that do not depend on options.

    Attributes:
        takes_draft: a draft model may be passed; then `Assisted` is the mode.
        drafts: it reads drafted tokens.
        replays: `score(of="scores")` can compute its scores: they depend on nothing but the row's tokens.
        no_cache: why it cannot begin with a cache; empty if it can.
    """

    takes_draft: bool = False
    drafts: bool = False
    replays: bool = False
    no_cache: str = ""

    def needs(self, cfg: GenerationConfig) -> Needs:
        """Return what it needs with these options.

        Raises:
            ConfigError: options that the mode cannot have.
        """
        return Needs(sequences=cfg.num_return_sequences)
