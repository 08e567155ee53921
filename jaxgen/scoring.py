"""Log-probabilities of given tokens: of any text in one forward pass, and of what generate chose from its scores."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxgen.errors import ConfigError, InputError
from jaxgen.generation_config import GenerationConfig
from jaxgen.model.causal_lm import CausalLM, forward
from jaxgen.model.config import ModelConfig
from jaxgen.request import (
    check_ids_shape,
    check_mask_shape,
    check_params,
    host_ids,
    host_mask,
    inferred_mask,
    prompt_bucket,
)

# Logits that are held at a time unless `chunk` says otherwise: 128 MiB of float32.
_HELD = 2**25


@flax.struct.dataclass
class Scores:
    """What `score` returns; in the columns of the ids.

    Attributes:
        logprobs: float32[B, L], the log-probability of each token after those before it; 0 for a row's first token,
            which nothing predicts, and for padding.
        top_logprobs: float32[B, L, n], those of the n likeliest tokens in its place, the likeliest first; 0 where
            `logprobs` is 0 by definition. None with `top=0`.
        top_tokens: int32[B, L, n], these tokens.
    """

    logprobs: jax.Array
    top_logprobs: jax.Array | None = None
    top_tokens: jax.Array | None = None


def score(params, ids, cfg: GenerationConfig, *, attention_mask=None, top: int = 0, chunk: int | None = None) -> Scores:
    """Return the log-probability of every token given those before it, under the model's own distribution.

    >>> out = generate(params, batch.ids, key, cfg, attention_mask=batch.attention_mask)         # doctest: +SKIP
    >>> scores = score(params, out.sequences, cfg, attention_mask=out.attention_mask)            # doctest: +SKIP
    >>> scores.logprobs[:, out.prompt_width :].sum(axis=1)   # of each row's answer              # doctest: +SKIP

    One forward pass. Logits are computed for some positions at a time, and again for their gradient, so that those of
    all are never held. It can be differentiated with respect to `params` and called under the caller's jit, where an
    id that the vocabulary does not have gives NaN. Called eagerly, it rounds the width up to a bucket, as `generate`
    does, so that few programs are compiled. Processors and warpers of `cfg` are left aside.

    Args:
        params: the parameters, a tree with Hugging Face's names.
        ids: int32[B, L], text padded to one width.
        cfg: `cfg.model` says for which model; no other option matters where the mask is given.
        attention_mask: `[B, L]`, 0 where ids is padding, wherever that is. Left out, it is inferred as in `generate`.
        top: n, how many of the likeliest tokens to return for each position too.
        chunk: positions, of all rows, whose logits are held at a time; by default what 128 MiB have room for.

    Raises:
        InputError: params, ids or mask that do not fit the model or each other.
        ConfigError: `cfg` without a model, a `top` or `chunk` that is not possible.
        TypeError: an argument of the wrong type.
    """
    if not isinstance(cfg, GenerationConfig):
        raise TypeError(f"cfg must be a jaxgen.GenerationConfig, got {type(cfg).__name__}")
    if cfg.model is None:
        raise ConfigError("cfg.model is None: set it to the checkpoint's ModelConfig (convert.load_hf does)")
    check_params(params, cfg)
    vocab = cfg.model.vocab_size
    _check_size("top", top, 0, vocab)
    if chunk is not None:
        _check_size("chunk", chunk, 1)

    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, ids, cfg, attention_mask)))
    ids, mask = _checked(ids, attention_mask, cfg, traced)
    rows, width = ids.shape
    bucket = width if traced else prompt_bucket(width)
    if bucket > width:
        ids, mask = (np.pad(x, ((0, 0), (0, bucket - width))) for x in (ids, mask))
    if chunk is None:
        chunks = -(-bucket // max(1, _HELD // (rows * vocab)))
        size = -(-bucket // chunks)
    else:
        size = min(int(chunk), bucket)
    scores = _score(params, ids, mask, model=cfg.model, top=int(top), chunk=size)
    if bucket == width:
        return scores
    # Cut on the host: a slice of a jax array would compile for each width.
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x)[:, :width]), scores)


def _checked(ids, attention_mask, cfg: GenerationConfig, traced: bool):
    """Return ids int32[B, L] and mask bool[B, L]; what is concrete of them is checked."""
    if isinstance(ids, Tracer):
        check_ids_shape(ids)
        ids = ids.astype(jnp.int32)
    else:
        ids = host_ids(ids, cfg)
    if isinstance(attention_mask, Tracer):
        check_mask_shape(attention_mask, ids)
        return ids, attention_mask.astype(bool)
    if attention_mask is None and traced:
        return ids, inferred_mask(jnp.asarray(ids), cfg)
    return ids, host_mask(attention_mask, ids, cfg)


def _check_size(name: str, value: int, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least or (most is not None and value > most):
        limits = f">= {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} must be {limits}, got {value}")


@functools.partial(jax.jit, static_argnames=("model", "top", "chunk"))
def _score(params, ids: jax.Array, mask: jax.Array, *, model: ModelConfig, top: int, chunk: int) -> Scores:
    ids = jnp.where(mask, ids, 0)  # whatever padding holds, an embedding that is not a number would spread
    # The logits of one position are left out again by the compiler, as nothing uses them.
    out = forward(model, params, ids, attention_mask=mask, logits_to_keep=1, output_hidden_states=True)
    assert out.hidden_states is not None
    before = _column_before(mask)
    predicted = mask & (before >= 0)
    hidden = jnp.take_along_axis(out.hidden_states[-1], jnp.maximum(before, 0)[..., None], axis=1)

    def of_chunk(part) -> Scores:
        hidden, targets, predicted = part
        logits = _head(model, params, hidden)
        return _pick(logits, targets, predicted, top)

    parts = jax.tree.map(lambda x: _split(x, chunk), (hidden, ids, predicted))
    with jax.named_scope("score"):
        scores = lax.map(jax.checkpoint(of_chunk, prevent_cse=False), parts)
    return jax.tree.map(lambda x: _joined(x)[:, : ids.shape[1]], scores)


def _column_before(mask: jax.Array) -> jax.Array:
    """int32[B, L]: the column of the last token before each column, -1 where there is none; `mask bool[B, L]`."""
    column = jnp.where(mask, jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :], -1)
    return jnp.pad(lax.cummax(column, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)


def _head(model: ModelConfig, params, hidden: jax.Array) -> jax.Array:
    """Map normed hidden states `[B, T, D]` to logits float32[B, T, V], as `CausalLM` does."""

    def head(module: CausalLM, x: jax.Array) -> jax.Array:
        return module.model.embed_tokens.attend(x) if model.tie_word_embeddings else module.lm_head(x)

    logits = CausalLM(model).apply({"params": params}, hidden, method=head)
    assert isinstance(logits, jax.Array)
    return logits.astype(jnp.float32)


def _pick(logits: jax.Array, targets: jax.Array, predicted: jax.Array, top: int) -> Scores:
    """Return the log-probabilities of `targets int32[B, T]` under `logits float32[B, T, V]`; 0 where not `predicted`.

    `predicted`: bool[B, T].
    """
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    targets = jnp.where(targets < 0, logits.shape[-1], targets)  # a negative index would wrap
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill", fill_value=jnp.nan) - total
    logprobs = jnp.where(predicted, chosen[..., 0], 0.0)
    if not top:
        return Scores(logprobs)
    best, tokens = lax.top_k(logits, top)
    held = predicted[..., None]
    return Scores(logprobs, jnp.where(held, best - total, 0.0), jnp.where(held, tokens.astype(jnp.int32), 0))


def _split(x: jax.Array, size: int) -> jax.Array:
    """Cut `[B, L, ...]` into `[ceil(L / size), B, size, ...]`, filled up with zeros."""
    padding = [(0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, padding).reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)


def _joined(x: jax.Array) -> jax.Array:
    """Undo `_split`."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def compute_transition_scores(
    sequences, scores: jax.Array | Sequence, beam_indices=None, normalize_logits: bool = False
) -> jax.Array:
    """Return the score with which each generated token was chosen: `compute_transition_scores` of transformers.

    >>> out = generate(params, ids, None, cfg.replace(output_scores=True))                       # doctest: +SKIP
    >>> compute_transition_scores(out.sequences, out.scores, normalize_logits=True)              # doctest: +SKIP

    With beams, the sum of a row over its tokens, divided by their number to the power of `length_penalty`, is its
    `sequences_scores`. Unlike in transformers the result has as many steps as the scores. Without `beam_indices` what
    is behind a row's end is the score of the pad id there: see `lengths` of the output.

    Args:
        sequences: int32[rows, P + N].
        scores: float32[N, R, V], or N of float32[R, V]; R is the number of rows, or of beams of all prompts.
        beam_indices: int32[rows, N], which of the R each token was chosen from, negative behind a row's end.
        normalize_logits: make the scores log-probabilities first.

    Returns:
        float32[rows, N], 0 where the beam index is negative.

    Raises:
        InputError: shapes that do not fit each other.
    """
    if isinstance(scores, tuple | list):
        if len({np.shape(step) for step in scores}) != 1:
            raise InputError("scores must be steps of one shape, [rows, V], at least one")
        shape = (len(scores), *np.shape(scores[0]))
        scores = tuple(scores)
    else:
        shape = np.shape(scores)
    if len(shape) != 3 or 0 in shape:
        raise InputError(f"scores must have shape [N, rows, V], or be N of [rows, V], got {list(shape)}")
    steps, sources, _ = shape
    if np.ndim(sequences) != 2 or np.shape(sequences)[1] < steps:
        raise InputError(
            f"sequences must have shape [rows, P + N] with N = {steps}, the steps of scores, got "
            f"{list(np.shape(sequences))}"
        )
    rows = np.shape(sequences)[0]
    if beam_indices is None and rows != sources:
        raise InputError(f"sequences has {rows} rows and scores {sources}: give the beam_indices of the same output")
    if beam_indices is not None and np.shape(beam_indices) != (rows, steps):
        raise InputError(
            f"beam_indices must have shape [rows, N] = {[rows, steps]}, got {list(np.shape(beam_indices))}"
        )
    beam_indices = None if beam_indices is None else jnp.asarray(beam_indices)
    return _transition_scores(jnp.asarray(sequences), scores, beam_indices, normalize_logits=bool(normalize_logits))


@functools.partial(jax.jit, static_argnames="normalize_logits")
def _transition_scores(sequences, scores, beam_indices, *, normalize_logits: bool) -> jax.Array:
    scores = (jnp.stack(scores) if isinstance(scores, tuple) else scores).astype(jnp.float32)
    steps = scores.shape[0]
    tokens = sequences[:, sequences.shape[1] - steps :]
    step = jnp.arange(steps)[None, :]
    source = jnp.arange(tokens.shape[0])[:, None] if beam_indices is None else jnp.maximum(beam_indices, 0)
    chosen = scores[step, source, tokens]
    if normalize_logits:
        chosen = chosen - jax.nn.logsumexp(scores, axis=-1)[step, source]
    return chosen if beam_indices is None else jnp.where(beam_indices < 0, 0.0, chosen)
