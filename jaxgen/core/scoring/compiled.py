"""The compiled parts of scoring: a forward pass, then logits and log-probabilities for a few positions at a time."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.control import scan
from jaxgen.core.decoding.logprobs import LogProbs, logprobs_of
from jaxgen.core.decoding.replay import Replay
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.causal_lm import head, hidden
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.context import Context
from jaxgen.programs import program
from jaxgen.shapes import repeat_rows


@program("score", static_argnames=["model", "start", "top", "chunk"])
def logprobs(
    params,
    ids: jax.Array,
    mask: jax.Array,
    replay: Replay | None,
    routed: jax.Array | None,
    *,
    context: Context,
    model: ModelConfig,
    start: int,
    top: int,
    chunk: int,
) -> LogProbs:
    """Return the log-probabilities of the tokens of `ids int32[B, L]`, using a single forward pass.

    Args:
        params, context, model: as in `hidden`.
        ids, mask: int32[B, L] and bool[B, L], False for padding.
        replay: recomputes the scores from which the tokens were chosen; None to use the model's own distribution.
        routed: `routed_experts` of the model, or None.
        start: the first column to score: 0, or the width of the prompts.
        top: n, the number of most likely tokens to return for each column.
        chunk: the number of columns whose logits are in memory at a time.
    """
    ids = jnp.where(mask, ids, 0)  # padding may have any id, and a NaN in that id's embedding would spread
    states, _ = hidden(model, params, ids, attention_mask=mask, routed_experts=routed, context=context)
    before = _column_before(mask)[:, start:]
    predicted = mask[:, start:] & (before >= 0)
    states = jnp.take_along_axis(states, jnp.maximum(before, 0)[..., None], axis=1)
    history = None if replay is None else replay.begin(ids, mask, start)
    scores = _of_states(params, states, ids[:, start:], predicted, history, replay, context, model, top, chunk)
    return jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (start, 0), *[(0, 0)] * (x.ndim - 2)]), scores)


@program("score_many", static_argnames=["model", "chunk"])
def continuation_logprobs(
    params,
    contexts: jax.Array,
    context_mask: jax.Array,
    ids: jax.Array,
    mask: jax.Array,
    *,
    context: Context,
    model: ModelConfig,
    chunk: int,
) -> LogProbs:
    """Return the log-probabilities of several continuations of each context, reading each context only once.

    Args:
        params, context, model: as in `hidden`.
        contexts: int32[B, P].
        context_mask: bool[B, P], False for padding, which is on the left. No context is empty.
        ids: int32[B*R, C], the R continuations of context 0, then those of context 1, and so on.
        mask: bool[B*R, C], False for padding, which is on the right.
        chunk: the number of columns whose logits are in memory at a time.
    """
    (rows, width), (owners, columns) = ids.shape, contexts.shape
    contexts, ids = jnp.where(context_mask, contexts, 0), jnp.where(mask, ids, 0)
    cache = KVCache.create(model, owners, columns)
    read = functools.partial(hidden, model, params, context=context)
    # Because `cache_position` is static, attention on a CPU skips the keys that come after the queries.
    states, cache = read(contexts, attention_mask=context_mask, cache=cache, cache_position=0)
    states = repeat_rows(states[:, -1:], rows)
    if width > 1:  # the last token predicts nothing, so the model need not read it
        assert cache is not None
        own = cache.fork(rows // owners, width - 1)
        rest, _ = read(ids[:, :-1], attention_mask=mask[:, :-1], cache=own, cache_position=own.offset)
        states = jnp.concatenate([states, rest], axis=1)
    return _of_states(params, states, ids, mask, None, None, context, model, 0, chunk)


def _of_states(
    params, states: jax.Array, ids: jax.Array, predicted: jax.Array, history, replay, context, model, top, chunk
) -> LogProbs:
    """Return the log-probabilities of `ids int32[B, C]` from the hidden states `[B, C, D]` that predict them."""

    def reduce_column(logits: jax.Array, tokens: jax.Array, predicted: jax.Array) -> LogProbs:
        is_greedy = predicted & (_first_largest(logits) == tokens)
        return dataclasses.replace(logprobs_of(logits, tokens, predicted, top), is_greedy=is_greedy)

    def score_chunk(history, part):
        states, tokens, predicted = part
        logits = head(model, params, states, context)
        if replay is None:
            return None, reduce_column(logits, tokens, predicted)
        return replay.run(history, logits, tokens, predicted, reduce_column)

    parts = jax.tree.map(lambda x: _split(x, chunk), (states, ids, predicted))
    with jax.named_scope("score"):
        _, scores = scan(jax.checkpoint(score_chunk, prevent_cse=False), history, parts)
    return jax.tree.map(lambda x: _joined(x, ids.shape[1]), scores)


def _first_largest(logits: jax.Array) -> jax.Array:
    """Return `argmax(logits, axis=-1)`, or V if a logit is NaN, using reductions that XLA vectorizes on a CPU."""
    size = logits.shape[-1]
    best = jnp.max(logits, axis=-1, keepdims=True)
    indices = jnp.where(logits == best, lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1), size)
    return jnp.min(indices, axis=-1)


def _column_before(mask: jax.Array) -> jax.Array:
    """For each column of `mask bool[B, L]`, return the column of the last token before it, or -1, as int32[B, L]."""
    column = jnp.where(mask, jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :], -1)
    return jnp.pad(lax.cummax(column, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def _split(x: jax.Array, size: int) -> jax.Array:
    """Split `[B, L, ...]` into `[ceil(L / size), B, size, ...]`, padding with zeros."""
    padding = [(0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, padding).reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)


def _joined(x: jax.Array, width: int) -> jax.Array:
    """Undo `_split`, returning `[B, width, ...]`."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :width]
