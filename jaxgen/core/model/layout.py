"""Layouts of a layer's projections: separate, or fused into one matrix for q, k and v, and one for gate and up."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.model.causal_lm import FUSED, param_shapes, projection_sizes
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.lowrank import Adapters
from jaxgen.core.model.weights import Quantized


def fused(node: Any, donate: bool = False) -> Any:
    """Return parameters with fused projections. With `donate`, the original arrays are deleted as they are fused."""
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
    return {name: fused(child, donate) for name, child in result.items()}


def _can_be_fused(weights: list[Any]) -> bool:
    if all(map(_is_adapters, weights)) and len({weight.a.shape for weight in weights}) == 1:
        weights = [weight.weight for weight in weights]
    return all(isinstance(weight, np.ndarray | jax.Array | Quantized) for weight in weights)


def _concatenated(*parts: Any) -> Any:
    return Adapters.fused(parts) if _is_adapters(parts[0]) else jnp.concatenate(parts)


def _is_adapters(node: Any) -> bool:
    return isinstance(node, Adapters)


def as_stored(params: Any, model: ModelConfig) -> Any:
    """Return the parameters in the layout of the family's checkpoints, with projections fused or separate."""
    return fused(params) if model.family.fused else separate(params, model)


def separate(params: Any, model: ModelConfig) -> Any:
    """Undo `fuse_projections`: return parameters with separate projections."""
    if not _has_fused(params):
        return params
    result = {}
    for key, child in params.items():
        if key not in FUSED or not isinstance(child, Mapping):
            result[key] = separate(child, model)
            continue
        for number, (part, start, end) in enumerate(parts_of(key, model)):
            cut = functools.partial(_part, number=number, start=start, end=end)
            result[part] = jax.tree.map(cut, child, is_leaf=_is_adapters)
    return result


def parts_of(fused: str, model: ModelConfig) -> list[tuple[str, int, int]]:
    """Return the name of each projection in a fused matrix, and the range of its rows."""
    widths = projection_sizes(model)[fused]
    ends = [int(end) for end in np.cumsum(widths)]
    return [(part, end - width, end) for part, width, end in zip(FUSED[fused], widths, ends, strict=True)]


def _part(node: Any, number: int, start: int, end: int) -> Any:
    return node.part(number) if _is_adapters(node) else node[start:end]


def _has_fused(node: Any) -> bool:
    return isinstance(node, Mapping) and any(key in FUSED or _has_fused(child) for key, child in node.items())


def expected_shapes(model: ModelConfig, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return a model's parameter shapes by dotted name, with projections fused or separate as in `names`."""
    shapes = dict(param_shapes(model))
    for name in names:
        path = name.split(".")
        parent = path[-2] if len(path) > 1 else ""
        group = next((group for group, parts in FUSED.items() if parent == group or parent in parts), None)
        if group is None or name in shapes:
            continue
        joined = ".".join((*path[:-2], group, path[-1]))
        parts = {".".join((*path[:-2], part, path[-1])): end - start for part, start, end in parts_of(group, model)}
        if parent == group and all(part in shapes for part in parts):
            removed = [shapes.pop(part) for part in parts]
            shapes[joined] = (sum(shape[0] for shape in removed), *removed[0][1:])
        elif joined in shapes:
            columns = shapes.pop(joined)[1:]
            shapes |= {part: (rows, *columns) for part, rows in parts.items()}
    return shapes
