"""The loop that all modes share: prefill, then one token per row and step until every row is finished.

Greedy search and sampling are this loop with another way to choose. No token is run through the model twice, and the
last one not at all. With classifier-free guidance the model has two rows for each row of the run, the second half
without the prompt.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.extensions import Rules
from jaxgen.decoding.forward import prefill, read
from jaxgen.decoding.prompt import UNKNOWN, Prompt, Request, Sizes
from jaxgen.decoding.recording import Records, columns_of
from jaxgen.decoding.sample import draw, greedy, sequence_keys
from jaxgen.decoding.stopping import StopReason, first_reason, is_eos
from jaxgen.errors import InputError
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.logits.history import History
from jaxgen.logits.pipeline import PerRow, build_transform
from jaxgen.model.cache import KVCache
from jaxgen.model.config import ModelConfig
from jaxgen.shapes import repeat_rows


@flax.struct.dataclass
class State:
    """What a step takes and gives. Rows are the R sequences of prompt 0, then those of prompt 1, and so on.

    Attributes:
        tokens: int32[rows, N], generated so far; the pad id from a row's end on.
        lengths: int32[rows], tokens generated, eos included.
        reasons: int32[rows], a `StopReason` each.
        keys: key[rows], or None where nothing is drawn.
        history: what processors know; `history.step` tokens per row have been chosen.
        cache: holds all but the last chosen token.
        stop_state: int32[rows], how much of a stop string there is; None without them.
        hook_state: the hook's own.
        records: what the output shall have of each step.
    """

    tokens: jax.Array
    lengths: jax.Array
    reasons: jax.Array
    keys: jax.Array | None
    history: History
    cache: KVCache
    stop_state: jax.Array | None
    hook_state: object
    records: Records


def start(params, cfg: GenerationConfig, rules: Rules, request: Request, sizes: Sizes) -> State:
    """Prefill the prompts and choose the first token of each row.

    The prompt runs through the model once, however many sequences it returns: they share its part of the cache.
    """
    model, copies, capacity = _model(cfg), cfg.num_return_sequences, sizes.capacity
    prompts = request.ids.shape[0]
    rows = prompts * copies
    prompt, cache, tokens = _place(params, cfg, request, sizes)
    wrong = (request.ids < 0) | (request.ids >= model.vocab_size)
    wrong = jnp.any(request.mask & wrong, axis=-1) & (request.embeds is None)
    wrong |= ~jnp.any(request.mask, axis=-1)
    budget = jnp.minimum(request.budget, capacity)
    reasons = repeat_rows(first_reason(BAD_ID=wrong, LENGTH=budget <= 0), rows)
    ids = jnp.pad(tokens.ids, ((0, 0), (0, capacity)))
    read = jnp.sum(request.mask, axis=-1, dtype=jnp.int32)
    if request.cache is not None:
        read += repeat_rows(request.cache.total_known, prompts)
    history = History.begin(cfg, ids, tokens.length, budget, rules.allowed, unknown=read - tokens.length)
    logits, out, cache, hook_state = prefill(params, cfg, rules, history, prompt, cache, capacity)
    history = dataclasses.replace(history.spread(rows), done=reasons != StopReason.NONE)
    lanes = prompt.ids.shape[0] // prompts
    state = State(
        tokens=jnp.broadcast_to(_pad(cfg), (rows, capacity)),
        lengths=jnp.zeros(rows, jnp.int32),
        reasons=reasons,
        keys=None if request.key is None else sequence_keys(request.key, prompts, copies),
        history=history,
        cache=cache.fork(copies, capacity),
        stop_state=None if rules.stop_strings is None else rules.stop_strings.begin(history.ids, history.length),
        hook_state=jax.tree.map(lambda leaf: repeat_rows(leaf, rows * lanes), hook_state),
        records=Records.begin(cfg, rows, capacity, out, columns_of(request.mask, prompt.length[:prompts])),
    )
    return _choose(cfg, rules, state, repeat_rows(logits, rows * lanes))


def hold(params, cfg: GenerationConfig, request: Request, sizes: Sizes) -> KVCache:
    """Prefill the prompts and choose nothing: the cache that holds them."""
    prompt, cache, _ = _place(params, cfg, request, sizes)
    nothing = jnp.zeros((prompt.ids.shape[0], 1), jnp.int32)
    history = History.begin(cfg, nothing, prompt.length, prompt.length)
    return prefill(params, cfg, Rules(), history, prompt, cache, 0)[2]


def advance(params, cfg: GenerationConfig, rules: Rules, state: State, until: jax.Array) -> State:
    """Generate until every row is finished, or has had `until int32[]` steps."""

    def unfinished(state: State) -> jax.Array:
        return (state.history.step < until) & ~jnp.all(state.history.done)

    def step(state: State) -> State:
        last = state.history.step - 1
        token = lax.dynamic_slice_in_dim(state.tokens, last, 1, axis=1)
        if cfg.on("guidance_scale"):
            token = jnp.concatenate([token, token], axis=0)
        prompt = Prompt(token, jnp.ones(token.shape, bool))
        logits, out, cache, hook_state = read(
            params, cfg, rules, state.history, state.hook_state, prompt, state.cache, state.cache.offset + last
        )
        records = state.records.put_layers(state.history.step, out)
        state = dataclasses.replace(state, cache=cache, hook_state=hook_state, records=records)
        return _choose(cfg, rules, state, logits)

    with jax.named_scope("decode"):
        return lax.while_loop(unfinished, step, state)


def finish(state: State) -> State:
    """Give each row's cache its true length, as finished rows went on with padding, and its tokens."""
    rows = state.lengths.shape[0]
    cache = state.cache.first(rows)
    length = jnp.clip(state.lengths - 1, 0)
    cache = dataclasses.replace(cache, length=length, tokens=state.tokens, known=state.lengths)
    return dataclasses.replace(state, cache=cache)


