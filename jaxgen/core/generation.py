"""generate(): check the call, prepare it, run the decode mode, and assemble the output.

In an eager call, generate() rounds the prompt width and the number of new tokens up to buckets, so that a few programs
serve all calls. The numbers in the config are arguments of the program. Under the caller's `jax.jit`, generate() is
traced with the exact shapes of its arguments.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from jaxgen.core.config.availability import refuse_unavailable, with_hints
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.tables import eos_list
from jaxgen.core.decoding import loop
from jaxgen.core.decoding.continuation import Continuation
from jaxgen.core.decoding.extensions import Extensions, HostCalls, check_arguments
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.model.cache import KVCache
from jaxgen.core.output import GenerateOutput, cut_continuation, output, raise_failures
from jaxgen.core.request.assistant import open_assistant
from jaxgen.core.request.cache_memory import check_call_memory
from jaxgen.core.request.checks import check_call, extensions_of
from jaxgen.core.request.driver import (
    RowStreamer,
    Streamer,
    has_methods,
    prefill_only,
    run_fitting,
    run_watched,
    run_whole,
)
from jaxgen.core.request.gradients import without_gradient
from jaxgen.core.request.healing import heal
from jaxgen.core.request.inputs import is_traced
from jaxgen.core.request.prepare import CallInputs, Prepared, prepare
from jaxgen.core.text.streaming import TextStreamer
from jaxgen.errors import InputError
from jaxgen.programs import under_jit


@with_hints
def generate(
    params,
    ids,
    key,
    cfg: GenerationConfig,
    *,
    attention_mask=None,
    inputs_embeds=None,
    cache: Continuation | KVCache | None = None,
    logits_processor: Sequence[Callable] | None = None,
    stopping_criteria: Sequence[Callable] | None = None,
    prefix_allowed_tokens_fn: TokenAutomaton | Callable | None = None,
    negative_prompt_ids=None,
    negative_prompt_attention_mask=None,
    streamer: Streamer | RowStreamer | None = None,
    tokenizer=None,
    assistant=None,
    hook=None,
) -> GenerateOutput:
    """Continue the prompts, like transformers' `generate()`, but as a pure function. For gradients, use `score`.

    >>> out = generate(params, batch.ids, jax.random.key(0), cfg, attention_mask=batch.attention_mask)

    Args:
        params: the parameters, a tree with Hugging Face's names, as returned by `load_hf`.
        ids: int32[B, P], the prompts, padded to the same width. Without ids, inputs_embeds or a cache, generation
            starts from `bos_token_id`.
        key: None for greedy decoding. For sampling, either one key per prompt, `key[B]`, or a single `jax.random.key`.
            With a single key, prompt b uses `fold_in(key, b)`.
        cfg: the options, with the model's config in `cfg.model`. Set options with `cfg.replace`.
        attention_mask: `[B, P]`, 0 for padding, which may be on either side. By default, tokens with the pad id are
            padding; if this id is also an eos id, no tokens are padding.
        inputs_embeds: `[B, P, D]`, used instead of the embeddings of `ids`; `ids` may then be None.
        cache: the `cache` of an earlier output, or the result of `prefill`, to continue from; `ids` then contains only
            the new tokens. The number of cache rows must divide B; prompts may share rows. The cache is not changed.
        logits_processor: pure functions `(history, scores float32[rows, V]) -> scores`; see docs/processors.md.
        stopping_criteria: pure functions `(history, scores) -> bool[rows]`, True for rows that end.
        prefix_allowed_tokens_fn: a `TokenAutomaton`, or a Python function `(row, ids) -> list of ids`. The function is
            called on the host in each step for each unfinished row. `ids` is int32[n], the row's ids without padding.
        negative_prompt_ids, negative_prompt_attention_mask: `[B, Q]`, prompts to steer away from; see `guidance_scale`.
        streamer: an object that receives the tokens through `put` (step by step) or `put_row` (row by row).
        tokenizer: a `jaxgen.Tokenizer`, for `stop_strings` and `token_healing`.
        assistant: `(params, cfg)` of a smaller model that drafts tokens; see docs/modes.md.
        hook: a `StepHook`, which can read and change the model's inputs and outputs.

    Raises:
        InputError, ConfigError, TypeError: the arguments are incompatible, or an option is not supported.
        GenerationError: a row could not continue because all tokens were banned or the scores were NaN. The error's
            `output` contains all rows. Under the caller's jit, check the output's `stop_reasons` instead.
    """
    inputs = CallInputs(
        ids, key, attention_mask, inputs_embeds, cache, negative_prompt_ids, negative_prompt_attention_mask
    )
    own = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria, "hook": hook}
    return _generate(params, cfg, inputs, own, prefix_allowed_tokens_fn, tokenizer, streamer, assistant)


def _generate(
    params, cfg: GenerationConfig, inputs: CallInputs, own: dict[str, Any], allowed, tokenizer, streamer, assistant
) -> GenerateOutput:
    """Check a call, then run it, or trace it under jit. `own` contains the caller's functions by name."""
    check_call(params, cfg)
    refuse_unavailable(cfg)
    draft = None
    if assistant is not None:
        draft, cfg = open_assistant(assistant, cfg)
    extensions = extensions_of(cfg, tokenizer=tokenizer, **own)
    if streamer is not None:
        _check_streamer(streamer, cfg)
    traced = is_traced(params, cfg, inputs, extensions, draft) or under_jit()
    if traced:
        params, cfg, inputs = without_gradient(params), without_gradient(cfg), without_gradient(inputs)
        extensions, draft = without_gradient(extensions), without_gradient(draft)
    on_host = {"streamer": streamer, "max_time": cfg.max_time, "token_healing": cfg.token_healing or None}
    for name, value in on_host.items():
        if traced and value is not None:
            raise InputError(f"{name} needs the host and cannot be used under jit: call generate outside it")
    if cfg.token_healing:
        inputs, allowed = heal(cfg, inputs, allowed, tokenizer)
    calls = None
    if not isinstance(allowed, TokenAutomaton | None):
        calls = _host_calls(allowed, cfg, eager=not traced)
        allowed = calls.pytree
    extensions = dataclasses.replace(extensions, allowed=allowed)
    prepared = partial(prepare, params, cfg, inputs, extensions, assistant=draft)
    if traced:
        call = prepared(eager=False)
        return output(call, loop.decode(call.run, call.request, call.mode))
    try:
        run = partial(_run, streamer=streamer, seconds=cfg.max_time, calls=calls)
        return run_fitting(partial(prepared, eager=True), run, streamer)
    finally:
        if calls is not None:
            calls.close()


