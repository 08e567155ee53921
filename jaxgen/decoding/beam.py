"""Beam search and beam sampling: `GenerationMixin._beam_search` and `BeamSearchScorer` of transformers.

A search has k running beams, in consecutive rows, and a list of its k best hypotheses: beams that have ended. In each
step the best continuations of the running beams are its candidates, best first. Those among the first k that end become
hypotheses; of the others the first k are the next running beams. A prompt has one search, or several (`group_beam`).

The rows of a prompt share the slots that they write to, so reordering beams moves no keys or values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.decoding import guidance
from jaxgen.decoding.forward import Forward, observe, run_model
from jaxgen.decoding.loop import Decoded, Prefilled, Progress
from jaxgen.decoding.recording import Recording, put_step
from jaxgen.decoding.rows import Rows, fork
from jaxgen.decoding.run import Run
from jaxgen.decoding.sample import draw_distinct, process
from jaxgen.decoding.stopping import StopReason, first_reason
from jaxgen.decoding.tokens import Tokens
from jaxgen.logits.row_options import RowOptions
from jaxgen.model.cache import KVCache
from jaxgen.shapes import repeat_rows

# The score of all beams of a search but the first before the first step, when all are the same.
_REPEATED = -1e9


@flax.struct.dataclass
class Hypotheses:
    """The best ended beams of each search, best first: k places, of which some may be empty.

    Attributes:
        scores: float32[S, k], with the length penalty; -inf for an empty place.
        rows: S*k rows, with the token that ended each.
        origins: int32[S*k, N], as in `Beams`.
    """

    scores: jax.Array
    rows: Rows
    origins: jax.Array


@flax.struct.dataclass
class Beams:
    """S searches of k beams each.

    Attributes:
        scores: float32[S, k], the sum of the scores of each running beam's tokens.
        rows: S*k rows, without the records of the run.
        origins: int32[S*k, N], for each generated token, the place in the search of the beam that it was added to.
        hypotheses: the best ended beams.
        complete: bool[S], True if the hypotheses are final.
    """

    scores: jax.Array
    rows: Rows
    origins: jax.Array
    hypotheses: Hypotheses
    complete: jax.Array

    @classmethod
    def begin(cls, rows: Rows, count: int, capacity: int) -> Beams:
        """Begin searches of `count` beams each, in which all beams are the same."""
        searches = rows.count // count
        scores = jnp.full((searches, count), _REPEATED).at[:, 0].set(0.0)
        origins = jnp.zeros((rows.count, capacity), jnp.int32)
        none = Hypotheses(jnp.full(scores.shape, -jnp.inf), _ended(rows), origins)
        return cls(scores, rows, origins, none, jnp.zeros(searches, bool))


@flax.struct.dataclass
class BeamState:
    """State of beam search.

    Attributes:
        beams: the searches of all prompts.
        cache: keys and values of all of the rows' tokens but the last.
        recording: the records of the run. As in transformers, a record's row is the place that a beam had in the step.
        cache_ids: as in `Rows`.
        keys: key[B], or None without sampling.
    """

    beams: Beams
    cache: KVCache
    recording: Recording
    cache_ids: jax.Array | None
    keys: jax.Array | None

    @property
    def finished(self) -> jax.Array:
        """bool[], True when every search is finished."""
        return jnp.all(self.beams.rows.history.done)


class BeamSearch:
    """Beam search, and beam sampling if there is a key. Each prompt has one search."""

    def begin(self, run: Run, prefilled: Prefilled) -> BeamState:
        """Choose the first token of each beam."""
        beams = run.cfg.num_beams
        rows = dataclasses.replace(prefilled.rows, keys=None).fork(beams)
        read = fork(dataclasses.replace(prefilled.read, cache=None, out=None), beams)
        state = BeamState(
            beams=Beams.begin(
                dataclasses.replace(rows, recording=Recording(), cache_ids=None), self.beams(run), run.capacity
            ),
            cache=prefilled.read.cache.fork(beams, run.capacity, shared=True),
            recording=rows.recording,
            cache_ids=rows.cache_ids,
            keys=prefilled.rows.keys,
        )
        return self._extend(run, state, read)

    def step(self, run: Run, state: BeamState) -> BeamState:
        """Run each beam's last token through the model and choose the next beams."""
        rows = state.beams.rows
        tokens = guidance.stack(run.cfg, Tokens(rows.history.last(1), rows.live[:, None]))
        read, rows = run_model(run, rows, tokens, state.cache)
        recording = state.recording.put_layers(rows.history.step, rows.live, read.out, 0)
        beams = dataclasses.replace(state.beams, rows=rows)
        return self._extend(run, dataclasses.replace(state, beams=beams, cache=read.cache, recording=recording), read)

    def finish(self, run: Run, state: BeamState) -> Decoded:
        """Return the best hypotheses of each prompt; until a search is complete, its running beams count too."""
        beams, hypotheses = state.beams, state.beams.hypotheses
        count = beams.scores.shape[1]
        prompts, rows = beams.rows.count // run.cfg.num_beams, beams.rows
        running = _penalized(run, rows, beams.scores, rows.history.step[::count])
        running = jnp.where(beams.complete[:, None], -jnp.inf, running)
        first = repeat_rows(jnp.arange(0, rows.count, count, dtype=jnp.int32), rows.count)[:, None]
        # Running beams come first: of equal scores the first wins, and an empty place has the score -inf.
        scores, of_searches = _best(
            count,
            (running, (_ended(rows), beams.origins + first)),
            (hypotheses.scores, (hypotheses.rows, hypotheses.origins + first)),
        )
        scores, (best, chosen_from) = _best(run.cfg.num_return_sequences, (scores.reshape(prompts, -1), of_searches))
        best = dataclasses.replace(best, recording=state.recording, cache_ids=state.cache_ids)
        step = best.history.step
        # A token's keys and values are in the slot of the row that the next token was chosen from.
        owners = jnp.pad(chosen_from[:, 1:], ((0, 0), (0, 1))) % run.cfg.num_beams
        owners, length = guidance.stack(run.cfg, (owners, jnp.maximum(step - 1, 0)))
        decoded = Decoded.of(run, best, dataclasses.replace(state.cache, owners=owners, length=length))
        generated = jnp.arange(run.capacity, dtype=jnp.int32)[None, :] < step[:, None]
        return dataclasses.replace(
            decoded, sequences_scores=scores.reshape(-1), beam_indices=jnp.where(generated, chosen_from, -1)
        )

    def progress(self, run: Run, state: BeamState) -> Progress:
        """Return no tokens: all of them may still change."""
        tokens = jnp.zeros((state.beams.rows.count, run.capacity), jnp.int32)
        return Progress(tokens, jnp.zeros((), jnp.int32), state.finished)

    def beams(self, run: Run) -> int:
        """Return the number of beams of one search, k."""
        return run.cfg.num_beams

    def grow(
        self, run: Run, beams: Beams, logits: jax.Array, log_probs: jax.Array, keys: jax.Array | None
    ) -> tuple[Beams, jax.Array, jax.Array]:
        """Choose the next beams.

        Args:
            run: the constants.
            beams: the beams.
            logits: float32[rows, V], as the model returned them.
            log_probs: float32[rows, V], before any processor.
            keys: key[B], or None without sampling.

        Returns:
            The beams, the row that each continues, int32[rows], and the processed scores, float32[rows, V].
        """
        scores = process(run, beams.rows, log_probs)
        beams, parents = grow(run, beams, logits, scores, keys)
        return beams, parents, scores

    def _extend(self, run: Run, state: BeamState, read: Forward) -> BeamState:
        live, step = state.beams.rows.live, state.beams.rows.history.step
        logits, log_probs, rows = observe(run, state.beams.rows, read, 0, live, normalize=True)
        beams = dataclasses.replace(state.beams, rows=rows)
        beams, parents, scores = self.grow(run, beams, logits, log_probs, state.keys)
        cache = state.cache.select(guidance.rows_of_cache(run.cfg, parents, rows.count))
        recording = state.recording.put(step, live, logits, scores)
        return dataclasses.replace(state, beams=beams, cache=cache, recording=recording)


