"""The processors and warpers that a config switches on, composed into one transform in transformers' order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.errors import InputError
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.logits import processors, warpers
from jaxgen.logits.history import History
from jaxgen.logits.row_options import OptionValues, RowOptions
from jaxgen.logits.watermark import watermark

# A function of what is known of the rows and their scores float32[rows, V] to other scores.
Processor = Callable[[History, jax.Array], jax.Array]


def build_transform(
    cfg: GenerationConfig, values: OptionValues, custom: Sequence[Processor] = (), allowed: Any = None
) -> Processor:
    """Return `(history, scores) -> scores`: what transformers' lists of processors would do.

    Args:
        cfg: the options that are on are applied.
        values: their values for each row.
        custom: the user's own processors.
        allowed: a `TokenAutomaton`, or a function from the history to the tokens that may follow, bool[rows, V].
    """
    options = RowOptions(cfg, values)

    def chosen(table: Sequence[tuple[str, Callable]]) -> Iterator[Processor]:
        for names, step in table:
            if all(cfg.on(name) for name in names.split()):
                yield functools.partial(step, options)

    steps = [*chosen(BEFORE_GRAMMAR)]
    if allowed is not None:
        steps.append(functools.partial(_grammar, options, allowed))
    steps += [*chosen(AFTER_GRAMMAR), *(functools.partial(_checked, processor) for processor in custom)]
    steps += chosen(RENORMALIZE)
    warping = [*chosen(WARPERS), *chosen(RENORMALIZE)] if cfg.do_sample else []

    def transform(history: History, scores: jax.Array) -> jax.Array:
        for step in steps:
            scores = step(history, scores)
        if not warping:
            return scores
        # To warpers a NaN is a token like others, that they may take away; and a traced temperature may be 0.
        invalid = jnp.any(jnp.isnan(scores), axis=-1, keepdims=True)
        if cfg.on("temperature"):
            invalid |= ~(options.number("temperature") > 0)
        for step in warping:
            scores = step(history, scores)
        return jnp.where(invalid, jnp.nan, scores)

    return transform


# What is done, in transformers' order: the options that must be on, and a function of all options per row, the history
# and the scores.
BEFORE_GRAMMAR = (
    # 1. Classifier-free guidance: see decoding/guidance.py, as it needs the logits without the prompt.
    # 2. A bias for tokens and for the ends of sequences of tokens.
    ("sequence_bias", lambda o, h, s: processors.sequence_bias(s, h.ids, h.length, *o.biases())),
    # 3. Penalties for the prompt's tokens, below 1 as an encouragement, and for all tokens so far.
    (
        "encoder_repetition_penalty",
        lambda o, h, s: processors.encoder_repetition_penalty(s, h.prompt_seen, o.number("encoder_repetition_penalty")),
    ),
    ("repetition_penalty", lambda o, h, s: processors.repetition_penalty(s, h.seen, o.number("repetition_penalty"))),
    # 4. No n-gram of the row twice, none of the prompt again.
    (
        "no_repeat_ngram_size",
        lambda o, h, s: processors.no_repeat_ngram(s, h.ids, h.length, o.cfg.no_repeat_ngram_size),
    ),
    (
        "encoder_no_repeat_ngram_size",
        lambda o, h, s: processors.encoder_no_repeat_ngram(
            s, h.ids, h.length, h.prompt_length, o.cfg.encoder_no_repeat_ngram_size
        ),
    ),
    # 5. Bad words.
    (
        "bad_words_ids",
        lambda o, h, s: processors.bad_words(s, h.ids, h.length, o.table("bad_words_ids"), o.table("eos_token_id")),
    ),
    # 6. No end yet: a minimal length of prompt and generation together, or of the generation alone in its place.
    (
        "min_length eos_token_id",
        lambda o, h, s: (
            s
            if o.cfg.on("min_new_tokens")
            else processors.ban(s, o.eos(s.shape[0]), h.total_length < o.value("min_length"))
        ),
    ),
    (
        "min_new_tokens eos_token_id",
        lambda o, h, s: processors.ban(s, o.eos(s.shape[0]), h.step < o.value("min_new_tokens")),
    ),
)
# 7. Only what an automaton or a function allows.
AFTER_GRAMMAR = (
    # 8. Forced tokens: after a prompt of one token, and as the last one that there is room for.
    ("forced_bos_token_id", lambda o, h, s: processors.force(s, o.one("forced_bos_token_id"), h.length == 1)),
    (
        "forced_eos_token_id",
        lambda o, h, s: processors.force(s, o.ids("forced_eos_token_id"), h.step == h.budget - 1),
    ),
    # 9. Invalid values.
    ("remove_invalid_values", lambda o, h, s: processors.remove_invalid_values(s)),
    # 10. The longer, the likelier an end.
    (
        "exponential_decay_length_penalty eos_token_id",
        lambda o, h, s: processors.exponential_decay(s, o.eos(s.shape[0]), h.step - o.decay(0)[:, 0], o.decay(1)),
    ),
    # 11. Suppressed tokens: always, and as the first of the generation.
    ("suppress_tokens", lambda o, h, s: processors.ban(s, o.ids("suppress_tokens"), jnp.ones_like(h.done))),
    (
        "begin_suppress_tokens",
        lambda o, h, s: processors.ban(s, o.ids("begin_suppress_tokens"), h.step == o.beginning(h)),
    ),
    # 12. Tokens forced at positions of their own.
    ("forced_decoder_ids", lambda o, h, s: processors.force(s, *o.forced_at(h))),
    # 13. The watermark.
    ("watermarking_config", lambda o, h, s: watermark(s, h.ids, h.length, o.cfg.watermarking_config)),
)
# 14. The user's own. 15. Log-probabilities, and once more at the end of the warpers.
RENORMALIZE = (("renormalize_logits", lambda o, h, s: processors.renormalize(s)),)
# 16. When sampling: temperature, then what cuts the tail. top_h has the place that release 5 gives it.
WARPERS = (
    ("temperature", lambda o, h, s: warpers.temperature(s, o.number("temperature"))),
    ("top_h", lambda o, h, s: warpers.top_h(s, o.number("top_h"))),
    ("top_k", lambda o, h, s: warpers.top_k(s, o.number("top_k"))),
    ("top_p", lambda o, h, s: warpers.top_p(s, o.number("top_p"))),
    ("min_p", lambda o, h, s: warpers.min_p(s, o.number("min_p"))),
    ("typical_p", lambda o, h, s: warpers.typical(s, o.number("typical_p"))),
    ("epsilon_cutoff", lambda o, h, s: warpers.epsilon(s, o.number("epsilon_cutoff"))),
    ("eta_cutoff", lambda o, h, s: warpers.eta(s, o.number("eta_cutoff"))),
)


def _grammar(options: RowOptions, allowed: Any, history: History, scores: jax.Array) -> jax.Array:
    if not isinstance(allowed, TokenAutomaton):
        return processors.allow_only(scores, allowed(history))
    assert history.grammar is not None
    may_follow = allowed.allowed(history.grammar, options.eos(scores.shape[0]), history.budget - history.step)
    return processors.allow_only(scores, may_follow)


def _checked(processor: Processor, history: History, scores: jax.Array) -> jax.Array:
    result = processor(history, scores)
    if not isinstance(result, jax.Array) or (result.shape, result.dtype) != (scores.shape, scores.dtype):
        given = f"{result.dtype}{list(result.shape)}" if isinstance(result, jax.Array) else repr(result)
        raise InputError(f"logits_processor must return the scores, float32{list(scores.shape)}, got {given}")
    return result
