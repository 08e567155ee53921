"""A ring buffer of numbered prompts that are waiting to be read."""

from __future__ import annotations

import flax.struct
import jax

from jaxgen.decoding.continuous.prefixes import Places
from jaxgen.decoding.request import Request

NOBODY = -1  # stands for "no prompt"


@flax.struct.dataclass
class Queue:
    """Ring of Q places. Waiting prompts occupy consecutive places starting at `first`, wrapping around to place 0.

    Attributes:
        request: a complete request (see `Request.complete`) with one prompt per place of the ring.
        number: int32[Q], the number that identifies each prompt; `NOBODY` for prompts to skip.
        first_sequence: int32[Q], the index of the first sequence to generate for each prompt.
        sequences: int32[Q], the number of sequences to generate for each prompt.
        first: int32[], the place of the next prompt.
        waiting: int32[], the number of waiting prompts.
        prefixes: the places of the prompts' first chunks in the prefix store; None without a store.
    """

    request: Request
    number: jax.Array
    first_sequence: jax.Array
    sequences: jax.Array
    first: jax.Array
    waiting: jax.Array
    prefixes: Places | None = None

    @property
    def places(self) -> int:
        """The number of places, Q."""
        return self.number.shape[0]

    def place(self, order: jax.Array) -> jax.Array:
        """Return the place that is `order int32[...]` places after `first`, wrapping around to place 0."""
        return (self.first + order) % self.places
