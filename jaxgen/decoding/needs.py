"""Requirements of a decode mode, read by the shared loop."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Needs:
    """Requirements of a decode mode with the options of a config; all of them static.

    Attributes:
        sequences: rows in the loop per prompt.
        candidates: tokens that the model reads per row and step, to choose one of them.
        layer_states: the mode reads the hidden states of all layers at each row's last token.
        final_states: the mode reads the last layer's normed hidden states of all tokens.
    """

    sequences: int = 1
    candidates: int = 1
    layer_states: bool = False
    final_states: bool = False
