"""Layouts of a layer's projections: separate, or fused into one matrix for q, k and v, and one for gate and up."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.feed_forward import FUSED
from jaxgen.core.model.lowrank import Adapters
from jaxgen.core.model.weights import Packed, map_rows, output_axis


def fused(node: Any, donate: bool = False) -> Any:
    """Return parameters with fused projections. With `donate`, the original arrays are deleted as they are fused."""
    if not isinstance(node, Mapping):
        return node
    result = dict(node)
    for name, parts in FUSED.items():
        if not all(part in node for part in parts):
            continue
        layers = [node[part] for part in parts]
        if not can_be_fused([layer["weight"] for layer in layers]):
            continue
        result[name] = jax.tree.map(_concatenated, *layers, is_leaf=_is_weight)
        for part in parts:
            del result[part]
        if donate:
            jax.block_until_ready(result[name])
            for array in jax.tree.leaves(layers):
                if isinstance(array, jax.Array):
                    array.delete()
    return {name: fused(child, donate) for name, child in result.items()}


def can_be_fused(weights: Sequence[Any]) -> bool:
    """Return True if several matrices can be concatenated.

    Packed weights must be of the same kind, with equal static fields and equal arrays of the whole matrix.
    """
    if all(map(_is_adapters, weights)) and len({weight.a.shape for weight in weights}) == 1:
        weights = [weight.weight for weight in weights]
    if all(isinstance(weight, np.ndarray | jax.Array) for weight in weights):
        return True
    if not all(isinstance(weight, Packed) for weight in weights) or len(set(map(jax.tree.structure, weights))) > 1:
        return False
    shared = [jax.tree.leaves(map_rows(lambda _: None, weight)) for weight in weights]
    widths = {tuple([(x.dtype, *x.shape[output_axis(w) + 1 :]) for x in jax.tree.leaves(w)]) for w in weights}
    return len(widths) == 1 and all(map(_are_equal, zip(*shared, strict=True)))


def _are_equal(arrays: Sequence[Any]) -> bool:
    """Return True if arrays are known to be equal; traced arrays are equal only if they are the same object."""
    first, *others = arrays
    if any(isinstance(array, Tracer) for array in arrays):
        return all(array is first for array in others)
    return all(np.array_equal(first, array) for array in others)


def _concatenated(*parts: Any) -> Any:
    if _is_adapters(parts[0]):
        return Adapters.fused(parts)
    axis = output_axis(parts[0])
    return map_rows(lambda *arrays: jnp.concatenate(arrays, axis), *parts)


def _is_adapters(node: Any) -> bool:
    return isinstance(node, Adapters)


def _is_weight(node: Any) -> bool:
    return isinstance(node, Adapters | Packed)


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
        weight = child["weight"]
        for number, (part, start, end) in enumerate(parts_of(key, model, weight.shape[output_axis(weight)])):
            cut = functools.partial(_part, number=number, start=start, end=end)
            result[part] = jax.tree.map(cut, child, is_leaf=_is_weight)
    return result


def parts_of(fused: str, model: ModelConfig, rows: int) -> list[tuple[str, int, int]]:
    """Return the name of each projection in a fused matrix with this many rows, and the range of its rows."""
    widths = model.qkv_sizes if fused == "qkv_proj" else (rows // 2, rows // 2)
    ends = [int(end) for end in np.cumsum(widths)]
    return [(part, end - width, end) for part, width, end in zip(FUSED[fused], widths, ends, strict=True)]


def _part(node: Any, number: int, start: int, end: int) -> Any:
    if _is_adapters(node):
        return node.part(number)
    rows = (slice(None),) * output_axis(node) + (slice(start, end),)
    return map_rows(lambda array: array[rows], node)


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
        parts = [".".join((*path[:-2], part, path[-1])) for part in FUSED[group]]
        if parent == group and all(part in shapes for part in parts):
            removed = [shapes.pop(part) for part in parts]
            shapes[joined] = _with_rows(removed[0], sum(_rows(shape) for shape in removed))
        elif joined in shapes:
            whole = shapes.pop(joined)
            sizes = [end - start for _, start, end in parts_of(group, model, _rows(whole))]
            shapes |= {part: _with_rows(whole, size) for part, size in zip(parts, sizes, strict=True)}
    return shapes


def _rows(shape: tuple[int, ...]) -> int:
    return shape[1 if len(shape) == 3 else 0]


def _with_rows(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    return (shape[0], rows, shape[2]) if len(shape) == 3 else (rows, *shape[1:])
