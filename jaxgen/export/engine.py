"""Export the loop of an `Engine`, for a host that runs it chunk by chunk and adds prompts between chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.config.generation_config import GenerationConfig, model_of
from jaxgen.decoding.chunks import Arrivals, open_queue, run_chunk
from jaxgen.decoding.hook import StepHook
from jaxgen.decoding.lanes import Lanes
from jaxgen.decoding.request import Request
from jaxgen.engine.device_loop import Loop
from jaxgen.engine.prefix_index import Prefixes
from jaxgen.engine.schedule import Schedule
from jaxgen.errors import ConfigError, check_whole
from jaxgen.export.file import ExportedPrograms
from jaxgen.export.lowering import PLATFORMS, check_export, description, exported, shapes_of
from jaxgen.export.plain import KEYS, flat_params, flatten, param_names, unflatten
from jaxgen.generation import extensions_of
from jaxgen.model.context import Context
from jaxgen.request.checks import check_call
from jaxgen.request.prompt import PromptReader
from jaxgen.request.prompt_options import PromptOptions

_STEPS = 8  # default number of steps in a chunk; the host can change it
# Maps the fields of a request to the names of the programs' inputs. Options keep their own names.
_FIELDS = {"ids": "ids", "mask": "attention_mask", "budget": "max_new_tokens"}
_NEWS = ("number", "sequences", "index", "own_key", "cancelled")


def export_engine(
    params,
    cfg: GenerationConfig,
    *,
    slots: int,
    prompt_width: int,
    platforms: Sequence[str] = PLATFORMS,
    logits_processor: Sequence[Callable] | None = None,
    stopping_criteria: Sequence[Callable] | None = None,
    hook: StepHook | None = None,
) -> ExportedPrograms:
    """Return an `Engine`'s programs, so that a host without jaxgen can answer prompts as they arrive.

    >>> export_engine(params, cfg, slots=16, prompt_width=512).save("engine.zip")

    `open` creates the initial state, in which all slots are free. `chunk` adds prompts, runs a few steps, and returns
    the next state and a journal of what happened. The tokens are the same as with an `Engine`, except that rounding may
    differ in 16-bit dtypes. Grammars and stop strings are not supported, because they need tables that the host cannot
    build. docs/production.md contains an example of a host.

    Args:
        params: the parameters, or their shapes as `jax.ShapeDtypeStruct`. The programs take parameters as an argument.
        cfg: the options, which are the defaults for prompts, as in `Engine`.
        slots: the number of sequences decoded at a time, and the maximum number of prompts that a chunk can add.
        prompt_width: the maximum number of tokens in a prompt.
        platforms: the platforms that the programs run on: one or more of cpu, cuda, tpu and rocm.
        logits_processor, stopping_criteria, hook: as in `generate`; each applies to all prompts. These objects and
            their arrays become part of the programs.

    Raises:
        InputError, ConfigError, TypeError: for the same reasons as in `Engine`, or because an option needs the host.
        ImportError: `flatbuffers` is not installed.
    """
    model_of(cfg)
    check_export(params, cfg, platforms)
    check_whole("slots", slots)
    check_whole("prompt_width", prompt_width)
    _check_options(cfg)
    form = PromptOptions(cfg, prompt_width)
    extensions = extensions_of(cfg, logits_processor, stopping_criteria, None, hook)
    engine = Loop.of(form, extensions, slots, steps=_STEPS, key_impl=KEYS)
    schedule = Schedule(
        PromptReader(form), {}, engine.places, slots, np.zeros(2, np.uint32), Prefixes(0, prompt_width, 0)
    )
    nobody = _as_inputs(schedule.no_arrivals())
    nobody["sequences"][:], nobody["max_new_tokens"][:] = cfg.num_return_sequences, form.capacity

    values = nobody | {"steps": np.asarray(_STEPS, np.int32)}
    programs, state = _programs(params, cfg, engine, form, values, platforms)
    outputs = jax.tree.unflatten(programs["chunk"].out_tree, programs["chunk"].out_avals)[1]
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in state.values())
    about = description("engine", params, cfg, shapes_of(values), outputs, programs)
    about |= {"slots": slots, "most_waiting": engine.places, "state_bytes": state_bytes, "journal": _journal(cfg)}
    return ExportedPrograms(about, values, programs)


def _check_options(cfg: GenerationConfig) -> None:
    if cfg.stop_strings is not None:
        raise ConfigError("stop_strings need tables that an exported engine does not have: match them on the host")
    if cfg.on("min_length"):
        raise ConfigError("min_length depends on each prompt's length: set min_new_tokens, which the host can change")


def _programs(
    params, cfg: GenerationConfig, engine: Loop, form: PromptOptions, values: dict[str, Any], platforms: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the programs by name, and the state's shapes. `values` are `chunk`'s default inputs, without arrivals."""
    names = param_names(params)

    def run_of(params: dict[str, Any]) -> Any:
        tree = jax.tree.map(params.__getitem__, names)
        check_call(tree, cfg)
        return dataclasses.replace(engine.run(tree, {}), context=Context(divided=False, portable=True))

    def open_state(params: dict[str, Any]) -> Any:
        arrivals = _arrivals(values, form)
        return open_queue(run_of(params), arrivals, **engine.of_open)

    arrays = shapes_of(flat_params(params))
    like = jax.eval_shape(open_state, arrays)

    def open_plain(params: dict[str, Any]) -> dict[str, Any]:
        return flatten(open_state(params))

    def chunk(params: dict[str, Any], state: dict[str, Any], inputs: dict[str, Any]) -> Any:
        arrivals = _arrivals(inputs, form)
        before = unflatten(like, state)
        after, journal = run_chunk(run_of(params), before, arrivals, inputs["steps"], **engine.of_chunk)
        return flatten(after), {"journal": journal}

    state = jax.eval_shape(open_plain, arrays)
    programs = {
        "open": exported(open_plain, platforms, arrays),
        "chunk": exported(chunk, platforms, arrays, state, shapes_of(values)),
    }
    return programs, state


