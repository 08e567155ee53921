"""The state from which a later run can continue: a cache, and the ids of its tokens."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.core.model.cache import KVCache, repeated_rows, row_numbers
from jaxgen.programs import program

UNKNOWN = -1  # the id of a token that was given as an embedding


@flax.struct.dataclass
class Continuation:
    """A cache that `generate(..., cache=)` continues from.

    Attributes:
        kv: keys and values. Any rows after the first B are padding, for prompts that were added to round their number.
        tokens: int32[B, W], the ids of each row's tokens in order. Tokens given as embeddings have the id `UNKNOWN`.
            None if the ids are not known, as in a cache filled by `CausalLM`.
        count: int32[B], the number of tokens in each row. `kv` contains one token fewer if the model has not yet
            read the last generated token.
    """

    kv: KVCache
    tokens: jax.Array | None
    count: jax.Array

    @classmethod
    def from_cache(cls, cache: KVCache) -> Continuation:
        """Wrap a cache that was filled by the model and whose token ids are not known."""
        return cls(cache, None, cache.total_length)

    def __repr__(self) -> str:
        """Show only the sizes."""
        return f"Continuation({self.rows} rows, {self.slots} slots)"

    @property
    def rows(self) -> int:
        """The number of rows, B."""
        return self.count.shape[0]

    @property
    def slots(self) -> int:
        """The number of slots per row, including those of the prefix."""
        return self.kv.offset + self.kv.slots

    def pending(self) -> tuple[jax.Array, jax.Array]:
        """Return each row's last token, int32[B], and whether the model has yet to read it, bool[B]."""
        if self.tokens is None:
            return jnp.zeros(self.rows, jnp.int32), jnp.zeros(self.rows, bool)
        last = jnp.take_along_axis(self.tokens, jnp.maximum(self.count - 1, 0)[:, None], axis=1)[:, 0]
        return last, self.count > self.kv.total_length[: self.rows]

    def without_padding(self) -> Continuation:
        """Return the continuation without the padding in `kv`."""
        return self if self.kv.rows == self.rows else self.reorder(jnp.arange(self.rows))

    def crop(self, length: jax.Array | int) -> Continuation:
        """Return a copy with at most the first `length` tokens of each row. `length` is int32[] or int32[B].

        A negative length removes tokens from the end, as in transformers. For example, `cache.crop(-5)` removes the
        last five tokens, and the next run continues after the remaining tokens.

        Raises:
            InputError: `length` is neither an integer nor one integer per row.
        """
        kv = self.without_padding().kv
        kept = kv.check_length(length)
        kept = jnp.clip(jnp.where(kept < 0, self.count + kept, kept), 0, self.count)
        return dataclasses.replace(self, kv=_crop(kv, kept), count=kept)

    def reorder(self, rows: jax.Array) -> Continuation:
        """Return a copy in which row i is the old row `rows[i]`. `rows`, int32[n], may repeat or omit indices.

        Raises:
            InputError: `rows` is not a list of row indices.
        """
        return _reorder(self, row_numbers(rows, self.rows))

    def expand(self, copies: int) -> Continuation:
        """Return a copy with each row repeated `copies` times, like `repeat_interleave`.

        `generate` does not need expanded rows, because several prompts can share one row.

        Raises:
            InputError: `copies` is not a positive integer.
        """
        return _reorder(self, repeated_rows(self.rows, copies))


@program("crop")
def _crop(kv: KVCache, length: jax.Array) -> KVCache:
    return kv.crop(length)


@program("reorder")
def _reorder(continuation: Continuation, rows: jax.Array) -> Continuation:
    tokens, count = jax.tree.map(lambda x: x[rows], (continuation.tokens, continuation.count))
    return Continuation(continuation.kv.reorder(rows), tokens, count)
