"""Export `generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxgen.config.availability import check_options, refuse_unavailable
from jaxgen.config.generation_config import GenerationConfig, model_of, warn_unused
from jaxgen.config.generation_options import OPTIONS, TRACED
from jaxgen.decoding import loop
from jaxgen.decoding.extensions import Extensions
from jaxgen.decoding.hook import StepHook
from jaxgen.errors import ConfigError, check_whole
from jaxgen.export.file import ExportedPrograms
from jaxgen.export.lowering import PLATFORMS, check_export, description, exported, shapes_of
from jaxgen.export.plain import KEYS, flat_params, flatten, param_names
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.model.context import Context
from jaxgen.output import output
from jaxgen.request.checks import check_call, check_room
from jaxgen.request.extensions import extensions_of
from jaxgen.request.prepare import CallInputs, prepare

_NOT_RETURNED = ("cache", "prompt_width")
# Arguments of `generate` that cannot be exported, and the reasons.
_REFUSED = {
    "streamer": "it is called on the host while tokens are generated: use generate itself",
    "assistant": "a program has one model: use prompt_lookup_num_tokens or assistant_early_exit",
    "cache": "a continuation is not a dict of arrays: pass the whole prompt",
    "inputs_embeds": "pass prompts as ids",
    "negative_prompt_ids": "the negative prompt is always the last token of each prompt",
    "negative_prompt_attention_mask": "the negative prompt is always the last token of each prompt",
}


def export_generate(
    params,
    cfg: GenerationConfig,
    *,
    batch: int | None,
    prompt_width: int,
    platforms: Sequence[str] = PLATFORMS,
    logits_processor: Sequence[Callable] | None = None,
    stopping_criteria: Sequence[Callable] | None = None,
    prefix_allowed_tokens_fn: TokenAutomaton | None = None,
    tokenizer=None,
    hook: StepHook | None = None,
    **others: Any,
) -> ExportedPrograms:
    """Return `generate` with this config as a program that runs with jax alone.

    >>> export_generate(params, cfg, batch=8, prompt_width=128).save("story.zip")

    The program's inputs are the prompts, the data of a random key for sampling, and the values of all traced options
    that are on. Inputs can differ between calls. The program generates the same tokens as `generate`, except
    that rounding may differ in 16-bit dtypes. `max_new_tokens` is also an input; it is capped at the value in `cfg`,
    which sets the size of the arrays.

    Args:
        params: the parameters, or their shapes as `jax.ShapeDtypeStruct`. The program takes parameters as an argument.
        cfg: the options. An option with one value per prompt in `cfg` also has one value per prompt in the program.
        batch: the number of prompts, or None if it can differ between calls; jax then compiles once for each number.
        prompt_width: the width of the prompts; shorter prompts can be padded on either side.
        platforms: the platforms that the program runs on: one or more of cpu, cuda, tpu and rocm.
        logits_processor, stopping_criteria, prefix_allowed_tokens_fn, tokenizer, hook: as in `generate`. These
            objects and their arrays become part of the program.

    Raises:
        InputError, ConfigError, TypeError: for the same reasons as in `generate`, or because an option or argument
            needs the host, which an exported program cannot call.
        ImportError: `flatbuffers` is not installed.
    """
    _refuse(others)
    model_of(cfg)
    refuse_unavailable(cfg)
    check_export(params, cfg, platforms, prefix_allowed_tokens_fn)
    _check_sizes(cfg, batch, prompt_width)
    prompts: Any = export.symbolic_shape("b")[0] if batch is None else batch
    check_options(cfg, prompts)
    warn_unused(cfg)
    extensions = extensions_of(cfg, logits_processor, stopping_criteria, tokenizer, hook)
    extensions = dataclasses.replace(extensions, allowed=prefix_allowed_tokens_fn)
    budget = np.asarray(cfg.max_new_tokens, np.int32)
    if prefix_allowed_tokens_fn is not None:
        check_room(prefix_allowed_tokens_fn, cfg, np.atleast_1d(budget))
    run, values = _program(params, cfg, extensions, budget)
    shape = (prompts, prompt_width)
    inputs = {"ids": jax.ShapeDtypeStruct(shape, np.int32), "attention_mask": jax.ShapeDtypeStruct(shape, np.bool_)}
    if cfg.on("do_sample"):
        inputs["key"] = jax.ShapeDtypeStruct((2,), np.uint32)
    inputs |= shapes_of(values)
    arrays = shapes_of(flat_params(params))
    program = exported(run, platforms, arrays, inputs)
    outputs = jax.tree.unflatten(program.out_tree, program.out_avals)
    return ExportedPrograms(description(params, cfg, inputs, outputs, program), values, {"generate": program})


def _program(
    params, cfg: GenerationConfig, extensions: Extensions, budget: np.ndarray
) -> tuple[Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]], dict[str, np.ndarray]]:
    """Return `generate` as a function of two dicts (parameters and inputs), and the default values of its inputs."""
    most = int(budget.max())
    sized = cfg.reset(["max_length"]).replace(max_new_tokens=most)  # so that max_new_tokens sets the size of arrays
    leaves, static = sized.tree_flatten()
    on = {name: leaf for name, leaf in zip(TRACED, leaves, strict=True) if leaf is not None}
    values = {name: np.asarray(jnp.asarray(x)) for name, x in flatten(jax.tree.map(jnp.asarray, on)).items()}
    values["max_new_tokens"] = budget
    structure, names = jax.tree.structure(on), param_names(params)

    def run(params: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
        given = jax.tree.unflatten(structure, [inputs[name] for name in values if name != "max_new_tokens"])
        own = GenerationConfig.tree_unflatten(static, [given.get(name) for name in TRACED])
        tree = jax.tree.map(params.__getitem__, names)
        check_call(tree, own)
        key = jax.random.wrap_key_data(inputs["key"], impl=KEYS) if "key" in inputs else None
        prepared = prepare(tree, own, CallInputs(inputs["ids"], key, inputs["attention_mask"]), extensions, eager=False)
        run = dataclasses.replace(prepared.run, context=Context(divided=False, portable=True))
        budget = jnp.broadcast_to(jnp.minimum(inputs["max_new_tokens"], most), prepared.request.budget.shape)
        request = dataclasses.replace(prepared.request, budget=budget)
        out = output(prepared, loop.decode(run, request, prepared.mode))
        fields = {field.name: getattr(out, field.name) for field in dataclasses.fields(out)}
        return flatten({name: value for name, value in fields.items() if name not in _NOT_RETURNED})

    return run, values


def _refuse(others: dict[str, Any]) -> None:
    for name in others:
        if name in _REFUSED:
            raise TypeError(f"an exported program has no {name}: {_REFUSED[name]}")
        if name in OPTIONS:
            raise TypeError(f"{name} is an option of the config: use cfg.replace({name}=...)")
        raise TypeError(f"export_generate() has no argument {name!r}")


def _check_sizes(cfg: GenerationConfig, batch: int | None, prompt_width: int) -> None:
    check_whole("prompt_width", prompt_width)
    if batch is not None:
        check_whole("batch", batch)
    if not cfg.on("max_new_tokens"):
        raise ConfigError("max_new_tokens is not set, but an exported program has arrays of fixed size: set it")
    if batch is None and cfg.slots is not None:
        raise ConfigError(f"batch=None is not offered with slots={cfg.slots}: pass the number of prompts")
