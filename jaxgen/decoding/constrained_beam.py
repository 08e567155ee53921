"""Beam search under constraints: `_constrained_beam_search` and `ConstrainedBeamSearchScorer` of transformers.

Besides the best continuations, each beam proposes the tokens that make progress with the constraints, however unlikely
they are. The next beams are taken in turn from banks: continuations that are equally far with the constraints.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxgen.decoding.beam import Beams, BeamSearch, Continuations, Step, open_beams, process
from jaxgen.decoding.constraints import ConstraintState, ConstraintTable
from jaxgen.decoding.rows import Rows
from jaxgen.decoding.run import Run

# In the order of continuations, a token of progress is worth this much, as in transformers.
_PER_TOKEN = 100


class ConstrainedBeamSearch(BeamSearch):
    """Beam search whose results meet all constraints, as far as the budget allows. Each prompt has one search."""

    def counts(self, run: Run, beams: Beams) -> jax.Array:
        """Return the running beams that count as results in the end, bool[S, k].

        Those that do not meet all constraints count only if there are fewer others than sequences to return.
        """
        met = _state(beams.rows).complete.reshape(beams.scores.shape)
        few = jnp.sum(met, axis=1, keepdims=True) < run.cfg.num_return_sequences
        return ~beams.complete[:, None] & (met | few)

    def grow(
        self, run: Run, beams: Beams, logits: jax.Array, log_probs: jax.Array, keys: jax.Array | None
    ) -> tuple[Beams, jax.Array, jax.Array]:
        """Choose the next beams; see `BeamSearch.grow`. As in transformers, recorded scores include the beams'."""
        step = Step.begin(run, beams, logits, process(run, beams.rows, log_probs))
        with jax.named_scope("choose"):
            candidates = step.candidates(None)
            rows = step.extend(candidates)
            ended = step.ended(rows)
            running = open_beams(step, candidates, ended)
            results = _met(candidates, ended, rows).first(running.tokens.shape[1])
        with jax.named_scope("constrain"):
            results, running = _with_proposals(step, results, running)
        beams, parents = step.finish(results, running, candidates.totals[:, 0])
        return beams, parents, step.totals.reshape(logits.shape)


def _with_proposals(step: Step, results: Continuations, running: Continuations) -> tuple[Continuations, Continuations]:
    """Return the k results and the k next beams of each search, chosen from these and the beams' proposals."""
    table, state, count = _table(step.run), _state(step.beams.rows), step.totals.shape[1]
    proposals = _proposals(step, table)
    rows = step.extend(proposals)
    banks = table.proposed_banks(state, _state(rows)).reshape(proposals.tokens.shape)
    known = _first_equal(step.beams, count)
    new = (proposals.tokens >= 0) & ~_among(proposals, running, known)

    ended = step.ended(rows)
    also = _met(proposals, ended & new & ~_among(proposals, results, known), rows)
    results = results.join(also)
    results = results.take(jax.lax.top_k(results.totals, count)[1])

    running_banks = table.banks(_state(step.extend(running))).reshape(running.tokens.shape)
    joined, new = running.join(proposals), new & ~ended
    valid = jnp.concatenate([jnp.ones(running.tokens.shape, bool), new], axis=1)
    order = _in_turn(joined.totals, jnp.concatenate([running_banks, banks], axis=1), valid)[:, :count]
    changed = step.live & jnp.any(new, axis=1)
    unchanged = jnp.arange(count, dtype=jnp.int32)[None, :]
    return results, joined.take(jnp.where(changed[:, None], order, unchanged))


def _proposals(step: Step, table: ConstraintTable) -> Continuations:
    """Return the proposals of all beams, k * C * A of each search; their token is -1 where there is none."""
    searches, count, vocab = step.totals.shape
    tokens = table.proposals(_state(step.beams.rows)).reshape(searches * count, -1)
    # The same token may begin several constraints.
    rows, number = jnp.arange(tokens.shape[0])[:, None], jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    given = jnp.where(tokens < 0, vocab, tokens)
    first = jnp.full((tokens.shape[0], vocab), tokens.shape[1], jnp.int32).at[rows, given].min(number, mode="drop")
    repeated = jnp.take_along_axis(first, jnp.maximum(tokens, 0), axis=1) < number
    tokens = jnp.where(repeated, -1, tokens)
    totals = jnp.take_along_axis(step.totals.reshape(-1, vocab), jnp.maximum(tokens, 0), axis=1)
    parents = jnp.broadcast_to(rows.astype(jnp.int32), tokens.shape)
    return jax.tree.map(lambda x: x.reshape(searches, -1), Continuations(totals, parents, tokens))


def _first_equal(beams: Beams, count: int) -> jax.Array:
    """int32[rows]: the first row of the search with the same text. At first all beams of a search are the same."""
    history = beams.rows.history
    width = beams.origins.shape[1]
    text = history.generated(width, jnp.int32(-1)).reshape(-1, count, width)
    equal = jnp.all(text[:, :, None] == text[:, None, :], axis=-1)
    first = jnp.arange(0, history.ids.shape[0], count, dtype=jnp.int32)[:, None]
    return (first + jnp.argmax(equal, axis=-1).astype(jnp.int32)).reshape(-1)


def _among(some: Continuations, others: Continuations, known: jax.Array) -> jax.Array:
    """bool[S, n]: continuations with the same text as one of the others, or whose beam is not the first of its text.

    Args:
        some: n of each search.
        others: the others; those with a total of -inf count too.
        known: int32[rows], as of `_first_equal`.
    """
    same_text = known[some.parents][:, :, None] == known[others.parents][:, None, :]
    same_token = some.tokens[:, :, None] == others.tokens[:, None, :]
    return jnp.any(same_text & same_token, axis=-1) | (known[some.parents] != some.parents)


def _in_turn(totals: jax.Array, banks: jax.Array, valid: jax.Array) -> jax.Array:
    """int32[S, n]: the order in which continuations become beams: the best of each bank, then the second of each.

    Args:
        totals: float32[S, n].
        banks: int32[S, n].
        valid: bool[S, n], the others come last.
    """
    # Scores of very unlikely tokens may mix up the banks: as in transformers, a turn ends where the bank changes.
    score = (banks * _PER_TOKEN).astype(jnp.float32) + totals
    order = jnp.lexsort((-score, ~valid), axis=-1)
    sorted_banks = jnp.take_along_axis(banks, order, axis=1)
    number = jnp.arange(banks.shape[1], dtype=jnp.int32)[None, :]
    changes = jnp.pad(sorted_banks[:, 1:] != sorted_banks[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    turn = number - jax.lax.cummax(jnp.where(changes, number, 0), axis=1)
    turn = jnp.where(jnp.take_along_axis(valid, order, axis=1), turn, banks.shape[1])
    return jnp.take_along_axis(order, jnp.argsort(turn, axis=1, stable=True), axis=1)


def _met(continuations: Continuations, wanted: jax.Array, rows: Rows) -> Continuations:
    """Set the totals to -inf, except those of the `wanted bool[S, n]` whose row meets all constraints."""
    met = _state(rows).complete.reshape(wanted.shape) & wanted
    return dataclasses.replace(continuations, totals=jnp.where(met, continuations.totals, -jnp.inf))


def _table(run: Run) -> ConstraintTable:
    table = ConstraintTable.of(run.cfg)
    assert table is not None
    return table


def _state(rows: Rows) -> ConstraintState:
    assert rows.constraints is not None
    return rows.constraints
