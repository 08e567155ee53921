"""Logits processors: functions `(history, scores, options) -> scores`, each named after its option.

`PROCESSORS` lists them. They run in every decode mode, in the order of their records in
`config/generation_options.py`. Scores are float32[rows, V]; a banned token has the score -inf. `history` contains the
rows' tokens, and `options` contains the config's values per row. Each processor follows the transformers class named in
its docstring. To add a processor, see CONTRIBUTING.md.

Shared operations are at the end of this file. Tables of ids are padded with -1, which matches no token; ids outside the
vocabulary are ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.core.logits.history import History
from jaxgen.core.logits.row_options import RowOptions
from jaxgen.core.logits.watermark import watermark
from jaxgen.shapes import add, put, token_set

# A function from the rows' history, their scores, float32[rows, V], and their options to new scores.
Processor = Callable[[History, jax.Array, RowOptions], jax.Array]

BANNED = -jnp.inf
LARGEST = float(np.finfo(np.float32).max)


def sequence_bias(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Add a sequence's bias to the score of its last token if the row ends with the sequence's other tokens.

    `SequenceBiasLogitsProcessor`, with a fix from later releases: the bias is added even if the sequence without its
    last token is the entire row.
    """
    return add_biases(scores, history, *options.values["sequence_bias"])


