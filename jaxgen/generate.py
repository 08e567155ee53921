"""generate(): check the request, prepare it, run one decoder, shape the output.

Called eagerly, it rounds prompt width and length up to buckets, so that few programs serve all requests, and gives the
numbers of the config to the program as arguments. Called inside the caller's own `jax.jit` it is traced with the
shapes that it is given.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxgen.decoding import loop
from jaxgen.decoding.sample import sequence_keys
from jaxgen.errors import ConfigError, InputError, NotBuiltYetError
from jaxgen.generation_config import GenerationConfig, warn_unused
from jaxgen.model.cache import KVCache
from jaxgen.request import (
    budgets,
    capacity_for,
    check_cache,
    check_ids_shape,
    check_key,
    check_knobs,
    check_mask_shape,
    check_params,
    host_ids,
    host_mask,
    inferred_mask,
    normal_form,
    prompt_bucket,
    refuse_options,
    refuse_unbuilt,
    traced_budgets,
    warn_unfeasible,
)

_STREAM_CHUNK = 4  # tokens per call of the compiled loop when streaming


class Streamer(Protocol):
    """What `streamer` must have: `BaseStreamer` of transformers."""

    def put(self, value: np.ndarray) -> None:
        """Take the prompts, int32[B, P], then the next token of each row, int32[rows], over and over."""

    def end(self) -> None:
        """Take note that nothing more comes."""


@flax.struct.dataclass
class GenerateOutput:
    """What `generate` returns. Rows are in transformers' order: the R sequences of prompt 0, then of prompt 1.

    Attributes:
        sequences: int32[B*R, P + N], the prompt as given, the generated tokens, then the pad id; N is
            `max_new_tokens`, the largest where there is one per prompt.
        lengths: int32[B*R], generated tokens per row, eos included.
        sequences_scores: float32[B*R], of beam search; else None.
        beam_indices: int32[B*R, N], of beam search; else None.
        scores: float32[N, B*R, V], what the token of each step was chosen from, with `output_scores`; zeros in
            steps after the last one.
        logits: float32[N, B*R, V], what the model gave, with `output_logits`.
        attentions: None as yet.
        hidden_states: None as yet.
        cache: keys and values of all tokens but the last chosen one of each row; to go on from.
        prompt_width: P, static.
    """

    sequences: jax.Array
    lengths: jax.Array
    sequences_scores: jax.Array | None = None
    beam_indices: jax.Array | None = None
    scores: jax.Array | None = None
    logits: jax.Array | None = None
    attentions: Any = None
    hidden_states: Any = None
    cache: KVCache | None = None
    prompt_width: int = flax.struct.field(pytree_node=False, default=0)


def generate(
    params,
    ids,
    key,
    cfg: GenerationConfig,
    *,
    attention_mask=None,
    inputs_embeds=None,
    cache=None,
    logits_processor=None,
    stopping_criteria=None,
    prefix_allowed_tokens_fn=None,
    negative_prompt_ids=None,
    negative_prompt_attention_mask=None,
    streamer: Streamer | None = None,
    tokenizer=None,
    assistant=None,
    hook=None,
    **options,
) -> GenerateOutput:
    """Continue the prompts: transformers' `generate()` as a pure function.

    >>> out = generate(params, batch.ids, jax.random.key(0), cfg, attention_mask=batch.attention_mask)  # doctest: +SKIP

    Args:
        params: the parameters, a tree with Hugging Face's names, as `convert.load_hf` gives.
        ids: int32[B, P], the prompts, padded to one width.
        key: None for greedy decoding; for sampling one `jax.random.key`, or `key[B]`, one per prompt. With one
            key, prompt b uses `fold_in(key, b)`.
        cfg: what to do; `cfg.model` says for which model. Options are set with `cfg.replace`.
        attention_mask: `[B, P]`, 0 where ids is padding, on whichever side. Left out, it follows from the pad id as
            in transformers: pad tokens are padding unless the pad id is an eos id too.
        cache: the `cache` of an earlier output with as many rows, to go on from: `ids` are then the new tokens only,
            and the result is that of a run from the beginning. It is not changed.
        streamer: its `put` gets the prompts and then each step's tokens, `end` is called at last.
        inputs_embeds, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, negative_prompt_ids,
            negative_prompt_attention_mask, tokenizer, assistant, hook: not built yet.
        **options: refused; a typo or an option of the config.

    Raises:
        InputError: ids, mask or key that do not fit the model, each other or the config.
        ConfigError: an option that cannot be honoured.
        NotBuiltYetError: an option that jaxgen knows and cannot do yet.
        TypeError: an argument of the wrong type.

    Gradients do not flow through it: tokens are integers. Use `CausalLM` for a differentiable forward pass.
    """
    refuse_options(options)
    unbuilt = {
        "inputs_embeds": inputs_embeds,
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
        "negative_prompt_ids": negative_prompt_ids,
        "negative_prompt_attention_mask": negative_prompt_attention_mask,
        "tokenizer": tokenizer,
        "assistant": assistant,
        "hook": hook,
    }
    if given := [name for name, value in unbuilt.items() if value is not None]:
        raise NotBuiltYetError(f"not built yet: {', '.join(given)}")
    if not isinstance(cfg, GenerationConfig):
        raise TypeError(f"cfg must be a jaxgen.GenerationConfig, got {type(cfg).__name__}")
    refuse_unbuilt(cfg)
    if cfg.model is None:
        raise ConfigError("cfg.model is None: set it to the checkpoint's ModelConfig (convert.load_hf does)")
    check_params(params, cfg)

    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((params, ids, attention_mask, key, cfg, cache))):
        if streamer is not None:
            raise InputError("streamer needs the host and cannot be used under jit: call generate outside of it")
        return _generate_traced(params, ids, attention_mask, key, cfg, cache)
    return _generate_eager(params, ids, attention_mask, key, cfg, cache, streamer)


def _generate_eager(params, ids, attention_mask, key, cfg: GenerationConfig, cache, streamer) -> GenerateOutput:
    ids = host_ids(ids, cfg)
    mask = host_mask(attention_mask, ids, cfg)
    check_knobs(cfg, ids.shape[0])
    check_cache(cache, cfg, ids.shape[0])
    warn_unused(cfg)
    lengths = mask.sum(axis=-1, dtype=np.int32)
    slots = 0
    if cache is not None:
        lengths += np.asarray(_total_known(cache))
        slots = prompt_bucket(int(lengths.max()))
    budget = budgets(cfg, lengths)
    warn_unfeasible(cfg, lengths, budget)
    new_tokens = int(budget.max())
    cfg = normal_form(cfg)
    key = check_key(key, cfg, ids.shape[0])
    capacity = capacity_for(new_tokens, recorded=cfg.output_scores or bool(cfg.output_logits))
    padding = ((0, 0), (prompt_bucket(ids.shape[1]) - ids.shape[1], 0))
    request = (params, cfg, np.pad(ids, padding), np.pad(mask, padding), budget, key, cache)
    sizes = (capacity, slots)
    state = _run(*request, *sizes) if streamer is None else _stream(request, sizes, ids, streamer)
    return _output(state, ids, new_tokens)


def _generate_traced(params, ids, attention_mask, key, cfg: GenerationConfig, cache) -> GenerateOutput:
    # What is concrete is checked as it is eagerly.
    ids = ids if isinstance(ids, Tracer) else jnp.asarray(host_ids(ids, cfg))
    check_ids_shape(ids)
    ids = ids.astype(jnp.int32)
    if attention_mask is None:
        mask = inferred_mask(ids, cfg)
    elif isinstance(attention_mask, Tracer):
        mask = attention_mask.astype(bool)
        check_mask_shape(mask, ids)
    else:
        mask = jnp.asarray(host_mask(attention_mask, ids, cfg))
    warn_unused(cfg)
    check_knobs(cfg, ids.shape[0])
    check_cache(cache, cfg, ids.shape[0])
    key = check_key(key, cfg, ids.shape[0])
    slots = 0 if cache is None else cache.offset + cache.slots + ids.shape[1]
    capacity, budget = traced_budgets(cfg, slots or ids.shape[1], mask, cache)
    cfg = jax.tree.map(jnp.asarray, cfg)  # what is concrete in the config, as if it had been an argument
    state = _run_traced(params, cfg, ids, mask, budget, key, cache, capacity, slots)
    return _output(state, ids, capacity)


def _begin(params, cfg, ids, mask, budget, key, cache: KVCache | None, capacity: int, slots: int) -> loop.State:
    keys = None if key is None else sequence_keys(key, ids.shape[0], cfg.num_return_sequences)
    if cache is None:
        prompt = loop.Prompt.align(ids, mask)
    else:
        cache = cache.merge(slots)
        prompt = loop.Prompt.after(cache, ids, mask)
    return loop.start(params, cfg, prompt, cache, budget, keys, capacity)


def _run_traced(params, cfg, ids, mask, budget, key, cache, capacity: int, slots: int) -> loop.State:
    state = _begin(params, cfg, ids, mask, budget, key, cache, capacity, slots)
    return loop.finish(loop.advance(params, cfg, state, jnp.int32(capacity)))


_run = jax.jit(_run_traced, static_argnums=(7, 8))


@functools.partial(jax.jit, static_argnums=(7, 8))
def _start(params, cfg, ids, mask, budget, key, cache, capacity: int, slots: int):
    state = _begin(params, cfg, ids, mask, budget, key, cache, capacity, slots)
    return state, _progress(state)


@functools.partial(jax.jit, donate_argnums=2)
def _advance(params, cfg, state: loop.State):
    state = loop.advance(params, cfg, state, state.history.step + _STREAM_CHUNK)
    return state, _progress(state)


_finish = jax.jit(loop.finish, donate_argnums=0)

_total_known = jax.jit(lambda cache: cache.total_known)


def _progress(state: loop.State):
    return state.tokens, state.history.step, jnp.all(state.done)


def _stream(request, sizes: tuple[int, int], ids: np.ndarray, streamer: Streamer) -> loop.State:
    """Run the loop in chunks, each dispatched before the tokens of the one before are read."""
    params, cfg = request[:2]
    streamer.put(ids)
    state, progress = _start(*request, *sizes)
    shown, finished = 0, False
    while not finished:
        state, following = _advance(params, cfg, state)
        tokens, step, finished = jax.device_get(progress)
        for column in range(shown, int(step)):
            streamer.put(tokens[:, column])
        shown, progress = int(step), following
    streamer.end()
    return _finish(state)


def _output(state: loop.State, ids, new_tokens: int) -> GenerateOutput:
    """Shape the result. When eager, numpy cuts what the buckets added: each slice of a jax array would compile."""
    eager = isinstance(ids, np.ndarray)
    xp, to_array = (np, jax.device_put) if eager else (jnp, jnp.asarray)

    def cut(record, axis: int):
        if record is None or record.shape[axis] == new_tokens:
            return record
        return to_array((np.asarray(record) if eager else record)[(slice(None),) * axis + (slice(new_tokens),)])

    tokens = cut(state.tokens, axis=1)
    prompts = xp.repeat(ids, tokens.shape[0] // ids.shape[0], axis=0)
    sequences = xp.concatenate([prompts, np.asarray(tokens) if eager else tokens], axis=1)
    return GenerateOutput(
        sequences=to_array(sequences),
        lengths=state.lengths,
        scores=cut(state.scores, axis=0),
        logits=cut(state.logits, axis=0),
        cache=state.cache,
        prompt_width=ids.shape[1],
    )
