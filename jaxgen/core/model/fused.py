"""Fused projections for fewer matrix products per layer: one matrix for q, k and v, and one for gate and up."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.model.causal_lm import FUSED, param_shapes
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.lowrank import Adapters
from jaxgen.core.model.sharding import mesh_of
from jaxgen.core.model.weights import Quantized
from jaxgen.errors import InputError


def fuse_projections(params: Mapping[str, Any], *, donate: bool = False) -> dict[str, Any]:
    """Fuse projections into fewer, larger matrices, for inference on a single device.

    >>> params = fuse_projections(params, donate=True)
    >>> generate(params, ids, key, cfg)

    `q_proj`, `k_proj` and `v_proj` become `qkv_proj`, and `gate_proj` and `up_proj` become `gate_up_proj`. Weights with
    several adapters are fused if all parts have updates of the same rank; other weights with low-rank updates are left
    unchanged. On a GPU, a step with few rows spends much of its time launching kernels, and fusing saves two kernels
    per layer. `save_hf` writes the original matrices.

    Args:
        params: the nested parameters, as returned by `load_hf`, quantized or not.
        donate: delete the original arrays as they are fused, so that the weights are not in memory twice.

    Raises:
        InputError: the parameters are split across a mesh.
    """
    if mesh_of(params) is not None:
        raise InputError(
            "params are divided over a mesh, and fused projections are for one device: leave fuse_projections out"
        )
    return _fused(params, donate)


def _fused(node: Any, donate: bool) -> Any:
    if not isinstance(node, Mapping):
        return node
    result = dict(node)
    for name, parts in FUSED.items():
        if not all(part in node for part in parts):
            continue
        layers = [node[part] for part in parts]
        if not _can_be_fused([layer["weight"] for layer in layers]):
            continue
        result[name] = jax.tree.map(_concatenated, *layers, is_leaf=_is_adapters)
        for part in parts:
            del result[part]
        if donate:
            jax.block_until_ready(result[name])
            for array in jax.tree.leaves(layers):
                if isinstance(array, jax.Array):
                    array.delete()
    return {name: _fused(child, donate) for name, child in result.items()}


def _can_be_fused(weights: list[Any]) -> bool:
    if all(map(_is_adapters, weights)) and len({weight.a.shape for weight in weights}) == 1:
        weights = [weight.weight for weight in weights]
    return all(isinstance(weight, np.ndarray | jax.Array | Quantized) for weight in weights)


def _concatenated(*parts: Any) -> Any:
    return Adapters.fused(parts) if _is_adapters(parts[0]) else jnp.concatenate(parts)


def _is_adapters(node: Any) -> bool:
    return isinstance(node, Adapters)


def separate(params: Any, model: ModelConfig) -> Any:
    """Undo `fuse_projections`: return parameters with separate projections."""
    if not _has_fused(params):
        return params
    shapes = param_shapes(model)
    result = {}
    for key, child in params.items():
        if key not in FUSED or not isinstance(child, Mapping):
            result[key] = separate(child, model)
            continue
        widths = [
            next(shape[0] for name, shape in shapes.items() if name.endswith(f".{part}.weight")) for part in FUSED[key]
        ]
        ends = np.cumsum(widths)
        for number, (part, end, width) in enumerate(zip(FUSED[key], ends, widths, strict=True)):
            cut = functools.partial(_part, number=number, start=end - width, end=end)
            result[part] = jax.tree.map(cut, child, is_leaf=_is_adapters)
    return result


def _part(node: Any, number: int, start: int, end: int) -> Any:
    return node.part(number) if _is_adapters(node) else node[start:end]


def _has_fused(node: Any) -> bool:
    return isinstance(node, Mapping) and any(key in FUSED or _has_fused(child) for key, child in node.items())


def expected_shapes(model: ModelConfig, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return a model's parameter shapes by dotted name, with projections fused if their fused name is in `names`."""
    shapes = dict(param_shapes(model))
    for name in names:
        path = name.split(".")
        if len(path) < 2 or path[-2] not in FUSED:
            continue
        parts = [".".join((*path[:-2], part, path[-1])) for part in FUSED[path[-2]]]
        if all(part in shapes for part in parts):
            removed = [shapes.pop(part) for part in parts]
            shapes[name] = (sum(shape[0] for shape in removed), *removed[0][1:])
    return shapes
