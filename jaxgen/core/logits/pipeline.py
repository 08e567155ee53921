"""Composition of a config's enabled processors and warpers into one transform.

`PROCESSORS` and `WARPERS` contain the function of each option. The functions run in the order of the records in
`jaxgen.core.config.generation_options`, which is transformers' order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.errors import ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import of_stage
from jaxgen.core.config.option import AFTER_GRAMMAR, BEFORE_GRAMMAR, RENORMALIZE, WARP
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.logits.history import History
from jaxgen.core.logits.processors import LARGEST, PROCESSORS, Processor, allow_only
from jaxgen.core.logits.row_options import RowOptions
from jaxgen.core.logits.warpers import WARPERS, top_k_top_p
from jaxgen.errors import InputError


class Transform(Protocol):
    """All processors and warpers as one function."""

    def __call__(self, history: History, scores: jax.Array, given: jax.Array | None = None) -> jax.Array:
        """Return the new scores, float32[rows, V]. In each row, warpers keep the token in `given int32[rows]`."""
        ...


def build_transform(
    options: RowOptions, custom: Sequence[Callable[..., jax.Array]] = (), allowed: Any = None
) -> Transform:
    """Return transformers' processors and warpers as one function. Warpers apply only to rows that sample.

    Args:
        options: the options; only enabled ones are applied.
        custom: the caller's own processors, `(history, scores, options)` or `(history, scores)`.
        allowed: a `TokenAutomaton`, or a function from the history to the tokens that may follow, bool[rows, V].
    """
    cfg = options.cfg
    steps = _processors(BEFORE_GRAMMAR, cfg)
    if allowed is not None:
        steps.append(functools.partial(_grammar, allowed))
    steps += _processors(AFTER_GRAMMAR, cfg)
    steps += [functools.partial(_checked, processor) for processor in custom]
    renormalizing = _processors(RENORMALIZE, cfg)
    draws, samples = cfg.on("do_sample"), options.values.get("do_sample")
    warping = _warpers(cfg) if draws else []
    first_cut = int(cfg.on("temperature"))  # temperature is the first warper, and removes nothing

    def apply(steps: Sequence[Processor], history: History, scores: jax.Array) -> jax.Array:
        for step in steps:
            scores = step(history, scores, options)
        return scores

    def transform(history: History, scores: jax.Array, given: jax.Array | None = None) -> jax.Array:
        # A score of inf would make the probabilities NaN.
        scores = jnp.minimum(apply(steps, history, scores), LARGEST)
        processed = scores = apply(renormalizing, history, scores)
        if not draws or not (warping or renormalizing):
            return scores
        # A NaN score or a traced temperature of 0 makes the whole row NaN; otherwise, warpers could remove the NaN. The
        # highest score is NaN if any score is; temperature needs it too, so XLA computes it once. The temperature's
        # bits are compared, because XLA replaces a value below float32's smallest normal number with 0.
        invalid = jnp.isnan(jnp.max(scores, axis=-1, keepdims=True))
        if cfg.on("temperature"):
            invalid |= lax.bitcast_convert_type(options.number("temperature"), jnp.int32) <= 0
        tempered = apply(warping[:first_cut], history, scores)
        scores = apply(warping[first_cut:], history, tempered)
        if given is not None:
            scores = jnp.where(jnp.arange(scores.shape[1])[None, :] == given[:, None], tempered, scores)
        warped = jnp.where(invalid, jnp.nan, apply(renormalizing, history, scores))
        return warped if samples is None else jnp.where(samples[:, None], warped, processed)

    return transform


def _on(stage: str, cfg: GenerationConfig) -> list[str]:
    """Return the names of a stage's enabled options, in order."""
    return [option.name for option in of_stage(stage) if all(map(cfg.on, (option.name, *option.needs)))]


def _processors(stage: str, cfg: GenerationConfig) -> list[Processor]:
    return [jax.named_scope(name)(PROCESSORS[name]) for name in _on(stage, cfg)]


def _warpers(cfg: GenerationConfig) -> list[Processor]:
    steps = {name: WARPERS[name] for name in _on(WARP, cfg)}
    if "top_k" in steps and "top_p" in steps:  # adjacent options, which can share a search
        steps = {name: top_k_top_p if name == "top_k" else step for name, step in steps.items() if name != "top_p"}
    return [jax.named_scope(step.__name__)(step) for step in steps.values()]


def _grammar(allowed: Any, history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    if not isinstance(allowed, TokenAutomaton):
        return allow_only(scores, allowed(history))
    assert history.grammar is not None
    may_follow = allowed.allowed(history.grammar, options.eos(scores.shape[0]), history.budget - history.step)
    return allow_only(scores, may_follow)


def call(argument: str, function: Callable, *arguments: Any) -> Any:
    """Call a function that the caller passed as `argument`. Raise InputError if the function needs array values."""
    try:
        return function(*arguments)
    except (ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError) as error:
        raise InputError(
            f"a function in {argument} uses the value of an array, but is traced without values: use jax.numpy "
            "instead of numpy, jnp.where instead of if, and no float(), int() or .item()"
        ) from error


def _checked(processor: Callable, history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    arguments = (history, scores) if accepts(processor, "history", "scores") else (history, scores, options)
    result = call("logits_processor", processor, *arguments)
    if not isinstance(result, jax.Array) or (result.shape, result.dtype) != (scores.shape, scores.dtype):
        given = f"{result.dtype}{list(result.shape)}" if isinstance(result, jax.Array) else repr(result)
        raise InputError(f"logits_processor must return the scores, float32{list(scores.shape)}, got {given}")
    return result


def accepts(function: Callable, *arguments: str) -> bool:
    """Return True if a function can be called with these arguments, by position, or has no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True
