"""The processors and warpers that a config switches on, composed into one transform in transformers' order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.generation_config import GenerationConfig
from jaxgen.logits import processors, warpers


@flax.struct.dataclass
class History:
    """What processors may know of the rows besides the scores.

    Attributes:
        prompt_length: int32[rows], tokens of the prompt, padding left out.
        step: int32[], tokens generated so far.
        seen: bool[rows, V], the tokens of prompt and generation; None where no option needs it.
    """

    prompt_length: jax.Array
    step: jax.Array
    seen: jax.Array | None = None

    @classmethod
    def of_prompt(cls, cfg: GenerationConfig, ids: jax.Array, mask: jax.Array) -> History:
        """Begin with a prompt, `ids int32[rows, P]` where `mask bool[rows, P]` holds."""
        seen = None
        if cfg.on("repetition_penalty"):
            assert cfg.model is not None
            rows = jnp.arange(ids.shape[0])[:, None]
            seen = jnp.zeros((ids.shape[0], cfg.model.vocab_size), bool)
            seen = seen.at[rows, jnp.where(mask, ids, cfg.model.vocab_size)].set(True, mode="drop")
        return cls(jnp.sum(mask, axis=-1, dtype=jnp.int32), jnp.zeros((), jnp.int32), seen)

    def push(self, tokens: jax.Array) -> History:
        """Add the next token of each row, int32[rows]."""
        seen = self.seen
        if seen is not None:
            seen = seen.at[jnp.arange(tokens.shape[0]), tokens].set(True, mode="drop", unique_indices=True)
        return dataclasses.replace(self, step=self.step + 1, seen=seen)


Transform = Callable[[History, jax.Array], jax.Array]


def build_transform(cfg: GenerationConfig, rows: int) -> Transform:
    """Return `(history, scores float32[rows, V]) -> scores`: what transformers' lists of processors would do.

    Args:
        cfg: its options that are on are applied; those with one value per prompt hold for all of a prompt's rows.
        rows: prompts times return sequences.
    """

    def knob(name: str) -> jax.Array:
        return per_row(getattr(cfg, name), rows)[:, None]

    steps: list[Transform] = []
    # 1. Repetition penalty.
    if cfg.on("repetition_penalty"):
        steps.append(lambda h, s: processors.repetition_penalty(s, _known(h.seen), knob("repetition_penalty")))
    # 2. Minimal length, of prompt and generation together and of the generation alone.
    if cfg.eos_token_id is not None and (cfg.on("min_length") or cfg.on("min_new_tokens")):
        steps.append(lambda h, s: processors.ban(s, _eos_set(cfg), _too_short(cfg, h, rows)))
    if cfg.do_sample:
        # 3. Temperature, then what cuts the tail: top-k, top-p, min-p.
        if cfg.on("temperature"):
            steps.append(lambda h, s: warpers.temperature(s, knob("temperature")))
        if cfg.on("top_k"):
            steps.append(lambda h, s: warpers.top_k(s, knob("top_k")))
        if cfg.on("top_p"):
            steps.append(lambda h, s: warpers.top_p(s, knob("top_p")))
        if cfg.on("min_p"):
            steps.append(lambda h, s: warpers.min_p(s, knob("min_p")))

    def transform(history: History, scores: jax.Array) -> jax.Array:
        for step in steps:
            scores = step(history, scores)
        return scores

    return transform


def per_row(value, rows: int) -> jax.Array:
    """Spread an option, a scalar or one value per prompt, over the rows: `[rows]`."""
    value = jnp.asarray(value)
    return jnp.broadcast_to(value, (rows,)) if value.ndim == 0 else jnp.repeat(value, rows // value.shape[0])


def _known(seen: jax.Array | None) -> jax.Array:
    assert seen is not None
    return seen


def _eos_set(cfg: GenerationConfig) -> jax.Array:
    assert cfg.model is not None
    return processors.token_set(jnp.atleast_1d(jnp.asarray(cfg.eos_token_id)), cfg.model.vocab_size)


def _too_short(cfg: GenerationConfig, history: History, rows: int) -> jax.Array:
    if cfg.on("min_new_tokens"):  # takes the place of min_length, as in transformers
        return history.step < per_row(cfg.min_new_tokens, rows)
    return history.prompt_length + history.step < per_row(cfg.min_length, rows)
