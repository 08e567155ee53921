"""The prompts of a run, and the tokens that the model reads in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.core.decoding.continuation import Continuation
from jaxgen.core.decoding.continuous.lanes import Lanes
from jaxgen.core.decoding.rng import prompt_keys
from jaxgen.core.logits.row_options import OptionValues, repeat_values
from jaxgen.shapes import pad_axis, put, repeat_rows

Array = Any  # np.ndarray while a call is being prepared, jax.Array inside a program


@flax.struct.dataclass
class Request:
    """The checked prompts of a run and their options. All fields are traced.

    In an eager call, prompts and negative prompts are padded to the width of a bucket.

    Attributes:
        ids: int32[B, P], padded on either side; all `UNKNOWN` if only embeddings were given.
        mask: bool[B, P], True for tokens.
        budget: int32[B], the maximum number of tokens to generate per prompt.
        options: values of the enabled options, either one for all prompts or `[B, ...]`; see `GenerationConfig.split`.
        grammar: int32[] or int32[B], the initial state of the token automaton; None without an automaton.
        stop_strings: int32[] or int32[B], the initial state of the stop strings' automaton; None without stop strings.
        lanes: in an engine, what each prompt needs, `[B]`; otherwise None.
        key: a single key, `key[B]`, or None for greedy search.
        cache: a cache of the tokens before the prompts, or None. B must be a multiple of the number of cache rows.
        embeds: `[B, P, D]`, embeddings that replace the ids as the model's input, or None.
        negative_ids: int32[B, Q], the negative prompts of guidance, or None.
        negative_mask: bool[B, Q], or None.
    """

    ids: Array
    mask: Array
    budget: Array
    options: OptionValues
    grammar: Array | None = None
    stop_strings: Array | None = None
    lanes: Lanes | None = None
    key: jax.Array | None = None
    cache: Continuation | None = None
    embeds: Array | None = None
    negative_ids: Array | None = None
    negative_mask: Array | None = None

    def select(self, prompts: jax.Array) -> Request:
        """Select prompts by index, `prompts int32[n]`, from a complete request whose cache, if any, has one row."""
        selected = jax.tree.map(lambda x: jnp.asarray(x)[prompts], dataclasses.replace(self, cache=None))
        return dataclasses.replace(selected, cache=self.cache)

    def complete(self) -> Request:
        """Return the request with one entry per prompt in every array except the cache's arrays.

        Prompts can then be selected by indexing each array.
        """
        prompts = self.ids.shape[0]
        states = {"grammar": self.grammar, "stop_strings": self.stop_strings}
        return dataclasses.replace(
            self,
            options=repeat_values(self.options, prompts),
            **jax.tree.map(lambda state: repeat_rows(jnp.atleast_1d(state), prompts), states),
            key=None if self.key is None else prompt_keys(self.key, prompts),
        )


@flax.struct.dataclass
class Tokens:
    """Tokens that the model reads in one pass, left-aligned: token i of a row is in column i.

    They come from the prompts or from one decode step. With guidance, B counts the rows of all streams.

    Attributes:
        ids: int32[B, T]; `UNKNOWN` for tokens that are given only as embeddings.
        mask: bool[B, T], False after a row's last token.
        embeds: `[B, T, D]`, embeddings that replace the ids as the model's input, or None.
        position_ids: int32[B, T], or None to use each token's index in its row.
        key_mask: bool[B, W], True for tokens of the row that may be attended to; None for all tokens.
        adapter: int32[B], the adapter of each row, or None if there are no adapters.
    """

    ids: jax.Array
    mask: jax.Array
    embeds: jax.Array | None = None
    position_ids: jax.Array | None = None
    key_mask: jax.Array | None = None
    adapter: jax.Array | None = None

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

    def columns(self, first: jax.Array, size: int) -> Tokens:
        """Return `size` columns, starting at `first` (int32[] or int32[B]). Columns past the end are masked."""
        if first.ndim:
            columns = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
            within = columns < self.mask.shape[1]
            columns = jnp.where(within, columns, 0)
            tokens = self._map_columns(lambda x: jax.vmap(lambda row, at: row[at])(x, columns))
            return dataclasses.replace(tokens, mask=tokens.mask & within)
        return self._map_columns(lambda x: lax.dynamic_slice_in_dim(x, first, size, axis=1))

    def padded(self, width: int) -> Tokens:
        """Return the tokens padded to `width` columns."""
        return self._map_columns(lambda x: pad_axis(x, 1, width))

    def _map_columns(self, change: Callable[[jax.Array], jax.Array]) -> Tokens:
        changed = jax.tree.map(change, dataclasses.replace(self, key_mask=None, adapter=None))
        return dataclasses.replace(changed, key_mask=self.key_mask, adapter=self.adapter)
