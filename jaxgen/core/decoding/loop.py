"""The loop that all decode modes share: prefill, then steps of the mode until every row is done.

No token runs through the model twice. Only contrastive search and modes with drafts may read a row's last token.

This is all of decoding, for one prompt in greedy search. Everything else in this package adds to these lines: rows that
end at different steps, options, records, and other ways to choose a token.

>>> def greedy(params, ids, cfg):
...     model, prompt, new = CausalLM(cfg.model), ids.shape[1], cfg.max_new_tokens
...     cache = KVCache.create(cfg.model, 1, prompt + new)
...
...     def read(ids, cache):  # run new tokens through the model, and choose the token that follows them
...         out = model.apply({"params": params}, ids, cache=cache)
...         return jnp.argmax(out.logits[:, -1], axis=-1).astype(ids.dtype), out.cache
...
...     def unfinished(state):
...         tokens, length, cache = state
...         return (length < prompt + new) & (tokens[0, length - 1] != cfg.eos_token_id)
...
...     def step(state):
...         tokens, length, cache = state
...         token, cache = read(tokens[:, length - 1, None], cache)
...         return tokens.at[:, length].set(token), length + 1, cache
...
...     token, cache = read(ids, cache)  # prefill
...     tokens = jnp.pad(ids, ((0, 0), (0, new)), constant_values=cfg.pad_token_id).at[:, prompt].set(token)
...     return jax.lax.while_loop(unfinished, step, (tokens, prompt + 1, cache))[0]
>>> tokens = jax.jit(lambda params, ids: greedy(params, ids, cfg))(params, ids)
>>> bool(jnp.all(tokens == generate(params, ids, None, cfg).sequences))
True
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.control import while_loop
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding import guidance
from jaxgen.core.decoding.continuation import UNKNOWN, Continuation
from jaxgen.core.decoding.forward import Forward, begin_hook
from jaxgen.core.decoding.logprobs import LogProbs
from jaxgen.core.decoding.needs import Needs
from jaxgen.core.decoding.passes import run_prompts
from jaxgen.core.decoding.recording import Recording, columns_of
from jaxgen.core.decoding.request import Request, Tokens
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run, is_expanded
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.causal_lm import embed
from jaxgen.core.model.sharding import REPLICATED, constrain
from jaxgen.shapes import repeat_rows, resize_axis


class Mode(abc.ABC):
    """Base class of decode modes. A mode determines how rows are extended. Each mode has its own file.

    The functions of a mode are pure. The state of a mode is a pytree whose attribute `finished`, bool[], is True when
    no row needs another step.

    Attributes:
        takes_draft: True if a draft model may be passed. With a draft model, `Assisted` runs instead of this mode.
        drafts: True if the mode reads drafted tokens.
        replays: True if `score(of="scores")` can recompute the scores, because they depend only on the row's tokens.
        refills: True if rows can be replaced, which requires the methods `empty`, `enter` and `insert`.
        watched: in a call with a streamer or `max_time`, the number of steps between the host's reads of the tokens.
        crops: True if the mode removes tokens from the cache after the model has read them; see `LayerState.can_crop`.
        no_cache: the reason why the mode cannot start from a cache; empty if it can.
    """

    takes_draft: bool = False
    drafts: bool = False
    replays: bool = False
    refills: bool = False
    crops: bool = False
    watched: int = 4
    no_cache: str = ""

    def needs(self, cfg: GenerationConfig) -> Needs:
        """Return the requirements of the mode with these options.

        Raises:
            ConfigError: the mode does not support some of the options.
        """
        return Needs(sequences=cfg.num_return_sequences)

    def start(self, run: Run, request: Request) -> Any:
        """Return the initial state: by default, the state after the prompts have been read."""
        return self.begin(run, *prefill(run, request))

    def begin(self, run: Run, rows: Rows, read: Forward) -> Any:
        """Return the state after the prompts have been read; see `prefill`. It may include each row's first token.

        A mode must define this method, unless it defines `start`.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def step(self, run: Run, state: Any) -> Any:
        """Return the state after one more step. A step may append tokens to rows, reorder rows, or replace rows."""

    @abc.abstractmethod
    def finish(self, run: Run, state: Any) -> Decoded:
        """Return the result. Some rows may not be done."""

    @abc.abstractmethod
    def progress(self, run: Run, state: Any) -> Progress:
        """Return the tokens so far, for a streamer."""


