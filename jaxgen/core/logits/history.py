"""History of the rows, which processors read in addition to the scores: tokens, and state derived from the tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, NoReturn

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.shapes import put, short_repr, token_set


@flax.struct.dataclass
class History:
    """The tokens of each row, without padding: token i of a row is in column i.

    Each row has its own length and step.

    Attributes:
        ids: int32[rows, W], prompt and generated tokens; columns from `length` on are undefined.
        length: int32[rows], the number of tokens.
        prompt_length: int32[rows], the number of prompt tokens.
        budget: int32[rows], the maximum number of tokens to generate.
        done: bool[rows], True for rows to which no more tokens are appended.
        unknown: int32[rows], the number of prompt tokens that were given as embeddings and whose ids are unknown.
        seen: bool[rows, V], True for the tokens in `ids`; None if no option needs it.
        prompt_seen: bool[rows, V], True for the tokens of the prompt; None if no option needs it.
        grammar: int32[rows], the state of the token automaton; None if there is no automaton.
        chosen: int32[rows, n], the tokens that earlier groups of beams chose in this step; None if there are no groups.
    """

    ids: jax.Array
    length: jax.Array
    prompt_length: jax.Array
    budget: jax.Array
    done: jax.Array
    unknown: jax.Array
    seen: jax.Array | None = None
    prompt_seen: jax.Array | None = None
    grammar: jax.Array | None = None
    chosen: jax.Array | None = None

    __repr__ = short_repr

    @classmethod
    def begin(
        cls,
        cfg: GenerationConfig,
        ids: jax.Array,
        length: jax.Array,
        budget: jax.Array,
        grammar: jax.Array | None = None,
        unknown: jax.Array | int = 0,
        options: Collection[str] = (),
    ) -> History:
        """Create the history of rows that begin with the first `length int32[rows]` tokens of `ids int32[rows, W]`.

        W must leave space for `budget` new tokens. `seen` and `prompt_seen` are created only if their option is on in
        `cfg` or named in `options`.
        """
        seen = None
        needs_seen = cfg.on("repetition_penalty") or "repetition_penalty" in options
        needs_prompt = cfg.on("encoder_repetition_penalty") or "encoder_repetition_penalty" in options
        if needs_seen or needs_prompt:
            within = jnp.arange(ids.shape[1])[None, :] < length[:, None]
            seen = token_set(jnp.where(within, ids, -1), cfg.model.vocab_size)
        return cls(
            ids=ids,
            length=length,
            prompt_length=length,
            budget=budget,
            done=budget <= 0,
            unknown=jnp.broadcast_to(jnp.asarray(unknown, jnp.int32), length.shape),
            seen=seen if needs_seen else None,
            prompt_seen=seen if needs_prompt else None,
            grammar=grammar,
        )

    @property
    def step(self) -> jax.Array:
        """The number of generated tokens in each row, int32[rows]."""
        return self.length - self.prompt_length

    @property
    def total_length(self) -> jax.Array:
        """The number of tokens in each row, including tokens with unknown ids, int32[rows]."""
        return self.length + self.unknown

    def __getitem__(self, _: Any) -> NoReturn:
        """Raise an error for the `input_ids[...]` of transformers' processors that names the replacements."""
        raise TypeError(
            "a History cannot be indexed like transformers' input_ids: history.last(n) returns the last n tokens of "
            "each row, and history.ids has all of them, from column 0 to history.length"
        )

    def push(self, tokens: jax.Array, live: jax.Array, allowed=None, eos: jax.Array | None = None) -> History:
        """Append `tokens int32[rows]` to the rows where `live bool[rows]` is True; leave the others unchanged.

        `allowed` is the `TokenAutomaton` to advance, if any; `eos bool[rows, V]` marks the tokens that end the text.
        """
        seen, grammar = self.seen, self.grammar
        if isinstance(allowed, TokenAutomaton) and grammar is not None:
            grammar = jnp.where(live, allowed.push(grammar, tokens, eos), grammar)
        if seen is not None:
            seen = put(seen, jnp.where(live, tokens, seen.shape[1]), live)
        column = jnp.where(live, self.length, self.ids.shape[1])
        return dataclasses.replace(
            self,
            ids=put(self.ids, column, tokens),
            length=self.length + live.astype(jnp.int32),
            seen=seen,
            grammar=grammar,
        )

    def last(self, count: int) -> jax.Array:
        """Return the last `count` tokens of each row, int32[rows, count], padded with -1 on the left."""
        column = self.length[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None, :]
        tokens = jnp.take_along_axis(self.ids, jnp.maximum(column, 0), axis=1)
        return jnp.where(column >= 0, tokens, -1)

    def generated(self, capacity: int, pad: jax.Array) -> jax.Array:
        """Return the generated tokens of each row, followed by the pad id, as int32[rows, capacity]."""
        step = jnp.arange(capacity, dtype=jnp.int32)[None, :]
        return jnp.where(step < self.step[:, None], self.following(self.prompt_length, capacity), pad)

    def following(self, column: jax.Array, count: int) -> jax.Array:
        """Return `count` tokens, starting at `column int32[rows]`; entries after a row's last token are undefined."""
        columns = column[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
        return jnp.take_along_axis(self.ids, jnp.minimum(columns, self.ids.shape[1] - 1), axis=1)
