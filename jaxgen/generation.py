"""generate(): check the request, prepare it, run one decoder, shape the output.

Called eagerly, it rounds prompt width and length up to buckets, so that few programs serve all requests, and gives the
numbers of the config to the program as arguments. Called inside the caller's own `jax.jit` it is traced with the
shapes that it is given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxgen.config.availability import refuse_options, refuse_unbuilt
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.tables import eos_list
from jaxgen.decoding import loop
from jaxgen.decoding.continuation import Continuation
from jaxgen.decoding.extensions import Extensions, HostCalls, as_pytree, functions
from jaxgen.decoding.hook import StepHook
from jaxgen.decoding.loop import Mode
from jaxgen.decoding.modes import mode_of
from jaxgen.errors import InputError, NotBuiltYetError
from jaxgen.grammar.stop_strings import StopStrings
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.model.cache import KVCache
from jaxgen.output import GenerateOutput, output, raise_failures
from jaxgen.request.checks import check_call
from jaxgen.request.driver import Streamer, prefill_only, run_watched, run_whole
from jaxgen.request.prepare import CallInputs, Prepared, prepare, under_jit
from jaxgen.request.prompts import is_traced
from jaxgen.text.streaming import TextStreamer


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
        ids: int32[B, P], the prompts, padded to one width. None begins with `bos_token_id`.
        key: None for greedy decoding; for sampling one `jax.random.key`, or `key[B]`, one per prompt. With one
            key, prompt b uses `fold_in(key, b)`.
        cfg: what to do; `cfg.model` says for which model. Options are set with `cfg.replace`.
        attention_mask: `[B, P]`, 0 where ids is padding, on whichever side. Left out, it follows from the pad id as
            in transformers: pad tokens are padding unless the pad id is an eos id too.
        inputs_embeds: `[B, P, D]`, what the model reads in place of the embeddings of `ids`. With ids None the
            processors know, and the output has, only what is generated.
        cache: the `cache` of an earlier output, or of `prefill`, to go on from: `ids` are then the new tokens only,
            and the result is that of a run from the beginning. It has as many rows as there are prompts, or fewer that
            divide them: then B / rows prompts share each. It is not changed.
        logits_processor: functions `(history, scores float32[rows, V]) -> scores`, pure, with `history` a
            `jaxgen.History`; they come after those of the config and before the warpers. A function is a part of the
            compiled program: the same object again compiles nothing. One that holds arrays should be a pytree,
            `jax.tree_util.Partial` or a `flax.struct.dataclass`, whose arrays are then arguments.
        stopping_criteria: functions `(history, scores) -> bool[rows]`, pure, called with the new token in the history:
            which rows end.
        prefix_allowed_tokens_fn: a `TokenAutomaton`; or a Python function `(row, ids) -> list of ids` that is called on
            the host in each step for each unfinished row, with its ids, int32[n], without padding.
        negative_prompt_ids: int32[B, Q], for `guidance_scale`: what to guide away from; by default the last token of
            each prompt.
        negative_prompt_attention_mask: `[B, Q]`; left out, all of them are tokens.
        streamer: its `put` gets the prompts and then each step's tokens, `end` is called at last.
        tokenizer: a `jaxgen.Tokenizer`, for `stop_strings`.
        hook: a `StepHook`.
        assistant: not built yet.
        **options: refused; a typo or an option of the config.

    Raises:
        InputError: ids, mask or key that do not fit the model, each other or the config.
        ConfigError: an option that cannot be honoured.
        GenerationError: a row that cannot go on, as all tokens are banned or the scores are not numbers. Under the
            caller's own jit nothing raises: see `stop_reasons` of the output.
        NotBuiltYetError: an option that jaxgen knows and cannot do yet.
        TypeError: an argument of the wrong type.

    Gradients do not flow through it: tokens are integers. Use `CausalLM` for a differentiable forward pass.
    """
    refuse_options(options)
    if assistant is not None:
        raise NotBuiltYetError("not built yet: assistant")
    check_call(params, cfg)
    refuse_unbuilt(cfg)
    inputs = CallInputs(
        ids, key, attention_mask, inputs_embeds, cache, negative_prompt_ids, negative_prompt_attention_mask
    )
    extensions = Extensions(
        processors=functions("logits_processor", logits_processor),
        criteria=functions("stopping_criteria", stopping_criteria),
        stop_strings=_stop_strings(cfg, tokenizer),
        hook=_hook(hook),
    )
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must have the methods put and end, got {type(streamer).__name__}")
    if isinstance(streamer, TextStreamer) and cfg.num_return_sequences > 1:
        raise InputError(
            f"a TextStreamer prints one sequence, got num_return_sequences={cfg.num_return_sequences}: set it to 1"
        )
    traced = is_traced(params, cfg, inputs, extensions) or under_jit()
    for name, value in {"streamer": streamer, "max_time": cfg.max_time}.items():
        if traced and value is not None:
            raise InputError(f"{name} needs the host and cannot be used under jit: call generate outside of it")
    with _allowed(prefix_allowed_tokens_fn, cfg, eager=not traced) as (allowed, calls):
        extensions = dataclasses.replace(extensions, allowed=allowed)
        prepared = prepare(params, cfg, inputs, extensions, eager=not traced)
        mode = mode_of(cfg)
        if traced:
            return output(prepared, loop.decode(prepared.run, prepared.request, mode))
        return _run(prepared, mode, streamer, cfg.max_time, calls)


