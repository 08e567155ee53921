"""Beam search under constraints, as in transformers' `_constrained_beam_search` and `ConstrainedBeamSearchScorer`.

In addition to the best continuations, each beam proposes the tokens that make progress on the constraints, even if
they are unlikely. Continuations with equal progress form a bank. The next beams are the best of each bank, then the
second best of each bank, and so on.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.core.decoding.beam import Beams, BeamSearch, Continuations, Step
from jaxgen.core.decoding.constraints import ConstraintAutomaton, ConstraintState
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.sample import process


class ConstrainedBeamSearch(BeamSearch):
    """Beam search in which the results meet all constraints, budget permitting. Each prompt has one search."""

    def count_as_results(self, run: Run, beams: Beams) -> jax.Array:
        """Return which running beams count as results at the end, as bool[S, k].

        Beams with unmet constraints count only if fewer than `num_return_sequences` beams meet all constraints.
        """
        # Unlike in transformers, a beam with a banned token never counts as meeting the constraints.
        met = _state(beams.rows).all_met.reshape(beams.scores.shape) & (beams.scores > -jnp.inf)
        few = jnp.sum(met, axis=1, keepdims=True) < run.cfg.num_return_sequences
        return ~beams.finished[:, None] & (met | few)

    def grow(
        self, run: Run, beams: Beams, logits: jax.Array, log_probs: jax.Array, keys: jax.Array | None
    ) -> tuple[Beams, jax.Array, jax.Array]:
        """Choose the next beams; see `BeamSearch.grow`. Each recorded score includes the beam's total so far."""
        table, count = ConstraintAutomaton.from_config(run.cfg), beams.scores.shape[1]
        step = Step.begin(run, beams, logits, process(run, beams.rows, log_probs))
        with jax.named_scope("choose"):
            candidates = step.candidates(None)
            proposals = _proposals(step, table)
            joined = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), candidates, proposals)
            rows = step.extend(joined)
            ended, met = step.ended(rows), _state(rows).all_met.reshape(joined.tokens.shape)
            banks = _banks(step, table, _state(rows), proposals.tokens.shape[1])
        searches, number = candidates.tokens.shape
        open_indices = step.best(candidates.only(~ended[:, :number]))
        # As in transformers, a candidate that ends becomes a result only if it is among the first k candidates.
        first = jnp.broadcast_to(jnp.arange(number, dtype=jnp.int32)[None, :], (searches, number))
        with jax.named_scope("constrain"):
            known = jnp.concatenate([first[:, :count], open_indices], axis=1)
            new = _are_new(step, proposals, candidates.take(known))
            indices = _in_turn(joined.only(~ended), banks, open_indices, new & ~ended[:, number:])
        results = joined.only(ended & met & jnp.concatenate([first < count, new], axis=1))
        results = results.take(lax.top_k(results.totals, count)[1])
        running = joined.only(~ended).take(jnp.where(step.live[:, None], indices, open_indices))
        beams, parents = step.finish(results, running, candidates.totals[:, 0])
        return beams, parents, step.totals.reshape(logits.shape)


def _proposals(step: Step, table: ConstraintAutomaton) -> Continuations:
    """Return a proposal per beam, constraint and alternative, [S, k * C * A]. A token of -1 means no proposal."""
    searches, count, vocab = step.totals.shape
    tokens = table.proposals(_state(step.beams.rows)).reshape(searches * count, -1)
    # A token may begin several constraints, but each row proposes it only once.
    rows, number = jnp.arange(tokens.shape[0])[:, None], jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    given = jnp.where(tokens < 0, vocab, tokens)
    none = jnp.full(vocab, tokens.shape[1], jnp.int32)
    first = jax.vmap(lambda row: none.at[row].min(number[0], mode="drop"))(given)
    repeated = jnp.take_along_axis(first, jnp.maximum(tokens, 0), axis=1) < number
    tokens = jnp.where(repeated, -1, tokens)
    totals = jnp.take_along_axis(step.totals.reshape(-1, vocab), jnp.maximum(tokens, 0), axis=1)
    parents = jnp.broadcast_to(rows.astype(jnp.int32), tokens.shape)
    return jax.tree.map(lambda x: x.reshape(searches, -1), Continuations(totals, parents, tokens))


