"""Drafts for assisted generation, from a smaller model or from an earlier occurrence of a row's last tokens.

The methods of a `Drafter` are pure functions that take the old state and return the new state. A draft never
changes the generated text.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.control import fori_loop, while_loop
from jaxgen.core.decoding.forward import run_model
from jaxgen.core.decoding.passes import run_prompts
from jaxgen.core.decoding.request import Tokens
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.sample import choose, process
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.model.cache import KVCache


@flax.struct.dataclass
class Draft:
    """Drafted tokens.

    Attributes:
        tokens: int32[B, T], the drafted tokens of each row.
        count: int32[B], the number of drafted tokens; 0 for a row that is done.
    """

    tokens: jax.Array
    count: jax.Array


class Drafter(Protocol):
    """A source of drafts."""

    def begin(self, run: Run, rows: Rows) -> Any:
        """Return the initial state for these rows, which already contain their first generated token."""
        ...

    def propose(self, run: Run, rows: Rows, state: Any) -> tuple[Draft, Any]:
        """Draft the next tokens of each row, but leave at least one token of its budget for the model."""
        ...

    def update(self, run: Run, state: Any, rows: Rows, accepted: jax.Array) -> Any:
        """Return the state after each row gets `accepted` drafted tokens and one more token; `accepted` is int32[B]."""
        ...


def drafter_of(run: Run) -> Drafter:
    """Return the drafter of a run."""
    return PromptLookup() if run.draft is None else DraftModel()


class PromptLookup:
    """Drafter that copies tokens from earlier in the row, like transformers' `PromptLookupCandidateGenerator`.

    It finds the longest n-gram at the end of the row that also occurs earlier. The draft consists of the tokens after
    the first occurrence.
    """

    def begin(self, run: Run, rows: Rows) -> None:
        """Return no state."""

    def propose(self, run: Run, rows: Rows, state: None) -> tuple[Draft, None]:
        """Draft up to `prompt_lookup_num_tokens` tokens by copying them from the row."""
        assert run.cfg.prompt_lookup_num_tokens is not None
        history, width = rows.history, _within(run, run.cfg.prompt_lookup_num_tokens)
        start = first_occurrence(history.ids, history.length, run.cfg.max_matching_ngram_size or 2)
        count = jnp.minimum(_limit(rows, width), history.length - start)
        return Draft(history.following(start, width), count), None

    def update(self, run: Run, state: None, rows: Rows, accepted: jax.Array) -> None:
        """Return no state."""


@flax.struct.dataclass
class DraftState:
    """State of a draft model.

    Attributes:
        cache: the draft model's keys and values for all tokens of a row except the last one or two.
        wanted: int32[B], the number of tokens to draft next.
    """

    cache: KVCache
    wanted: jax.Array


class DraftModel:
    """Drafter that uses the model of `run.draft`, like `AssistedCandidateGenerator`.

    Drafting uses the processors, warpers, stopping rules and random numbers of the run.
    """

    def begin(self, run: Run, rows: Rows) -> DraftState:
        """Run the prompts through the draft model."""
        drafting, history = _draft_of(run), rows.history
        width = history.ids.shape[1] - run.capacity
        prompt = Tokens.of_length(_known(drafting, history.ids[:, :width]), history.prompt_length)
        cache = KVCache.create(drafting.model, rows.count, width, run.cfg.cache_dtype)
        read, _ = run_prompts(drafting, rows, prompt, cache, cache_is_empty=True)
        wanted = jnp.full(rows.count, drafting.cfg.num_assistant_tokens, jnp.int32)
        return DraftState(read.cache.grow(run.capacity), wanted)

    def propose(self, run: Run, rows: Rows, state: DraftState) -> tuple[Draft, DraftState]:
        """Draft `state.wanted` tokens for each row, or fewer if the row ends or the draft model is unsure."""
        drafting, width = _draft_of(run), _width(run)
        limit = jnp.minimum(state.wanted, _limit(rows, width))
        threshold, length = rows.values.get("assistant_confidence_threshold"), rows.history.length

        def draft_next(carry: tuple[jax.Array, Rows, KVCache]) -> tuple[jax.Array, Rows, KVCache]:
            active, rows, cache = carry
            read, _ = run_model(drafting, rows, _unread(drafting, rows, cache, active), cache)
            # The draft model's vocabulary may be padded to a different size.
            logits = read.logits[:, 0, : run.model.vocab_size]
            missing = run.model.vocab_size - logits.shape[1]
            logits = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
            scores = process(run, rows, logits)
            tokens, failed = choose(rows, scores)
            added = active & (failed == StopReason.NONE)
            rows = rows.push_text(run, tokens, added, scores)
            if run.extensions.allowed is not None:
                rows = rows.with_complete(run)
            active = added & rows.live & (rows.history.length - length < limit)
            if threshold is not None:
                probs = jax.nn.softmax(scores, axis=-1)
                active &= jnp.take_along_axis(probs, tokens[:, None], axis=1)[:, 0] >= threshold
            return active, rows, read.cache

        unrecorded = dataclasses.replace(rows, recording=None, logprobs=None, hook=())
        begin = (limit > 0, unrecorded, state.cache)
        _, drafted, cache = while_loop(lambda carry: jnp.any(carry[0]), draft_next, begin)
        draft = Draft(drafted.history.following(length, width), drafted.history.length - length)
        return draft, dataclasses.replace(state, cache=cache)

    def update(self, run: Run, state: DraftState, rows: Rows, accepted: jax.Array) -> DraftState:
        """Drop the rejected tokens, and adapt the length of the next draft unless the schedule is constant."""
        surplus = jnp.maximum(state.cache.total_length - (rows.history.length - 1), 0)
        wanted = state.wanted
        if _draft_of(run).cfg.num_assistant_tokens_schedule != "constant":
            wanted = jnp.where(accepted == wanted, jnp.minimum(wanted + 2, _width(run)), jnp.maximum(wanted - 1, 1))
        return DraftState(state.cache.drop_last(surplus), wanted)


def first_occurrence(ids: jax.Array, length: jax.Array, most: int) -> jax.Array:
    """Find the first occurrence of the last tokens of each row.

    Args:
        ids: int32[B, W], the tokens of each row, padded.
        length: int32[B], the number of tokens in each row.
        most: the maximum number of tokens to match; if there is no match, fewer tokens are tried.

    Returns:
        int32[B], the column after the occurrence; `length` if not even the last token occurs earlier.
    """
    column = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]

    def compare(size, carry):
        found, same, before = carry
        # `same` is True in column c if the `size` tokens before column c equal the row's last `size` tokens.
        token = jnp.take_along_axis(ids, jnp.maximum(length - size, 0)[:, None], axis=1)
        before = jnp.roll(before, 1, axis=1)
        same &= (column >= size) & (before == token) & (length >= size)[:, None]
        found = jnp.where(jnp.any(same, axis=-1), jnp.argmax(same, axis=-1).astype(jnp.int32), found)
        return found, same, before

    return fori_loop(1, min(most + 1, ids.shape[1]), compare, (length, column < length[:, None], ids))[0]


def _limit(rows: Rows, width: int) -> jax.Array:
    """Return the maximum draft length, int32[B]: the remaining budget minus 1, up to `width`; 0 for done rows."""
    left = rows.history.budget - rows.history.step - 1
    return jnp.where(rows.live, jnp.clip(left, 0, width), 0)


def _draft_of(run: Run) -> Run:
    assert run.draft is not None
    return run.draft


def _width(run: Run) -> int:
    """Return the maximum number of tokens that the draft model may draft."""
    cfg = _draft_of(run).cfg
    # The heuristic schedule drafts at most twice the initial number of tokens, which limits the width of a pass.
    growth = 1 if cfg.num_assistant_tokens_schedule == "constant" else 2
    return _within(run, cfg.num_assistant_tokens * growth)


def _within(run: Run, count: int) -> int:
    """Limit `count` to the number of tokens that a row can generate after its first token, but return at least 1."""
    return max(min(count, run.capacity - 1), 1)


def _unread(drafting: Run, rows: Rows, cache: KVCache, active: jax.Array) -> Tokens:
    """Return the tokens that are not yet in the draft model's cache: the last one or two of each row."""
    missing = rows.history.length - cache.total_length
    last = rows.history.last(2)
    ids = jnp.where((missing == 2)[:, None], last, last[:, ::-1])
    return Tokens.of_length(_known(drafting, ids), jnp.where(active, missing, 0))


def _known(drafting: Run, ids: jax.Array) -> jax.Array:
    """Clip ids to the draft model's vocabulary, which may have less padding than the main model's."""
    return jnp.clip(ids, 0, drafting.model.vocab_size - 1)
