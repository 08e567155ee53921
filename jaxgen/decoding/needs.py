"""Requirements that a decode mode declares to the shared loop."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Needs:
    """Requirements of a decode mode with the options of a config. All of them are static.

    Attributes:
        sequences: the number of rows in the loop per prompt.
        candidates: the number of tokens per row and step that the model reads before one is chosen.
        layer_states: the mode reads the hidden states of all layers at each row's last token.
        final_states: the mode reads the last layer's normed hidden states of all tokens.
    """

    sequences: int = 1
    candidates: int = 1
    layer_states: bool = False
    final_states: bool = False