def diversity_penalty(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Subtract the penalty from a token's score for each beam of an earlier group that chose the token in this step.

    `HammingDiversityLogitsProcessor` (arXiv 1610.02424).
    """
    assert history.chosen is not None
    counts = add(jnp.zeros_like(scores), history.chosen, jnp.ones(history.chosen.shape, scores.dtype))
    return bounded(scores - options.number("diversity_penalty") * counts, scores)


def encoder_repetition_penalty(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Multiply positive scores of the prompt's tokens by the penalty, and divide negative scores by it.

    `EncoderRepetitionPenaltyLogitsProcessor`, with the prompt as the encoder's input.
    """
    assert history.prompt_seen is not None
    penalty = options.number("encoder_repetition_penalty")
    penalized = jnp.where(scores < 0, divide(scores, penalty), scores * penalty)
    return jnp.where(history.prompt_seen, bounded(penalized, scores), scores)


def repetition_penalty(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Divide positive scores of the row's tokens by the penalty, and multiply negative scores by it.

    `RepetitionPenaltyLogitsProcessor` (CTRL, arXiv 1909.05858).
    """
    assert history.seen is not None
    penalty = options.number("repetition_penalty")
    penalized = jnp.where(scores < 0, scores * penalty, divide(scores, penalty))
    return jnp.where(history.seen, bounded(penalized, scores), scores)


def frequency_penalty(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Subtract the penalty from a token's score for each time it was generated, as in OpenAI's API."""
    counts = generated_counts(history, scores.shape[1])
    return bounded(scores - options.number("frequency_penalty") * counts, scores)


def presence_penalty(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Subtract the penalty from the score of every token that was generated, as in OpenAI's API."""
    generated = generated_counts(history, scores.shape[1]) > 0
    return jnp.where(generated, bounded(scores - options.number("presence_penalty"), scores), scores)


def no_repeat_ngram_size(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Ban each token that would repeat an n-gram of the row: `NoRepeatNGramLogitsProcessor`."""
    return ban_continuations(scores, history, history.length, options.cfg.no_repeat_ngram_size)


def encoder_no_repeat_ngram_size(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Ban each token that would repeat an n-gram of the prompt.

    `EncoderNoRepeatNGramLogitsProcessor`, with the prompt as the encoder's input.
    """
    return ban_continuations(scores, history, history.prompt_length, options.cfg.encoder_no_repeat_ngram_size)


def bad_words_ids(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Ban a sequence's last token if the row ends with the sequence's other tokens: `NoBadWordsLogitsProcessor`.

    A sequence of one eos token is ignored.
    """
    sequences, eos = options.values["bad_words_ids"], options.table("eos_token_id")
    if eos is not None:
        single = jnp.sum(sequences >= 0, axis=-1) == 1
        ends = jnp.any(sequences[:, :, :1] == eos[:, None, :], axis=-1)
        sequences = jnp.where((single & ends)[..., None], -1, sequences)
    bans = jnp.full(sequences.shape[:-1], BANNED, jnp.float32)
    return add_biases(scores, history, sequences, bans)


def min_length(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Ban eos tokens in rows that are too short, counting the prompt: `MinLengthLogitsProcessor`.

    `min_new_tokens` takes precedence.
    """
    if options.cfg.on("min_new_tokens"):
        return scores
    return ban(scores, options.eos(scores.shape[0]), history.total_length < options.value("min_length"))


def min_new_tokens(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Ban eos tokens in rows with too few generated tokens: `MinNewTokensLengthLogitsProcessor`."""
    return ban(scores, options.eos(scores.shape[0]), history.step < options.value("min_new_tokens"))


def forced_bos_token_id(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Force the token `forced_bos_token_id` after a one-token prompt: `ForcedBOSTokenLogitsProcessor`."""
    return force(scores, token_set(options.number("forced_bos_token_id"), scores.shape[1]), history.length == 1)


def forced_eos_token_id(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Force a token in `forced_eos_token_id` if one token of the budget is left: `ForcedEOSTokenLogitsProcessor`."""
    return force(scores, options.ids("forced_eos_token_id"), history.step == history.budget - 1)


def remove_invalid_values(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Replace NaN with 0 and infinities with the largest finite numbers: `InfNanRemoveLogitsProcessor`."""
    return jnp.nan_to_num(scores)


def exponential_decay_length_penalty(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Add `|score| * (factor ** over - 1)` to eos scores in rows with more than `start` generated tokens.

    `ExponentialDecayLengthPenalty`, with a fix from later releases: a banned token stays banned. The exponent `over` is
    the number of generated tokens minus `start`.
    """
    start, factor = (x[:, None] for x in options.values["exponential_decay_length_penalty"])
    over = history.step[:, None] - start
    power = jnp.minimum(factor ** over.astype(jnp.float32), LARGEST)
    raised = options.eos(scores.shape[0]) & (over > 0)
    return jnp.where(raised, bounded(scores + jnp.abs(scores) * (power - 1), scores), scores)


def suppress_tokens(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Ban the option's tokens: `SuppressTokensLogitsProcessor`."""
    return ban(scores, options.ids("suppress_tokens"), jnp.ones_like(history.done))


def begin_suppress_tokens(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Ban the option's tokens in the first step in which no token is forced: `SuppressTokensAtBeginLogitsProcessor`."""
    return ban(scores, options.ids("begin_suppress_tokens"), history.step == options.beginning(history))


def forced_decoder_ids(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Force tokens at their positions: `ForceTokensLogitsProcessor`."""
    forced = options.values["forced_decoder_ids"]
    here = forced[..., 0] == history.length[:, None]
    # If several entries have the same position, the last one wins, as in a dict.
    last = here & (jnp.cumsum(here[:, ::-1], axis=-1)[:, ::-1] == 1)
    tokens = token_set(jnp.where(last, forced[..., 1], -1), scores.shape[1])
    return force(scores, tokens, jnp.any(here, axis=-1))


def watermarking_config(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Raise the scores of green tokens: `WatermarkLogitsProcessor`; see `jaxgen.core.logits.watermark`."""
    config = options.cfg.watermarking_config
    if config.context_width > history.ids.shape[1]:  # no row can have so many tokens
        return scores
    return bounded(watermark(scores, history.last(config.context_width), config), scores)


def renormalize_logits(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Return log-probabilities: `LogitNormalization`."""
    return log_softmax(scores)


# The processors by option, in transformers' order.
PROCESSORS: dict[str, Processor] = {
    "sequence_bias": sequence_bias,
    "diversity_penalty": diversity_penalty,
    "encoder_repetition_penalty": encoder_repetition_penalty,
    "repetition_penalty": repetition_penalty,
    "frequency_penalty": frequency_penalty,
    "presence_penalty": presence_penalty,
    "no_repeat_ngram_size": no_repeat_ngram_size,
    "encoder_no_repeat_ngram_size": encoder_no_repeat_ngram_size,
    "bad_words_ids": bad_words_ids,
    "min_length": min_length,
    "min_new_tokens": min_new_tokens,
    "forced_bos_token_id": forced_bos_token_id,
    "forced_eos_token_id": forced_eos_token_id,
    "remove_invalid_values": remove_invalid_values,
    "exponential_decay_length_penalty": exponential_decay_length_penalty,
    "suppress_tokens": suppress_tokens,
    "begin_suppress_tokens": begin_suppress_tokens,
    "forced_decoder_ids": forced_decoder_ids,
    "watermarking_config": watermarking_config,
    "renormalize_logits": renormalize_logits,
}


# --- Shared operations ------------------------------------------------------------------------------------------------


def guidance(cond: jax.Array, uncond: jax.Array, scale: jax.Array) -> jax.Array:
    """Return log-probabilities, moved away from those of the negative prompt; a scale of 1 leaves them unchanged.

    `UnbatchedClassifierFreeGuidanceLogitsProcessor` (arXiv 2306.17806). The result is not normalized. A token that is
    -inf in `cond` stays -inf; a token that is -inf only in `uncond` keeps its log-probability.

    Args:
        cond: float32[rows, V], the raw logits.
        uncond: float32[rows, V], the raw logits after the negative prompt.
        scale: the strength of guidance; a value below 1 moves toward `uncond`.
    """
    cond, uncond = log_softmax(cond), log_softmax(uncond)
    untouched = (scale == 1) | (cond == BANNED) | (uncond == BANNED)
    return jnp.where(untouched, cond, bounded(scale * (cond - uncond) + uncond, cond))


def bounded(changed: jax.Array, scores: jax.Array) -> jax.Array:
    """Return `changed`, the result of arithmetic on `scores`, without overflow: finite scores stay finite.

    A score that is not finite, such as that of a banned token, is left unchanged.
    """
    return jnp.where(jnp.isfinite(scores), jnp.clip(changed, -LARGEST, LARGEST), scores)


def divide(scores: jax.Array, value: jax.Array) -> jax.Array:
    """Return `scores / value float32[rows, 1]`, rounded once. The value must be positive; banned tokens stay banned.

    XLA would replace division by a broadcast array with multiplication by the reciprocal, which rounds twice. For a
    value above 8.5e37, the reciprocal is 0, and -inf would become NaN. Division by the result of a `where` is kept.

    On a CPU, XLA's float32 has no numbers between 0 and 2**-126. Values in this range are computed from their bits, as
    multiples of 2**-149, and multiplied by 2**23, like the scores.
    """
    bits = lax.bitcast_convert_type(value, jnp.int32)
    is_small = bits < 2**23
    value = jnp.where(is_small, bits.astype(jnp.float32) * 2.0**-126, value)
    return scores * jnp.where(is_small, 2.0**23, 1.0) / jnp.where(scores == BANNED, 1.0, value)


def log_softmax(scores: jax.Array) -> jax.Array:
    """Return log-probabilities. Banned tokens stay -inf, even if all tokens of a row are banned."""
    return jnp.where(scores == BANNED, BANNED, jax.nn.log_softmax(scores, axis=-1))


def generated_counts(history: History, vocab_size: int) -> jax.Array:
    """Return how often each token was generated in each row, as float32[rows, V]; the prompt is not counted."""
    rows, width = history.ids.shape
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    generated = (column >= history.prompt_length[:, None]) & (column < history.length[:, None])
    tokens = jnp.where(generated, history.ids, vocab_size)
    return add(jnp.zeros((rows, vocab_size), jnp.float32), tokens, jnp.ones(tokens.shape, jnp.float32))


def add_biases(scores: jax.Array, history: History, sequences: jax.Array, bias: jax.Array) -> jax.Array:
    """Add a sequence's `bias` to the score of its last token if the row ends with the sequence's other tokens.

    Biases for the same token are summed; if any of them is -inf, the token is banned.

    Args:
        scores: float32[rows, V].
        history: the rows' tokens.
        sequences: int32[rows, S, n], the S sequences of each row, padded at the end.
        bias: float32[rows, S].
    """
    size = jnp.sum(sequences >= 0, axis=-1, dtype=jnp.int32)
    last = jnp.take_along_axis(sequences, jnp.maximum(size - 1, 0)[..., None], axis=-1)[..., 0]

    index = jnp.arange(sequences.shape[-1], dtype=jnp.int32)[None, None, :]
    column = (history.length[:, None] - size + 1)[..., None] + index
    there = jnp.take_along_axis(history.ids[:, None, :], jnp.maximum(column, 0), axis=-1)
    agrees = ((there == sequences) & (column >= 0)) | (index >= size[..., None] - 1)
    applies = jnp.all(agrees, axis=-1) & (size > 0)

    added = add(jnp.zeros_like(scores), jnp.where(applies, last, scores.shape[1]), bias)
    biased = scores + added
    # -inf plus inf would be NaN; the token is banned instead.
    return jnp.where(jnp.isnan(biased) & ~jnp.isnan(scores), BANNED, biased)


def ban_continuations(scores: jax.Array, history: History, end: jax.Array, n: int) -> jax.Array:
    """Ban each token that would repeat an n-gram of the row's first `end int32[rows]` tokens."""
    ids = history.ids
    starts = ids.shape[1] - n + 1
    if starts <= 0:
        return scores
    last = history.last(n - 1)
    follows = jnp.arange(n - 1, ids.shape[1], dtype=jnp.int32)[None, :] < end[:, None]
    for offset in range(n - 1):
        follows &= ids[:, offset : offset + starts] == last[:, offset : offset + 1]
    banned = jnp.where(follows, ids[:, n - 1 :], scores.shape[1])
    return put(scores, banned, jnp.full(banned.shape, BANNED))


def ban(scores: jax.Array, tokens: jax.Array, rows: jax.Array) -> jax.Array:
    """Ban the tokens where `tokens bool[rows, V]` is True, in the rows where `rows bool[rows]` is True."""
    return jnp.where(tokens & rows[:, None], BANNED, scores)


def allow_only(scores: jax.Array, allowed: jax.Array) -> jax.Array:
    """Ban all tokens for which `allowed bool[rows, V]` is False: `PrefixConstrainedLogitsProcessor`."""
    return jnp.where(allowed, scores, BANNED)


def force(scores: jax.Array, tokens: jax.Array, rows: jax.Array) -> jax.Array:
    """Where `rows bool[rows]` is True, set the scores of `tokens bool[rows, V]` to 0 and ban all other tokens.

    A row with an empty set of tokens is left unchanged.
    """
    forced = rows[:, None] & jnp.any(tokens, axis=-1, keepdims=True)
    return jnp.where(forced, jnp.where(tokens, 0.0, BANNED), scores)
