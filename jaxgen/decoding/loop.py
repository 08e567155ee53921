"""The loop that all modes share: prefill, then one token per row and step until every row is finished.

Greedy search and sampling are this loop with another way to choose. No token is run through the model twice, and the
last one not at all.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.decoding.sample import draw, greedy
from jaxgen.decoding.stopping import is_eos
from jaxgen.generation_config import GenerationConfig
from jaxgen.logits.pipeline import History, build_transform
from jaxgen.model.cache import KVCache, spread
from jaxgen.model.causal_lm import forward


@flax.struct.dataclass
class Prompt:
    """The prompts, left-aligned: token i of a row is in column i.

    Attributes:
        ids: int32[B, P].
        mask: bool[B, P], False past a row's end.
    """

    ids: jax.Array
    mask: jax.Array

    @classmethod
    def align(cls, ids: jax.Array, mask: jax.Array) -> Prompt:
        """Close the gaps that padding, wherever it is, leaves in `ids int32[B, P]`."""
        order = jnp.where(mask, jnp.cumsum(mask, axis=-1) - 1, ids.shape[1])
        rows = jnp.arange(ids.shape[0])[:, None]
        length = jnp.sum(mask, axis=-1, dtype=jnp.int32)
        aligned = jnp.zeros_like(ids).at[rows, order].set(ids, mode="drop")
        return cls(aligned, jnp.arange(ids.shape[1])[None, :] < length[:, None])

    @classmethod
    def after(cls, cache: KVCache, ids: jax.Array, mask: jax.Array) -> Prompt:
        """Put the token that a cache knows and does not hold, where it does, in front of `ids int32[B, P]`."""
        if cache.tokens is None or cache.known is None:
            return cls.align(ids, mask)
        pending = jnp.take_along_axis(cache.tokens, cache.length[:, None], axis=1, mode="clip")
        is_pending = (cache.known > cache.length)[:, None]
        return cls.align(jnp.concatenate([pending, ids], axis=1), jnp.concatenate([is_pending, mask], axis=1))

    @property
    def length(self) -> jax.Array:
        """int32[B], tokens per row."""
        return jnp.sum(self.mask, axis=-1, dtype=jnp.int32)


@flax.struct.dataclass
class State:
    """What a step takes and gives. Rows are the R sequences of prompt 0, then those of prompt 1, and so on.

    Attributes:
        tokens: int32[rows, N], generated so far; the pad id from a row's end on.
        lengths: int32[rows], tokens generated, eos included.
        done: bool[rows].
        budget: int32[rows], the most tokens that the row may get, at most N.
        keys: key[rows], or None where nothing is drawn.
        history: what processors know; `history.step` tokens per row have been chosen.
        cache: holds all but the last chosen token.
        scores: float32[N, rows, V], processed, or None; zeros in steps that never came.
        logits: likewise, as the model gave them.
    """

    tokens: jax.Array
    lengths: jax.Array
    done: jax.Array
    budget: jax.Array
    keys: jax.Array | None
    history: History
    cache: KVCache
    scores: jax.Array | None
    logits: jax.Array | None


def start(
    params, cfg: GenerationConfig, prompt: Prompt, cache: KVCache | None, budget: jax.Array, keys, capacity: int
) -> State:
    """Prefill the prompts and choose the first token of each row.

    The prompt runs through the model once, however many sequences it returns: they share its part of the cache.

    Args:
        params: the model's parameters.
        cfg: what to do; its `num_return_sequences` is R.
        prompt: B prompts, or what follows the tokens of `cache`.
        cache: what came before, in one part with room for the prompt; None where it is the beginning.
        budget: int32[B], the most tokens to generate per prompt.
        keys: key[B * R] or None.
        capacity: N, room for generated tokens.
    """
    assert cfg.model is not None
    prompts, copies = prompt.ids.shape[0], cfg.num_return_sequences
    rows = prompts * copies
    if cache is None:
        cache = KVCache.create(cfg.model, prompts, prompt.ids.shape[1])
        tokens = prompt.ids
    else:
        tokens = _followed_by(cache, prompt)
    with jax.named_scope("prefill"):
        out = forward(
            cfg.model,
            params,
            prompt.ids,
            attention_mask=prompt.mask,
            cache=cache,
            logits_to_keep=prompt.length[:, None] - 1,
        )
    assert out.cache is not None
    cache = dataclasses.replace(out.cache, tokens=tokens, known=out.cache.length)
    held = jnp.arange(tokens.shape[1])[None, :] < cache.length[:, None]
    logits = spread(out.logits[:, 0], rows)
    budget = jnp.minimum(spread(budget, rows), capacity)
    record = (capacity, *logits.shape)
    state = State(
        tokens=jnp.broadcast_to(_pad(cfg), (rows, capacity)),
        lengths=jnp.zeros(rows, jnp.int32),
        done=budget <= 0,
        budget=budget,
        keys=keys,
        history=History.of_prompt(cfg, spread(tokens, rows), spread(held, rows)),
        cache=cache.fork(copies, capacity),
        scores=jnp.zeros(record, jnp.float32) if cfg.output_scores else None,
        logits=jnp.zeros(record, jnp.float32) if cfg.output_logits else None,
    )
    return _choose(cfg, state, logits)


def advance(params, cfg: GenerationConfig, state: State, until: jax.Array) -> State:
    """Generate until every row is finished, or has had `until int32[]` steps."""
    model = _model(cfg)

    def unfinished(state: State) -> jax.Array:
        return (state.history.step < until) & ~jnp.all(state.done)

    def step(state: State) -> State:
        last = state.history.step - 1
        token = lax.dynamic_slice_in_dim(state.tokens, last, 1, axis=1)
        out = forward(model, params, token, cache=state.cache, cache_position=state.cache.offset + last)
        return _choose(cfg, dataclasses.replace(state, cache=out.cache), out.logits[:, 0])

    with jax.named_scope("decode"):
        return lax.while_loop(unfinished, step, state)


def finish(state: State) -> State:
    """Give each row's cache its true length, as finished rows went on with padding, and its tokens."""
    length = jnp.clip(state.lengths - 1, 0)
    cache = dataclasses.replace(state.cache, length=length, tokens=state.tokens, known=state.lengths)
    return dataclasses.replace(state, cache=cache)


