"""A chronological journal of new tokens and of rows that end. The host reads it periodically."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.core.decoding.continuous.queue import NOBODY
from jaxgen.core.decoding.continuous.slots import Results, Sequences
from jaxgen.core.decoding.rows import Rows

NO_TOKEN = -1  # stands for "no token", in the entry of a sequence that ends without a new token


@flax.struct.dataclass
class Journal(Results):
    """Entries since the journal was last cleared. Each entry is a row of numbers.

    The columns are the prompt's number, the sequence's index within the prompt, the token or `NO_TOKEN`, and the
    `StopReason`, which is 0 if the sequence continues. If log-probabilities are recorded, more columns follow: the bits
    of the token's log-probability, the ids of the most likely tokens, and the bits of their log-probabilities.

    Attributes:
        entries: int32[E, C], the entries, followed by unused rows.
        count: int32[], the number of entries.
        rows: the maximum number of entries that one step adds; static.
    """

    entries: jax.Array
    count: jax.Array
    rows: int = flax.struct.field(pytree_node=False)

    @classmethod
    def open(cls, rows: Rows, steps: int) -> Journal:
        """Return an empty journal with space for `steps` steps of these rows."""
        columns = 4
        if rows.logprobs is not None:
            top = rows.logprobs.top_tokens
            columns += 1 if top is None else 1 + 2 * top.shape[-1]
        return cls(jnp.zeros((steps * rows.count, columns), jnp.int32), jnp.zeros((), jnp.int32), rows.count)

    def has_space(self) -> jax.Array:
        """Return bool[], True if there is space for the entries of one more step."""
        return self.count + self.rows <= self.entries.shape[0]

    def follow(self, sequences: Sequences, before: Rows | None, after: Rows) -> Journal:
        """Add an entry for each row that gained a token or ended. `before` is None for rows that are new."""
        added, ended = after.history.step > 0, after.history.done
        if before is not None:
            added, ended = after.history.step > before.history.step, ended & ~before.history.done
        columns = [
            sequences.number,
            sequences.copy,
            jnp.where(added, after.history.last(1)[:, 0], NO_TOKEN),
            jnp.where(ended, after.reasons, 0),
        ]
        if after.logprobs is not None:
            column = jnp.maximum(after.history.step - 1, 0)
            newest = jax.tree.map(lambda x: jax.vmap(lambda row, at: row[at])(x, column), after.logprobs)
            columns.append(lax.bitcast_convert_type(newest.logprobs, jnp.int32))
            if newest.top_tokens is not None:
                columns += [*newest.top_tokens.T, *lax.bitcast_convert_type(newest.top_logprobs, jnp.int32).T]
        told = (added | ended) & (sequences.number != NOBODY)
        # Rows without an entry get distinct indices past the end, because the scatter's indices must be unique.
        dropped = self.entries.shape[0] + jnp.arange(after.count, dtype=jnp.int32)
        entry = jnp.where(told, self.count + jnp.cumsum(told, dtype=jnp.int32) - 1, dropped)
        entries = self.entries.at[entry].set(jnp.stack(columns, axis=1), mode="drop", unique_indices=True)
        return dataclasses.replace(self, entries=entries, count=self.count + jnp.sum(told, dtype=jnp.int32))
