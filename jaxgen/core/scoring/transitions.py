"""Scores or log-probabilities of generated tokens, taken from the recorded scores."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.errors import InputError
from jaxgen.programs import program


def compute_transition_scores(
    sequences, scores: jax.Array | Sequence, beam_indices=None, normalize_logits: bool = False
) -> jax.Array:
    """Return the score that each generated token had when chosen, like transformers' `compute_transition_scores`.

    >>> out = generate(params, ids, None, cfg.replace(output_scores=True))
    >>> compute_transition_scores(out.sequences, out.scores, normalize_logits=True)

    In a beam search, a row's `sequences_scores` is the sum of the scores of its n tokens, divided by
    `n**length_penalty`. The result has one column per step of `scores`; transformers omits the columns after the end of
    the longest row. Without `beam_indices`, entries after a row's end are the scores of the pad id; see `lengths` in
    the output.

    Args:
        sequences: int32[rows, P + N], the prompts and the generated tokens.
        scores: float32[N, R, V], or N arrays float32[R, V]. R is the total number of beams in a beam search;
            otherwise, R equals `rows`.
        beam_indices: int32[rows, N], the row of `scores` from which each token was chosen; negative after a row's end.
        normalize_logits: convert the scores to log-probabilities first.

    Returns:
        float32[rows, N], 0 where the beam index is negative.

    Raises:
        InputError: the shapes do not match.
    """
    if isinstance(scores, tuple | list):
        if len({np.shape(step) for step in scores}) != 1:
            raise InputError("scores must be a non-empty sequence of arrays of one shape, [rows, V]")
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
        raise InputError(f"sequences has {rows} rows, but scores has {sources}: pass the same output's beam_indices")
    if beam_indices is not None and np.shape(beam_indices) != (rows, steps):
        raise InputError(
            f"beam_indices must have shape [rows, N] = {[rows, steps]}, got {list(np.shape(beam_indices))}"
        )
    beam_indices = None if beam_indices is None else jnp.asarray(beam_indices)
    return _transition_scores(jnp.asarray(sequences), scores, beam_indices, normalize_logits=bool(normalize_logits))


@program("compute_transition_scores", static_argnames=["normalize_logits"])
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
