"""The processors and warpers that a config switches on, composed into one transform in transformers' order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxgen.generation_config import GenerationConfig
from jaxgen.logits import processors, warpers
from jaxgen.logits.automaton import TokenAutomaton
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
    knobs = Knobs(cfg, rows)
    steps: list[Processor] = []

    def add(processor: Processor, *needed: str) -> None:
        if all(cfg.on(name) for name in needed):
            steps.append(processor)

    # 1. Classifier-free guidance: below, as it needs the scores without the prompt.
    # 2. A bias for tokens and for the ends of sequences of tokens.
    add(lambda h, s: processors.sequence_bias(s, h.ids, h.length, *knobs.biases()), "sequence_bias")
    # 3. Penalties for the prompt's tokens, below 1 as an encouragement, and for all tokens so far.
    add(
        lambda h, s: processors.encoder_repetition_penalty(
            s, _kept(h.prompt_seen), knobs.number("encoder_repetition_penalty")
        ),
        "encoder_repetition_penalty",
    )
    add(
        lambda h, s: processors.repetition_penalty(s, _kept(h.seen), knobs.number("repetition_penalty")),
        "repetition_penalty",
    )
    # 4. No n-gram of the row twice, none of the prompt again.
    if size := cfg.no_repeat_ngram_size:
        steps.append(lambda h, s: processors.no_repeat_ngram(s, h.ids, h.length, size))
    if prompt_size := cfg.encoder_no_repeat_ngram_size:
        steps.append(lambda h, s: processors.encoder_no_repeat_ngram(s, h.ids, h.length, h.prompt_length, prompt_size))
    # 5. Bad words.
    add(
        lambda h, s: processors.bad_words(
            s, h.ids, h.length, _kept(knobs.table("bad_words_ids")), knobs.table("eos_token_id")
        ),
        "bad_words_ids",
    )
    # 6. No end yet: a minimal length of prompt and generation together, or of the generation alone.
    if cfg.on("min_new_tokens") or cfg.on("min_length"):
        add(lambda h, s: processors.ban(s, knobs.ids("eos_token_id"), knobs.too_short(h)), "eos_token_id")
    # 7. Only what an automaton or a function allows.
    if isinstance(allowed, TokenAutomaton):
        eos = knobs.ids("eos_token_id") if cfg.on("eos_token_id") else None
        steps.append(lambda h, s: processors.allow_only(s, allowed.allowed(_kept(h.state), eos, h.budget - h.step)))
    elif allowed is not None:
        steps.append(lambda h, s: processors.allow_only(s, allowed(h)))
    # 8. Forced tokens: after a prompt of one token, and as the last one that there is room for.
    add(
        lambda h, s: processors.force(s, knobs.one("forced_bos_token_id"), h.length == 1),
        "forced_bos_token_id",
    )
    add(
        lambda h, s: processors.force(s, knobs.ids("forced_eos_token_id"), h.step == h.budget - 1),
        "forced_eos_token_id",
    )
    # 9. Invalid values.
    if cfg.remove_invalid_values:
        steps.append(lambda h, s: processors.remove_invalid_values(s))
    # 10. The longer, the likelier an end.
    add(
        lambda h, s: processors.exponential_decay(
            s, knobs.ids("eos_token_id"), h.step - knobs.decay(0)[:, 0], knobs.decay(1)
        ),
        "exponential_decay_length_penalty",
        "eos_token_id",
    )
    # 11. Suppressed tokens: always, and as the first of the generation.
    add(lambda h, s: processors.ban(s, knobs.ids("suppress_tokens"), jnp.ones_like(h.done)), "suppress_tokens")
    add(
        lambda h, s: processors.ban(s, knobs.ids("begin_suppress_tokens"), h.step == knobs.beginning(h)),
        "begin_suppress_tokens",
    )
    # 12. Tokens forced at positions of their own.
    add(lambda h, s: processors.force(s, *knobs.forced_at(h)), "forced_decoder_ids")
    # 13. The watermark.
    add(lambda h, s: watermark(s, h.ids, h.length, cfg.watermarking_config), "watermarking_config")
    # 14. The user's own.
    steps += custom
    # 15. Log-probabilities.
    if cfg.renormalize_logits:
        steps.append(lambda h, s: processors.renormalize(s))
    if cfg.do_sample:
        # 16. The warpers, when sampling: temperature, then what cuts the tail, then log-probabilities again.
        for name, warp in WARPERS.items():
            add(lambda h, s, name=name, warp=warp: warp(s, knobs.number(name)), name)
        if cfg.renormalize_logits:
            steps.append(lambda h, s: processors.renormalize(s))

    def transform(history: History, scores: jax.Array, unconditional: jax.Array | None = None) -> jax.Array:
        if unconditional is not None:
            scores = processors.guidance(scores, unconditional, knobs.number("guidance_scale"))
        for step in steps:
            scores = step(history, scores)
        return scores

    return transform


# In transformers' order; top_h has the place that release 5 gives it.
WARPERS = {
    "temperature": warpers.temperature,
    "top_h": warpers.top_h,
    "top_k": warpers.top_k,
    "top_p": warpers.top_p,
    "min_p": warpers.min_p,
    "typical_p": warpers.typical,
    "epsilon_cutoff": warpers.epsilon,
    "eta_cutoff": warpers.eta,
}


def per_row(value, rows: int, rank: int = 0) -> jax.Array:
    """Spread an option over the rows: one value of that rank, or one per prompt; `[rows, ...]`."""
    value = jnp.asarray(value)
    if value.ndim == rank:
        return jnp.broadcast_to(value, (rows, *value.shape))
    return jnp.repeat(value, rows // value.shape[0], axis=0, total_repeat_length=rows)


class Knobs:
    """The traced options of a config, spread over the rows of a run."""

    def __init__(self, cfg: GenerationConfig, rows: int):
        self.cfg, self.rows = cfg, rows

    def number(self, name: str) -> jax.Array:
        """`[rows, 1]`."""
        return per_row(getattr(self.cfg, name), self.rows)[:, None]

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

    def too_short(self, history: History) -> jax.Array:
        """bool[rows]: which rows must not end yet."""
        if self.cfg.on("min_new_tokens"):  # takes the place of min_length, as in transformers
            return history.step < per_row(self.cfg.min_new_tokens, self.rows)
        return history.length < per_row(self.cfg.min_length, self.rows)

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


def _kept(value: jax.Array | None) -> jax.Array:
    assert value is not None
    return value
