"""Rows of an engine that need more than the others: each step leaves out everything that none of its rows needs.

The program of an engine contains every option that a prompt may turn on, but most rows use only a few. In `generate`,
all rows need the same, so there are no lanes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.control import cond
from jaxgen.core.decoding.run import Run
from jaxgen.core.logits.history import History

Array = Any  # np.ndarray while prompts are being prepared, jax.Array inside a program


@flax.struct.dataclass
class Lanes:
    """The needs of each row. Rows without a grammar are in grammar state 0, and likewise for stop strings.

    Attributes:
        unusual: bool[rows], True for rows that turn on an option in `rare`.
        logged: bool[rows], True for rows whose log-probabilities are recorded; None if none are.
        rare: the options that only unusual rows turn on; static.
    """

    unusual: Array
    logged: Array | None
    rare: tuple[str, ...] = flax.struct.field(pytree_node=False)

    def process(
        self, run: Run, history: History, scores: jax.Array, apply: Callable[[Run, jax.Array], jax.Array]
    ) -> jax.Array:
        """Return `apply(run, scores)`. The run has only the options, and the grammar, that a live row needs."""
        live, usual = ~history.done, dataclasses.replace(run, cfg=run.cfg.reset(self.rare))
        without = dataclasses.replace(usual, extensions=dataclasses.replace(run.extensions, allowed=None))

        def apply_usual(scores: jax.Array) -> jax.Array:
            if run.extensions.allowed is None or history.grammar is None:
                return apply(without, scores)
            some = jnp.any((history.grammar != 0) & live)
            return cond(some, functools.partial(apply, usual), functools.partial(apply, without), scores)

        return cond(jnp.any(self.unusual & live), functools.partial(apply, run), apply_usual, scores)

    def read_texts(self, added: jax.Array, states: tuple[Any, Any], read: Callable[[], Any]) -> Any:
        """Return `read()`: new `states` of grammar and stop strings, and masks, which are False if no row has either.

        `added bool[rows]` is True for the rows that have a new token.
        """
        grammar, stop_strings = states
        ends = jax.tree.map(lambda x: jnp.zeros(x.shape, bool), jax.eval_shape(read)[1])
        return cond(jnp.any(added & ((grammar != 0) | (stop_strings != 0))), read, lambda: (states, ends))

    def record(self, added: jax.Array, compute: Callable[[jax.Array], Any]) -> tuple[jax.Array, Any]:
        """Return the rows in `added bool[rows]` that record log-probabilities, and `compute` of them; zeros if none."""
        assert self.logged is not None
        added = added & self.logged
        none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, added))
        return added, cond(jnp.any(added), lambda: compute(added), lambda: none)
