"""What processors may know of a row besides its scores: its tokens, and what is kept of them from step to step."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.shapes import repeat_rows


@flax.struct.dataclass
class History:
    """The tokens of each row. Padding is not among them: token i of a row is in column i.

    Attributes:
        ids: int32[rows, W], prompt and generation; what is behind a row's end means nothing.
        length: int32[rows], how many tokens there are.
        prompt_length: int32[rows], how many of them are the prompt's.
        step: int32[], how many are generated; the same for all rows.
        budget: int32[rows], how many may be generated.
        done: bool[rows], which rows are finished; what goes on in them is not looked at any more.
        unknown: int32[rows], how many tokens the model has read besides: those that came as embeddings.
        seen: bool[rows, V], the tokens among them; None where no option needs it.
        prompt_seen: bool[rows, V], the tokens of the prompt; None where no option needs it.
        state: int32[rows], the token automaton's; None without one.
    """

    ids: jax.Array
    length: jax.Array
    prompt_length: jax.Array
    step: jax.Array
    budget: jax.Array
    done: jax.Array
    unknown: jax.Array
    seen: jax.Array | None = None
    prompt_seen: jax.Array | None = None
    state: jax.Array | None = None

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
        """Begin with the prompts, `ids int32[rows, W]` with room for what `budget int32[rows]` allows."""
        held = jnp.arange(ids.shape[1])[None, :] < length[:, None]
        seen = None
        if cfg.on("repetition_penalty") or cfg.on("encoder_repetition_penalty"):
            assert cfg.model is not None
            rows = jnp.arange(ids.shape[0])[:, None]
            seen = jnp.zeros((ids.shape[0], cfg.model.vocab_size), bool)
            seen = seen.at[rows, jnp.where(held, ids, cfg.model.vocab_size)].set(True, mode="drop")
        return cls(
            ids=ids,
            length=length,
            prompt_length=length,
            step=jnp.zeros((), jnp.int32),
            budget=budget,
            done=budget <= 0,
            unknown=jnp.broadcast_to(jnp.asarray(unknown, jnp.int32), length.shape),
            seen=seen if cfg.on("repetition_penalty") else None,
            prompt_seen=seen if cfg.on("encoder_repetition_penalty") else None,
            state=allowed.begin(ids.shape[0]) if isinstance(allowed, TokenAutomaton) else None,
        )

    def push(self, tokens: jax.Array, done: jax.Array, allowed=None, eos: jax.Array | None = None) -> History:
        """Add the next token of each row, int32[rows]; `done bool[rows]` says which rows it finishes.

        A `TokenAutomaton` as `allowed` goes on with it; `eos` marks the tokens that end its text.
        """
        rows = jnp.arange(tokens.shape[0])
        seen, state = self.seen, self.state
        if isinstance(allowed, TokenAutomaton) and state is not None:
            state = allowed.push(state, tokens, eos)
        if seen is not None:
            seen = seen.at[rows, tokens].set(True, mode="drop", unique_indices=True)
        return dataclasses.replace(
            self,
            ids=self.ids.at[rows, self.length].set(tokens, mode="drop", unique_indices=True),
            length=self.length + 1,
            step=self.step + 1,
            done=done,
            seen=seen,
            state=state,
        )

    def spread(self, rows: int) -> History:
        """Repeat each row so that there are `rows`."""
        return jax.tree.map(lambda x: repeat_rows(x, rows) if x.ndim else x, self)

    def last(self, count: int) -> jax.Array:
        """int32[rows, count]: the last tokens of each row, -1 where there are fewer."""
        column = self.length[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None, :]
        tokens = jnp.take_along_axis(self.ids, jnp.maximum(column, 0), axis=1)
        return jnp.where(column >= 0, tokens, -1)
