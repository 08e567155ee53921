"""Composition of a config's enabled processors and warpers into one transform.

Each option is implemented by the function of the same name in `processors` or `warpers`. The functions run in the order
of the records in `jaxgen.config.generation_options`, which is transformers' order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.errors import ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError
from jax.sharding import Mesh

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.generation_options import of_stage
from jaxgen.config.option import AFTER_GRAMMAR, BEFORE_GRAMMAR, RENORMALIZE, WARP
from jaxgen.errors import InputError
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.logits import processors, warpers
from jaxgen.logits.history import History
from jaxgen.logits.row_options import OptionValues, RowOptions

# A function from the rows' history and scores, float32[rows, V], to new scores.
Processor = Callable[[History, jax.Array], jax.Array]


class Transform(Protocol):
    """All processors and warpers as one function."""

    def __call__(self, history: History, scores: jax.Array, given: jax.Array | None = None) -> jax.Array:
        """Return the new scores, float32[rows, V]. In each row, warpers keep the token in `given int32[rows]`."""
        ...


def build_transform(
    cfg: GenerationConfig,
    values: OptionValues,
    custom: Sequence[Processor] = (),
    allowed: Any = None,
    mesh: Mesh | None = None,
) -> Transform:
    """Return transformers' processors and warpers as one function. Warpers apply only to rows that sample.

    Args:
        cfg: the options; only enabled ones are applied.
        values: the options' values for each row.
        custom: the caller's own processors.
        allowed: a `TokenAutomaton`, or a function from the history to the tokens that may follow, bool[rows, V].
        mesh: the mesh that the scores are split across, or None.
    """
    options = RowOptions(cfg, values, mesh)
    steps = _processors(BEFORE_GRAMMAR, options)
    if allowed is not None:
        steps.append(functools.partial(_grammar, options, allowed))
    steps += _processors(AFTER_GRAMMAR, options)
    steps += [functools.partial(_checked, processor) for processor in custom]
    renormalizing = _processors(RENORMALIZE, options)
    draws, samples = cfg.on("do_sample"), values.get("do_sample")
    warping = _warpers(options) if draws else []
    first_cut = int(cfg.on("temperature"))  # temperature is the first warper, and removes nothing

    def transform(history: History, scores: jax.Array, given: jax.Array | None = None) -> jax.Array:
        # A score of inf would make the probabilities NaN.
        scores = jnp.minimum(_apply(steps, history, scores), processors.LARGEST)
        processed = scores = _apply(renormalizing, history, scores)
        if not draws or not (warping or renormalizing):
            return scores
        # A NaN score or a traced temperature of 0 makes the whole row NaN; otherwise, warpers could remove the NaN. The
        # highest score is NaN if any score is; temperature needs it too, so XLA computes it once. The temperature's
        # bits are compared, because XLA replaces a value below float32's smallest normal number with 0.
        invalid = jnp.isnan(jnp.max(scores, axis=-1, keepdims=True))
        if cfg.on("temperature"):
            invalid |= lax.bitcast_convert_type(options.number("temperature"), jnp.int32) <= 0
        tempered = _apply(warping[:first_cut], history, scores)
        scores = _apply(warping[first_cut:], history, tempered)
        if given is not None:
            scores = jnp.where(jnp.arange(scores.shape[1])[None, :] == given[:, None], tempered, scores)
        warped = jnp.where(invalid, jnp.nan, _apply(renormalizing, history, scores))
        return warped if samples is None else jnp.where(samples[:, None], warped, processed)

    return transform


def _apply(steps: Sequence[Processor], history: History, scores: jax.Array) -> jax.Array:
    for step in steps:
        scores = step(history, scores)
    return scores


def _on(stage: str, cfg: GenerationConfig) -> list[str]:
    """Return the names of a stage's enabled options, in order."""
    return [option.name for option in of_stage(stage) if all(map(cfg.on, (option.name, *option.needs)))]


def _processors(stage: str, options: RowOptions) -> list[Processor]:
    return [functools.partial(_processor, name, options) for name in _on(stage, options.cfg)]


def call(argument: str, function: Processor, history: History, scores: jax.Array) -> Any:
    """Call a function that the caller passed as `argument`. Raise InputError if the function needs array values."""
    try:
        return function(history, scores)
    except (ConcretizationTypeError, TracerArrayConversionError, TracerIntegerConversionError) as error:
        raise InputError(
            f"a function in {argument} uses the value of an array, but is traced without values: use jax.numpy "
            "instead of numpy, jnp.where instead of if, and no float(), int() or .item()"
        ) from error


def _warpers(options: RowOptions) -> list[Processor]:
    steps: list[tuple[str, ...]] = [(name,) for name in _on(WARP, options.cfg)]
    if ("top_k",) in steps and ("top_p",) in steps:  # adjacent options, which can share a search
        at = steps.index(("top_k",))
        steps[at : at + 2] = [("top_k", "top_p")]
    return [functools.partial(_warper, names, options) for names in steps]


def _processor(name: str, options: RowOptions, history: History, scores: jax.Array) -> jax.Array:
    with jax.named_scope(name):
        return getattr(processors, name)(scores, history, options)


def _warper(names: tuple[str, ...], options: RowOptions, history: History, scores: jax.Array) -> jax.Array:
    name = "_".join(names)
    more: dict[str, Any] = {"mesh": options.mesh} if name in ("top_k", "top_p", "top_k_top_p") else {}
    if options.cfg.num_beams > 1 and name not in ("temperature", "top_h"):
        more["min_tokens_to_keep"] = options.at_least(scores.shape[0])
    if name == "temperature":
        more["beams"] = options.cfg.num_beams
    with jax.named_scope(name):
        return getattr(warpers, name)(scores, *map(options.number, names), **more)


def _grammar(options: RowOptions, allowed: Any, history: History, scores: jax.Array) -> jax.Array:
    if not isinstance(allowed, TokenAutomaton):
        return processors.allow_only(scores, allowed(history))
    assert history.grammar is not None
    may_follow = allowed.allowed(history.grammar, options.eos(scores.shape[0]), history.budget - history.step)
    return processors.allow_only(scores, may_follow)


def _checked(processor: Processor, history: History, scores: jax.Array) -> jax.Array:
    result = call("logits_processor", processor, history, scores)
    if not isinstance(result, jax.Array) or (result.shape, result.dtype) != (scores.shape, scores.dtype):
        given = f"{result.dtype}{list(result.shape)}" if isinstance(result, jax.Array) else repr(result)
        raise InputError(f"logits_processor must return the scores, float32{list(scores.shape)}, got {given}")
    return result
