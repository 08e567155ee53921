"""The program of an engine, and its state on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxgen.core.decoding.continuous.chunks import Arrivals, open_queue, run_chunk, run_first_chunk
from jaxgen.core.decoding.continuous.slots import Continuous
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.modes import mode_of
from jaxgen.core.decoding.run import Run
from jaxgen.core.model.context import Context
from jaxgen.core.model.sharding import is_divided, mesh_of, replicate
from jaxgen.core.request.cache_memory import check_call_memory
from jaxgen.core.request.prompt_options import PromptOptions
from jaxgen.programs import Program, default_device

STEPS = 8  # maximum number of steps in a chunk
_STATIC = ("mode", "key_impl")
_STATIC_SIZES = ("queue_capacity", "entries", "stored")
_open = Program(open_queue, "Engine (state)", static_argnames=_STATIC + _STATIC_SIZES)
_first_chunk = Program(run_first_chunk, "Engine (first chunk)", static_argnames=_STATIC + _STATIC_SIZES)
_chunk = Program(run_chunk, "Engine (chunk)", static_argnames=_STATIC, donate_argnames=["state"])


class Loop:
    """Everything that stays the same across all chunks of an engine. Parameters and tables may change.

    Args:
        options: the options that prompts may set.
        extensions: the caller's functions.
        slots: the number of slots.
        key_impl: the implementation of random keys.
        stored: the capacity of the prefix store, in blocks; 0 for no store.

    Attributes:
        queue_capacity: the maximum number of prompts waiting on the device.
        of_chunk: the static arguments of `run_chunk`.
        of_open: the static arguments of `open_queue` and `run_first_chunk`.
    """

    def __init__(self, options: PromptOptions, extensions: Extensions, slots: int, key_impl: str, stored: int = 0):
        mode = mode_of(options.full)
        self.options, self.slots, self._extensions = options, slots, extensions
        self._needs = mode.needs(options.full)
        self.queue_capacity = max(2 * slots, 8)
        self.of_chunk: dict[str, Any] = {"mode": Continuous(mode, slots), "key_impl": key_impl}
        # `entries` is the journal's capacity per slot. Steps add entries, and so do sequences that enter the loop.
        sizes = {"queue_capacity": self.queue_capacity, "entries": 2 * STEPS + 8, "stored": stored}
        self.of_open: dict[str, Any] = self.of_chunk | sizes

    def run(self, params: Any, tables: dict[str, Any], mesh: Any = None) -> Run:
        """Return the constants of a chunk."""
        extensions = dataclasses.replace(self._extensions, **tables)
        context = Context(mesh is not None or is_divided(params))
        cfg, capacity = self.options.full, self.options.capacity
        return Run(params, cfg, extensions, self.slots, capacity, self._needs, context=context, mesh=mesh)


class Device:
    """The device side of an engine: its state, and the program that changes it.

    The state includes a prefix store of `store_bytes` bytes, and the table of grammars takes `grammar_bytes` bytes.
    `params` is used only to check the memory and to find the mesh, because each chunk is passed its own parameters.
    """

    def __init__(self, params: Any, loop: Loop, store_bytes: int, grammar_bytes: int = 0):
        self._loop, self._mesh = loop, mesh_of(params)
        run = loop.run(params, {}, self._mesh)
        in_slots = dataclasses.replace(run, cfg=run.cfg.replace(slots=loop.slots))
        check_call_memory(in_slots, loop.options.width, store_bytes, grammar_bytes)
        self._state: Any = None
        self._no_arrivals: Any = None  # kept on the device because most chunks have no arrivals
        self._tables: dict[str, tuple[Any, Any]] = {}  # the latest tables, as given and on the parameters' devices

    def open(self, params: Any, no_arrivals: Arrivals, tables: dict[str, Any]) -> None:
        """Create the state, with all slots free. On a mesh, the first chunk creates the state instead."""
        self._no_arrivals = self._placed(no_arrivals, params)
        if self._mesh is None:
            state = _open(self._run(params, tables), self._no_arrivals, **self._loop.of_open)
            # Chunks return committed states. Commit the first state too, so that no second program is compiled.
            self._state = committed(state, params)

    def step(self, params: Any, arrivals: Arrivals | None, tables: dict[str, Any], steps: int) -> jax.Array:
        """Start a chunk of `steps` steps, and return its journal without waiting for it; see `run_chunk`."""
        placed = self._no_arrivals if arrivals is None else self._placed(arrivals, params)
        run = self._run(params, tables)
        if self._state is None:
            self._state, packed = _first_chunk(run, placed, np.int32(steps), **self._loop.of_open)
        else:
            self._state, packed = _chunk(run, self._state, placed, np.int32(steps), **self._loop.of_chunk)
        return packed

    def _placed(self, tree: Any, params: Any) -> Any:
        """Place the arrays of a tree on the devices of the parameters."""
        return committed(tree, params) if self._mesh is None else replicate(tree, self._mesh)

    def _run(self, params: Any, tables: dict[str, Any]) -> Run:
        """Return the constants of a chunk. Tables that have not changed are not copied to the devices again."""
        for name, table in tables.items():
            if name not in self._tables or self._tables[name][0] is not table:
                self._tables[name] = table, self._placed(table, params)
        return self._loop.run(params, {name: self._tables[name][1] for name in tables}, self._mesh)


def committed(tree: Any, like: Any) -> Any:
    """Return the arrays of `tree`, committed to the device of `like`. Arrays already on this device are not copied."""
    leaf = jax.tree.leaves(like)[0]
    return jax.device_put(tree, leaf.device if isinstance(leaf, jax.Array) else default_device())


def trace(loop: Loop, params: Any, arrivals: Arrivals, tables: dict[str, Any]) -> jax.stages.Traced:
    """Return the traced program of a chunk. The parameters can be abstract shapes instead of arrays."""
    run = loop.run(params, tables)
    state = jax.eval_shape(lambda: open_queue(run, arrivals, **loop.of_open))
    return _chunk.trace(run, state, arrivals, np.int32(STEPS), **loop.of_chunk)
