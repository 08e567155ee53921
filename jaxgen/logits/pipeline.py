"""The processors and warpers that a config switches on, composed into one transform.

A processor is the function in `processors`, a warper that in `warpers`, with the name of the option. The order is that
of the records in `jaxgen.config.options`, which is transformers'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.options import AFTER_GRAMMAR, BEFORE_GRAMMAR, RENORMALIZE, WARP, of_stage
from jaxgen.errors import InputError
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.logits import processors, warpers
from jaxgen.logits.history import History

# A function from what is known of the rows and their scores float32[rows, V] to other scores.
Processor = Callable[[History, jax.Array], jax.Array]


def build_transform(
    cfg: GenerationConfig, rows: int, custom: Sequence[Processor] = (), allowed: Any = None
) -> Callable[[History, jax.Array, jax.Array | None], jax.Array]:
    """Return `(history, scores, unconditional) -> scores`: transformers' processors and warpers as one function.

    Args:
        cfg: its options that are on are applied; the value of a prompt is that of all its rows.
        rows: prompts times return sequences.
        custom: the caller's own processors.
        allowed: a `TokenAutomaton`, or a function from the history to the tokens that may follow, bool[rows, V].
    """
    options = PerRow(cfg, rows)
    steps = _processors(BEFORE_GRAMMAR, options)
    if allowed is not None:
        steps.append(functools.partial(_grammar, options, allowed))
    steps += _processors(AFTER_GRAMMAR, options)
    steps += [functools.partial(_checked, processor) for processor in custom]
    steps += _processors(RENORMALIZE, options)
    warping = [*_warpers(options), *_processors(RENORMALIZE, options)] if cfg.do_sample else []

    def transform(history: History, scores: jax.Array, unconditional: jax.Array | None = None) -> jax.Array:
        if unconditional is not None:
            scale = options.number("guidance_scale")
            # Where one of several prompts has the scale 1, it is off.
            scores = jnp.where(scale == 1, scores, processors.guidance(scores, unconditional, scale))
        for step in steps:
            scores = step(history, scores)
        if not warping:
            return scores
        # A warper could remove a NaN like any other token, and a traced temperature may be 0.
        invalid = jnp.any(jnp.isnan(scores), axis=-1, keepdims=True)
        if cfg.on("temperature"):
            invalid |= ~(options.number("temperature") > 0)
        for step in warping:
            scores = step(history, scores)
        return jnp.where(invalid, jnp.nan, scores)

    return transform


def _on(stage: str, cfg: GenerationConfig) -> list[str]:
    """Return the processors of a stage that a config switches on, in their order."""
    return [option.name for option in of_stage(stage) if all(map(cfg.on, (option.name, *option.needs)))]


def _processors(stage: str, options: PerRow) -> list[Processor]:
    return [functools.partial(_processor, name, options) for name in _on(stage, options.cfg)]


def _warpers(options: PerRow) -> list[Processor]:
    return [functools.partial(_warper, name, options) for name in _on(WARP, options.cfg)]


def _processor(name: str, options: PerRow, history: History, scores: jax.Array) -> jax.Array:
    with jax.named_scope(name):
        return getattr(processors, name)(scores, history, options)


def _warper(name: str, options: PerRow, history: History, scores: jax.Array) -> jax.Array:
    with jax.named_scope(name):
        return getattr(warpers, name)(scores, options.number(name))


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
