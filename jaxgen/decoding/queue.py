"""Numbered prompts that wait to be read, in a ring of places."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.decoding.prefixes import Places
from jaxgen.decoding.request import Request
from jaxgen.decoding.run import Run

NOBODY = -1  # the number of no prompt


@flax.struct.dataclass
class Queue:
    """Ring of Q places. Waiting prompts occupy consecutive places from `first` on, continuing at place 0.

    Attributes:
        request: the prompts in all places, complete.
        number: int32[Q], the number of each prompt, which identifies its sequences; `NOBODY` for a prompt to skip.
        sequences: int32[Q], the number of sequences per prompt.
        first: int32[], the place of the next prompt.
        waiting: int32[], the number of waiting prompts.
        prefixes: where the prompts' first chunks are in the store of prefixes; None without a store.
    """

    request: Request
    number: jax.Array
    sequences: jax.Array
    first: jax.Array
    waiting: jax.Array
    prefixes: Places | None = None

    @classmethod
    def from_request(cls, run: Run, request: Request) -> Queue:
        """Return the queue of all prompts of a run, numbered from 0; the request is complete."""
        prompts = run.sizes.prompts
        number = jnp.arange(prompts, dtype=jnp.int32)
        sequences = jnp.full(prompts, run.needs.sequences, jnp.int32)
        return cls(request, number, sequences, jnp.zeros((), jnp.int32), jnp.int32(prompts))

    @property
    def places(self) -> int:
        """The number of places, Q."""
        return self.number.shape[0]

    def place(self, order: jax.Array) -> jax.Array:
        """Return the place of the prompt that is `order int32[...]` places after the next one."""
        return (self.first + order) % self.places

    def drop(self, count: jax.Array) -> Queue:
        """Remove the next `count int32[]` prompts."""
        return dataclasses.replace(self, first=self.place(count), waiting=self.waiting - count)
