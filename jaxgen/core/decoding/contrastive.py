"""Contrastive search (arXiv 2202.06417), as in transformers' `GenerationMixin._contrastive_search`.

In each step, the model reads the candidates of each row: its k most likely next tokens. The row continues with a
candidate that is likely and whose hidden state differs from the states of earlier tokens in the row. Because
the model reads all candidates, it has already read every chosen token, including the last one.

The candidate rows of a prompt share their cache slots, so choosing a candidate does not move any keys or values.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.values import is_tracer
from jaxgen.core.decoding.forward import Forward, observe, run_model
from jaxgen.core.decoding.loop import Decoded, Mode, Progress
from jaxgen.core.decoding.needs import Needs
from jaxgen.core.decoding.request import Tokens
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.sample import process, record_layers
from jaxgen.core.decoding.stop_reasons import StopReason, failure
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.sharding import sharded_top_k
from jaxgen.errors import ConfigError
from jaxgen.shapes import pad_axis, put, repeat_rows, take


@flax.struct.dataclass
class ContrastiveState:
    """State of contrastive search.

    Attributes:
        rows: one row per prompt.
        cache: the keys and values of all tokens, with k cache rows per prompt, one for each candidate.
        read: the model's output for each row's last token; its fields `cache`, `out` and `hidden` are None.
        context: float32[rows, W, D], the hidden states of each row's tokens after the final norm, as unit vectors.
    """

    rows: Rows
    cache: KVCache
    read: Forward
    context: jax.Array

    @property
    def finished(self) -> jax.Array:
        """bool[], True when every row is done."""
        return jnp.all(self.rows.history.done)


class ContrastiveSearch(Mode):
    """Contrastive search. Each row has k candidates per step, where k is at most `Needs.candidates`."""

    replays = crops = True
    no_cache = (
        "contrastive search (penalty_alpha) is not offered with cache=: it compares hidden states of all tokens, which "
        "a cache does not have; pass the whole prompt, or leave out penalty_alpha"
    )

    def needs(self, cfg: GenerationConfig) -> Needs:
        """Set the number of candidates to the largest `top_k`. `top_k` cannot be traced because it sets array sizes."""
        if is_tracer(cfg.top_k):
            raise ConfigError(
                "top_k is traced under jit, and contrastive search (penalty_alpha) needs it to size arrays: pass one "
                "whole number, or a config that is not an argument of the jitted function"
            )
        candidates = min(int(np.max(np.asarray(cfg.top_k))), cfg.model.vocab_size)
        return Needs(candidates=max(1, candidates), final_states=True)

    def begin(self, run: Run, rows: Rows, read: Forward) -> ContrastiveState:
        """Return the initial state. The first step chooses the first token."""
        directions = _directions(run, read)
        return ContrastiveState(
            rows=rows,
            cache=read.cache.fork(run.needs.candidates, run.capacity, shared=True),
            read=dataclasses.replace(read, out=None, cache=None, hidden=None),
            context=pad_axis(directions, 1, directions.shape[1] + run.capacity),
        )

    def step(self, run: Run, state: ContrastiveState) -> ContrastiveState:
        """Run the candidates of each row through the model, and append the best candidate."""
        logits, scores, rows = observe(run, state.rows, state.read, 0, state.rows.live)
        scores = process(run, rows, scores)
        failed = failure(jnp.max(scores, axis=-1))
        live = rows.live & (failed == StopReason.NONE)
        tokens, probs, possible = _candidates(run, rows, scores)
        read, candidates = _read(run, rows, tokens, live, state.cache)
        with jax.named_scope("choose"):
            directions = _directions(run, read).reshape(*tokens.shape, -1)
            cosine = jnp.einsum("bkd,bsd->bks", directions, state.context, precision=lax.Precision.HIGHEST)
            length, width = rows.history.total_length, state.context.shape[1]
            filled = jnp.arange(width, dtype=jnp.int32)[None, None, :] < length[:, None, None]
            similarity = jnp.max(jnp.where(filled, cosine, -jnp.inf), axis=-1)  # [rows, k]
            alpha = rows.options(run).number("penalty_alpha")
            values = jnp.where(possible, (1 - alpha) * probs - alpha * similarity, -jnp.inf)
            chosen = jnp.argmax(values, axis=-1).astype(jnp.int32)  # in a tie, the most likely candidate wins

        # the row index of each chosen candidate, int32[rows]
        best = jnp.arange(rows.count, dtype=jnp.int32) * tokens.shape[1] + chosen
        token, direction = (take(x.reshape(-1, *x.shape[2:]), best, rows.count) for x in (tokens, directions))
        context = put(state.context, jnp.where(live, length, width), direction)
        cache, read = read.cache.select(repeat_rows(best, candidates.count)), read.select(best)

        rows = dataclasses.replace(rows, hook=jax.tree.map(lambda x: take(x, best, rows.count), candidates.hook))
        rows = rows.push(run, token, failed, rows.live, logits, scores)
        if run.cfg.records:
            rows = record_layers(rows, read, 0, rows.live, cache.offset)
        return ContrastiveState(rows, cache, dataclasses.replace(read, out=None), context)

    def finish(self, run: Run, state: ContrastiveState) -> Decoded:
        """Return the tokens, and the cache without the last token of each row."""
        cache = state.cache.first_stream()
        cache = cache.select(jnp.arange(0, cache.rows, run.needs.candidates, dtype=jnp.int32))
        length = jnp.maximum(state.rows.history.step - 1, 0)
        return Decoded.from_rows(run, state.rows, dataclasses.replace(cache, length=length))

    def progress(self, run: Run, state: ContrastiveState) -> Progress:
        """Return the tokens so far."""
        return Progress.from_rows(run, state.rows)


def _candidates(run: Run, rows: Rows, scores: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the candidates of each row, most likely first: tokens int32[rows, k] and probabilities float32[rows, k].

    The third value, bool[rows, k], is False for tokens that are banned or beyond the row's own `top_k`.
    """
    count = run.needs.candidates
    with jax.named_scope("candidates"):
        best, tokens = sharded_top_k(scores[:, None], count, run.mesh)
        probs = jnp.take_along_axis(jax.nn.softmax(scores, axis=-1), tokens, axis=1)
        wanted = jnp.maximum(rows.options(run).number("top_k"), 1)
        possible = (best > -jnp.inf) & (jnp.arange(count, dtype=jnp.int32)[None, :] < wanted)
    return tokens.astype(jnp.int32), probs, possible


def _read(run: Run, rows: Rows, tokens: jax.Array, live: jax.Array, cache: KVCache) -> tuple[Forward, Rows]:
    """Run the candidates `tokens int32[rows, k]` of the live rows through the model, each in a separate row.

    Returns:
        The model's output for the rows * k candidates, and the candidates' rows with the hook's new state.
    """
    candidates = dataclasses.replace(rows, recording=None, cache_ids=None).fork(tokens.shape[1])
    flat, added = tokens.reshape(-1), repeat_rows(live, candidates.count)
    eos = candidates.options(run).eos(candidates.count)
    history = candidates.history.push(flat, added, run.extensions.allowed, eos)  # the hook may read the history
    inputs = Tokens(flat[:, None], added[:, None])
    return run_model(run, dataclasses.replace(candidates, history=history), inputs, cache)


def _directions(run: Run, read: Forward) -> jax.Array:
    """Return the hidden states in the stream with the prompt as unit vectors, float32[rows, T, D]. Zeros stay zeros."""
    hidden = read.hidden_of_prompts(run).astype(jnp.float32)
    length = jnp.sqrt(jnp.sum(hidden**2, axis=-1, keepdims=True))
    return hidden / jnp.where(length == 0, 1.0, length)