@with_hints
def prefill(
    params, ids, cfg: GenerationConfig, *, attention_mask=None, cache: Continuation | KVCache | None = None
) -> Continuation:
    """Run prompts through the model and return their cache, for `generate(..., cache=)` to continue from.

    A prefix that many prompts share, such as a system prompt, is then computed and stored only once. A cache with one
    row serves any number of prompts; a cache with n rows serves any multiple of n prompts.

    >>> prefix = tok.chat_prefix([{"role": "system", "content": text}])
    >>> shared = prefill(params, [prefix], cfg)
    >>> ids, mask = tok.chat(conversations, after=prefix)
    >>> out = generate(params, ids, key, cfg, attention_mask=mask, cache=shared)

    Args:
        params: the parameters.
        ids: int32[B, P], the prompts.
        cfg: only `cfg.model`, the special tokens, `prefill_chunk_size`, `cache_dtype` and `adapter` are used. Calls
            that continue the cache must use the same adapter.
        attention_mask: `[B, P]`, as in `generate`.
        cache: a cache of the tokens before the prompts, as in `generate`.

    Raises:
        InputError, ConfigError, TypeError: as for `generate`.
    """
    check_call(params, cfg)
    read = ("model", "pad_token_id", "eos_token_id", "bos_token_id", "prefill_chunk_size", "cache_dtype", "adapter")
    cfg = GenerationConfig(max_new_tokens=1, **{name: getattr(cfg, name) for name in read})
    if not is_traced(cfg):  # merge per-prompt eos ids, because `cfg` may be meant for a later call with more prompts
        cfg = cfg.replace(eos_token_id=eos_list(cfg.eos_token_id) or None)
    inputs = CallInputs(ids, attention_mask=attention_mask, cache=cache)
    prepared = partial(prepare, params, cfg, inputs, Extensions())
    if is_traced(params, cfg, inputs) or under_jit():
        call = prepared(eager=False)
        return loop.continuation_of(call.run, call.request)

    def run(call: Prepared) -> Continuation:
        check_call_memory(call.run, call.request.ids.shape[1])
        return cut_continuation(call, prefill_only(call.run, call.request))

    return run_fitting(partial(prepared, eager=True), run)


def _check_streamer(streamer: Streamer | RowStreamer, cfg: GenerationConfig) -> None:
    if not (has_methods(streamer, "put", "end") or has_methods(streamer, "put_row", "end")):
        raise TypeError(
            f"streamer must have the methods put and end, or put_row and end, got {type(streamer).__name__}"
        )
    if cfg.num_beams > 1:
        raise InputError(f"a streamer cannot follow beams, got num_beams={cfg.num_beams}: leave the streamer out")
    if isinstance(streamer, TextStreamer) and cfg.num_return_sequences > 1:
        raise InputError(
            f"a TextStreamer prints one sequence, got num_return_sequences={cfg.num_return_sequences}: set it to 1, or "
            "pass a TextRowStreamer"
        )


def _host_calls(given: Any, cfg: GenerationConfig, eager: bool) -> HostCalls:
    """Return the `HostCalls` of a `prefix_allowed_tokens_fn` that is not an automaton."""
    function: Any = given
    if not callable(given):
        raise TypeError(f"prefix_allowed_tokens_fn must be a function or a TokenAutomaton, got {type(given).__name__}")
    check_arguments("prefix_allowed_tokens_fn", function, "row", "ids")
    # As in transformers, all beams of a prompt have the same `row`.
    return HostCalls(function, cfg.model.vocab_size, cfg.num_beams // cfg.num_beam_groups, eager)


def _run(
    prepared: Prepared,
    streamer: Streamer | RowStreamer | None,
    seconds: float | None,
    calls: HostCalls | None,
) -> GenerateOutput:
    """Run an eager call. Raise `GenerationError` if any row failed."""
    check_call_memory(prepared.run, prepared.request.ids.shape[1])
    if streamer is None and seconds is None:
        decoded = run_whole(prepared.run, prepared.request, mode=prepared.mode)
    else:
        deadline = None if seconds is None else time.monotonic() + seconds
        decoded = run_watched(prepared, streamer, deadline)
    jax.block_until_ready(decoded.reasons)
    if calls is not None and calls.error is not None:
        raise calls.error
    out = output(prepared, decoded)
    raise_failures(out)
    if streamer is not None:
        streamer.end()
    return out
