"""The prompts of a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.core.decoding.continuation import Continuation
from jaxgen.core.decoding.continuous.lanes import Lanes
from jaxgen.core.decoding.rng import prompt_keys
from jaxgen.core.logits.row_options import OptionValues, repeat_values
from jaxgen.shapes import repeat_rows

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
