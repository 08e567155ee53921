"""The compiled part of `score`: one forward pass, then logits and log-probabilities a few positions at a time."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.decoding.replay import Replay
from jaxgen.model.causal_lm import head, hidden
from jaxgen.model.config import ModelConfig
from jaxgen.model.context import Context
from jaxgen.programs import program
from jaxgen.shapes import short_repr


@flax.struct.dataclass
class LogProbs:
    """Result of `score`, aligned with the ids. `GenerateOutput.generated` cuts it to the generated columns.

    Attributes:
        logprobs: float32[B, L], the log-probability of each token given those before it; 0 for a row's first token,
            which nothing predicts, for padding and for columns before `prompt_width`.
        top_logprobs: float32[B, L, n], the log-probabilities of the n most likely tokens at that position, in
            descending order; 0 where `logprobs` is 0 by definition. None with `top_logprobs=0`.
        top_tokens: int32[B, L, n], the ids of these tokens.
    """

    logprobs: jax.Array | None
    top_logprobs: jax.Array | None = None
    top_tokens: jax.Array | None = None

    __repr__ = short_repr


@program(static_argnames=["model", "start", "top", "chunk"])
def logprobs(
    params,
    ids: jax.Array,
    mask: jax.Array,
    replay: Replay | None,
    *,
    context: Context,
    model: ModelConfig,
    start: int,
    top: int,
    chunk: int,
) -> LogProbs:
    """Return the log-probabilities of the tokens in the columns from `start` on, from one forward pass.

    Args:
        params: the parameters.
        ids: int32[B, L].
        mask: bool[B, L], False for padding.
        replay: computes the scores that the tokens were chosen from; None for the model's own distribution.
        context: what is known about the weights.
        model: the model's config.
        start: 0, or the width of the prompts.
        top: n, how many of the most likely tokens to return.
        chunk: the number of columns whose logits, for all rows, are in memory at once.
    """
    ids = jnp.where(mask, ids, 0)  # padding may have any id, and a NaN embedding would spread
    states = hidden(model, params, ids, attention_mask=mask, context=context).last
    before = _column_before(mask)[:, start:]
    predicted = mask[:, start:] & (before >= 0)
    states = jnp.take_along_axis(states, jnp.maximum(before, 0)[..., None], axis=1)
    reduce_column = functools.partial(logprobs_of, top=top)

    def score_chunk(history, part):
        states, tokens, predicted = part
        logits = head(model, params, states, context)
        if replay is None:
            return None, reduce_column(logits, tokens, predicted)
        return replay.run(history, logits, tokens, predicted, reduce_column)

    parts = jax.tree.map(lambda x: _split(x, chunk), (states, ids[:, start:], predicted))
    with jax.named_scope("score"):
        history = None if replay is None else replay.begin(ids, mask, start)
        _, scores = lax.scan(jax.checkpoint(score_chunk, prevent_cse=False), history, parts)
    return jax.tree.map(lambda x: _joined(x, start, ids.shape[1]), scores)


def _column_before(mask: jax.Array) -> jax.Array:
    """Return the column of the last token before each column of `mask bool[B, L]`: int32[B, L], -1 if none."""
    column = jnp.where(mask, jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :], -1)
    return jnp.pad(lax.cummax(column, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def logprobs_of(logits: jax.Array, targets: jax.Array, predicted: jax.Array, top: int) -> LogProbs:
    """Return the log-probabilities of `targets int32[...]` under `logits float32[..., V]`; 0 where not `predicted`.

    `predicted`: bool[...].
    """
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    targets = jnp.where(targets < 0, logits.shape[-1], targets)  # a negative index would wrap
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill", fill_value=jnp.nan) - total
    logprobs = jnp.where(predicted, chosen[..., 0], 0.0)
    if not top:
        return LogProbs(logprobs)
    best, tokens = lax.top_k(logits, top)
    shown = predicted[..., None]
    return LogProbs(logprobs, jnp.where(shown, best - total, 0.0), jnp.where(shown, tokens.astype(jnp.int32), 0))


def _split(x: jax.Array, size: int) -> jax.Array:
    """Cut `[B, L, ...]` into `[ceil(L / size), B, size, ...]`, padded with zeros."""
    padding = [(0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, padding).reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)


def _joined(x: jax.Array, start: int, width: int) -> jax.Array:
    """Undo `_split`, and put the result into the last columns, from `start` on, of `[B, width, ...]`."""
    x = x.swapaxes(0, 1)
    x = x.reshape(x.shape[0], -1, *x.shape[3:])[:, : width - start]
    return jnp.pad(x, [(0, 0), (start, 0), *[(0, 0)] * (x.ndim - 2)])
