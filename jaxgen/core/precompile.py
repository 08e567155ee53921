"""warmup(): compile programs before the first call needs them.

The module is named differently from the function, so that `jaxgen.warmup` is always the function. `Engine.warmup` does
the same for an engine.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from jaxgen.buckets import capacity_for, prompt_bucket
from jaxgen.core.config.availability import refuse_argument, refuse_unavailable
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.request.assistant import open_assistant
from jaxgen.core.request.cache_memory import check_call_memory
from jaxgen.core.request.checks import check_call, extensions_of
from jaxgen.core.request.driver import compile_for, run_fitting
from jaxgen.core.request.prepare import CallInputs, Prepared, prepare
from jaxgen.errors import InputError
from jaxgen.progress import progress_bar

_OF_CALL = "logits_processor stopping_criteria prefix_allowed_tokens_fn tokenizer assistant hook".split()


def warmup(
    params,
    cfg: GenerationConfig,
    widths: Iterable[int],
    lengths: Iterable[int],
    *,
    prompts: int = 1,
    key=None,
    streaming: bool = False,
    progress: bool = False,
    **call: Any,
) -> int:
    """Compile the programs that calls to `generate` will need, so that the first calls do not have to wait.

    >>> warmup(params, cfg, widths=range(1, 129), lengths=[256], key=jax.random.key(0))
    3

    Each program serves all widths and lengths that round up to the same sizes, and all values of traced options. For
    each pair of sizes, compile one program (three with `streaming`) and generate one token with it. Only the 64 most
    recently used programs are kept. Return the number of pairs of sizes.

    Args:
        params: the parameters, as in later calls.
        cfg: the options, as in later calls; `max_new_tokens` may differ.
        widths, lengths: the expected widths of prompts, and the expected values of `max_new_tokens`.
        prompts: the number of prompts per call.
        key: None for greedy decoding. For sampling, any key with the same shape and dtype as in later calls.
        streaming: compile the programs for calls with a streamer or `max_time`.
        progress: if True, show a progress bar of tqdm on stderr, which counts pairs of sizes.
        **call: more arguments, as in later calls to `generate`: `logits_processor`, `stopping_criteria`,
            `prefix_allowed_tokens_fn` (a `TokenAutomaton`), `tokenizer`, `assistant`, `hook`.

    Raises:
        InputError, ConfigError, TypeError: as for `generate`; if widths, lengths or prompts are below 1; or if
            `progress` is True and tqdm is not installed.
    """
    for name in call:
        if name not in _OF_CALL:
            refuse_argument("warmup", name, ["prompts", "key", "streaming", "progress", *_OF_CALL])
    check_call(params, cfg)
    refuse_unavailable(cfg)
    of_call = dict.fromkeys(_OF_CALL) | call
    allowed, assistant, draft = of_call.pop("prefix_allowed_tokens_fn"), of_call.pop("assistant"), None
    if not isinstance(allowed, TokenAutomaton | None):
        raise TypeError(
            "prefix_allowed_tokens_fn must be a TokenAutomaton here: programs with a function are not reused"
        )
    if cfg.token_healing:
        raise InputError("programs with token_healing depend on the prompts: leave it out, or call generate itself")
    if assistant is not None:
        draft, cfg = open_assistant(assistant, cfg)
    extensions = dataclasses.replace(extensions_of(cfg, **of_call), allowed=allowed)
    columns = {prompt_bucket(width) for width in _sizes("widths", widths)}
    capacities = {capacity_for(length, cfg.records) for length in _sizes("lengths", lengths)}
    (rows,) = _sizes("prompts", [prompts])
    pairs = list(itertools.product(sorted(columns), sorted(capacities)))
    with progress_bar(progress, "compiling", len(pairs), "pairs of sizes") as add:
        for width, length in pairs:
            sized = cfg.replace(max_new_tokens=length)
            mask = np.broadcast_to(np.arange(width) == width - 1, (rows, width))  # a prompt can have any length
            inputs = CallInputs(np.zeros((rows, width), np.int32), key, attention_mask=mask)
            watched = streaming or cfg.max_time is not None
            prepared = partial(prepare, params, sized, inputs, extensions, eager=True, assistant=draft)
            run_fitting(prepared, partial(_compile, width=width, watched=watched))
            add(1)
    return len(pairs)


def _compile(prepared: Prepared, width: int, watched: bool) -> None:
    check_call_memory(prepared.run, width)
    compile_for(prepared, watched)


def _sizes(name: str, given: Iterable[int]) -> list[int]:
    sizes = list(given)
    wrong = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1]
    if wrong or not sizes:
        raise InputError(f"{name} must be whole numbers of at least 1, got {wrong[0] if wrong else 'none'!r}")
    return sizes
