"""A ring buffer of numbered prompts that are waiting to be read."""

from __future__ import annotations

import flax.struct
import jax

from jaxgen.core.decoding.continuous.prefixes import StoreIndices
from jaxgen.core.decoding.request import Request

NOBODY = -1  # stands for "no prompt"


@flax.struct.dataclass
class Queue:
    """Ring of Q entries. Waiting prompts have consecutive indices starting at `first`, wrapping around to 0.

    Attributes:
        request: a complete request (see `Request.complete`) with Q prompts.
        number: int32[Q], the number that identifies each prompt; `NOBODY` for prompts to skip.
        first_sequence: int32[Q], the index of the first sequence to generate for each prompt.
        sequences: int32[Q], the number of sequences to generate for each prompt.
        first: int32[], the index of the next prompt.
        waiting: int32[], the number of waiting prompts.
        prefixes: the store indices of the prompts' first blocks; None without a store.
    """

    request: Request
    number: jax.Array
    first_sequence: jax.Array
    sequences: jax.Array
    first: jax.Array
    waiting: jax.Array
    prefixes: StoreIndices | None = None

    @property
    def capacity(self) -> int:
        """The maximum number of waiting prompts, Q."""
        return self.number.shape[0]

    def queue_index(self, order: jax.Array) -> jax.Array:
        """Return the index that is `order int32[...]` after `first`, wrapping around to 0."""
        return (self.first + order) % self.capacity
