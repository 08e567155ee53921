"""Compile programs for machines that need not be available."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

# These variables must be set before jax and the compilers are loaded.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # otherwise the compiler waits for a metadata server
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # the lock protects the chip, which is not used
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # no driver is needed

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jaxgen import GenerationConfig, ModelConfig
from jaxgen.core.config.generation_config import model_of
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.model.fused import fuse_projections
from jaxgen.core.model.grouped import Grouped
from jaxgen.core.model.int8 import Int8
from jaxgen.core.model.sharding import divide, shardings
from jaxgen.core.request.driver import run_whole
from jaxgen.core.request.prepare import CallInputs, prepare


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip's published figures: bf16 FLOP/s, bytes of memory, and bytes/s of its memory and of all its links.

    `link` counts one direction. `slices` are the available topologies, smallest first. `launch`, the seconds between
    two operations, is an assumption.
    """

    flops: float
    memory: float
    bandwidth: float
    link: float
    slices: tuple[str, ...]
    source: str
    launch: float


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")
CHIPS = {
    "v5e": Chip(197e12, 16e9, 819e9, 200e9, _FLAT, "docs.cloud.google.com/tpu/docs/v5e", 0.5e-6),
    "v5p": Chip(459e12, 95e9, 2765e9, 600e9, _CUBES, "docs.cloud.google.com/tpu/docs/v5p", 0.5e-6),
    "v6e": Chip(918e12, 32e9, 1638e9, 400e9, _FLAT, "docs.cloud.google.com/tpu/docs/v6e", 0.5e-6),
    "h100": Chip(989e12, 80e9, 3350e9, 450e9, (), "nvidia.com/en-us/data-center/h100", 2e-6),
}
# A description of an H100 with 80 GB of HBM3. XLA usually gets such a description from the GPU's driver.
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 device_address_bits: 64
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 3352320000000 device_memory_size: 84942979072 l2_cache_size: 52428800
}
"""


_LOWERED = {"gpu": "cuda"}  # lowering uses other names for some platforms


def device_for(target: str) -> jax.Device:
    """Return one device of a machine that need not be available: h100, or a TPU slice such as v5e:2x2."""
    if target == "h100":
        found = topologies.get_topology_desc(
            platform="cuda", topology_name="h100", topology="1x1x1", target_config=_H100
        )
    else:
        found = topologies.get_topology_desc(platform="tpu", topology_name=target)
    return found.devices[0]


def mesh_for(model: ModelConfig, target: str, data: int, parts: int) -> Mesh:
    """Return a mesh of the devices in a TPU slice such as v5e:2x4, which need not be available."""
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


FORMS = {
    "plain": lambda params: params,
    "fused": fuse_projections,
    "int8": lambda params: jax.tree.map(_int8, params),
    "int4": lambda params: _with_packed_layers(fuse_projections(params)),
}


def _int8(weight: jax.Array) -> Any:
    if weight.ndim != 2:
        return weight
    return Int8(weight.astype(jnp.int8), jnp.ones(len(weight)), np.dtype(weight.dtype))


def _with_packed_layers(params: Any) -> Any:
    """Pack the matrices of the layers; as with `quantize="int4"`, the embedding and the head remain arrays."""
    layers = jax.tree.map(_int4, params["model"]["layers"])
    return params | {"model": params["model"] | {"layers": layers}}


def _int4(weight: jax.Array) -> Any:
    """Return packed codes with one scale for 128 inputs, as in most published checkpoints of 4 bits."""
    if weight.ndim != 2:
        return weight
    features, columns = weight.shape
    words, scales = jnp.zeros((features, columns // 8), jnp.uint32), jnp.ones((features, columns // 128), jnp.float16)
    return Grouped(words, scales, None, None, 4, np.dtype(weight.dtype))


def compile_generate(
    cfg: GenerationConfig,
    where: Mesh | jax.Device,
    rows: int,
    width: int,
    form: str = "plain",
    attach: Callable[[Any], Any] | None = None,
) -> jax.stages.Compiled:
    """Compile a call of `generate()` with `rows` prompts of `width` tokens for a mesh or a device.

    `form` is a key of `FORMS`, such as "fused"; all except "plain" are for a single device.
    `attach`, if given, first adds adapters to the parameters.
    """
    model = model_of(cfg)
    ids, key = np.zeros((rows, width), np.int32), jax.random.key(0) if cfg.do_sample else None
    inputs = CallInputs(ids, key, attention_mask=np.ones_like(ids))
    params = shapes(model, where)
    if form != "plain" or attach is not None:
        assert not isinstance(where, Mesh)
        on_device = SingleDeviceSharding(where)
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device),
            jax.eval_shape(lambda x: FORMS[form](attach(x) if attach else x), params),
        )
    prepared = prepare(params, cfg, inputs, Extensions(), eager=True)
    device = where.devices.flat[0] if isinstance(where, Mesh) else where
    traced = run_whole.trace(prepared.run, prepared.request, mode=prepared.mode)
    return lower_for(device, traced).compile()


def lower_for(device: jax.Device, traced: jax.stages.Traced) -> jax.stages.Lowered:
    """Lower a program for a device that need not be available."""
    return traced.lower(lowering_platforms=(_LOWERED.get(device.platform, device.platform),))
