"""Greedy search and sampling, which choose one token per row at each step, based on the row's scores."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxgen.buckets import cache_slots
from jaxgen.control import cond
from jaxgen.core.decoding.forward import Forward, observe, run_model
from jaxgen.core.decoding.loop import Decoded, Mode, Progress
from jaxgen.core.decoding.request import Tokens
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.stop_reasons import StopReason, failure
from jaxgen.core.logits.pipeline import build_transform
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.sharding import ROWS, constrain, sharded_top_k

_BLOCK = 512


@flax.struct.dataclass
class SampleState:
    """The rows, and the keys and values of each row's tokens except the last."""

    rows: Rows
    cache: KVCache

    @property
    def finished(self) -> jax.Array:
        """bool[], True when every row is done."""
        return jnp.all(self.rows.history.done)


class Sample(Mode):
    """Sampling (`GenerationMixin._sample`), or greedy search (`_greedy_search`) if there is no random key."""

    takes_draft = replays = refills = True

    def begin(self, run: Run, rows: Rows, read: Forward) -> SampleState:
        """Choose the first token of each sequence."""
        copies = run.needs.sequences
        if copies == 1:
            if rows.keys is not None:
                rows = rows.sequence(jnp.zeros(rows.count, jnp.int32))
            return self.enter(run, rows, read)
        rows, cache, read = rows.fork(copies), read.cache, read.fork(copies)
        return SampleState(self.extend(run, rows, read, 0, rows.live), cache.fork(copies, run.capacity))

    def enter(self, run: Run, rows: Rows, read: Forward) -> SampleState:
        """Choose the first token of each row. Each row must be a sequence with its own copy of the prompt's cache."""
        # With the prompt and the answer in one array, a step needs fewer but larger matrix products.
        return SampleState(self.extend(run, rows, read, 0, rows.live), read.cache.grow(run.capacity))

    def empty(self, run: Run, rows: Rows, cache: KVCache, count: int) -> SampleState:
        """Return the state of `count` done rows, with the structure that `enter` returns for `rows` and `cache`."""
        done = rows.take(jnp.zeros(count, jnp.int32)).end(jnp.ones(count, bool), jnp.int32(StopReason.LENGTH))
        size = cache_slots(cache.slots + run.capacity)  # as in `grow`
        return SampleState(constrain(done, run.mesh, ROWS), cache.empty_rows(count, size))

    def insert(self, run: Run, state: SampleState, source: SampleState, rows: jax.Array) -> SampleState:
        """Return the state with row i of `source` in place of row `rows[i]`. `rows` is int32[n]."""
        return SampleState(state.rows.insert(source.rows, rows), state.cache.insert(source.cache, rows))

    def step(self, run: Run, state: SampleState) -> SampleState:
        """Run the last token of each row through the model, and choose the next token."""
        rows = state.rows
        # The model reads no token of a row that is done, so the row's cache stays unchanged.
        tokens = Tokens(rows.history.last(1), rows.live[:, None])
        read, rows = run_model(run, rows, tokens, state.cache)
        if run.cfg.records:
            rows = record_layers(rows, read, 0, rows.live, read.cache.offset)
        return SampleState(self.extend(run, rows, read, 0, rows.live), read.cache)

    def extend(self, run: Run, rows: Rows, read: Forward, column: int | jax.Array, live: jax.Array) -> Rows:
        """Choose a token for each row from one column of the model's output, and append the tokens to the live rows."""
        logits, scores, rows = observe(run, rows, read, column, live)
        if run.changes_scores:
            scores = process(run, rows, scores)
        return rows.push(run, *choose(rows, scores), live, logits, scores)

    def finish(self, run: Run, state: SampleState) -> Decoded:
        """Return the tokens."""
        return Decoded.from_rows(run, state.rows, state.cache)

    def progress(self, run: Run, state: SampleState) -> Progress:
        """Return the tokens so far."""
        return Progress.from_rows(run, state.rows)


def record_layers(rows: Rows, read: Forward, column: int | jax.Array, live: jax.Array, offset: int) -> Rows:
    """For each live row's newest token, record the layers' values, taken from `column` of the model's output.

    `offset` is the number of slots in the cache's prefix.
    """
    assert rows.recording is not None
    recording = rows.recording.put_layers(rows.history.step, live, read.out, column, offset)
    return dataclasses.replace(rows, recording=recording)


