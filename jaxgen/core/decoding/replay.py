"""Replay: recompute the scores from which existing tokens were chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.control import scan
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.request import Array, Tokens
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.logits.history import History
from jaxgen.core.logits.pipeline import build_transform
from jaxgen.core.logits.row_options import RowOptions
from jaxgen.shapes import repeat_rows


@flax.struct.dataclass
class Replay:
    """Everything that determines which token is chosen, except the model.

    Attributes:
        cfg: a config for greedy search or sampling, without guidance.
        extensions: processors and an automaton.
        new_tokens: int32[] or int32[B], the maximum number of new tokens in a row.
        longest: int32[], the maximum number of tokens in a row, including its prompt.
    """

    cfg: GenerationConfig
    extensions: Extensions
    new_tokens: Array
    longest: Array

    def begin(self, ids: jax.Array, mask: jax.Array, width: int) -> History:
        """Return the history of the first `width` columns of `ids int32[rows, L]`, with space for the other columns."""
        rows, columns = ids.shape
        prompt = Tokens.align(ids[:, :width], mask[:, :width])
        budget = jnp.minimum(repeat_rows(jnp.atleast_1d(self.new_tokens), rows), self.longest - prompt.length)
        room = jnp.pad(prompt.ids, ((0, 0), (0, columns - width)))
        allowed = self.extensions.allowed
        grammar = allowed.begin(rows) if isinstance(allowed, TokenAutomaton) else None
        return History.begin(self.cfg, room, prompt.length, budget, grammar)

    def run(self, history: History, logits: jax.Array, tokens: jax.Array, live: jax.Array, reduce_column: Callable):
        """Score the next T tokens of each row, one column at a time. The backward pass recomputes the scores.

        Args:
            history: the preceding tokens.
            logits: float32[rows, T, V], the model's logits.
            tokens: int32[rows, T], the chosen tokens.
            live: bool[rows, T], False after a row's end.
            reduce_column: a function `(scores float32[rows, V], tokens, live) -> pytree` to apply to each column. The
                arrays of the pytree have the shape `[rows, ...]`.

        Returns:
            The history with the tokens added, and the results of `reduce_column` as a pytree of arrays of shape
            `[rows, T, ...]`.
        """
        allowed, rows = self.extensions.allowed, logits.shape[0]
        options = RowOptions.of(self.cfg, rows)
        transform, eos = build_transform(options, self.extensions.processors, allowed), options.eos(rows)

        def step(history: History, column) -> tuple[History, Any]:
            logits, token, live = column
            history = dataclasses.replace(history, done=~live)
            reduced = reduce_column(transform(history, logits, token), token, live)
            return history.push(token, live, allowed, eos), reduced

        columns = jax.tree.map(lambda x: x.swapaxes(0, 1), (logits, tokens, live))
        history, reduced = scan(jax.checkpoint(step, prevent_cse=False), history, columns)
        return history, jax.tree.map(lambda x: x.swapaxes(0, 1), reduced)
