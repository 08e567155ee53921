"""Export `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import export

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.decoding.hook import StepHook
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.output import output
from jaxgen.core.request.flat_call import flat_call, flatten
from jaxgen.errors import ConfigError, check_whole
from jaxgen.export.file import ExportedPrograms
from jaxgen.export.lowering import PLATFORMS, check_platforms, description, exported

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
    check_platforms(platforms)
    _check_sizes(cfg, batch, prompt_width)
    prompts: Any = export.symbolic_shape("b")[0] if batch is None else batch
    own = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
    own |= {"tokenizer": tokenizer, "hook": hook}
    call = flat_call(params, cfg, (prompts, prompt_width), prefix_allowed_tokens_fn, **own)

    def run(params: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
        out = output(*call.run(params, inputs))
        return flatten({name: value for name, value in vars(out).items() if name not in _NOT_RETURNED})

    program = exported(run, platforms, call.params, call.inputs)
    outputs = jax.tree.unflatten(program.out_tree, program.out_avals)
    details = description(call, cfg, outputs, program)
    return ExportedPrograms(details, call.values, {"generate": program})


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
    if batch is None and cfg.slots is not None:
        raise ConfigError(f"batch=None is not offered with slots={cfg.slots}: pass the number of prompts")
