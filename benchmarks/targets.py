"""Machines that programs are compiled for, here or not, and the programs."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

# All are read when jax and the compilers are loaded.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # the compiler would wait for a metadata server
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # its lock is for the chip
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # there need not be a driver

import flax.traverse_util
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxgen import GenerationConfig, ModelConfig
from jaxgen.config.generation_config import model_of
from jaxgen.decoding.extensions import Extensions
from jaxgen.decoding.modes import mode_of
from jaxgen.model.causal_lm import param_shapes
from jaxgen.model.sharding import divide, shardings
from jaxgen.request.driver import run_whole
from jaxgen.request.prepare import CallInputs, prepare


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of a chip: FLOP/s in bf16, bytes of memory, bytes/s of memory and of its links together.

    `link` counts one direction. `slices` are the topologies that can be had, smallest first.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    slices: tuple[str, ...]
    source: str


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")
CHIPS = {
    "v5e": Chip(197e12, 16e9, 819e9, 200e9, _FLAT, "docs.cloud.google.com/tpu/docs/v5e"),
    "v5p": Chip(459e12, 95e9, 2765e9, 600e9, _CUBES, "docs.cloud.google.com/tpu/docs/v5p"),
    "v6e": Chip(918e12, 32e9, 1638e9, 400e9, _FLAT, "docs.cloud.google.com/tpu/docs/v6e"),
}


def mesh_for(model: ModelConfig, target: str, data: int, parts: int) -> Mesh:
    """Return a mesh of the devices of a TPU slice such as v5e:2x4, which need not exist."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=target).devices
    return divide(model, Mesh(np.array(devices).reshape(data, parts), ("data", "model")))


def shapes(model: ModelConfig, where: Mesh | jax.Device) -> Any:
    """Return the shapes of a model's parameters on a mesh or a device."""
    divided: dict[str, NamedSharding] = shardings(model, where) if isinstance(where, Mesh) else {}

    def on(name: str) -> Sharding:
        return divided[name] if isinstance(where, Mesh) else SingleDeviceSharding(where)

    flat = {
        name: jax.ShapeDtypeStruct(shape, model.dtype, sharding=on(name)) for name, shape in param_shapes(model).items()
    }
    return flax.traverse_util.unflatten_dict(flat, sep=".")


def compile_generate(cfg: GenerationConfig, where: Mesh | jax.Device, rows: int, width: int) -> jax.stages.Compiled:
    """Compile `generate()` for a mesh or a device, as for a call with `rows` prompts of `width` tokens."""
    model = model_of(cfg)
    ids, key = np.zeros((rows, width), np.int32), jax.random.key(0) if cfg.do_sample else None
    inputs = CallInputs(ids, key, attention_mask=np.ones_like(ids))
    prepared = prepare(shapes(model, where), cfg, inputs, Extensions(), eager=True)
    run = dataclasses.replace(prepared.run, model=model)  # without what `prepare` knows of this machine
    device = where.devices.flat[0] if isinstance(where, Mesh) else where
    traced = run_whole.trace(run, prepared.request, mode=mode_of(cfg))
    return traced.lower(lowering_platforms=(device.platform,)).compile()
