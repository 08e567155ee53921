"""The program of an engine, and its state on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.config.availability import check_options
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.chunks import Arrivals, open_queue, run_chunk
from jaxgen.decoding.continuous import Continuous
from jaxgen.decoding.extensions import Extensions
from jaxgen.decoding.modes import mode_of
from jaxgen.decoding.run import Request, Run, Sizes
from jaxgen.engine.forms import Form
from jaxgen.model.context import Context
from jaxgen.model.sharding import mesh_of, replicate
from jaxgen.programs import Program
from jaxgen.request.checks import check_slots
from jaxgen.request.memory import check_call_memory
from jaxgen.request.prepare import Prepared

_STATIC = ("mode", "key_impl")
_open = Program(open_queue, static_argnames=[*_STATIC, "places", "steps"])
_chunk = Program(run_chunk, static_argnames=_STATIC, donate_argnames=["state"])


class Device:
    """The device's side of an engine: its state, and the program that changes it.

    Args:
        params: the parameters.
        form: of the prompts.
        extensions: the caller's functions.
        slots: the number of sequences that are decoded at a time.
        steps: about how many steps a chunk takes.
        key_impl: the implementation of random keys.
    """

    def __init__(self, params: Any, form: Form, extensions: Extensions, slots: int, steps: int, key_impl: str):
        self.params, self._form, self._extensions, self._steps = params, form, extensions, np.int32(steps)
        self._key_impl, self._mesh = key_impl, mesh_of(params)
        mode = mode_of(form.full)
        cfg = form.full.replace(slots=slots)
        check_slots(cfg, None, extensions, mode)
        check_options(cfg.reset(form.own), 1)
        self._sizes = Sizes(slots, form.capacity, needs=mode.needs(form.full))
        self._mode = Continuous(mode, slots)
        self._check_memory(cfg)
        self._state: Any = None

    def _check_memory(self, cfg: GenerationConfig) -> None:
        width, capacity = self._form.width, self._form.capacity
        ids = jax.ShapeDtypeStruct((self._mode.slots, width), np.int32)
        run = dataclasses.replace(self._run({}), cfg=cfg)
        check_call_memory(Prepared(self._mode, run, Request(ids, ids, ids, {}), ids, ids, width, capacity))

    def open(self, arrivals: Arrivals, tables: dict[str, Any], places: int) -> None:
        """Make the state: all slots are free."""
        # A step adds an entry per slot, and so does each sequence that enters.
        steps = 2 * int(self._steps) + 8
        names = {"mode": self._mode, "key_impl": self._key_impl}
        self._state = _open(self._run(tables), arrivals, places=places, steps=steps, **names)

    def step(self, arrivals: Arrivals, tables: dict[str, Any]) -> jax.Array:
        """Start a chunk and return what will have happened in it; see `run_chunk`."""
        arrivals = replicate(jax.tree.map(jnp.asarray, arrivals), self._mesh) if self._mesh else arrivals
        run = self._run(tables)
        self._state, packed = _chunk(run, self._state, arrivals, self._steps, mode=self._mode, key_impl=self._key_impl)
        return packed

    def trace(self, arrivals: Arrivals, tables: dict[str, Any]) -> jax.stages.Traced:
        """Return the program, not compiled yet."""
        names = {"mode": self._mode, "key_impl": self._key_impl}
        return _chunk.trace(self._run(tables), self._state, arrivals, self._steps, **names)

    def _run(self, tables: dict[str, Any]) -> Run:
        form = self._form
        extensions = dataclasses.replace(self._extensions, **tables)
        context = Context(self._mesh is not None)
        return Run(self.params, form.full, extensions, self._sizes, context, usual=form.usual, mesh=self._mesh)
