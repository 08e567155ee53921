"""Prepare a call to generate(): normalize its arguments, check them, and, in an eager call, round sizes up.

Sizes are rounded up so that a few programs serve many calls. Prompts become wider by padding on the left, which the
program moves to the right. Additional prompts are copies of the first one that end after one token. Neither changes a
result: both are cut off before anybody sees them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxgen.buckets import capacity_for, prompt_bucket, rows_bucket
from jaxgen.core.config.availability import check_options, normal_form
from jaxgen.core.config.generation_config import GenerationConfig, warn_unused
from jaxgen.core.config.generation_options import TRACED
from jaxgen.core.decoding.continuation import Continuation
from jaxgen.core.decoding.continuous.slots import Continuous
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.loop import Mode
from jaxgen.core.decoding.modes import mode_of
from jaxgen.core.decoding.request import Array, Request
from jaxgen.core.decoding.run import Run, is_expanded
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.logits.row_options import OptionValues
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.context import Context
from jaxgen.core.model.sharding import is_divided, mesh_of, replicate, rows_on
from jaxgen.core.request.assistant import Assistant, check_drafting, with_draft
from jaxgen.core.request.checks import (
    check_cache,
    check_grammar,
    check_key,
    check_lengths,
    check_longrope,
    check_processes,
    check_room,
    check_slots,
)
from jaxgen.core.request.inputs import is_traced, mask_of, negative_prompts, prompts_of
from jaxgen.core.request.lengths import beyond
from jaxgen.errors import ConfigError, InputError, warn
from jaxgen.programs import Program
from jaxgen.shapes import repeat_rows

Tree = TypeVar("Tree")


@flax.struct.dataclass
class CallInputs:
    """The arrays of a call, as the caller passed them."""

    ids: Any
    key: Any = None
    attention_mask: Any = None
    inputs_embeds: Any = None
    cache: Any = None
    negative_prompt_ids: Any = None
    negative_prompt_attention_mask: Any = None


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A call that is ready to run.

    Attributes:
        mode: the decode mode.
        run: the constants of the run.
        request: the prompts, with sizes rounded up if the call is eager.
        ids: int32[B, P], the prompts as passed; P is 0 if only embeddings were passed.
        mask: bool[B, P], True for tokens.
        width: the width of the prompts as passed, including embeddings.
        new_tokens: the maximum number of tokens that a row can generate, before rounding up.
    """

    mode: Mode
    run: Run
    request: Request
    ids: Array
    mask: Array
    width: int
    new_tokens: int

    @property
    def prompts(self) -> int:
        """The number of prompts as passed, B."""
        return self.mask.shape[0]

    @property
    def has_more_prompts(self) -> bool:
        """True if the number of prompts is rounded up."""
        return self.run.prompts != self.prompts

    def cut(self, tree: Tree) -> Tree:
        """Drop the rows of the additional prompts from arrays whose first axis has the rows of all prompts."""
        return jax.tree.map(lambda x: np.asarray(x)[: x.shape[0] * self.prompts // self.run.prompts], tree)


def prepare(
    params,
    cfg: GenerationConfig,
    inputs: CallInputs,
    extensions: Extensions,
    *,
    eager: bool,
    assistant: Assistant | None = None,
    more_prompts: bool = True,
) -> Prepared:
    """Check a call, and return the inputs of the loop.

    In an eager call, the prompt width, the number of new tokens and, with `more_prompts`, the number of prompts are
    rounded up, so that a few programs serve all calls. Prompts are padded on the left; the program left-aligns them.
    Inside the caller's own `jax.jit`, sizes are not rounded up.

    Raises:
        InputError, ConfigError, TypeError: the call is not valid.
    """
    ids, embeds = prompts_of(inputs.ids, inputs.inputs_embeds, cfg, inputs.cache is not None)
    has_ids = not (inputs.ids is None and embeds is not None)
    mask = mask_of(inputs.attention_mask, ids, cfg, embeds is not None)
    prompts, width = ids.shape
    key = check_key(inputs.key, cfg, prompts)
    mesh = mesh_of(params)
    cache = None if inputs.cache is None else _continuation(inputs.cache, mesh, eager)
    mode = mode_of(cfg, assisted=assistant is not None)
    needs = mode.needs(cfg)
    _check(cfg, prompts, cache, mesh, extensions, mode)
    if cfg.slots is not None:
        mode = Continuous(mode, cfg.slots)
    if mode.drafts:
        check_drafting(cfg, assistant, prompts, has_ids and (cache is None or cache.tokens is not None))
    negative_ids, negative_mask = inputs.negative_prompt_ids, inputs.negative_prompt_attention_mask
    if cfg.on("guidance_scale") or negative_ids is not None or negative_mask is not None:
        negative_ids, negative_mask = negative_prompts(negative_ids, negative_mask, cfg, prompts, has_ids)
    warn_unused(cfg)

    cached = None if cache is None else _cached_tokens(cache, prompts, eager)
    room = width if cache is None else width + cache.slots
    new_tokens, budget = _budget(cfg, mask, cached, room, extensions, eager)
    if negative_mask is not None and not is_traced(negative_mask, budget):
        check_longrope(cfg.model, np.sum(negative_mask, axis=-1), np.asarray(budget))
    given = (ids, mask) if has_ids else (ids[:, :0], mask[:, :0])
    slots = 0 if cache is None else _slots(cfg, cache, mask, cached, negative_mask, mesh, eager)
    capacity, rounded = new_tokens, prompts
    if eager:
        capacity = capacity_for(new_tokens, recorded=cfg.records)
        rounded = rounded_prompts(cfg, prompts, cache, extensions, mesh) if more_prompts else prompts
        ids, mask, embeds, negative_ids, negative_mask = jax.tree.map(
            widen, (ids, mask, embeds, negative_ids, negative_mask)
        )
    context = Context(mesh is not None or is_divided(params) if eager else None)
    run = Run(params, normal_form(cfg), extensions, rounded, capacity, needs, slots, context, mesh=mesh)
    if assistant is not None or run.cfg.assistant_early_exit is not None:
        run = with_draft(run, assistant)
    # The program's arguments must be arrays, so Python numbers become arrays.
    run, options = _without_options(run, np.asarray if eager else jnp.asarray)
    grammar = extensions.allowed.start if isinstance(extensions.allowed, TokenAutomaton) else None
    stops = None if extensions.stop_strings is None else extensions.stop_strings.start
    request = Request(ids, mask, budget, options, grammar, stops, key=key, cache=cache, embeds=embeds)
    request = dataclasses.replace(request, negative_ids=negative_ids, negative_mask=negative_mask)
    if rounded > prompts:
        request, extensions = add_prompts(request, extensions, rounded)
        run = dataclasses.replace(run, extensions=extensions)
    return Prepared(mode, run, request, *given, width, new_tokens)


def _without_options(run: Run, as_array: Callable) -> tuple[Run, OptionValues]:
    """Remove the values of per-prompt options from the run. Return the run and the values for `Request.options`."""
    draft, options = (None, {}) if run.draft is None else _without_options(run.draft, as_array)
    cfg, own = jax.tree.map(as_array, run.cfg.split())
    return dataclasses.replace(run, cfg=cfg, draft=draft), options | own


def _check(
    cfg: GenerationConfig,
    prompts: int,
    cache: Continuation | None,
    mesh: Mesh | None,
    extensions: Extensions,
    mode: Mode,
) -> None:
    """Raise an error if parts of a call are incompatible."""
    check_options(cfg, prompts)
    if cache is not None:
        check_cache(cache, cfg, prompts, extensions, mode)
    if mesh is not None and mesh.is_multi_process:
        check_processes(cfg, extensions)
    if isinstance(extensions.allowed, TokenAutomaton):
        check_grammar(extensions.allowed, cfg, prompts)
    if cfg.slots is not None:
        check_slots(cfg, cache, extensions, mode)


_wrapped = Program(Continuation.from_cache, "generate (cache)")


def _continuation(cache, mesh: Mesh | None, eager: bool) -> Continuation:
    """Return a call's cache as a `Continuation`, on the mesh if there is one."""
    if not isinstance(cache, Continuation | KVCache):
        raise TypeError(
            f"cache must be the cache of an earlier output, or a jaxgen.KVCache, got {type(cache).__name__}"
        )
    cache = cache if isinstance(cache, Continuation) else _wrapped(cache)
    return replicate(cache, mesh) if eager else cache


def _cached_tokens(cache: Continuation, prompts: int, eager: bool) -> Array:
    """Return the number of cached tokens before each prompt, as int32[B]."""
    return np.repeat(np.asarray(cache.count), prompts // cache.rows) if eager else repeat_rows(cache.count, prompts)


def _slots(
    cfg: GenerationConfig, cache: Continuation, mask, cached, negative_mask, mesh: Mesh | None, eager: bool
) -> int:
    """Return the number of cache slots for cached tokens, plus those for the prompts unless they share cache rows."""
    prompts = mask.shape[0]
    own = cache.rows == prompts or cfg.on("guidance_scale") or is_expanded(cache.rows, prompts, mesh)
    if not eager:
        negative = 0 if negative_mask is None else negative_mask.shape[1]
        return max(cache.slots + (mask.shape[1] if own else 0), negative)
    negative = 0 if negative_mask is None else int(negative_mask.sum(axis=-1).max())
    tokens = cached + mask.sum(axis=-1) if own else cached
    return prompt_bucket(max(int(tokens.max()), negative))


def _budget(
    cfg: GenerationConfig, mask: Array, cached: Array | None, room: int, extensions: Extensions, eager: bool
) -> tuple[int, Array]:
    """Return the maximum number of new tokens in any row, and the budget of each prompt, int32[B].

    `max_new_tokens` takes precedence over `max_length`. `max_length` counts all tokens in a row, including
    `cached int32[B]` tokens before the prompt. `room` is a static upper bound on a row's length before generation.
    """
    prompts = mask.shape[0]
    lengths = mask.sum(axis=-1, dtype=np.int32) + (0 if cached is None else cached)
    if cfg.on("max_new_tokens"):
        budget: Any = cfg.max_new_tokens
        if np.ndim(budget) == 1 and budget.shape != (prompts,):
            raise InputError(f"max_new_tokens has {budget.shape[0]} values for {prompts} prompts")
        new_tokens = _static_budget(cfg, room) if is_traced(budget) else int(np.max(budget))
        xp = np if isinstance(prompts, int) and not is_traced(budget) else jnp  # numpy has no symbolic sizes
        budget = xp.broadcast_to(xp.asarray(budget, np.int32), (prompts,))
    else:
        if cfg.max_length == GenerationConfig.max_length:
            warn(f"neither max_new_tokens nor max_length is set: prompt and answer end at {cfg.max_length} tokens")
        longest = int(lengths.max()) if eager else room
        beyond(longest, cfg.max_length, f"the longest prompt has {'' if eager else 'room for '}{longest} tokens")
        budget = (cfg.max_length - lengths).astype(np.int32)
        new_tokens = int(budget.max()) if eager else cfg.max_length - room
        budget = budget if eager else jnp.minimum(budget, new_tokens)
    if not is_traced(lengths, budget):
        in_pieces = cfg.on("slots") or cfg.on("prefill_chunk_size")
        begun = np.asarray(cached) if cached is not None else 0 if in_pieces else None
        check_lengths(cfg, np.asarray(lengths), np.asarray(budget), begun)
        if isinstance(extensions.allowed, TokenAutomaton):
            check_room(extensions.allowed, cfg, np.asarray(budget))
    else:
        check_longrope(cfg.model, room, new_tokens, 0)
    return new_tokens, budget


def _static_budget(cfg: GenerationConfig, room: int) -> int:
    """Return the number of new tokens that `max_length` allows. Arrays have this size if `max_new_tokens` is traced."""
    if cfg.max_length == GenerationConfig.max_length or cfg.max_length <= room:
        raise ConfigError(
            "max_new_tokens is traced under jit and cannot size arrays: set max_length to the maximum number of "
            f"tokens of prompt and answer, more than the {room} before the answer; it is {cfg.max_length}"
        )
    return cfg.max_length - room


def widen(x: Array) -> Array:
    """Pad `x [B, P, ...]` on the left, up to the next bucket."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (prompt_bucket(x.shape[1]) - x.shape[1], 0)
    return np.pad(x, padding)


def rounded_prompts(
    cfg: GenerationConfig, prompts: int, cache: Continuation | None, extensions: Extensions, mesh: Mesh | None
) -> int:
    """Return the number of prompts for which a program is compiled.

    It is not rounded up if the caller's functions would see the additional rows; with `slots`, where most prompts wait;
    if the cache's keys and values would have to be copied; or with several processes, where one of them alone may lack
    the memory.
    """
    rounded = rows_bucket(prompts)
    is_callers = extensions.processors or extensions.criteria or extensions.hook is not None
    if mesh is not None and mesh.is_multi_process:
        return prompts
    if cfg.slots is not None or is_callers or not isinstance(extensions.allowed, TokenAutomaton | None):
        return prompts
    if cache is not None and cache.rows > 1 and (cache.rows, cache.kv.rows) != (prompts, rows_on(mesh, rounded)):
        return prompts
    return rounded


def add_prompts(request: Request, extensions: Extensions, prompts: int) -> tuple[Request, Extensions]:
    """Add copies of the first prompt, up to `prompts` prompts, each with a budget of one token."""

    def add(x: Array) -> Array:
        x = np.asarray(x)
        return np.concatenate([x, np.broadcast_to(x[:1], (prompts - len(x), *x.shape[1:]))])

    def add_values(value: Any, rank: int) -> Any:
        return add(value) if np.ndim(value) > rank else value

    def add_states(state: Any) -> Any:
        return add_values(state, 0)

    budget, key, cache = add(request.budget), request.key, request.cache
    budget[request.ids.shape[0] :] = 1
    if key is not None and key.ndim:
        key = jax.random.wrap_key_data(add(jax.random.key_data(key)), impl=jax.random.key_impl(key))
    if cache is not None and cache.rows > 1:
        tokens, count = jax.tree.map(add, (cache.tokens, cache.count))
        cache = dataclasses.replace(cache, tokens=tokens, count=count)
    arrays = {name: getattr(request, name) for name in ("ids", "mask", "embeds", "negative_ids", "negative_mask")}
    options = {
        name: jax.tree.map(add_values, value, TRACED[name].kind.ranks) for name, value in request.options.items()
    }
    states = jax.tree.map(add_states, {"grammar": request.grammar, "stop_strings": request.stop_strings})
    request = dataclasses.replace(
        request, **jax.tree.map(add, arrays), **states, options=options, budget=budget, key=key, cache=cache
    )
    allowed, strings = extensions.allowed, extensions.stop_strings
    if isinstance(allowed, TokenAutomaton):
        allowed = dataclasses.replace(allowed, start=add_states(allowed.start))
    if strings is not None:
        strings = dataclasses.replace(strings, start=add_states(strings.start))
    return request, dataclasses.replace(extensions, allowed=allowed, stop_strings=strings)
