"""Beam search and beam sampling, as in transformers' `GenerationMixin._beam_search` and `BeamSearchScorer`.

A search has k running beams, in consecutive rows, and a list of its k best hypotheses, which are beams that have ended.
In each step, the best continuations of the running beams become the candidates, best first. A candidate that ends
becomes a hypothesis if it is among the first k candidates. The first k candidates that do not end become the next
running beams. A prompt has one search, or one per group in diverse beam search (`group_beam`).

The rows of a prompt share cache slots, so reordering beams does not move keys or values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.forward import Forward, observe, run_model
from jaxgen.core.decoding.loop import Decoded, Mode, Progress
from jaxgen.core.decoding.needs import Needs
from jaxgen.core.decoding.recording import Recording, put_step
from jaxgen.core.decoding.request import Tokens
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.sample import draw_distinct, process
from jaxgen.core.decoding.stop_reasons import StopReason, failure
from jaxgen.core.logits.processors import bounded
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.sharding import sharded_top_k
from jaxgen.shapes import repeat_rows, take


@flax.struct.dataclass
class Hypotheses:
    """For each search, the best beams that have ended, best first. Some of the k entries may be empty.

    Attributes:
        scores: float32[S, k], with the length penalty; -inf for an empty entry.
        rows: S*k rows, including the tokens that ended the beams.
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
        rows: S*k rows, without per-step records.
        origins: int32[S*k, N], for each generated token, the beam that it extended, as an index within the search.
        hypotheses: the best beams that have ended.
        finished: bool[S], True if the hypotheses are final.
    """

    scores: jax.Array
    rows: Rows
    origins: jax.Array
    hypotheses: Hypotheses
    finished: jax.Array

    @classmethod
    def begin(cls, rows: Rows, count: int, capacity: int) -> Beams:
        """Begin the searches, each with `count` identical beams."""
        searches = rows.count // count
        # All beams of a search are still identical, so all but the first start with a low score.
        scores = jnp.full((searches, count), -1e9).at[:, 0].set(0.0)
        origins = jnp.zeros((rows.count, capacity), jnp.int32)
        none = Hypotheses(jnp.full(scores.shape, -jnp.inf), _for_output(rows), origins)
        return cls(scores, rows, origins, none, jnp.zeros(searches, bool))


@flax.struct.dataclass
class BeamState:
    """State of beam search.

    Attributes:
        beams: the searches of all prompts.
        cache: the keys and values of all but the last token of each row.
        recording: the per-step records, or None. As in transformers, they stay in their rows when beams are reordered.
        cache_ids: as in `Rows`.
        keys: key[B], or None if nothing is sampled.
    """

    beams: Beams
    cache: KVCache
    recording: Recording | None
    cache_ids: jax.Array | None
    keys: jax.Array | None

    @property
    def finished(self) -> jax.Array:
        """bool[], True when every search is finished."""
        return jnp.all(self.beams.rows.history.done)


class BeamSearch(Mode):
    """Beam search, or beam sampling if there is a key. Each prompt has one search."""

    crops = True

    def needs(self, cfg: GenerationConfig) -> Needs:
        """Require one row per beam."""
        return Needs(sequences=cfg.num_beams)

    def begin(self, run: Run, rows: Rows, read: Forward) -> BeamState:
        """Choose the first token of each beam."""
        count = run.needs.sequences
        beams, forked = dataclasses.replace(rows, keys=None).fork(count), read.fork(count)
        unrecorded = dataclasses.replace(beams, recording=None, cache_ids=None)
        state = BeamState(
            beams=Beams.begin(unrecorded, run.cfg.num_beams // run.cfg.num_beam_groups, run.capacity),
            cache=read.cache.fork(count, run.capacity, shared=True),
            recording=beams.recording,
            cache_ids=beams.cache_ids,
            keys=rows.keys,
        )
        return self._extend(run, state, forked)

    def step(self, run: Run, state: BeamState) -> BeamState:
        """Run the last token of each beam through the model, and choose the next beams."""
        rows = state.beams.rows
        tokens = Tokens(rows.history.last(1), rows.live[:, None])
        read, rows = run_model(run, rows, tokens, state.cache)
        recording = state.recording
        if recording is not None:
            recording = recording.put_layers(rows.history.step, rows.live, read.out, 0, read.cache.offset)
        beams = dataclasses.replace(state.beams, rows=rows)
        return self._extend(run, dataclasses.replace(state, beams=beams, cache=read.cache, recording=recording), read)

    def finish(self, run: Run, state: BeamState) -> Decoded:
        """Return the best hypotheses of each prompt. An unfinished search may also return beams that have not ended."""
        beams, hypotheses = state.beams, state.beams.hypotheses
        count = beams.scores.shape[1]
        prompts, rows = beams.rows.count // run.cfg.num_beams, beams.rows
        running = beams.scores / _divisors(run, rows, rows.history.step[::count])
        running = jnp.where(self.count_as_results(run, beams), running, -jnp.inf)
        first = repeat_rows(jnp.arange(0, rows.count, count, dtype=jnp.int32), rows.count)[:, None]
        # Running beams come first, so that they win ties. Empty entries of the hypotheses have a score of -inf.
        scores, of_searches = _best(
            count,
            (running, (_for_output(rows.with_complete(run)), beams.origins + first)),
            (hypotheses.scores, (hypotheses.rows, hypotheses.origins + first)),
        )
        scores, (best, chosen_from) = _best(run.cfg.num_return_sequences, (scores.reshape(prompts, -1), of_searches))
        best = dataclasses.replace(best, recording=state.recording, cache_ids=state.cache_ids)
        step = best.history.step
        # The keys and values of token i were written to the cache by the beam that token i + 1 extended.
        owners = jnp.pad(chosen_from[:, 1:], ((0, 0), (0, 1))) % run.cfg.num_beams
        cache = dataclasses.replace(state.cache.first_stream(), owners=owners, length=jnp.maximum(step - 1, 0))
        decoded = Decoded.from_rows(run, best, cache)
        generated = jnp.arange(run.capacity, dtype=jnp.int32)[None, :] < step[:, None]
        return dataclasses.replace(
            decoded, sequences_scores=scores.reshape(-1), beam_indices=jnp.where(generated, chosen_from, -1)
        )

    def progress(self, run: Run, state: BeamState) -> Progress:
        """Return no tokens, because any token may still change."""
        rows = state.beams.rows.count
        tokens = jnp.zeros((rows, run.capacity), jnp.int32)
        none = jnp.zeros((), jnp.int32)
        return Progress(tokens, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool), none, state.finished)

    def count_as_results(self, run: Run, beams: Beams) -> jax.Array:
        """Return which running beams count as results at the end, as bool[S, k]."""
        return jnp.broadcast_to(~beams.finished[:, None], beams.scores.shape)

    def grow(
        self, run: Run, beams: Beams, logits: jax.Array, log_probs: jax.Array, keys: jax.Array | None
    ) -> tuple[Beams, jax.Array, jax.Array]:
        """Choose the next beams from `log_probs float32[rows, V]`, the log-probabilities before any processors run.

        `logits float32[rows, V]` are the model's logits. `keys` is key[B], or None if nothing is sampled.

        Returns:
            The next beams, the row that each beam continues (int32[rows]), and the scores to record (float32[rows, V]).
        """
        scores = process(run, beams.rows, log_probs)
        beams, parents = choose_beams(run, beams, logits, scores, keys)
        return beams, parents, scores

    def _extend(self, run: Run, state: BeamState, read: Forward) -> BeamState:
        live, step = state.beams.rows.live, state.beams.rows.history.step
        logits, log_probs, rows = observe(run, state.beams.rows, read, 0, live, lambda x, _: jax.nn.log_softmax(x))
        beams = dataclasses.replace(state.beams, rows=rows)
        beams, parents, scores = self.grow(run, beams, logits, log_probs, state.keys)
        recording = state.recording and state.recording.put(step, live, logits, scores)
        return dataclasses.replace(state, beams=beams, cache=state.cache.select(parents), recording=recording)


@flax.struct.dataclass
class Continuations:
    """Running beams extended by one token: n continuations for each of S searches.

    Attributes:
        totals: float32[S, n], the sum of the scores of the beam's tokens, including the new token.
        parents: int32[S, n], the rows of the beams that are extended.
        tokens: int32[S, n], the new tokens.
    """

    totals: jax.Array
    parents: jax.Array
    tokens: jax.Array

    def take(self, indices: jax.Array) -> Continuations:
        """Return the continuations at the indices `indices int32[S, m]`."""
        return jax.tree.map(lambda x: jnp.take_along_axis(x, indices, axis=1), self)

    def only(self, kept: jax.Array) -> Continuations:
        """Set the totals of continuations to -inf where `kept bool[S, n]` is False."""
        return dataclasses.replace(self, totals=jnp.where(kept, self.totals, -jnp.inf))


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the searches: the running beams, and the scores of their continuations.

    Attributes:
        run: the constants of the run.
        beams: the searches before the step.
        logits: float32[rows, V], the model's logits.
        scores: float32[rows, V], the processed scores.
        totals: float32[S, k, V], the score of each beam plus the score of each next token.
        live: bool[S], True for searches that take this step.
        failed: int32[S], a `StopReason` for each search that cannot continue, otherwise NONE.
    """

    run: Run
    beams: Beams
    logits: jax.Array
    scores: jax.Array
    totals: jax.Array
    live: jax.Array
    failed: jax.Array

    @classmethod
    def begin(cls, run: Run, beams: Beams, logits: jax.Array, scores: jax.Array) -> Step:
        """Begin a step."""
        searches, count = beams.scores.shape
        so_far = beams.scores.reshape(-1, 1)
        totals = jnp.where(so_far == -jnp.inf, so_far, bounded(scores + so_far, scores)).reshape(searches, count, -1)
        failed = failure(jnp.max(totals, axis=(1, 2)))
        live = beams.rows.live[::count] & (failed == StopReason.NONE)
        return cls(run, beams, logits, scores, totals, live, failed)

    def candidates(self, keys: jax.Array | None) -> Continuations:
        """Return the best continuations of each search, best first.

        If `keys` (key[S]) is not None, the continuations are sampled. At least k continuations do not end with an eos
        id. In a finished search, the parents of the first k continuations are the search's own k rows, in order.
        """
        run, rows, (searches, count, vocab) = self.run, self.beams.rows, self.totals.shape
        options = rows.options(run)
        eos = options.table("eos_token_id")
        most = min((1 + (1 if eos is None else eos.shape[1])) * count, count * vocab)
        if keys is None:
            totals, index = sharded_top_k(self.totals, most, run.mesh)
        else:
            drawn = options.at_least(rows.count)[::count, 0] * count
            keys = jax.vmap(jax.random.fold_in)(keys, rows.history.step[::count])
            totals, index = draw_distinct(keys, self.totals, most, drawn, run.mesh)
            totals, order = lax.top_k(totals, most)
            index = jnp.take_along_axis(index, order, axis=1)
        number = jnp.arange(most, dtype=jnp.int32)[None, :]
        first = jnp.arange(searches, dtype=jnp.int32)[:, None] * count
        parents = first + jnp.where(self.live[:, None], index // vocab, number % count)
        return Continuations(totals, parents, index % vocab)

    def best(self, continuations: Continuations) -> jax.Array:
        """Return the indices of the k best continuations, int32[S, k], best first; in a finished search, 0 to k - 1."""
        count = self.totals.shape[1]
        indices = lax.top_k(continuations.totals, count)[1]
        return jnp.where(self.live[:, None], indices, jnp.arange(count, dtype=jnp.int32)[None, :])

    def extend(self, continuations: Continuations) -> Rows:
        """Return the S * n rows of continuations, without log-probabilities."""
        parents = continuations.parents.reshape(-1)
        rows, added = self.beams.rows.select(parents, self.live.size), repeat_rows(self.live, parents.size)
        scores = take(self.scores, parents, self.live.size)
        return rows.push_text(self.run, continuations.tokens.reshape(-1), added, scores)

    def ended(self, rows: Rows) -> jax.Array:
        """Return bool[S, n], True if a continuation in `rows` (S * n rows) ended for a reason other than LENGTH."""
        ended = (rows.reasons != StopReason.NONE) & (rows.reasons != StopReason.LENGTH)
        return self.live[:, None] & ended.reshape(self.live.size, -1)

    def finish(self, results: Continuations, running: Continuations, best: jax.Array) -> tuple[Beams, jax.Array]:
        """Return the next beams, and the row that each of them continues, int32[rows].

        Args:
            results: for each search, k beams that have ended. Beams with a total of -inf do not count.
            running: for each search, k beams that have not ended.
            best: float32[S], the best total of all continuations.
        """
        run, rows, hypotheses = self.run, self.beams.rows, self.beams.hypotheses
        count = self.totals.shape[1]
        divisors = _divisors(run, rows, rows.history.step[::count] + 1)
        result_rows, result_origins = self._rows(results)
        # The best continuation may be one of the results. `_are_finished` compares the best score with the results'
        # scores. A single division computes all scores, because XLA could round two divisions differently.
        scores = lax.optimization_barrier(jnp.concatenate([results.totals, best[:, None]], axis=1) / divisors)
        scores, attained = jnp.where(results.totals > -jnp.inf, scores[:, :-1], -jnp.inf), scores[:, -1]
        kept, (kept_rows, kept_origins) = _best(
            count,
            (hypotheses.scores, (hypotheses.rows, hypotheses.origins)),
            (scores, (_for_output(result_rows), result_origins)),
        )
        following, origins = self._rows(running)
        finished = self.beams.finished | (self.live & _are_finished(run, rows, kept, best, attained))
        failed = repeat_rows(rows.live[::count] & ~self.live, rows.count)
        following = following.end(failed, repeat_rows(self.failed, rows.count))
        done = following.history.done | repeat_rows(finished, rows.count)
        following = dataclasses.replace(following, history=dataclasses.replace(following.history, done=done))
        beams = Beams(
            scores=jnp.where(self.live[:, None], running.totals, self.beams.scores),
            rows=following,
            origins=origins,
            hypotheses=Hypotheses(kept, kept_rows, kept_origins),
            finished=finished,
        )
        return beams, running.parents.reshape(-1)

    def _rows(self, continuations: Continuations) -> tuple[Rows, jax.Array]:
        """Return the continuations' rows, including log-probabilities, and `origins int32[S * n, N]` as in `Beams`."""
        parents, count = continuations.parents.reshape(-1), self.totals.shape[1]
        added = repeat_rows(self.live, parents.size)
        rows = self.extend(continuations)
        if self.run.cfg.output_logprobs is not None:
            logits, scores = (take(x, parents, self.live.size) for x in (self.logits, self.scores))
            rows = rows.with_logprobs(self.run, added, logits, scores)
        step = take(self.beams.rows.history.step, parents, self.live.size)
        origins = take(self.beams.origins, parents, self.live.size)
        return rows, put_step(origins, step, added, parents % count)


def choose_beams(
    run: Run, beams: Beams, logits: jax.Array, scores: jax.Array, keys: jax.Array | None
) -> tuple[Beams, jax.Array]:
    """Choose the next beams from processed scores, as in `BeamSearchScorer.process`; see `BeamSearch.grow`."""
    count = beams.scores.shape[1]
    with jax.named_scope("choose"):
        step = Step.begin(run, beams, logits, scores)
        candidates = step.candidates(keys)
    ended = step.ended(step.extend(candidates))
    results = jax.tree.map(lambda x: x[:, :count], candidates.only(ended))
    running = candidates.only(~ended)
    return step.finish(results, running.take(step.best(running)), candidates.totals[:, 0])


def _are_finished(run: Run, rows: Rows, kept: jax.Array, best: jax.Array, attained: jax.Array) -> jax.Array:
    """Return bool[S], True for searches whose hypotheses are final; see `BeamHypotheses.is_done`.

    `kept float32[S, k]` are the scores of the hypotheses, best first. `best float32[S]` is the score of the best
    candidate without the length penalty, and `attained float32[S]` is the same score with the length penalty.
    """
    full = kept[:, -1] > -jnp.inf
    stopping = run.cfg.early_stopping
    if stopping is True:
        return full
    count = kept.shape[1]
    if stopping == "never":
        at_length = best / _divisors(run, rows, rows.history.budget[::count])[:, 0]
        attained = jnp.where(_length_penalty(run, rows)[::count] > 0, at_length, attained)
    return full & (kept[:, -1] >= attained)


def _divisors(run: Run, rows: Rows, length: jax.Array) -> jax.Array:
    """Raise `length int32[S]` to the power of each search's length penalty; return float32[S, 1]."""
    penalty = _length_penalty(run, rows)[:: rows.count // length.shape[0]]
    # Within these limits, no score of a beam becomes infinite, and the reciprocal that XLA multiplies with is not 0.
    return jnp.clip(jnp.maximum(length, 1).astype(jnp.float32) ** penalty, 2.0**-100, 2.0**126)[:, None]


def _length_penalty(run: Run, rows: Rows) -> jax.Array:
    """Return the length penalty of each row, float32[rows]."""
    if not run.cfg.on("length_penalty"):
        return jnp.ones(rows.count, jnp.float32)
    return rows.options(run).value("length_penalty")


def _for_output(rows: Rows) -> Rows:
    """Return the rows with only the fields that the output needs."""
    history = dataclasses.replace(rows.history, seen=None, prompt_seen=None, grammar=None)
    return dataclasses.replace(rows, history=history, values={}, stop_strings=None, constraints=None, hook=())


def _best(count: int, *pools: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
    """Merge pools, and return the `count` best entries of each group, best first. In a tie, the first entry wins.

    A pool is a pair `(scores, tree)`. The scores are float32[groups, n], and the tree's arrays are `[groups * n, ...]`.
    """
    groups = pools[0][0].shape[0]
    scores, index = lax.top_k(jnp.concatenate([scores for scores, _ in pools], axis=1), count)

    def chosen(*parts: jax.Array) -> jax.Array:
        joined = jnp.concatenate([x.reshape(groups, -1, *x.shape[1:]) for x in parts], axis=1)
        return jax.vmap(lambda group, at: group[at])(joined, index).reshape(groups * count, *joined.shape[2:])

    return scores, jax.tree.map(chosen, *(tree for _, tree in pools))