@flax.struct.dataclass
class Progress:
    """Progress of a run, for a streamer.

    Attributes:
        tokens: int32[rows, N], the tokens generated so far, followed by pad ids.
        lengths: int32[rows], the number of generated tokens in each row.
        done: bool[rows], True for rows that get no more tokens.
        steps: int32[], the number of columns of `tokens` that are final.
        finished: bool[], True when no row needs another step.
    """

    tokens: jax.Array
    lengths: jax.Array
    done: jax.Array
    steps: jax.Array
    finished: jax.Array

    @classmethod
    def from_rows(cls, run: Run, rows: Rows) -> Progress:
        """Return the progress of rows whose tokens never change once generated."""
        history = rows.history
        longest = jnp.max(history.step)
        steps = jnp.min(jnp.where(history.done, longest, history.step))
        tokens = history.generated(run.capacity, run.pad_id)
        return cls(tokens, history.step, history.done, steps, jnp.all(history.done))


@flax.struct.dataclass
class Decoded:
    """The result of a run. Each prompt's R sequences are in consecutive rows, in the order of the prompts.

    Attributes:
        tokens: int32[rows, N], the generated tokens, followed by pad ids.
        lengths: int32[rows], the number of generated tokens, including eos.
        reasons: int32[rows], the `StopReason` of each row.
        recording: the per-step records that the config requests; None if it requests none.
        logprobs: `[rows, N, ...]`, the log-probabilities of the generated tokens; None unless requested.
        continuation: the cache to continue from; None if rows were replaced.
        sequences_scores: float32[rows], for beam search; otherwise None.
        beam_indices: int32[rows, N], for beam search; otherwise None.
        drafted: int32[rows], the number of drafted tokens, for assisted generation; otherwise None.
        accepted: int32[rows], the number of drafted tokens that were accepted.
    """

    tokens: jax.Array
    lengths: jax.Array
    reasons: jax.Array
    recording: Recording | None
    continuation: Continuation | None
    logprobs: LogProbs | None = None
    sequences_scores: jax.Array | None = None
    beam_indices: jax.Array | None = None
    drafted: jax.Array | None = None
    accepted: jax.Array | None = None

    @classmethod
    def from_rows(cls, run: Run, rows: Rows, cache: KVCache) -> Decoded:
        """Return the result for `rows`. `cache` contains each row's tokens except the last."""
        history, recording = rows.history, rows.recording and dataclasses.replace(rows.recording, columns=None)
        kv = cache.first_stream() if run.guided else cache
        continuation = Continuation(kv, rows.all_tokens(run.capacity), history.total_length)
        tokens = history.generated(run.capacity, run.pad_id)
        return cls(tokens, history.step, rows.reasons, recording, continuation, rows.logprobs)


def decode(run: Run, request: Request, mode: Mode) -> Decoded:
    """Run a mode from prefill until every row is done."""
    decoded = mode.finish(run, advance(run, mode.start(run, request), mode))
    return decoded if run.mesh is None else without_padding(run, decoded)


def without_padding(run: Run, decoded: Decoded) -> Decoded:
    """Drop the rows that pad the batch for the mesh. Every process can read everything except keys and values."""
    recording, continuation = run.cut(decoded.recording), decoded.continuation
    decoded = run.cut(dataclasses.replace(decoded, recording=None, continuation=None))
    decoded = constrain(decoded, run.mesh, REPLICATED)
    if run.mesh is not None and run.mesh.is_multi_process:
        recording = constrain(recording, run.mesh, REPLICATED)
    continuation = None if continuation is None else _cut(run, continuation)
    return dataclasses.replace(decoded, recording=recording, continuation=continuation)


def _cut(run: Run, continuation: Continuation) -> Continuation:
    """Drop the rows that pad the batch for the mesh, but leave the keys and values unchanged."""
    tokens, count = constrain(run.cut((continuation.tokens, continuation.count)), run.mesh, REPLICATED)
    return dataclasses.replace(continuation, tokens=tokens, count=count)


def progress(run: Run, state: Any, mode: Mode) -> Progress:
    """Return the tokens generated so far for the prompts of the request, replicated on all devices."""
    now = mode.progress(run, state)
    if run.mesh is None:
        return now
    tokens, lengths, done = run.cut((now.tokens, now.lengths, now.done))
    now = dataclasses.replace(now, tokens=tokens, lengths=lengths, done=done)
    return constrain(now, run.mesh, REPLICATED)


