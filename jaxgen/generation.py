"""generate(): check the request, prepare it, run one decoder, shape the output.

Called eagerly, it rounds prompt width and length up to buckets, so that few programs serve all requests, and gives the
numbers of the config to the program as arguments. Called inside the caller's own `jax.jit` it is traced with the
shapes that it is given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.config.availability import normal_form, refuse_options, refuse_unbuilt
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.tables import eos_list
from jaxgen.decoding import loop
from jaxgen.decoding.extensions import HostCalls, Rules, as_pytree, functions
from jaxgen.decoding.hook import StepHook
from jaxgen.decoding.prompt import Request, Sizes
from jaxgen.decoding.stopping import StopReason
from jaxgen.errors import InputError, NotBuiltYetError
from jaxgen.grammar.stop_strings import StopStrings
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.model.cache import KVCache
from jaxgen.output import GenerateOutput, output, raise_failures
from jaxgen.request.request import Inputs, check_call, eager_request, is_traced, traced_request, under_jit
from jaxgen.text.streaming import TextStreamer

_CHUNK = 4  # tokens per call of the compiled loop where the host looks on: with a streamer, or max_time


class Streamer(Protocol):
    """What `streamer` must have: `BaseStreamer` of transformers."""

    def put(self, value: np.ndarray) -> None:
        """Take the prompts, int32[B, P], then the next token of each row, int32[rows], over and over."""

    def end(self) -> None:
        """Take note that nothing more comes."""


def generate(
    params,
    ids,
    key,
    cfg: GenerationConfig,
    *,
    attention_mask=None,
    inputs_embeds=None,
    cache: KVCache | None = None,
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
    given = Inputs(attention_mask, inputs_embeds, cache, negative_prompt_ids, negative_prompt_attention_mask)
    rules = Rules(
        processors=functions("logits_processor", logits_processor),
        criteria=functions("stopping_criteria", stopping_criteria),
        stop_strings=_stop_strings(cfg, tokenizer),
        hook=_hook(hook),
    )
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must have the methods put and end, got {type(streamer).__name__}")
    if isinstance(streamer, TextStreamer) and cfg.num_return_sequences > 1:
        raise InputError(
            f"a TextStreamer prints one row, and there are num_return_sequences={cfg.num_return_sequences}"
        )
    traced = is_traced(params, ids, key, cfg, given, rules) or under_jit()
    with _allowed(prefix_allowed_tokens_fn, cfg, eager=not traced) as (allowed, calls):
        rules = dataclasses.replace(rules, allowed=allowed)
        if not traced:
            return _generate_eager(params, ids, key, cfg, given, rules, streamer, calls)
    for name, value in {"streamer": streamer, "max_time": cfg.max_time}.items():
        if value is not None:
            raise InputError(f"{name} needs the host and cannot be used under jit: call generate outside of it")
    return _generate_traced(params, ids, key, cfg, given, rules)


def prefill(params, ids, cfg: GenerationConfig, *, attention_mask=None, cache: KVCache | None = None) -> KVCache:
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
    looked_at = ("model", "pad_token_id", "eos_token_id", "bos_token_id", "prefill_chunk_size")
    cfg = GenerationConfig(max_new_tokens=1, **{name: getattr(cfg, name) for name in looked_at})
    if not is_traced(cfg):  # ids per prompt are those of other prompts than these
        cfg = cfg.replace(eos_token_id=eos_list(cfg.eos_token_id) or None)
    given = Inputs(attention_mask, cache=cache)
    traced = is_traced(params, ids, cfg, given) or under_jit()
    prepare, run = (traced_request, loop.hold) if traced else (eager_request, _hold)
    request, sizes, _, _ = prepare(ids, None, cfg, given, Rules())
    return run(params, cfg if traced else normal_form(cfg), request, sizes)


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


def _generate_eager(params, ids, key, cfg: GenerationConfig, given, rules, streamer, calls) -> GenerateOutput:
    request, sizes, prompt, new_tokens = eager_request(ids, key, cfg, given, rules)
    deadline = None if cfg.max_time is None else time.monotonic() + cfg.max_time
    cfg = jax.tree.map(np.asarray, normal_form(cfg))  # as a program gets it, also where jax.disable_jit holds
    if streamer is None and deadline is None:
        state = _run(params, cfg, rules, request, sizes)
    else:
        state = _watched(params, cfg, rules, request, sizes, prompt, streamer, deadline)
    jax.block_until_ready(state.reasons)
    if calls is not None and calls.error is not None:
        raise calls.error
    raise_failures(state)
    if streamer is not None:
        streamer.end()
    return output(state, *prompt, new_tokens)


def _generate_traced(params, ids, key, cfg: GenerationConfig, given, rules) -> GenerateOutput:
    request, sizes, prompt, new_tokens = traced_request(ids, key, cfg, given, rules)
    cfg = jax.tree.map(jnp.asarray, cfg)  # what is concrete in the config, as if it had been an argument
    return output(_run_traced(params, cfg, rules, request, sizes), *prompt, new_tokens)


def _run_traced(params, cfg, rules: Rules, request: Request, sizes: Sizes) -> loop.State:
    state = loop.start(params, cfg, rules, request, sizes)
    return loop.finish(loop.advance(params, cfg, rules, state, jnp.int32(sizes.capacity)))


_run = jax.jit(_run_traced, static_argnames="sizes")
_hold = jax.jit(loop.hold, static_argnames="sizes")


@functools.partial(jax.jit, static_argnames="sizes")
def _start(params, cfg, rules: Rules, request: Request, sizes: Sizes):
    state = loop.start(params, cfg, rules, request, sizes)
    return state, _progress(state)


@functools.partial(jax.jit, donate_argnames="state")
def _advance(params, cfg, rules: Rules, state: loop.State):
    state = loop.advance(params, cfg, rules, state, state.history.step + _CHUNK)
    return state, _progress(state)


def _finish_late(state: loop.State, out_of_time: jax.Array) -> loop.State:
    reasons = jnp.where(out_of_time & (state.reasons == StopReason.NONE), jnp.int32(StopReason.TIME), state.reasons)
    return loop.finish(dataclasses.replace(state, reasons=reasons))


_finish = jax.jit(_finish_late, donate_argnames="state")
_finish_half = jax.jit(_finish_late)  # of what guidance leaves half is dropped, and cannot be taken over


def _progress(state: loop.State):
    return state.tokens, state.history.step, jnp.all(state.history.done)


def _watched(params, cfg, rules, request, sizes, prompt, streamer: Streamer | None, deadline) -> loop.State:
    """Run the loop in chunks, each dispatched before the tokens of the one before are read."""
    if streamer is not None:
        streamer.put(prompt[0])
    state, progress = _start(params, cfg, rules, request, sizes)
    shown, finished, late = 0, False, False
    while not (finished or late):
        late = deadline is not None and time.monotonic() > deadline
        following = progress
        if not late:
            state, following = _advance(params, cfg, rules, state)
        tokens, step, finished = jax.device_get(progress)
        if streamer is not None:
            for column in range(shown, int(step)):
                streamer.put(tokens[:, column])
        shown, progress = int(step), following
    finish = _finish_half if cfg.on("guidance_scale") else _finish
    return finish(state, np.bool_(late and not finished))