def grow(
    run: Run, beams: Beams, logits: jax.Array, scores: jax.Array, keys: jax.Array | None
) -> tuple[Beams, jax.Array]:
    """Choose the next beams from processed scores: `BeamSearchScorer.process`; see `BeamSearch.grow`."""
    rows, (searches, count) = beams.rows, beams.scores.shape
    vocab, step = scores.shape[-1], rows.history.step[::count]
    with jax.named_scope("choose"):
        totals = (scores + beams.scores.reshape(-1, 1)).reshape(searches, -1)
        best = jnp.max(totals, axis=-1)
        failed = first_reason(NO_TOKEN=best == -jnp.inf, NOT_A_NUMBER=jnp.isnan(best))
        live = rows.live[::count] & (failed == StopReason.NONE)
        total, index = _candidates(run, rows, totals, step, keys)
    number = jnp.arange(total.shape[1], dtype=jnp.int32)[None, :]
    first = jnp.arange(searches, dtype=jnp.int32)[:, None] * count
    parents = first + jnp.where(live[:, None], index // vocab, number % count)  # a finished search keeps its rows
    candidates = rows.select(parents.reshape(-1))
    added = repeat_rows(live, candidates.count)
    candidates = candidates.append(run, (index % vocab).reshape(-1), added, scores[parents.reshape(-1)])
    reasons = candidates.reasons.reshape(total.shape)
    ended = live[:, None] & (reasons != StopReason.NONE) & (reasons != StopReason.LENGTH)

    def take(chosen: jax.Array) -> tuple[Rows, jax.Array, jax.Array]:
        """Return the rows of `chosen int32[S, k]` candidates, their parents int32[S, k], and their origins."""
        parent = jnp.take_along_axis(parents, chosen, axis=1)
        flat, added = parent.reshape(-1), repeat_rows(live, parent.size)
        taken = candidates.select((jnp.arange(searches)[:, None] * total.shape[1] + chosen).reshape(-1))
        taken = taken.with_logprobs(run, added, logits[flat], scores[flat])
        origins = put_step(beams.origins[flat], rows.history.step[flat], added, flat % count)
        return taken, parent, origins

    hypotheses = beams.hypotheses
    ended_rows, _, ended_origins = take(jnp.broadcast_to(number[:, :count], beams.scores.shape))
    ended_scores = _penalized(run, rows, total[:, :count], step + 1)
    kept, (kept_rows, kept_origins) = _best(
        count,
        (hypotheses.scores, (hypotheses.rows, hypotheses.origins)),
        (jnp.where(ended[:, :count], ended_scores, -jnp.inf), (_ended(ended_rows), ended_origins)),
    )
    open_scores, chosen = lax.top_k(jnp.where(ended, -jnp.inf, total), count)
    following, parent, origins = take(jnp.where(live[:, None], chosen, number[:, :count]))

    complete = beams.complete | (live & _is_complete(run, rows, kept, total[:, 0], step + 1))
    following = following.end(repeat_rows(rows.live[::count] & ~live, rows.count), repeat_rows(failed, rows.count))
    done = following.history.done | repeat_rows(complete, rows.count)
    following = dataclasses.replace(following, history=dataclasses.replace(following.history, done=done))
    beams = Beams(
        scores=jnp.where(live[:, None], open_scores, beams.scores),
        rows=following,
        origins=origins,
        hypotheses=Hypotheses(kept, kept_rows, kept_origins),
        complete=complete,
    )
    return beams, parent.reshape(-1)


def _candidates(
    run: Run, rows: Rows, totals: jax.Array, step: jax.Array, keys: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the candidates of each search, best first: scores float32[S, C] and indices int32[S, C].

    There are enough for k beams that do not end with an eos id.

    Args:
        run: the constants.
        rows: the running beams.
        totals: float32[S, k * V], the scores of all continuations.
        step: int32[S], folded into the keys.
        keys: key[S] to draw the candidates with; None for the best.
    """
    searches, size = totals.shape
    count = rows.count // searches
    eos = RowOptions(run.cfg, rows.options).table("eos_token_id")
    most = min((1 + (1 if eos is None else eos.shape[1])) * count, size)
    if keys is None:
        return lax.top_k(totals, most)
    drawn = RowOptions(run.cfg, rows.options).at_least(rows.count)[::count, 0] * count
    keys = jax.vmap(jax.random.fold_in)(keys, step)
    index = jax.vmap(draw_distinct, in_axes=(0, 0, None, 0))(keys, totals, most, drawn)
    chosen = jnp.take_along_axis(totals, jnp.minimum(index, size - 1), axis=1)
    total, order = lax.top_k(jnp.where(index < size, chosen, -jnp.inf), most)
    return total, jnp.take_along_axis(jnp.minimum(index, size - 1), order, axis=1)


def _is_complete(run: Run, rows: Rows, kept: jax.Array, best: jax.Array, length: jax.Array) -> jax.Array:
    """Return the searches whose hypotheses are final, bool[S]: `BeamHypotheses.is_done`.

    Args:
        run: the constants.
        rows: the running beams.
        kept: float32[S, k], the scores of the hypotheses, best first.
        best: float32[S], the score of the best candidate.
        length: int32[S], its number of generated tokens.
    """
    full = kept[:, -1] > -jnp.inf
    stopping = run.cfg.early_stopping
    if stopping is True:
        return full
    count = kept.shape[1]
    if stopping == "never":
        longest = rows.history.budget[::count]
        length = jnp.where(_length_penalty(run, rows)[::count] > 0, longest, length)
    return full & (kept[:, -1] >= _penalized(run, rows, best[:, None], length)[:, 0])


def _penalized(run: Run, rows: Rows, totals: jax.Array, length: jax.Array) -> jax.Array:
    """Divide `totals float32[S, n]` by `length int32[S]` to the power of `length_penalty`."""
    penalty = _length_penalty(run, rows)[:: rows.count // totals.shape[0]]
    return totals / (jnp.maximum(length, 1).astype(jnp.float32) ** penalty)[:, None]


def _length_penalty(run: Run, rows: Rows) -> jax.Array:
    """float32[rows]."""
    if not run.cfg.on("length_penalty"):
        return jnp.ones(rows.count, jnp.float32)
    return RowOptions(run.cfg, rows.options).value("length_penalty")


def _ended(rows: Rows) -> Rows:
    """Return only what the output needs of rows that have ended."""
    history = dataclasses.replace(rows.history, seen=None, prompt_seen=None, grammar=None)
    return dataclasses.replace(rows, history=history, options={}, stop_strings=None, hook=())


def _best(count: int, *pools: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
    """Merge pools and return the `count` best entries of each group, best first; of equal scores the first.

    Args:
        count: how many.
        pools: scores float32[groups, n], and a tree of arrays `[groups * n, ...]`.
    """
    groups = pools[0][0].shape[0]
    scores, index = lax.top_k(jnp.concatenate([scores for scores, _ in pools], axis=1), count)

    def take(*parts: jax.Array) -> jax.Array:
        joined = jnp.concatenate([x.reshape(groups, -1, *x.shape[1:]) for x in parts], axis=1)
        return joined[jnp.arange(groups)[:, None], index].reshape(groups * count, *joined.shape[2:])

    return scores, jax.tree.map(take, *(tree for _, tree in pools))