def advance(run: Run, state: Any, mode: Mode, steps: int | None = None) -> Any:
    """Take steps until every row is done. If `steps` is given, take at most that many."""

    def unfinished(carry: tuple[jax.Array, Any]) -> jax.Array:
        step, state = carry
        return ~state.finished if steps is None else ~state.finished & (step < steps)

    def step(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        step, state = carry
        return step + 1, mode.step(run, state)

    with jax.named_scope("decode"):
        return while_loop(unfinished, step, (jnp.zeros((), jnp.int32), state))[1]


def prefill(run: Run, request: Request) -> tuple[Rows, Forward]:
    """Run each prompt through the model once, regardless of how many sequences continue it.

    Return one row per prompt, before any token is generated, and the model's output for the last token of each prompt,
    with the cache that contains the prompts.
    """
    prompt, cache, rows = open_prompts(run, request.complete())
    with jax.named_scope("prefill"):
        empty = request.cache is None
        read, rows = run_prompts(run, rows, prompt, cache, cache_is_empty=empty, following=run.capacity)
    if run.cfg.records:
        columns = columns_of(run.pad(request.mask), prompt.length[: rows.count])
        rows = dataclasses.replace(rows, recording=Recording.begin(run.cfg, run.capacity, read.out, columns))
    return rows, read


def continuation_of(run: Run, request: Request) -> Continuation:
    """Run the prompts through the model, and return the cache without generating any tokens."""
    rows, read = prefill(run, request)
    return _cut(run, Continuation(read.cache, rows.cache_ids, rows.history.total_length))


def open_prompts(run: Run, request: Request) -> tuple[Tokens, KVCache, Rows]:
    """Return the tokens to read, the cache to add them to, and the rows before any token is generated.

    `request` must be complete. With guidance, the tokens and the cache have rows for both streams.
    """
    read = known = prompt = Tokens.align(request.ids, request.mask, request.embeds)
    cache_ids, total = prompt.ids, prompt.length
    if request.cache is not None:
        read, (cache_ids, total) = _after_pending(run, request.cache, prompt), _all_tokens(run, request.cache, prompt)
        known = prompt if cache_ids is None else Tokens.of_length(cache_ids, total)
    if known.embeds is not None or request.cache is not None:  # embeddings are not passed to processors
        known = Tokens.align(known.ids, known.mask & (known.ids != UNKNOWN))
    rows = Rows.begin(run, request, known, cache_ids, total)
    if run.mesh is not None:
        read, rows = run.pad(read), rows.pad(run)
    if run.guided:
        read = guidance.with_negative(run, request, read)
    if run.extensions.hook is not None:
        rows = begin_hook(run, rows)
    if request.cache is None:
        rows_read, width = read.ids.shape
        cache = KVCache.create(run.model, rows_read, width, run.cfg.cache_dtype)
    else:
        cache = _extended(run, request.cache, rows.count, read.ids.shape[1])
    if run.guided:
        cache = dataclasses.replace(cache, streams=2)
    return read, cache, rows


def _all_tokens(run: Run, given: Continuation, prompt: Tokens) -> tuple[jax.Array | None, jax.Array]:
    """Return each prompt's tokens, int32[B, W], and the number of tokens, int32[B]. Cached tokens come first.

    The first value is None if the ids of the cached tokens are not known.
    """
    prompts = prompt.ids.shape[0]
    count = repeat_rows(given.count, prompts)
    total = count + prompt.length
    if given.tokens is None:
        return None, total
    cached = Tokens.of_length(resize_axis(repeat_rows(given.tokens, prompts), 1, run.cached_slots), count)
    return Tokens(prompt.ids, prompt.mask).after(cached).ids, total


def _after_pending(run: Run, given: Continuation, prompt: Tokens) -> Tokens:
    """Prepend the pending token, if any: the last generated token, which the model has not read yet."""
    if given.tokens is None:
        return prompt
    rows = prompt.ids.shape[0]
    token, pending = (repeat_rows(x, rows)[:, None] for x in given.pending())
    embeds = None if prompt.embeds is None else embed(run.model, run.params, jnp.maximum(token, 0))
    return prompt.after(Tokens(token, pending, embeds))


def _extended(run: Run, given: Continuation, prompts: int, width: int) -> KVCache:
    """Return a cache that begins with the tokens of `given`, with space for `prompts` prompts of this width."""
    is_padded = given.rows == run.prompts and given.kv.rows == prompts
    kv = (given if is_padded else given.without_padding()).kv.flatten(run.cached_slots)
    if is_expanded(kv.rows, run.prompts, run.mesh):
        kv = run.pad(kv.expand(run.prompts // kv.rows))
    if run.guided:
        return guidance.with_empty_rows(kv, prompts)
    is_shared = kv.rows < prompts or run.cfg.slots is not None
    return kv.fork(prompts // kv.rows, width) if is_shared else kv
