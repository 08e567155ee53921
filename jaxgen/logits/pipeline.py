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
from jaxgen.logits.watermark import watermark

# A function of what is known of the rows and their scores float32[rows, V] to other scores.
Processor = Callable[[History, jax.Array], jax.Array]


def build_transform(
    cfg: GenerationConfig, rows: int, custom: Sequence[Processor] = (), allowed: Any = None
) -> Callable[[History, jax.Array, jax.Array | None], jax.Array]:
    """Return `(history, scores, unconditional) -> scores`: what transformers' lists of processors would do.

    Args:
        cfg: its options that are on are applied; those with one value per prompt hold for all of a prompt's rows.
        rows: prompts times return sequences.
        custom: the user's own processors.
        allowed: a `TokenAutomaton`, or a function from the history to the tokens that may follow, bool[rows, V].
    """
    options = PerRow(cfg, rows)

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

    def transform(history: History, scores: jax.Array, unconditional: jax.Array | None = None) -> jax.Array:
        if unconditional is not None:
            scale = options.number("guidance_scale")
            # Where one of several prompts has the scale 1, it is off.
            scores = jnp.where(scale == 1, scores, processors.guidance(scores, unconditional, scale))
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
    # 1. Classifier-free guidance: in the transform itself, as it needs the scores without the prompt.
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
            else processors.ban(s, o.eos(), h.length + h.unknown < o.value("min_length"))
        ),
    ),
    ("min_new_tokens eos_token_id", lambda o, h, s: processors.ban(s, o.eos(), h.step < o.value("min_new_tokens"))),
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
        lambda o, h, s: processors.exponential_decay(s, o.eos(), h.step - o.decay(0)[:, 0], o.decay(1)),
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


def _grammar(options: PerRow, allowed: Any, history: History, scores: jax.Array) -> jax.Array:
    if not isinstance(allowed, TokenAutomaton):
        return processors.allow_only(scores, allowed(history))
    assert history.state is not None
    may_follow = allowed.allowed(history.state, options.eos(), history.budget - history.step)
    return processors.allow_only(scores, may_follow)


def _checked(processor: Processor, history: History, scores: jax.Array) -> jax.Array:
    result = processor(history, scores)
    if not isinstance(result, jax.Array) or (result.shape, result.dtype) != (scores.shape, scores.dtype):
        given = f"{result.dtype}{list(result.shape)}" if isinstance(result, jax.Array) else repr(result)
        raise InputError(f"logits_processor must return the scores, float32{list(scores.shape)}, got {given}")
    return result


def per_row(value, rows: int, rank: int = 0) -> jax.Array:
    """Spread an option over the rows: one value of that rank, or one per prompt; `[rows, ...]`."""
    value = jnp.asarray(value)
    if value.ndim == rank:
        return jnp.broadcast_to(value, (rows, *value.shape))
    return jnp.repeat(value, rows // value.shape[0], axis=0, total_repeat_length=rows)


class PerRow:
    """The traced options of a config, spread over the rows of a run."""

    def __init__(self, cfg: GenerationConfig, rows: int):
        self.cfg, self.rows = cfg, rows

    def value(self, name: str) -> jax.Array:
        """`[rows]`."""
        return per_row(getattr(self.cfg, name), self.rows)

    def number(self, name: str) -> jax.Array:
        """`[rows, 1]`."""
        return self.value(name)[:, None]

    def table(self, name: str) -> jax.Array | None:
        """An id table, `[E]` or `[S, W]`, or with one per row, `[rows, E]` or `[rows, S, W]`; None where off."""
        value, rank = getattr(self.cfg, name), 2 if name == "bad_words_ids" else 1
        if value is None or jnp.ndim(value) > rank:
            return value if value is None else per_row(value, self.rows, rank)
        return jnp.atleast_1d(value)

    def ids(self, name: str) -> jax.Array:
        """A set of ids as bool[V] or bool[rows, V]."""
        table = self.table(name)
        assert table is not None
        return processors.token_set(table, self._vocab)

    def eos(self) -> jax.Array:
        """The ids that end a row, as `ids`; none where the option is off."""
        return self.ids("eos_token_id") if self.cfg.on("eos_token_id") else jnp.zeros(self._vocab, bool)

    def one(self, name: str) -> jax.Array:
        """An id as bool[rows, V]."""
        return processors.token_set(self.number(name), self._vocab)

    def biases(self) -> tuple[jax.Array, jax.Array]:
        """The sequences and their biases."""
        sequences, bias = self.cfg.sequence_bias
        if sequences.ndim == 2:
            return sequences, bias
        return per_row(sequences, self.rows, 2), per_row(bias, self.rows, 1)

    def decay(self, part: int) -> jax.Array:
        """`[rows, 1]`: the start or the factor of the exponential decay."""
        pair = self.cfg.exponential_decay_length_penalty
        assert pair is not None
        return per_row(pair[part], self.rows)[:, None]

    def beginning(self, history: History) -> jax.Array:
        """int32[rows]: the step that begin_suppress_tokens is for, the first that nothing is forced in."""
        begin = jnp.zeros(self.rows, jnp.int32)
        if self.cfg.on("forced_bos_token_id"):
            begin = begin + (history.prompt_length <= 1).astype(jnp.int32)
        if self.cfg.on("forced_decoder_ids"):
            forced = per_row(self.cfg.forced_decoder_ids, self.rows, 2)
            count = jnp.sum(forced[..., 0] >= 0, axis=-1)
            last = jnp.take_along_axis(forced[..., 0], jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
            begin = begin + jnp.where(count > 0, last, 0)
        return begin

    def forced_at(self, history: History) -> tuple[jax.Array, jax.Array]:
        """The tokens that forced_decoder_ids wants next, bool[rows, V], and bool[rows], where it wants one."""
        forced = per_row(self.cfg.forced_decoder_ids, self.rows, 2)
        here = forced[..., 0] == history.length[:, None]
        # Of several for one position the last holds, as in a dict.
        last = here & (jnp.cumsum(here[:, ::-1], axis=-1)[:, ::-1] == 1)
        return processors.token_set(jnp.where(last, forced[..., 1], -1), self._vocab), jnp.any(here, axis=-1)

    @property
    def _vocab(self) -> int:
        assert self.cfg.model is not None
        return self.cfg.model.vocab_size