def _followed_by(cache: KVCache, prompt: Prompt) -> jax.Array:
    """int32[B, S]: the tokens of the cache's slots with the prompt's behind them; zeros where nobody knows them."""
    row = jnp.arange(prompt.ids.shape[0])[:, None]
    slot = cache.length[:, None] + jnp.arange(prompt.ids.shape[1], dtype=jnp.int32)[None, :]
    slot = jnp.where(prompt.mask, slot, cache.slots)
    tokens = jnp.zeros((cache.rows, cache.slots), jnp.int32) if cache.tokens is None else cache.tokens
    return tokens.at[row, slot].set(prompt.ids, mode="drop")


def _choose(cfg: GenerationConfig, state: State, logits: jax.Array) -> State:
    """Choose the next token of each row from `logits float32[rows, V]` and add it."""
    rows, step = logits.shape[0], state.history.step
    with jax.named_scope("process"):
        scores = build_transform(cfg, rows)(state.history, logits)
    with jax.named_scope("choose"):
        token = greedy(scores) if state.keys is None else draw(state.keys, step, scores)
    token = jnp.where(state.done, _pad(cfg), token)
    lengths = state.lengths + jnp.where(state.done, 0, 1)
    done = state.done | is_eos(token, cfg.eos_token_id) | (lengths >= state.budget)
    return dataclasses.replace(
        state,
        tokens=lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], step, axis=1),
        lengths=lengths,
        done=done,
        history=state.history.push(token),
        scores=_record(state.scores, scores, step),
        logits=_record(state.logits, logits, step),
    )


def _record(buffer: jax.Array | None, values: jax.Array, step: jax.Array) -> jax.Array | None:
    return None if buffer is None else lax.dynamic_update_index_in_dim(buffer, values, step, axis=0)


def _pad(cfg: GenerationConfig) -> jax.Array:
    """Return the id that follows a row's end: the pad id, else the first eos id, else 0."""
    if cfg.pad_token_id is not None:
        return jnp.asarray(cfg.pad_token_id, jnp.int32)
    if cfg.eos_token_id is not None:
        return jnp.atleast_1d(jnp.asarray(cfg.eos_token_id, jnp.int32))[0]
    return jnp.zeros((), jnp.int32)


def _model(cfg: GenerationConfig):
    assert cfg.model is not None
    return cfg.model
