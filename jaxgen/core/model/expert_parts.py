"""Experts divided over the devices of a mesh: each device multiplies by its own experts, and the results are added up.

All devices that share a row have all of its tokens. Beside each device's own experts, nothing is exchanged except the
sum of the outputs: one all-reduce per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxgen.core.model.context import Context
from jaxgen.core.model.weights import Weight

# The axes of the mesh that the arrays of a model are placed on, and those that divide its matrices; see `sharding`.
AXES = ("data", "model", "copies")
ALL_PARTS = ("model", "copies")


def is_by_expert(experts: int, parts: int) -> bool:
    """Return True if whole experts are divided over this many devices, and False if each expert's width is."""
    return experts % parts == 0


def sum_over_devices(
    add: Callable[..., jax.Array], matrices: Any, tokens: tuple[jax.Array, jax.Array, jax.Array], context: Context
) -> jax.Array:
    """Return `add(matrices, *tokens, context)`, where each device adds up the outputs of its own experts.

    Without a mesh, and on a mesh whose devices have a part of every expert, this is a plain call.

    Args:
        add: returns the weighted sum of the outputs of each token's experts, as float32[B, T, D]. Experts outside
            [0, E) must add nothing.
        matrices: a tree of the experts' weights, each `[E, F, D]`.
        tokens: the tokens' values `[B, T, D]`, their experts int32[B, T, k], and the weights of these, float32[B, T, k].
        context: information about this pass through the model.
    """
    weights = jax.tree.leaves(matrices, is_leaf=_is_weight)
    mesh, count = _mesh_of(weights[0]), weights[0].shape[0]
    if mesh is None:
        return add(matrices, *tokens, context)
    parts = mesh.shape["model"] * mesh.shape["copies"]
    if not is_by_expert(count, parts):
        return add(matrices, *tokens, context)
    own = Context(divided=False, portable=context.portable, expert_parts=parts)

    def of_device(matrices: Any, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        if parts == 1:
            return add(matrices, x, experts, weights, own)
        first = lax.axis_index(ALL_PARTS) * (count // parts)
        return lax.psum(add(matrices, x, experts - first, weights, own), ALL_PARTS)

    rows = PartitionSpec(None if tokens[0].shape[0] % mesh.shape["data"] else "data")
    over = PartitionSpec(ALL_PARTS if parts > 1 else None, None, None)
    specs = jax.tree.map(lambda x: x.specs(over) if isinstance(x, Weight) else over, matrices, is_leaf=_is_weight)
    divided = jax.shard_map(of_device, mesh=mesh, in_specs=(specs, rows, rows, rows), out_specs=rows)
    return divided(matrices, *tokens)


def _mesh_of(weight: Any) -> AbstractMesh | None:
    """Return the mesh that a weight is placed on, also if the weight is traced; None without a mesh of `AXES`."""
    mesh = jax.typeof(jax.tree.leaves(weight)[0]).sharding.mesh
    if mesh.axis_names != AXES or set(mesh.axis_types) != {AxisType.Auto}:
        return None
    return mesh


def _is_weight(node: Any) -> bool:
    return isinstance(node, Weight)
