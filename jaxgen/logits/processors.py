"""Logits processors: what they do holds for greedy search too. Each is a pure function, scores float32[rows, V] in
and out, with −inf for a token that is banned. They follow transformers' classes of the names given.

Common arguments, W being the room for a row's tokens:
    ids: int32[rows, W], the tokens of a row from column 0 on, prompt and generation; what is behind its end means
        nothing.
    length: int32[rows], how many there are.
    tokens: a set of tokens, bool[V], or bool[rows, V] with one per row.
    rows: bool[rows], the rows that it is done in.

A table of ids is filled up with −1, which stands for none; ids beyond the vocabulary are left out. A number is
float32, a scalar or [rows, 1].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BANNED = -jnp.inf


def guidance(cond: jax.Array, uncond: jax.Array, scale: jax.Array) -> jax.Array:
    """Return log-probabilities moved away from those without the prompt, by `scale`; 1 leaves them where they are.

    `UnbatchedClassifierFreeGuidanceLogitsProcessor` (arXiv 2306.17806). The result does not sum up to 1. A token that
    is −inf in `cond` stays so; one that is in `uncond` alone keeps its log-probability.

    Args:
        cond: float32[rows, V], the raw logits.
        uncond: float32[rows, V], the raw logits without the prompt or after the negative one.
        scale: below 1 moves towards `uncond`.
    """
    cond, uncond = renormalize(cond), renormalize(uncond)
    untouched = (scale == 1) | (cond == BANNED) | (uncond == BANNED)
    return jnp.where(untouched, cond, scale * (cond - uncond) + uncond)


def sequence_bias(
    scores: jax.Array, ids: jax.Array, length: jax.Array, sequences: jax.Array, bias: jax.Array
) -> jax.Array:
    """Add `bias` to the last token of each sequence whose other tokens are the row's last ones.

    `SequenceBiasLogitsProcessor`, with the fix of later releases: a sequence of n tokens needs a row of n - 1. The
    biases of one token add up; −inf bans it, whatever the others are.

    Args:
        scores: float32[rows, V].
        sequences: int32[S, N], or [rows, S, N] with a table per row; each filled up at its end.
        bias: float32[S] or [rows, S].
    """
    rows, vocab = scores.shape
    sequences = jnp.broadcast_to(sequences, (rows, *sequences.shape[-2:]))
    size = jnp.sum(sequences >= 0, axis=-1, dtype=jnp.int32)
    last = jnp.take_along_axis(sequences, jnp.maximum(size - 1, 0)[..., None], axis=-1)[..., 0]

    index = jnp.arange(sequences.shape[-1], dtype=jnp.int32)[None, None, :]
    column = (length[:, None] - size + 1)[..., None] + index
    there = jnp.take_along_axis(ids[:, None, :], jnp.maximum(column, 0), axis=-1)
    agrees = ((there == sequences) & (column >= 0)) | (index >= size[..., None] - 1)
    applies = jnp.all(agrees, axis=-1) & (size > 0)

    target = jnp.where(applies, last, vocab)
    added = jnp.zeros_like(scores).at[jnp.arange(rows)[:, None], target].add(bias, mode="drop")
    biased = scores + added
    # Of −inf and inf the ban is what remains.
    return jnp.where(jnp.isnan(biased) & ~jnp.isnan(scores), BANNED, biased)


def encoder_repetition_penalty(scores: jax.Array, prompt_seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Multiply the positive scores of the prompt's tokens by `penalty`, divide the negative ones.

    `EncoderRepetitionPenaltyLogitsProcessor`, which takes the prompt for the encoder's input.

    Args:
        scores: float32[rows, V].
        prompt_seen: bool[rows, V], the tokens of the row's prompt, padding left out.
        penalty: above 1 encourages.
    """
    return jnp.where(prompt_seen, jnp.where(scores < 0, scores / penalty, scores * penalty), scores)