def prefill(
    params, ids, cfg: GenerationConfig, *, attention_mask=None, cache: Continuation | KVCache | None = None
) -> Continuation:
    """Run prompts through the model and return the cache that holds them, for `generate(..., cache=)` to go on from.

    A prefix that many requests share, a system prompt for example, is computed once and read from one place: a cache of
    one row serves any number of prompts, and one of n rows any multiple of n.

    >>> system = prefill(params, [tok.encode(text)], cfg)                                        # doctest: +SKIP
    >>> out = generate(params, ids, key, cfg, attention_mask=mask, cache=system)                 # doctest: +SKIP

    Args:
        params: the parameters.
        ids: int32[B, P], the prompts.
        cfg: `cfg.model`, the special tokens and `prefill_chunk_size` are looked at.
        attention_mask: `[B, P]`, as in `generate`.
        cache: what comes before, as in `generate`.

    Raises:
        InputError, ConfigError, TypeError: as `generate`.
    """
    check_call(params, cfg)
    read = ("model", "pad_token_id", "eos_token_id", "bos_token_id", "prefill_chunk_size")
    cfg = GenerationConfig(max_new_tokens=1, **{name: getattr(cfg, name) for name in read})
    if not is_traced(cfg):  # ids per prompt are those of other prompts than these
        cfg = cfg.replace(eos_token_id=eos_list(cfg.eos_token_id) or None)
    inputs = CallInputs(ids, attention_mask=attention_mask, cache=cache)
    traced = is_traced(params, cfg, inputs) or under_jit()
    prepared = prepare(params, cfg, inputs, Extensions(), eager=not traced)
    return (loop.continuation_of if traced else prefill_only)(prepared.run, prepared.request)


def _stop_strings(cfg: GenerationConfig, tokenizer) -> StopStrings | None:
    if cfg.stop_strings is None:
        return None
    if tokenizer is None:
        raise InputError("stop_strings are text: give the tokenizer too, generate(..., tokenizer=tokenizer)")
    assert cfg.model is not None
    return StopStrings.build(cfg.stop_strings, tokenizer, cfg.model.vocab_size)


def _hook(given):
    if given is None:
        return None
    if not isinstance(given, StepHook):
        raise TypeError(f"hook must be an object of a class derived from jaxgen.StepHook, got {given!r}")
    return as_pytree(given)


@contextlib.contextmanager
def _allowed(given, cfg: GenerationConfig, eager: bool) -> Iterator[tuple[Any, HostCalls | None]]:
    """Give what the loop asks for the allowed tokens, and the calls of the host that it makes."""
    if given is None or isinstance(given, TokenAutomaton):
        yield given, None
        return
    if not callable(given):
        raise TypeError(f"prefix_allowed_tokens_fn must be a function or a TokenAutomaton, got {type(given).__name__}")
    assert cfg.model is not None
    function: Any = given
    calls = HostCalls(function, cfg.model.vocab_size, eager)
    try:
        yield calls.pytree, calls
    finally:
        if eager:
            calls.close()


def _run(
    prepared: Prepared, mode: Mode, streamer: Streamer | None, seconds: float | None, calls: HostCalls | None
) -> GenerateOutput:
    """Run an eager call and raise what failed in it."""
    if streamer is None and seconds is None:
        decoded = run_whole(prepared.run, prepared.request, mode)
    else:
        deadline = None if seconds is None else time.monotonic() + seconds
        decoded = run_watched(prepared, mode, streamer, deadline)
    jax.block_until_ready(decoded.reasons)
    if calls is not None and calls.error is not None:
        raise calls.error
    raise_failures(decoded)
    if streamer is not None:
        streamer.end()
    return output(prepared, decoded)
