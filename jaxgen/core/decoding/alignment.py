"""The tokens that the model reads in one pass, left-aligned in their rows."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.shapes import put


@flax.struct.dataclass
class Tokens:
    """Tokens to read, from the prompts or from one decode step. Token i of a row is in column i.

    Attributes:
        ids: int32[B, T]; `UNKNOWN` for tokens that are given only as embeddings.
        mask: bool[B, T], False after a row's last token.
        embeds: `[B, T, D]`, embeddings that replace the ids as the model's input, or None.
    """

    ids: jax.Array
    mask: jax.Array
    embeds: jax.Array | None = None

    @classmethod
    def align(cls, ids: jax.Array, mask: jax.Array, embeds: jax.Array | None = None) -> Tokens:
        """Move the tokens in `ids int32[B, T]` to the left, so that padding comes last."""
        order = jnp.where(mask, jnp.cumsum(mask, axis=-1) - 1, ids.shape[1])
        return cls(
            ids=put(jnp.zeros_like(ids), order, ids),
            mask=jnp.arange(ids.shape[1])[None, :] < jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32),
            embeds=None if embeds is None else put(jnp.zeros_like(embeds), order, embeds),
        )

    @classmethod
    def of_length(cls, ids: jax.Array, length: jax.Array) -> Tokens:
        """Return the first tokens of each row of `ids int32[B, T]`. The number of tokens is `length int32[B]`."""
        return cls(ids, jnp.arange(ids.shape[1])[None, :] < length[:, None])

    @property
    def length(self) -> jax.Array:
        """int32[B], the number of tokens in each row."""
        return jnp.sum(self.mask, axis=-1, dtype=jnp.int32)

    def after(self, other: Tokens) -> Tokens:
        """Return the tokens of `other`, then the tokens of `self`. Both operands must have embeddings, or neither."""
        both = jax.tree.map(lambda x, y: jnp.concatenate([x.astype(y.dtype), y], axis=1), other, self)
        return Tokens.align(both.ids, both.mask, both.embeds)