def _place(params, cfg: GenerationConfig, request: Request, sizes: Sizes) -> tuple[Prompt, KVCache, Prompt]:
    """Return what the model shall read, the cache that it goes into, and every token that is known of each prompt."""
    model, prompts, cache = _model(cfg), request.ids.shape[0], request.cache
    table = params["model"]["embed_tokens"]["weight"]
    prompt = Prompt.align(request.ids, request.mask, request.embeds)
    if cache is not None:
        cache = cache.merge(sizes.slots)
        prompt = prompt.after(cache, table)
    tokens = _known(cache, prompt)
    guided = cfg.on("guidance_scale")
    if guided:
        negative = prompt.last()
        if request.negative_ids is not None and request.negative_mask is not None:
            negative = Prompt.align(request.negative_ids, request.negative_mask)
        prompt = prompt.over(negative, table)
    rows, width = prompt.ids.shape
    if cache is None:
        return prompt, KVCache.create(model, rows, width), tokens
    if guided:
        return prompt, cache.expand(prompts // cache.rows).grow(rows), tokens
    if cache.rows < prompts:
        return prompt, cache.fork(prompts // cache.rows, width), tokens
    return prompt, cache, tokens


def _known(cache: KVCache | None, prompt: Prompt) -> Prompt:
    """Return the tokens of each prompt, those of the cache first; what came as an embedding is left out."""
    ids, mask = prompt.ids, prompt.mask
    if cache is not None and cache.tokens is not None:
        held = jnp.arange(cache.slots)[None, :] < cache.length[:, None]
        rows = ids.shape[0]
        ids = jnp.concatenate([repeat_rows(cache.tokens, rows), ids], axis=1)
        mask = jnp.concatenate([repeat_rows(held, rows), mask], axis=1)
    return Prompt.align(ids, mask & (ids != UNKNOWN))


def _choose(cfg: GenerationConfig, rules: Rules, state: State, logits: jax.Array) -> State:
    """Choose the next token of each row from the model's `logits float32[rows or 2 rows, V]` and add it."""
    history, rows = state.history, state.tokens.shape[0]
    unconditional = logits[rows:] if cfg.on("guidance_scale") else None
    logits = logits[:rows]
    with jax.named_scope("process"):
        transform = build_transform(cfg, rows, rules.processors, rules.allowed)
        scores = transform(history, logits, unconditional)
    with jax.named_scope("choose"):
        token = greedy(scores) if state.keys is None else draw(state.keys, history.step, scores)
        best = jnp.max(scores, axis=-1)
    failed = first_reason(NO_TOKEN=best == -jnp.inf, NOT_A_NUMBER=jnp.isnan(best))
    live = ~history.done & (failed == StopReason.NONE)
    token = jnp.where(live, token, _pad(cfg))
    lengths = state.lengths + live.astype(jnp.int32)
    tokens = lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], history.step, axis=1)
    records = state.records.put(cfg, history.step, logits, scores, token, live)
    with jax.named_scope("stop"):
        history, stop_state, reason = _after(cfg, rules, state, token, lengths, scores)
    reason = jnp.where(failed == StopReason.NONE, reason, failed)
    reasons = jnp.where(state.history.done, state.reasons, reason)
    return dataclasses.replace(
        state,
        tokens=tokens,
        lengths=lengths,
        reasons=reasons,
        history=dataclasses.replace(history, done=reasons != StopReason.NONE),
        stop_state=stop_state,
        records=records,
    )


def _after(cfg: GenerationConfig, rules: Rules, state: State, token: jax.Array, lengths: jax.Array, scores: jax.Array):
    """Add a token to the history and see whether it ends its row: the new history, stop state and reasons."""
    rows = token.shape[0]
    options = PerRow(cfg, rows)
    ended = is_eos(token, options.table("eos_token_id"))
    holds = {"EOS": ended, "LENGTH": lengths >= state.history.budget}
    eos = options.eos()
    history = state.history.push(token, state.history.done, rules.allowed, eos)
    if isinstance(rules.allowed, TokenAutomaton) and history.state is not None:
        endless = ~jnp.any(eos, axis=-1)  # rows without an eos id to end with
        holds["COMPLETE"] = endless & rules.allowed.exhausted(history.state, history.budget - history.step)
    stop_state = state.stop_state
    if rules.stop_strings is not None and stop_state is not None:
        stop_state, holds["STOP_STRING"] = rules.stop_strings.push(stop_state, token)
    for criterion in rules.criteria:
        stops = jnp.asarray(criterion(history, scores))
        if stops.shape != (rows,) or stops.dtype != bool:
            raise InputError(f"stopping_criteria must return bool[{rows}], one per row, got {stops.dtype}{stops.shape}")
        holds["CRITERION"] = holds.get("CRITERION", False) | stops
    return history, stop_state, first_reason(**holds)


def _pad(cfg: GenerationConfig) -> jax.Array:
    """Return the id that follows a row's end: the pad id, else the first eos id, else 0."""
    if cfg.pad_token_id is not None:
        return jnp.asarray(cfg.pad_token_id, jnp.int32)
    if cfg.on("eos_token_id"):
        ids = jnp.ravel(jnp.asarray(cfg.eos_token_id, jnp.int32))
        return ids[jnp.argmax(ids >= 0)]
    return jnp.zeros((), jnp.int32)


def _model(cfg: GenerationConfig) -> ModelConfig:
    assert cfg.model is not None
    return cfg.model
