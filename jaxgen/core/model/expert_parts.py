"""Experts divided over the devices of a mesh: each device multiplies by its own experts, and the results are added up.

All devices that share a row have all of its tokens. Beside each device's own experts, nothing is exchanged except the
sum of the outputs: one all-reduce per layer.
"""

from __future__ import annotations

import functools
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
    route: Callable[..., tuple[jax.Array, jax.Array]],
    add: Callable[..., jax.Array],
    matrices: Any,
    tokens: tuple[jax.Array, jax.Array, jax.Array | None],
    context: Context,
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of the outputs of each token's experts, float32[B, T, D], and the experts.

    On a mesh, each device adds up the outputs of its own experts, in the router's order, and the devices' sums are
    added. Without a mesh, or if each device has a part of every expert, all outputs are added in the router's order.

    Args:
        route: returns the weights and the indices of each token's experts, given the last two entries of `tokens`.
        add: returns the weighted sum, float32[B, T, D], given the matrices, `x`, indices, weights and the context.
            Indices outside [0, E) must add nothing.
        matrices: a tree of the experts' weights, each `[E, F, D]`.
        tokens: the values `x [B, T, D]`, the router's logits `[B, T, E]`, and the given experts int32[B, T, k] or None.
        context: information about this pass through the model.
    """
    leaves = jax.tree.leaves(matrices, is_leaf=_is_weight)
    mesh, count = _mesh_of(leaves[0]), leaves[0].shape[0]
    parts = 1 if mesh is None else mesh.shape["model"] * mesh.shape["copies"]

    def of_device(
        matrices: Any, x: jax.Array, logits: jax.Array, experts: jax.Array | None, context: Context = context
    ) -> tuple[jax.Array, jax.Array]:
        weights, experts = route(logits, experts)
        if context.expert_parts == 1:
            return add(matrices, x, experts, weights, context), experts
        own = experts - lax.axis_index(ALL_PARTS) * (count // parts)
        return lax.psum(add(matrices, x, own, weights, context), ALL_PARTS), experts

    if mesh is None or not is_by_expert(count, parts):
        return of_device(matrices, *tokens)
    own = Context(divided=False, portable=context.portable, expert_parts=parts)
    rows = PartitionSpec(None if tokens[0].shape[0] % mesh.shape["data"] else "data")
    over = PartitionSpec(ALL_PARTS if parts > 1 else None, None, None)
    specs = jax.tree.map(lambda x: x.specs(over) if isinstance(x, Weight) else over, matrices, is_leaf=_is_weight)
    divided = jax.shard_map(
        functools.partial(of_device, context=own), mesh=mesh, in_specs=(specs, rows, rows, rows), out_specs=rows
    )
    return divided(matrices, *tokens)


def _mesh_of(weight: Any) -> AbstractMesh | None:
    """Return the mesh that a weight is placed on, also if the weight is traced; None without a mesh of `AXES`."""
    mesh = jax.typeof(jax.tree.leaves(weight)[0]).sharding.mesh
    if mesh.axis_names != AXES or set(mesh.axis_types) != {AxisType.Auto}:
        return None
    return mesh


def _is_weight(node: Any) -> bool:
    return isinstance(node, Weight)
