"""What processors may know of a row beside its scores: its tokens, and what is tracked of them from step to step."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.grammar.token_automaton import TokenAutomaton


@flax.struct.dataclass
class History:
    """The tokens of each row. Padding is not among them: token i of a row is in column i.

    Rows are independent in time: each has its own length and step.

    Attributes:
        ids: int32[rows, W], prompt and generated tokens; columns from `length` on are undefined.
        length: int32[rows], the number of tokens.
        prompt_length: int32[rows], how many of them are the prompt's.
        budget: int32[rows], how many tokens may be generated.
        done: bool[rows], the rows that are finished. They get no more tokens.
        unknown: int32[rows], tokens of the prompt whose ids are not known, as they were given as embeddings.
        seen: bool[rows, V], the tokens in `ids`; None where no option needs it.
        prompt_seen: bool[rows, V], the tokens of the prompt; None where no option needs it.
        grammar: int32[rows], the state of the token automaton; None without one.
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

    @classmethod
    def begin(
        cls,
        cfg: GenerationConfig,
        ids: jax.Array,
        length: jax.Array,
        budget: jax.Array,
        allowed=None,
        unknown: jax.Array | int = 0,
    ) -> History:
        """Begin with the prompts, the first `length int32[rows]` of `ids int32[rows, W]`; W has room for `budget`."""
        seen = None
        if cfg.on("repetition_penalty") or cfg.on("encoder_repetition_penalty"):
            assert cfg.model is not None
            vocab = cfg.model.vocab_size
            rows, columns = jnp.arange(ids.shape[0])[:, None], jnp.arange(ids.shape[1])[None, :]
            seen = jnp.zeros((ids.shape[0], vocab), bool)
            seen = seen.at[rows, jnp.where(columns < length[:, None], ids, vocab)].set(True, mode="drop")
        return cls(
            ids=ids,
            length=length,
            prompt_length=length,
            budget=budget,
            done=budget <= 0,
            unknown=jnp.broadcast_to(jnp.asarray(unknown, jnp.int32), length.shape),
            seen=seen if cfg.on("repetition_penalty") else None,
            prompt_seen=seen if cfg.on("encoder_repetition_penalty") else None,
            grammar=allowed.begin(ids.shape[0]) if isinstance(allowed, TokenAutomaton) else None,
        )

    @property
    def step(self) -> jax.Array:
        """int32[rows], how many tokens each row has generated."""
        return self.length - self.prompt_length

    @property
    def total_length(self) -> jax.Array:
        """int32[rows], the number of tokens, those without known ids included."""
        return self.length + self.unknown

    def push(self, tokens: jax.Array, live: jax.Array, allowed=None, eos: jax.Array | None = None) -> History:
        """Append `tokens int32[rows]` to the rows that are `live bool[rows]`; the others stay as they are.

        `allowed`: the `TokenAutomaton` to advance, if any; `eos bool[rows, V]` marks the tokens that end its text.
        """
        rows, width = jnp.arange(tokens.shape[0]), self.ids.shape[1]
        seen, grammar = self.seen, self.grammar
        if isinstance(allowed, TokenAutomaton) and grammar is not None:
            grammar = jnp.where(live, allowed.push(grammar, tokens, eos), grammar)
        if seen is not None:
            added = jnp.where(live, tokens, seen.shape[1])
            seen = seen.at[rows, added].set(True, mode="drop", unique_indices=True)
        column = jnp.where(live, self.length, width)
        return dataclasses.replace(
            self,
            ids=self.ids.at[rows, column].set(tokens, mode="drop", unique_indices=True),
            length=self.length + live.astype(jnp.int32),
            seen=seen,
            grammar=grammar,
        )

    def last(self, count: int) -> jax.Array:
        """int32[rows, count]: the last tokens of each row, -1 where there are fewer."""
        column = self.length[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None, :]
        tokens = jnp.take_along_axis(self.ids, jnp.maximum(column, 0), axis=1)
        return jnp.where(column >= 0, tokens, -1)

    def generated(self, capacity: int, pad: jax.Array) -> jax.Array:
        """int32[rows, capacity]: the generated tokens of each row, then the pad id."""
        step = jnp.arange(capacity, dtype=jnp.int32)[None, :]
        column = jnp.minimum(self.prompt_length[:, None] + step, self.ids.shape[1] - 1)
        return jnp.where(step < self.step[:, None], jnp.take_along_axis(self.ids, column, axis=1), pad)
