"""The state of rows: tokens, options, keys, grammar, stop strings, constraints, hook and records.

Every array has one row per sequence or, if named in `of_prompts`, one row per prompt. `fork` turns rows into sequences,
`select` reorders rows, as in beam search, and `insert` replaces rows that are done. Each of these methods is a single
map over the arrays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.constraints import ConstraintAutomaton, ConstraintState
from jaxgen.core.decoding.continuous.lanes import Lanes
from jaxgen.core.decoding.logprobs import LogProbs, logprobs_of
from jaxgen.core.decoding.recording import Recording, put_step
from jaxgen.core.decoding.request import Request, Tokens
from jaxgen.core.decoding.rng import sequence_keys
from jaxgen.core.decoding.row_state import RowState
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.stop_reasons import StopReason, ended, first_reason, read_texts, with_complete
from jaxgen.core.logits.history import History
from jaxgen.core.logits.row_options import OptionValues, RowOptions
from jaxgen.shapes import put, repeat_rows, take


@flax.struct.dataclass
class Rows(RowState):
    """All per-row state except keys and values. Each row counts its own steps.

    Attributes:
        history: the row's tokens, as processors see them.
        reasons: int32[rows], the `StopReason` of each row.
        values: the values of the options of the row's prompt, by name; see `options`.
        keys: key[rows], or None for greedy search.
        stop_strings: int32[rows], each row's state in the stop strings' automaton; None without stop strings.
        lanes: in an engine, what each row needs; otherwise None.
        constraints: progress through the constraints of beam search; None without constraints.
        hook: the state of the user's hook, one tree per stream (two with guidance).
        logprobs: `[rows, N, ...]`, for the chosen token and the most likely tokens in each step; None unless requested.
        recording: the per-step records of the output; None unless requested.
        cache_ids: int32[B, W], the ids of all tokens before the generated ones, `UNKNOWN` for embeddings; None if the
            ids in the cache are not known.
    """

    of_prompts = ("cache_ids",)

    history: History
    reasons: jax.Array
    values: OptionValues
    keys: jax.Array | None
    stop_strings: jax.Array | None
    lanes: Lanes | None
    constraints: ConstraintState | None
    hook: tuple[Any, ...]
    logprobs: LogProbs | None
    recording: Recording | None
    cache_ids: jax.Array | None

    @classmethod
    def begin(cls, run: Run, request: Request, known: Tokens, cache_ids: jax.Array | None, total: jax.Array) -> Rows:
        """Begin one row per prompt. The request must be complete.

        `known` contains each prompt's tokens with known ids, including tokens in the cache. `total int32[B]` is the
        number of tokens in each prompt, including cached tokens and tokens without known ids.
        """
        prompts, budget = request.ids.shape[0], jnp.minimum(request.budget, run.capacity)
        wrong = (request.ids < 0) | (request.ids >= run.model.vocab_size)
        wrong = jnp.any(request.mask & wrong, axis=-1) & (request.embeds is None)
        wrong |= ~jnp.any(request.mask, axis=-1)
        reasons = first_reason(BAD_ID=wrong, LENGTH=budget <= 0)
        ids = jnp.pad(known.ids, ((0, 0), (0, run.capacity)))
        history = History.begin(
            run.cfg, ids, known.length, budget, request.grammar, total - known.length, request.options
        )
        stop_strings = request.stop_strings
        if run.extensions.stop_strings is not None:
            assert stop_strings is not None
            stop_strings = run.extensions.stop_strings.begin(stop_strings, history.ids, history.length)
        constraints = ConstraintAutomaton.from_config(run.cfg) if run.cfg.constrained else None
        return cls(
            history=dataclasses.replace(history, done=reasons != StopReason.NONE),
            reasons=reasons,
            values=request.options,
            keys=request.key,
            stop_strings=stop_strings,
            lanes=request.lanes,
            constraints=None if constraints is None else constraints.begin(history.ids, history.length),
            hook=(),
            logprobs=None if run.cfg.output_logprobs is None else _no_logprobs(run.cfg, prompts, run.capacity),
            recording=None,
            cache_ids=cache_ids,
        )

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.reasons.shape[0]

    @property
    def live(self) -> jax.Array:
        """bool[rows], True for rows that are not done."""
        return ~self.history.done

    def options(self, run: Run) -> RowOptions:
        """Return the options of the rows."""
        return RowOptions(run.cfg, self.values, run.mesh)

    def pad(self, run: Run) -> Rows:
        """Append rows that are done until there is one row for each prompt in the loop."""
        rows = run.pad(self)
        return rows.end(jnp.arange(rows.count) >= run.prompts, jnp.int32(StopReason.LENGTH))

    def fork(self, copies: int) -> Rows:
        """Return `copies` sequences for each row, each with a different key."""
        forked = dataclasses.replace(self, keys=None).map_sequences(lambda x: repeat_rows(x, x.shape[0] * copies))
        return dataclasses.replace(forked, keys=None if self.keys is None else sequence_keys(self.keys, copies))

    def sequence(self, number: jax.Array) -> Rows:
        """For each row, return only the sequence at index `number int32[rows]`, exactly as `fork` would return it."""
        keys = None if self.keys is None else jax.vmap(jax.random.fold_in)(self.keys, number)
        return dataclasses.replace(self, keys=keys)

    def select(self, rows: jax.Array, groups: int = 1) -> Rows:
        """Return the state with row `rows[i]` in place of row i. Both rows must have the same prompt.

        `rows` is int32[count]. The rows form `groups` equal parts, and no row moves to another part; see `shapes.take`.
        """
        return self.map_sequences(lambda x: take(x, rows, groups))

    def take(self, rows: jax.Array) -> Rows:
        """Return the rows at the indices `rows int32[n]`. The state must have one row per prompt."""
        return jax.tree.map(lambda x: x[rows], self)

    def insert(self, source: Rows, rows: jax.Array) -> Rows:
        """Return the state with row i of `source` in place of row `rows[i]`. `rows` is int32[source.count].

        Indices of `count` or more are ignored; all others must be distinct. `source` must have the same form as the
        state, apart from its number of rows. The sequences of a prompt share arrays. All sequences of a prompt must
        therefore be replaced together, by the sequences of one prompt in `source`, in the same order.
        """
        # Each dropped row gets a different index, because the scatter's indices must be unique.
        rows = jnp.where(rows < self.count, rows, self.count + jnp.arange(source.count, dtype=jnp.int32))

        def write(x: jax.Array, y: jax.Array) -> jax.Array:
            sequences = self.count // x.shape[0]
            target = rows if sequences == 1 else rows[::sequences] // sequences
            return x.at[target].set(y, mode="drop", unique_indices=True)

        return jax.tree.map(write, self, source)

    def push(
        self, run: Run, tokens: jax.Array, failed: jax.Array, live: jax.Array, logits: jax.Array, scores: jax.Array
    ) -> Rows:
        """Append a token to each live row, record the step, and set the stop reasons of the rows that end.

        Args:
            run: the constants of the run.
            tokens: int32[rows], the chosen tokens.
            failed: int32[rows], a `StopReason` for rows in which no token can be chosen, otherwise NONE.
            live: bool[rows], the rows to extend; rows that are done are never extended.
            logits: float32[rows, V], the model's logits.
            scores: float32[rows, V], after all processors and warpers, from which the tokens were chosen.
        """
        live &= self.live
        added = live & (failed == StopReason.NONE)
        rows = self.push_text(run, tokens, added, scores)
        if run.extensions.allowed is not None:
            rows = rows.with_complete(run)
        if run.cfg.output_logprobs is not None:
            rows = rows.with_logprobs(run, added, logits, scores)
        if self.recording is not None:  # failed steps are recorded too, because their scores show the reason
            recording = self.recording.put(self.history.step, live, logits, scores)
            rows = dataclasses.replace(rows, recording=recording)
        return rows.end(live & ~added, failed)

    def push_text(self, run: Run, tokens: jax.Array, added: jax.Array, scores: jax.Array) -> Rows:
        """Append `tokens int32[rows]` where `added bool[rows]` is True, and set the stop reasons, but record nothing.

        `scores` are as in `push`. A row whose text is complete at the end of its budget gets the reason LENGTH;
        see `with_complete`.
        """
        with jax.named_scope("stop"):
            history, stop_strings, ends = self.history.push(tokens, added), self.stop_strings, {}
            if run.extensions.allowed is not None or run.extensions.stop_strings is not None:
                states = self.history.grammar, stop_strings
                (grammar, stop_strings), ends = read_texts(
                    run, self.history, states, self.options(run), tokens, added, self.lanes
                )
                history = dataclasses.replace(history, grammar=grammar)
            constraints = self.constraints
            if constraints is not None:
                constraints = ConstraintAutomaton.from_config(run.cfg).push(constraints, tokens, added)
            rows = dataclasses.replace(self, history=history, stop_strings=stop_strings, constraints=constraints)
            ends |= ended(run, history, self.values.get("eos_token_id"), tokens, scores)
            return rows.end(added, first_reason(**ends))

    def with_complete(self, run: Run) -> Rows:
        """Return the rows with COMPLETE instead of LENGTH as the stop reason of rows whose text is complete."""
        return dataclasses.replace(self, reasons=with_complete(run, self.history, self.reasons))

    def end(self, mask: jax.Array, reason: jax.Array) -> Rows:
        """Set the stop reason of the rows where `mask bool[rows]` is True. Any reason except NONE ends a row."""
        reasons = jnp.where(mask, reason, self.reasons)
        history = dataclasses.replace(self.history, done=self.history.done | (reasons != StopReason.NONE))
        return dataclasses.replace(self, history=history, reasons=reasons)

    def with_logprobs(self, run: Run, added: jax.Array, logits: jax.Array, scores: jax.Array) -> Rows:
        """Record the newest token's log-probability where `added` is True. The other arguments are as in `push`."""
        assert self.logprobs is not None
        source = logits if run.cfg.output_logprobs == "logits" else scores

        def compute(added: jax.Array) -> LogProbs:
            return logprobs_of(source, self.history.last(1)[:, 0], added, run.cfg.top_logprobs)

        added, result = (added, compute(added)) if self.lanes is None else self.lanes.record(added, compute)
        logprobs = jax.tree.map(lambda x, new: put_step(x, self.history.step - 1, added, new), self.logprobs, result)
        return dataclasses.replace(self, logprobs=logprobs)

    def all_tokens(self, capacity: int) -> jax.Array | None:
        """Return the ids of all tokens of each row in order, int32[rows, W + capacity]; None if they are not known."""
        if self.cache_ids is None:
            return None
        before, history = repeat_rows(self.cache_ids, self.count), self.history
        step = jnp.arange(capacity, dtype=jnp.int32)[None, :]
        column = (history.total_length - history.step)[:, None] + step
        column = jnp.where(step < history.step[:, None], column, before.shape[1] + capacity)
        generated = history.generated(capacity, jnp.zeros((), jnp.int32))
        return put(jnp.pad(before, ((0, 0), (0, capacity))), column, generated)


def _no_logprobs(cfg: GenerationConfig, rows: int, capacity: int) -> LogProbs:
    zeros = jnp.zeros((rows, capacity), jnp.float32)
    if not cfg.top_logprobs:
        return LogProbs(zeros)
    top = (rows, capacity, cfg.top_logprobs)
    return LogProbs(zeros, jnp.zeros(top, jnp.float32), jnp.zeros(top, jnp.int32))
