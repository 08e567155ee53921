"""The prompts as the model reads them: left-aligned, and with classifier-free guidance each in two rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.model.cache import KVCache
from jaxgen.model.linear import look_up as embed
from jaxgen.shapes import repeat_rows

Array = Any  # of jax or, before a program is called with it, of numpy
UNKNOWN = -1  # the id of a token that came as an embedding


@flax.struct.dataclass
class Prompt:
    """Tokens to prefill: token i of a row is in column i.

    Attributes:
        ids: int32[B, P]; `UNKNOWN` where there are embeddings only.
        mask: bool[B, P], False past a row's end.
        embeds: `[B, P, D]`, what the model reads instead of ids, or None.
    """

    ids: jax.Array
    mask: jax.Array
    embeds: jax.Array | None = None

    @classmethod
    def align(cls, ids: jax.Array, mask: jax.Array, embeds: jax.Array | None = None) -> Prompt:
        """Close the gaps that padding, wherever it is, leaves in `ids int32[B, P]`."""
        order = jnp.where(mask, jnp.cumsum(mask, axis=-1) - 1, ids.shape[1])
        rows = jnp.arange(ids.shape[0])[:, None]
        length = jnp.sum(mask, axis=-1, dtype=jnp.int32)
        return cls(
            ids=jnp.zeros_like(ids).at[rows, order].set(ids, mode="drop"),
            mask=jnp.arange(ids.shape[1])[None, :] < length[:, None],
            embeds=None if embeds is None else jnp.zeros_like(embeds).at[rows, order].set(embeds, mode="drop"),
        )

    @property
    def length(self) -> jax.Array:
        """int32[B], tokens per row."""
        return jnp.sum(self.mask, axis=-1, dtype=jnp.int32)

    def after(self, cache: KVCache, table: jax.Array) -> Prompt:
        """Put the token that a cache knows and does not hold, where it does, in front.

        `table [V, D]`: the embeddings, for that token where the others are embeddings.
        """
        if cache.tokens is None or cache.known is None:
            return self
        rows = self.ids.shape[0]
        last = jnp.minimum(cache.length, cache.slots - 1)
        pending = repeat_rows(jnp.take_along_axis(cache.tokens, last[:, None], axis=1), rows)
        is_pending = repeat_rows(cache.known > cache.length, rows)[:, None]
        embeds = self.embeds
        if embeds is not None:
            embeds = jnp.concatenate([embed(jnp.maximum(pending, 0), table).astype(embeds.dtype), embeds], axis=1)
        return Prompt.align(
            jnp.concatenate([pending, self.ids], axis=1), jnp.concatenate([is_pending, self.mask], axis=1), embeds
        )

    def last(self) -> Prompt:
        """Return the last token of each row alone: what guidance takes for a negative prompt."""
        ids = jnp.take_along_axis(self.ids, jnp.maximum(self.length - 1, 0)[:, None], axis=1)
        return Prompt(ids, jnp.ones(ids.shape, bool))

    def over(self, negative: Prompt, table: jax.Array) -> Prompt:
        """Stack the rows of a negative prompt under these, filled up to one width."""
        width = max(self.ids.shape[1], negative.ids.shape[1])

        def stack(a: jax.Array, b: jax.Array) -> jax.Array:
            a, b = (jnp.pad(x, ((0, 0), (0, width - x.shape[1]), *[(0, 0)] * (x.ndim - 2))) for x in (a, b))
            return jnp.concatenate([a, b], axis=0)

        embeds = None
        if self.embeds is not None:
            embeds = stack(self.embeds, embed(negative.ids, table).astype(self.embeds.dtype))
        return Prompt(stack(self.ids, negative.ids), stack(self.mask, negative.mask), embeds)


@flax.struct.dataclass
class Request:
    """What a run is given, checked, with its sizes rounded up: all of it traced.

    Attributes:
        ids: int32[B, P], padded anywhere; `UNKNOWN` throughout where only embeddings were given.
        mask: bool[B, P].
        budget: int32[B], the most tokens to generate per prompt.
        key: one key, `key[B]`, or None where nothing is drawn.
        cache: what comes before the prompts, of B rows or of fewer that they share; or None.
        embeds: `[B, P, D]` or None.
        negative_ids: int32[B, Q], the negative prompts of guidance, or None.
        negative_mask: bool[B, Q], or None.
    """

    ids: Array
    mask: Array
    budget: Array
    key: jax.Array | None = None
    cache: KVCache | None = None
    embeds: Array | None = None
    negative_ids: Array | None = None
    negative_mask: Array | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The static sizes of a run.

    Attributes:
        capacity: room for generated tokens, N.
        slots: room in the cache for what is held already and, unless rows share it, the prompts; 0 without a cache.
    """

    capacity: int
    slots: int = 0
