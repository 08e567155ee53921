"""Sharding of parameters, caches and rows over the devices of a mesh.

A mesh has two axes: `data` splits the rows of a batch, and `model` splits every matrix. XLA's partitioner derives all
communication from these axes. Each layer needs one all-reduce after `o_proj` and one after `down_proj`, as in
Megatron-LM (arXiv 1909.08053), and the embedding needs one.

If `model` is larger than the number of key-value heads, several devices store the same head. Arrays are therefore
placed on another mesh of the same devices. `divide` splits the axis `model` into two axes: a smaller `model`, which
splits the key-value heads, and `copies`, which replicates them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgen.core.model import workarounds
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.expert_parts import ALL_PARTS, AXES, is_by_expert
from jaxgen.core.model.feed_forward import FUSED
from jaxgen.core.model.layout import separate
from jaxgen.core.model.weights import Weight, input_unit
from jaxgen.errors import InputError

_OUTPUTS, _INPUTS = PartitionSpec(ALL_PARTS, None), PartitionSpec(None, ALL_PARTS)

# The partitioning of each layer's matrix [out, in], by the layer's name. A layer's bias is split across the mesh in the
# same way as the outputs of the layer's matrix. All other parameters are replicated.
_MATRICES = {
    "embed_tokens": _OUTPUTS,
    "lm_head": _OUTPUTS,
    "q_proj": _OUTPUTS,
    "k_proj": PartitionSpec("model", None),
    "v_proj": PartitionSpec("model", None),
    "gate_proj": _OUTPUTS,
    "up_proj": _OUTPUTS,
    "o_proj": _INPUTS,
    "down_proj": _INPUTS,
}
ROWS = PartitionSpec("data")
REPLICATED = PartitionSpec()


def divide(model: ModelConfig, mesh: Mesh) -> Mesh:
    """Return a mesh for a model's arrays, with the devices of `mesh` and the axes `data`, `model` and `copies`.

    Args:
        model: the model's config.
        mesh: a mesh with the axes `data` and `model` (either may be missing), or a result of this function.

    Raises:
        InputError: the mesh has an unknown axis, or its `model` axis has a size that does not divide the model's
            dimensions.
        TypeError: `mesh` is not a `jax.sharding.Mesh`.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    shape = dict(mesh.shape)
    if not set(shape) <= set(AXES):
        raise InputError(f"mesh must have the axes 'data' and 'model', got {list(shape)}")
    order = [mesh.axis_names.index(name) for name in AXES if name in shape]
    devices = mesh.devices.transpose(order)
    parts = shape.get("model", 1) * shape.get("copies", 1)
    if not _fits(model, parts):
        allowed = [size for size in range(1, model.num_attention_heads + 1) if _fits(model, size)]
        groups = [*_sizes(model), {"num_key_value_heads": model.num_key_value_heads}]
        sizes = [" or ".join(f"{name}={size}" for name, size in group.items()) for group in groups]
        raise InputError(
            f"the mesh's axis 'model' has size {parts}, which does not divide the model's sizes "
            f"({', '.join(sizes)}): it must be one of {allowed}"
        )
    heads = math.gcd(model.num_key_value_heads, parts)
    devices = devices.reshape(shape.get("data", 1), heads, parts // heads)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def shard_params(params: Any, cfg: Any, mesh: Mesh) -> Any:
    """Return the parameters sharded over the devices of a mesh. `cfg` is a `GenerationConfig` or a `ModelConfig`.

    >>> mesh = jax.make_mesh((1, 8), ("data", "model"))
    >>> params = shard_params(params, cfg, mesh)

    Raises:
        InputError: the mesh has axes other than `data` and `model`, the size of its `model` axis does not divide the
            model's dimensions, or some projections are fused.
        TypeError: `mesh` is not a `jax.sharding.Mesh`, or `cfg` is not a config with a model.
    """
    model = getattr(cfg, "model", cfg)
    if not isinstance(model, ModelConfig):
        raise TypeError(f"cfg must be a GenerationConfig with a model, or a ModelConfig, got {type(model).__name__}")
    mesh = divide(model, mesh)
    params = separate(params, model) if model.family.fused else params

    def put(path, leaf):
        if any(key.key in FUSED for key in path):
            raise InputError(
                "params have fused projections, which work on one device only: shard params that are not fused"
            )
        return jax.tree.map(jax.device_put, leaf, _sharding(".".join(key.key for key in path), leaf, mesh))

    return jax.tree_util.tree_map_with_path(put, params, is_leaf=lambda x: isinstance(x, Weight))


def shardings(model: ModelConfig, mesh: Mesh, weights: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the sharding of each parameter, by its dotted name, for a mesh that `divide` accepts.

    If any parameters are `Weight`s, pass all parameters by dotted name as `weights`, because each array of a `Weight`
    has its own sharding.
    """
    mesh = divide(model, mesh)
    return {name: _sharding(name, weight, mesh) for name, weight in (weights or param_shapes(model)).items()}


def _sharding(name: str, weight: Any, mesh: Mesh) -> Any:
    """Return the sharding of each array of a parameter, in a tree with the parameter's structure."""
    layer, _, kind = name.rpartition(".")
    spec = _MATRICES.get(layer.rpartition(".")[2], REPLICATED)
    shape = weight.shape if hasattr(weight, "shape") else weight
    parts = mesh.shape["model"] * mesh.shape["copies"]
    if kind != "weight" and spec != REPLICATED:
        spec = PartitionSpec(spec[0])
    elif len(shape) == 3 and is_by_expert(shape[0], parts):
        spec = PartitionSpec(ALL_PARTS, None, None)
    else:
        if spec == _INPUTS and isinstance(weight, Weight) and shape[-1] % (parts * input_unit(weight)):
            spec = REPLICATED if shape[-2] % parts else _OUTPUTS  # the parts would cut a group, or packed numbers
        if len(shape) == 3:
            spec = PartitionSpec(None, *spec)
    specs = weight.specs(spec) if isinstance(weight, Weight) else spec
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def mesh_of(params: Any) -> Mesh | None:
    """Return the mesh over which the parameters are sharded, or None if they have no mesh or are traced by jit.

    Raises:
        InputError: the caller has set a mesh with Explicit axes, which jax cannot combine with a different mesh.
    """
    for leaf in jax.tree.leaves(params):
        sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and mesh.axis_names == AXES:
            if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
                raise InputError(
                    "jax.set_mesh has set a mesh with Explicit axes, and the parameters are on a mesh of their own: "
                    "leave jax.set_mesh out; the parameters are enough"
                )
            return mesh
    return None


def is_divided(params: Any) -> bool:
    """Return True if the parameters are on several devices, on jaxgen's mesh or another; False if they are traced."""
    leaf = next((leaf for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array)), None)
    return leaf is not None and not isinstance(leaf, Tracer) and len(leaf.devices()) > 1


def rows_on(mesh: Mesh | None, rows: int) -> int:
    """Return `rows` rounded up to a multiple of the size of the mesh's `data` axis."""
    parts = 1 if mesh is None else mesh.shape["data"]
    return -(-rows // parts) * parts


def place_rows(tree: Any, mesh: Mesh | None) -> Any:
    """Shard host arrays `[rows, ...]` over a mesh if `data` divides `rows`; otherwise, return them unchanged."""
    if mesh is None or any(x.shape[0] % mesh.shape["data"] for x in jax.tree.leaves(tree)):
        return tree
    sharding = NamedSharding(mesh, ROWS)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda part: x[part]), tree)


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Replicate a tree's arrays over `mesh`, except those already on a mesh; if `mesh` is None, return the tree.

    Host arrays must be identical in all processes.
    """
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, REPLICATED)

    def copy(x: Any) -> jax.Array:
        if mesh_of(x) is not None:
            return x
        # `device_put` would compare arrays across processes, and wait for those in which `x` is not an array of jax.
        if mesh.is_multi_process and isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = np.asarray(x)
        if isinstance(x, np.ndarray):
            return jax.make_array_from_callback(x.shape, everywhere, lambda part: x[part])
        return jax.device_put(x, everywhere)

    return jax.tree.map(copy, tree)


def constrain(tree: Any, mesh: Mesh | None, spec: PartitionSpec) -> Any:
    """Constrain all arrays of a tree to the sharding `spec`; without a mesh, return the tree."""
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), tree)


def sharded_top_k(
    x: jax.Array, count: int, mesh: Mesh | None, values: jax.Array | None = None, stable: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Find the `count` largest entries of each row of `x float32[B, n, V]`, in the order of `lax.top_k`.

    On a mesh, each device finds the largest entries in its part of V, and only these entries are exchanged. If
    `stable` is False, equal entries may be in any order.

    Returns:
        The largest entries, and their positions, from 0 to n*V - 1. If `values` (shaped like `x`) is given, its entries
        at these positions are returned instead of the largest entries of `x`.
    """
    rows, beams, vocab = x.shape
    if mesh is None:
        best, place = workarounds.top_k(x.reshape(rows, -1), count, stable)
        return best if values is None else jnp.take_along_axis(values.reshape(rows, -1), place, axis=1), place

    def of_part(x: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, _, width = x.shape
        best, place = lax.top_k(x, min(count, width))
        first = lax.axis_index(ALL_PARTS) * width + jnp.arange(beams, dtype=jnp.int32)[None, :, None] * vocab
        parts = (best, jnp.take_along_axis(values, place, axis=2), first + place)
        best, *rest = (lax.all_gather(part, ALL_PARTS, axis=2, tiled=True).reshape(rows, -1) for part in parts)
        order = lax.top_k(best, count)[1]
        value, place = (jnp.take_along_axis(part, order, axis=1) for part in rest)
        return value, place

    values, over = x if values is None else values, None if rows % mesh.shape["data"] else "data"
    divided, result = PartitionSpec(over, None, ALL_PARTS), PartitionSpec(over)
    return jax.shard_map(of_part, mesh=mesh, in_specs=(divided, divided), out_specs=result, check_vma=False)(x, values)


def _fits(model: ModelConfig, parts: int) -> bool:
    """Return True if a model can be divided into this many parts."""
    heads = model.num_key_value_heads
    one_of = all(any(size % parts == 0 for size in sizes.values()) for sizes in _sizes(model))
    return one_of and (heads % parts == 0 or parts % heads == 0)


def _sizes(model: ModelConfig) -> list[dict[str, int]]:
    """Return groups of sizes, by their names. The number of parts must divide one size of each group."""
    names: list[tuple[str, ...]] = [("num_attention_heads",), ("vocab_size",)]
    if not all(layer.experts for layer in model.layers):
        names.append(("intermediate_size",))
    if model.sparse_layers:
        names.append(("num_experts", "moe_intermediate_size"))
        if model.shared_expert_intermediate_size is not None:
            names.append(("shared_expert_intermediate_size",))
    return [{name: getattr(model, name) for name in group} for group in names]
