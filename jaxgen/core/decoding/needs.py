"""Requirements that a decode mode declares to the shared loop."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Needs:
    """Static requirements of a decode mode under a given config.

    Attributes:
        sequences: the number of rows per prompt in the loop.
        candidates: the number of candidate tokens that the model reads per row in each step.
        layer_states: True if the mode reads the hidden states of all layers at each row's last token.
        final_states: True if the mode reads the normed hidden states of the last layer at every token.
    """

    sequences: int = 1
    candidates: int = 1
    layer_states: bool = False
    final_states: bool = False