def choose(rows: Rows, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Choose the next token of each row from its processed `scores float32[rows, V]`.

    Return the tokens, int32[rows], and the reasons why no token can be chosen, a `StopReason` for each row or NONE.
    """
    with jax.named_scope("choose"):
        keys, step, samples = rows.keys, rows.history.step, rows.values.get("do_sample")
        if keys is None:
            token = greedy(scores)
        elif samples is None:
            token = draw(keys, step, scores)
        else:
            some = jnp.any(samples & rows.live)
            drawn = cond(some, lambda x: draw(keys, step, x), greedy, scores)
            token = jnp.where(samples, drawn, greedy(scores))
        return token, failure(jnp.max(scores, axis=-1))


def process(run: Run, rows: Rows, scores: jax.Array) -> jax.Array:
    """Apply the processors to `scores float32[rows, V]`, and also the warpers if tokens are drawn."""
    if rows.lanes is not None:
        alike = dataclasses.replace(rows, lanes=None)
        return rows.lanes.process(run, rows.history, scores, lambda run, scores: process(run, alike, scores))
    if not run.changes_scores:
        return scores
    extensions = run.extensions
    with jax.named_scope("process"):
        transform = build_transform(rows.options(run), extensions.processors, extensions.allowed)
        return transform(rows.history, scores)


def greedy(scores: jax.Array) -> jax.Array:
    """Return the highest-scoring token of each row, int32[rows]. In a tie, the lowest id wins."""
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def draw(keys: jax.Array, step: jax.Array, scores: jax.Array) -> jax.Array:
    """Draw a token for each row from softmax(scores float32[rows, V]). Return int32[rows].

    `keys` (key[rows]) contains the random key of each row. `step` (int32[rows] or int32[]) is folded into each key.

    First, a block of tokens is drawn according to its probability, and then a token from that block. The distribution
    is the same, but random numbers are needed only for the blocks and for the tokens of one block.
    """
    return jax.vmap(_draw_row)(keys, jnp.broadcast_to(step, keys.shape), scores)


def _draw_row(key: jax.Array, step: jax.Array, scores: jax.Array) -> jax.Array:
    padding = -scores.shape[0] % _BLOCK
    blocks = jnp.pad(scores, (0, padding), constant_values=-jnp.inf).reshape(-1, _BLOCK)
    highest = jnp.max(blocks, axis=-1)
    best = jnp.max(highest)
    best = jnp.where(best == -jnp.inf, 0.0, best)  # subtracted, because noise added to huge scores is lost to rounding
    highest = jnp.where(highest == -jnp.inf, 0.0, highest - best)
    sums = jnp.sum(jnp.exp(blocks - best - highest[:, None]), axis=-1)
    block_key, index_key = jax.random.split(jax.random.fold_in(key, step))
    block = jax.random.categorical(block_key, jnp.log(sums) + highest).astype(jnp.int32)
    return block * _BLOCK + jax.random.categorical(index_key, blocks[block] - best).astype(jnp.int32)


def draw_distinct(
    keys: jax.Array, scores: jax.Array, most: int, count: jax.Array, mesh: Mesh | None
) -> tuple[jax.Array, jax.Array]:
    """For each search, draw entries from softmax(scores) without replacement, like `torch.multinomial`.

    Gumbel noise is added to the scores, and the entries with the largest sums are drawn (arXiv 1903.06059).

    Args:
        keys: key[S].
        scores: float32[S, k, V].
        most: the maximum of `count`.
        count: int32[S], the number of entries to draw.
        mesh: the mesh that V is split across, or None.

    Returns:
        The scores of the drawn entries, float32[S, most], and the entries' indices, int32[S, most], both in the order
        in which the entries were drawn. After the first `count` entries of a search, all scores are -inf. The indices
        are positions in the flattened scores of a search, from 0 to k * V - 1.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[1:], scores.dtype))(keys)
    drawn, indices = sharded_top_k(scores + noise, most, mesh, scores)
    return jnp.where(jnp.arange(most)[None, :] < count[:, None], drawn, -jnp.inf), indices