def repetition_penalty(scores: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Divide the positive scores of tokens seen before by `penalty`, multiply the negative ones.

    `RepetitionPenaltyLogitsProcessor` (CTRL, arXiv 1909.05858).

    Args:
        scores: float32[rows, V].
        seen: bool[rows, V], the tokens of the row's prompt, padding left out, and of what it generated.
        penalty: above 1 discourages.
    """
    return jnp.where(seen, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


def no_repeat_ngram(scores: jax.Array, ids: jax.Array, length: jax.Array, n: int) -> jax.Array:
    """Ban each token that would complete an n-gram of the row once more: `NoRepeatNGramLogitsProcessor`."""
    return _ban_continuations(scores, ids, length, length, n)


def encoder_no_repeat_ngram(
    scores: jax.Array, ids: jax.Array, length: jax.Array, prompt_length: jax.Array, n: int
) -> jax.Array:
    """Ban each token that would complete an n-gram of the row's first `prompt_length int32[rows]` tokens.

    `EncoderNoRepeatNGramLogitsProcessor`, which takes the prompt for the encoder's input.
    """
    return _ban_continuations(scores, ids, length, prompt_length, n)


def _ban_continuations(scores: jax.Array, ids: jax.Array, length: jax.Array, end: jax.Array, n: int) -> jax.Array:
    """Ban what follows the row's last n - 1 tokens among its first `end int32[rows]`, at most `length`, tokens."""
    rows, vocab = scores.shape
    starts = ids.shape[1] - n + 1
    if starts <= 0:
        return scores
    # A row shorter than n - 1 has no n-gram, so it does not matter what is read in front of it.
    column = length[:, None] - (n - 1) + jnp.arange(n - 1, dtype=jnp.int32)[None, :]
    last = jnp.take_along_axis(ids, jnp.maximum(column, 0), axis=1)

    follows = jnp.arange(n - 1, ids.shape[1], dtype=jnp.int32)[None, :] < end[:, None]
    for offset in range(n - 1):
        follows &= ids[:, offset : offset + starts] == last[:, offset : offset + 1]
    banned = jnp.where(follows, ids[:, n - 1 :], vocab)
    return scores.at[jnp.arange(rows)[:, None], banned].set(BANNED, mode="drop")


def bad_words(
    scores: jax.Array, ids: jax.Array, length: jax.Array, sequences: jax.Array, eos: jax.Array | None
) -> jax.Array:
    """Ban the last token of each sequence whose other tokens are the row's last ones: `NoBadWordsLogitsProcessor`.

    Args:
        scores: float32[rows, V].
        sequences: int32[S, N], or [rows, S, N] with a table per row; each filled up at its end.
        eos: int32[E], [rows, E] or None; a sequence of one of them alone does not count.
    """
    if eos is not None:
        rows = scores.shape[0]
        sequences = jnp.broadcast_to(sequences, (rows, *sequences.shape[-2:]))
        eos = jnp.broadcast_to(eos, (rows, eos.shape[-1]))
        single = jnp.sum(sequences >= 0, axis=-1) == 1
        ends = jnp.any(sequences[:, :, :1] == eos[:, None, :], axis=-1)
        sequences = jnp.where((single & ends)[..., None], -1, sequences)
    return sequence_bias(scores, ids, length, sequences, jnp.full(sequences.shape[:-1], BANNED, jnp.float32))


def ban(scores: jax.Array, tokens: jax.Array, rows: jax.Array) -> jax.Array:
    """Ban `tokens` in `rows`.

    With the eos tokens while a row is shorter than wanted: `MinLengthLogitsProcessor`,
    `MinNewTokensLengthLogitsProcessor`. With others: `SuppressTokensLogitsProcessor`, and at a row's first step
    `SuppressTokensAtBeginLogitsProcessor`.
    """
    return jnp.where(_per_row(tokens) & rows[:, None], BANNED, scores)


def allow_only(scores: jax.Array, allowed: jax.Array) -> jax.Array:
    """Ban all but `allowed bool[rows, V]`: `PrefixConstrainedLogitsProcessor`."""
    return jnp.where(allowed, scores, BANNED)


def force(scores: jax.Array, tokens: jax.Array, rows: jax.Array) -> jax.Array:
    """Give `tokens` the score 0 in `rows` and ban all others there. A row whose set is empty stays as it is.

    `ForcedBOSTokenLogitsProcessor`, `ForcedEOSTokenLogitsProcessor`, `ForceTokensLogitsProcessor`.
    """
    tokens = _per_row(tokens)
    forced = rows[:, None] & jnp.any(tokens, axis=-1, keepdims=True)
    return jnp.where(forced, jnp.where(tokens, 0.0, BANNED), scores)


def remove_invalid_values(scores: jax.Array) -> jax.Array:
    """Put 0 for NaN and the largest and smallest finite numbers for inf and −inf: `InfNanRemoveLogitsProcessor`."""
    return jnp.nan_to_num(scores)


def exponential_decay(scores: jax.Array, eos: jax.Array, over: jax.Array, factor: jax.Array) -> jax.Array:
    """Add `|score| * (factor ** over - 1)` to the scores of the eos tokens where `over` is above 0.

    `ExponentialDecayLengthPenalty`, with the fix of later releases: what is not finite is not added, so that a banned
    token stays banned.

    Args:
        scores: float32[rows, V].
        eos: bool[V] or bool[rows, V].
        over: int32[rows], by how many tokens the row is longer than the length at which this begins.
        factor: above 1 the end becomes likelier.
    """
    over = over[:, None]
    added = jnp.abs(scores) * (factor ** over.astype(jnp.float32) - 1)
    return jnp.where(_per_row(eos) & (over > 0) & jnp.isfinite(added), scores + added, scores)


def renormalize(scores: jax.Array) -> jax.Array:
    """Return log-probabilities: `LogitNormalization`. Banned tokens stay −inf, even where all of a row's are."""
    return jnp.where(scores == BANNED, BANNED, jax.nn.log_softmax(scores, axis=-1))


def token_set(ids: jax.Array, vocab_size: int) -> jax.Array:
    """Return bool[V], True for each of `ids int32[n]`, or bool[rows, V] for int32[rows, n]."""
    if ids.ndim == 2:
        return jax.vmap(lambda row: token_set(row, vocab_size))(ids)
    ids = jnp.where(ids < 0, vocab_size, ids)
    return jnp.zeros(vocab_size, bool).at[ids].set(True, mode="drop")


def _per_row(tokens: jax.Array) -> jax.Array:
    return tokens if tokens.ndim == 2 else tokens[None, :]