def _banks(step: Step, table: ConstraintAutomaton, state: ConstraintState, proposed: int) -> jax.Array:
    """Return the continuations' banks, int32[S, n], given their `state`. The last `proposed` columns are proposals."""
    banks = table.banks(state).reshape(step.live.size, -1)
    own, proposals = banks[:, :-proposed], banks[:, -proposed:]
    proposals = proposals.reshape(step.beams.rows.count, *table.ids.shape[:2])
    proposals = table.proposed_banks(_state(step.beams.rows), proposals)
    return jnp.concatenate([own, proposals.reshape(own.shape[0], -1)], axis=1)


def _are_new(step: Step, proposals: Continuations, known: Continuations) -> jax.Array:
    """Return bool[S, E], True for proposals that differ from every `known` continuation in their token or text.

    Several beams may have the same text; initially, all beams do. Among beams with the same text, only the
    proposals of the first beam count.
    """
    history, (searches, count, _) = step.beams.rows.history, step.totals.shape
    text = history.generated(step.run.capacity, jnp.int32(-1)).reshape(searches, count, -1)
    equal = jnp.all(text[:, :, None] == text[:, None, :], axis=-1)
    rows = jnp.arange(searches * count, dtype=jnp.int32)
    first = rows // count * count + jnp.argmax(equal, axis=-1).astype(jnp.int32).reshape(-1)
    same_text = first[proposals.parents][:, :, None] == first[known.parents][:, None, :]
    same_token = proposals.tokens[:, :, None] == known.tokens[:, None, :]
    is_first = first[proposals.parents] == proposals.parents
    return (proposals.tokens >= 0) & is_first & ~jnp.any(same_text & same_token, axis=-1)


def _in_turn(joined: Continuations, banks: jax.Array, best: jax.Array, new: jax.Array) -> jax.Array:
    """Return the indices of the next beams, int32[S, k]: the best of each bank, then the second best, and so on.

    If there are no new proposals, return the indices of the best candidates.

    Args:
        joined: the candidates, then the proposals.
        banks: int32[S, n], the banks of `joined`.
        best: int32[S, k], the indices of the k best candidates, best first.
        new: bool[S, E], True for proposals that may be chosen.
    """
    count, last = best.shape[1], joined.tokens.shape[1]
    proposed = jnp.arange(last - new.shape[1], last, dtype=jnp.int32)[None, :]
    indices = jnp.concatenate([best, jnp.broadcast_to(proposed, new.shape)], axis=1)
    valid = jnp.concatenate([jnp.ones(best.shape, bool), new], axis=1)
    banks = jnp.take_along_axis(banks, indices, axis=1)
    # As in transformers, the sort key of a continuation is its bank times 100, plus its score.
    scores = (banks * 100).astype(jnp.float32) + joined.take(indices).totals

    order = jnp.lexsort((-scores, ~valid), axis=-1)
    valid, banks, indices_in_order = (jnp.take_along_axis(x, order, axis=1) for x in (valid, banks, indices))
    # If scores differ by more than 100, continuations of different banks can alternate in the sorted order. As in
    # transformers, ranks start again from 0 wherever neighboring entries of `banks` differ.
    changes = jnp.pad(banks[:, 1:] != banks[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    number = jnp.arange(banks.shape[1], dtype=jnp.int32)[None, :]
    rank = jnp.where(valid, number - lax.cummax(jnp.where(changes, number, 0), axis=1), banks.shape[1])
    chosen = jnp.take_along_axis(indices_in_order, jnp.argsort(rank, axis=1, stable=True)[:, :count], axis=1)
    return jnp.where(jnp.any(new, axis=1, keepdims=True), chosen, best)


def _state(rows: Rows) -> ConstraintState:
    assert rows.constraints is not None
    return rows.constraints
