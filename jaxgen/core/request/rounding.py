"""Round the sizes of an eager call up, so that a few programs serve many calls.

Prompts become wider by padding on the left, which the program moves to the right. Additional prompts are copies of the
first one that end after one token. Neither changes a result: both are cut off before anybody sees them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgen.buckets import prompt_bucket, rows_bucket
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import TRACED
from jaxgen.core.decoding.continuation import Continuation
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.request import Array, Request
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.model.sharding import rows_on

Tree = TypeVar("Tree")


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


def cut_prompts(tree: Tree, prompts: int, rounded: int) -> Tree:
    """Drop the rows of the additional prompts from arrays whose first axis has the rows of `rounded` prompts."""
    return jax.tree.map(lambda x: np.asarray(x)[: x.shape[0] * prompts // rounded], tree)
