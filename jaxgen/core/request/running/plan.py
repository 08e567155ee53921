"""The plan of a running loop: everything that is checked and decided before prompts arrive."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgen.core.config.availability import refuse_argument
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.grammar.stop_strings import StopAutomaton
from jaxgen.core.model.lowrank import adapter_count
from jaxgen.core.model.sharding import mesh_of
from jaxgen.core.request.checks import check_call, check_key, extensions_of, typed_key
from jaxgen.core.request.prompt import Prompt, PromptReader
from jaxgen.core.request.prompt_options import PromptOptions
from jaxgen.core.request.running.automaton_tables import grammar_capacity, tables_of
from jaxgen.core.request.running.device_loop import STEPS, Device, Loop, committed
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.core.request.running.prefix_index import Prefixes
from jaxgen.core.request.running.schedule import Job, Pace, Schedule
from jaxgen.errors import InputError, shown


@dataclasses.dataclass(frozen=True)
class Plan:
    """A loop that prompts enter and leave.

    Attributes:
        sizes: the sizes.
        prompts: the reader of prompts, which checks them.
        schedule: the prompts, none at first.
        device: the device side of the loop.
        pace: the number of steps in a chunk.
        has_key: True if the caller passed a key from which each prompt's key is derived.
        mesh: the mesh of the parameters, or None.
        identity: text that is equal in all processes that can run the loop together.
    """

    sizes: EngineSizes
    prompts: PromptReader
    schedule: Schedule
    device: Device
    pace: Pace
    has_key: bool
    mesh: Mesh | None
    identity: str

    def open(self, params: Any) -> Any:
        """Create the loop's state on the device, and return the parameters, committed to it."""
        params = params if self.mesh is not None else committed(params, params)
        self.device.open(params, self.schedule.no_arrivals(), self.schedule.joint)
        return params

    def job(self, prompt: Prompt, group: Hashable) -> Job:
        """Return a job for a prompt, without a record of its results.

        Raises:
            InputError: an automaton of the prompt is too large, or the prompt samples and there is no key.
        """
        if prompt.options["do_sample"] and prompt.key is None and not self.has_key:
            raise InputError("the prompt needs random numbers and the engine has no key: pass Engine(..., key=)")
        automata: dict[str, tuple[Hashable, Any]] = {}  # equal automata have the same key
        if prompt.grammar is not None:
            automata["allowed"] = id(prompt.grammar), prompt.grammar
        if prompt.stop_strings is not None:
            assert self.prompts.tokenizer is not None
            vocab = self.prompts.cfg.model.vocab_size
            stops = StopAutomaton.of(prompt.stop_strings, self.prompts.tokenizer, vocab)
            automata["stop_strings"] = frozenset(prompt.stop_strings), stops
        for name, (_, automaton) in automata.items():
            self.schedule.tables[name].fits(automaton)
        return Job(prompt, None, automata, group)

    def replacement(self, old: Any, new: Any) -> Any:
        """Return new parameters, sharded like the old ones, so that nothing has to be compiled again.

        Raises:
            InputError: the parameters differ in structure, shapes or dtypes.
        """
        check_call(new, self.prompts.cfg)
        forms = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (old, new)]
        if forms[0] != forms[1]:
            raise InputError("params differ in form from those of the engine: create a new engine for them")
        return jax.device_put(new, jax.tree.map(lambda x: x.sharding, old))


def plan_of(
    params: Any,
    cfg: GenerationConfig,
    key: Any = None,
    *,
    sizes: EngineSizes | None = None,
    tokenizer: Any = None,
    prompt_options: Collection[str] | None = None,
    stop_in_prompt: bool = True,
    logits_processor: Sequence[Callable] | None = None,
    stopping_criteria: Sequence[Callable] | None = None,
    hook: Any = None,
    **own_sizes: int | None,
) -> Plan:
    """Check the arguments of an engine and the memory that it needs, and return the plan of its loop.

    The arguments and the errors are as in `Engine`.
    """
    sizes = _sizes(sizes, own_sizes)
    check_call(params, cfg)
    key = typed_key(key)
    check_key(key, cfg, 1)
    has_key = key is not None
    key = key if has_key else jax.random.key(0)
    key_impl = str(jax.random.key_impl(key))
    options = PromptOptions(cfg, sizes.prompt_width, prompt_options, sizes.id_entries, adapter_count(params))
    extensions = extensions_of(cfg.replace(stop_strings=None), logits_processor, stopping_criteria, None, hook)
    prefixes = Prefixes.of(options.full, sizes, hook is not None)
    loop = Loop(options, extensions, sizes.slots, key_impl, prefixes.capacity)
    vocab, prompts = cfg.model.vocab_size, PromptReader(options, tokenizer, key_impl)
    tables, key_data = tables_of(vocab, sizes, tokenizer, stop_in_prompt), np.asarray(jax.random.key_data(key))
    return Plan(
        sizes=sizes,
        prompts=prompts,
        schedule=Schedule(prompts, tables, loop.queue_capacity, sizes.slots, key_data, prefixes),
        device=Device(params, loop, prefixes.bytes(options.full), grammar_capacity(sizes).bytes(vocab)),
        pace=Pace(STEPS),
        has_key=has_key,
        mesh=mesh_of(params),
        identity=repr((cfg, cfg.model, stop_in_prompt, sizes, prefixes.capacity)),
    )


def _sizes(sizes: EngineSizes | None, own_sizes: dict[str, Any]) -> EngineSizes:
    """Return `sizes` with some fields replaced; raise an error if a field does not exist or a size is invalid."""
    if not isinstance(sizes, EngineSizes | None):
        raise TypeError(f"sizes must be an EngineSizes, got {shown(sizes)}")
    names = [size.name for size in dataclasses.fields(EngineSizes)]
    for name in own_sizes:
        if name not in names:
            refuse_argument("Engine", name, [*names, *inspect.signature(plan_of).parameters][:-1])
    return dataclasses.replace(sizes or EngineSizes(), **own_sizes)
