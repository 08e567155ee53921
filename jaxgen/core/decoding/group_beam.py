"""Diverse beam search (arXiv 1610.02424), as in transformers' `GenerationMixin._group_beam_search`.

Each prompt has one search per group of beams. In each step, the groups choose their tokens one after the other.
`diversity_penalty` lowers the scores of tokens that previous groups have chosen in the same step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxgen.core.decoding.beam import Beams, BeamSearch, choose_beams
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.sample import process
from jaxgen.shapes import repeat_rows, take


class GroupBeamSearch(BeamSearch):
    """Diverse beam search. Each prompt has one search per group, and its searches are in consecutive rows."""

    def grow(
        self, run: Run, beams: Beams, logits: jax.Array, log_probs: jax.Array, keys: jax.Array | None
    ) -> tuple[Beams, jax.Array, jax.Array]:
        """Choose the next beams, group by group; see `BeamSearch.grow`."""
        searches, count = beams.scores.shape
        groups = run.cfg.num_beam_groups
        prompts = searches // groups
        chosen = jnp.zeros((prompts, 0), jnp.int32)
        grown = []
        for group in range(groups):
            row = jnp.arange(searches * count, dtype=jnp.int32)
            part, row, logits_of_part, log_probs_of_part = jax.tree.map(
                lambda x, group=group: _of_group(x, prompts, groups, group), (beams, row, logits, log_probs)
            )
            history = dataclasses.replace(part.rows.history, chosen=repeat_rows(chosen, part.rows.count))
            scores = process(run, dataclasses.replace(part.rows, history=history), log_probs_of_part)
            live = part.rows.live
            part, parents = choose_beams(run, part, logits_of_part, scores, None)
            # As in transformers, a group that finished before this step chooses the pad id.
            tokens = jnp.where(live, part.rows.history.last(1)[:, 0], run.pad_id)
            chosen = jnp.concatenate([chosen, tokens.reshape(prompts, count)], axis=1)
            grown.append((part, take(row, parents, prompts), scores))
        return jax.tree.map(lambda *parts: _join_groups(prompts, *parts), *grown)


def _of_group(x: jax.Array, prompts: int, groups: int, group: int) -> jax.Array:
    """Return the part of `x [prompts * groups * n, ...]` for one group, `[prompts * n, ...]`."""
    return x.reshape(prompts, groups, -1, *x.shape[1:])[:, group].reshape(-1, *x.shape[1:])


def _join_groups(prompts: int, *parts: jax.Array) -> jax.Array:
    """Join the parts of all groups. This is the inverse of `_of_group`."""
    x = jnp.stack([x.reshape(prompts, -1, *x.shape[1:]) for x in parts], axis=1)
    return x.reshape(-1, *x.shape[3:])