def _as_inputs(arrivals: Arrivals) -> dict[str, np.ndarray]:
    """Return the inputs for the program `chunk` that describe `arrivals`, as a dict of arrays by name."""
    news = {name: getattr(arrivals, name) for name in _NEWS} | {"key": arrivals.key_data}
    fields = {name: getattr(arrivals.request, field) for field, name in _FIELDS.items()}
    return fields | flatten(arrivals.request.options) | news


def _arrivals(inputs: dict[str, Any], form: PromptOptions) -> Arrivals:
    """Return the arrivals that the inputs describe; this is the inverse of `_as_inputs`."""
    options = unflatten({name: form.off[name] for name in sorted(form.off)}, inputs)
    unusual = jnp.zeros(inputs["number"].shape, bool)
    for name in form.own.intersection(form.rare):
        for value, off in zip(jax.tree.leaves(options[name]), jax.tree.leaves(form.off[name]), strict=True):
            value = jnp.asarray(value)
            unusual |= jnp.any(value != jnp.asarray(off)[None], axis=tuple(range(1, value.ndim)))
    news: dict[str, Any] = {name: jnp.asarray(inputs[name]) for name in _NEWS}
    ids, mask, budget = (jnp.asarray(inputs[name]) for name in _FIELDS.values())
    logged = None if form.cfg.output_logprobs is None else jnp.ones(unusual.shape, bool)
    lanes = Lanes(unusual, logged, form.rare)
    request = Request(ids, mask, jnp.minimum(budget, form.capacity), options, lanes=lanes)
    first_sequence = jnp.zeros_like(news["sequences"])  # a prompt is sent with all of its sequences
    return Arrivals(request, key_data=jnp.asarray(inputs["key"]), first_sequence=first_sequence, **news)


def _journal(cfg: GenerationConfig) -> str:
    """Return a description of the journal's format."""
    columns = "number, sequence, token or -1, stop reason or 0"
    if cfg.output_logprobs:
        columns += ", the float32 bits of the token's log-probability"
    if cfg.top_logprobs:
        columns += f", the ids of the {cfg.top_logprobs} most likely tokens, the bits of their log-probabilities"
    return f"first row: entries, waiting prompts, steps so far. Each entry: {columns}"
