"""Experts in checkpoints, which store the matrices of each expert separately; in memory, they are one array.

| names in files | name in memory |
|---|---|
| `mlp.experts.3.up_proj.weight` | `mlp.experts.up_proj.weight` |
| `block_sparse_moe.experts.3.w3.weight`, of Mixtral | `mlp.experts.up_proj.weight` |
| `mlp.experts.gate_up_proj`, which transformers 5 can write | both `gate_proj` and `up_proj` |
| `block_sparse_moe.gate.weight` | `mlp.gate.weight` |
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.tensors import STORED, Tensor
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.expert_config import ExpertRule

_LAYER = r"(?P<layer>model\.layers\.\d+\.)"
_IN_MEMORY = re.compile(_LAYER + r"mlp\.experts\.(?P<projection>\w+)\.weight(?P<suffix>\w*)")
_TOGETHER = re.compile(_LAYER + r"mlp\.experts\.(?P<projection>gate_up_proj|down_proj)")
_ROUTER = "mlp.gate.weight"


@dataclasses.dataclass(frozen=True)
class Stack(Tensor):
    """A tensor `[E, ...]` that consists of one tensor for each expert."""

    experts: tuple[Tensor, ...]

    @classmethod
    def of(cls, *experts: Tensor) -> Stack:
        """Return the stack of tensors with the same dtype and shape."""
        first, nbytes = experts[0], sum(tensor.nbytes for tensor in experts)
        return cls(first.file, first.name, first.dtype, (len(experts), *first.shape), first.offset, nbytes, experts)

    def read(self, dtype: np.dtype | None = None, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return the values as in `Tensor.read`. Only one expert at a time is in memory twice."""
        chosen, *rest = part or (slice(None),) * len(self.shape)
        shape = [len(range(*axis.indices(size))) for axis, size in zip(rest, self.shape[1:], strict=True)]
        result = np.empty((len(self.experts[chosen]), *shape), dtype or STORED[self.dtype])
        for index, tensor in enumerate(self.experts[chosen]):
            # If a part is given, the header of the tensor's file is not parsed again.
            result[index] = tensor.read(result.dtype, tuple(rest))
        return result


@dataclasses.dataclass(frozen=True)
class Part:
    """One expert's part of an array `[E, ...]` in memory."""

    array: Any
    expert: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return self.array.shape[1:]

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.array.dtype

    @property
    def nbytes(self) -> int:
        """The size of the part in bytes."""
        return self.array.nbytes // self.array.shape[0]


def stacked(
    path: Path, tensors: Mapping[str, Tensor], listed: set[str] | None, model: ModelConfig
) -> tuple[dict[str, Tensor], set[str] | None, list[str]]:
    """Return a checkpoint's tensors and `listed` under their names in memory, with stacks of experts, and problems.

    `listed` has the names of all tensors in the checkpoint, including those in damaged files, or is None.
    """
    rule = model.family.experts
    if rule is None:
        return dict(tensors), listed, []
    result: dict[str, Tensor] = {}
    together = {
        name: match
        for name, tensor in tensors.items()
        if (match := _TOGETHER.fullmatch(name))
        and isinstance(tensor, Tensor)
        and len(tensor.shape) == 3
        and tensor.shape[0] == model.num_experts
    }
    found: dict[str, dict[int, Tensor]] = {
        name: {} for name, shape in param_shapes(model).items() if _IN_MEMORY.fullmatch(name) and len(shape) == 3
    }
    for name, tensor in tensors.items():
        if name in together:
            continue
        own, expert = _in_memory(name, rule)
        if expert is not None and expert < (model.num_experts or 0):
            found.setdefault(own, {})[expert] = tensor
        else:
            result[own if expert is None else name] = tensor
    problems, known = [], set(listed or ())
    for name, match in together.items():
        separated = _separated(tensors[name], match["layer"], match["projection"])
        if any(found.get(own) for own in separated):
            reason = "contains experts that the files also have separately: remove one of the two"
            problems.append(f"{tensors[name].file}: {name} {reason}")
        found |= {own: dict(enumerate(experts)) for own, experts in separated.items()}
    for own, experts in found.items():
        faults = _faults(path, own, experts, listed, model)
        problems += faults
        known.add(own)
        if not faults and len(experts) == model.num_experts:
            result[own] = jax.tree.map(Stack.of, *[experts[expert] for expert in range(len(experts))])
    return result, None if listed is None else {_in_memory(name, rule)[0] for name in known}, problems


def names_in_files(name: str, model: ModelConfig) -> list[str]:
    """Return the names in files of a tensor with this name in memory: one name or, for a stack, one per expert."""
    rule, inside = model.family.experts, _IN_MEMORY.fullmatch(name)
    if rule is None:
        return [name]
    if inside and inside["projection"] in rule.projections:
        template = inside["layer"] + rule.projections[inside["projection"]] + inside["suffix"]
        return [template.format(expert) for expert in range(model.num_experts or 0)]
    return [name.removesuffix(_ROUTER) + rule.router if name.endswith(f".{_ROUTER}") else name]


def by_file_name(weights: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return weights, in files or in memory, by their names in files, with stacks of experts split."""
    result: dict[str, Any] = {}
    for name, weight in weights.items():
        names = names_in_files(name, model)
        result |= {names[0]: weight} if len(weight.shape) < 3 else dict(zip(names, apart(weight), strict=True))
    return result


def apart(weight: Any) -> list[Any]:
    """Return the part of each expert in a weight `[E, F, D]`."""
    return [jax.tree.map(functools.partial(_part, expert=expert), weight) for expert in range(weight.shape[0])]


def on_host(array: Any) -> np.ndarray:
    """Return an array in memory, or one expert's part of it, as a numpy array."""
    if isinstance(array, Part):
        array = array.array[array.expert]
    if isinstance(array, jax.Array) and any(device.platform != "cpu" for device in array.devices()):
        # An array on an accelerator caches its numpy copy. Convert a temporary array, so that freeing it also frees the
        # cached copy.
        array = jax.device_put(array, array.sharding, may_alias=False)
    return np.asarray(array)


def _part(array: Any, expert: int) -> Any:
    return array.experts[expert] if isinstance(array, Stack) else Part(array, expert)


def _in_memory(name: str, rule: ExpertRule) -> tuple[str, int | None]:
    """Return a tensor's name in memory, and the index of its expert; None if the tensor has no expert."""
    for projection, template in rule.projections.items():
        pattern = re.escape(template).replace(r"\{\}", r"(?P<expert>\d{1,6})")
        if given := re.fullmatch(_LAYER + pattern + r"(?P<suffix>\w*)", name):
            own = f"{given['layer']}mlp.experts.{projection}.weight{given['suffix']}"
            return own, int(given["expert"])
    given = re.fullmatch(_LAYER + re.escape(rule.router), name)
    return (given["layer"] + _ROUTER if given else name), None


def _separated(tensor: Tensor, layer: str, projection: str) -> dict[str, list[Tensor]]:
    """Return the matrices of each expert in a tensor `[E, F, D]`, by the name in memory."""
    count, rows, columns = tensor.shape
    matrices = [dataclasses.replace(tensor.rows(e, e + 1), shape=(rows, columns)) for e in range(count)]
    if projection == "down_proj":
        parts = {projection: matrices}
    else:
        parts = {
            "gate_proj": [matrix.rows(0, rows // 2) for matrix in matrices],
            "up_proj": [matrix.rows(rows // 2, rows) for matrix in matrices],
        }
    return {f"{layer}mlp.experts.{name}.weight": experts for name, experts in parts.items()}


def _faults(
    path: Path, own: str, experts: Mapping[int, Tensor], listed: set[str] | None, model: ModelConfig
) -> list[str]:
    """List the experts that are missing, or that differ from the first in dtype or shape."""
    names, shape = names_in_files(own, model), list(param_shapes(model).get(own, ())[1:])
    missing = [name for expert, name in enumerate(names) if expert not in experts]
    missing = [name for name in missing if listed is not None and name not in listed]
    others = f" and {len(missing) - 1} others like it are" if len(missing) > 1 else " is"
    faults = [f"{path}: {missing[0]} {shape}{others} missing"] if missing else []
    first = next(iter(experts.values()), None)
    for tensor in experts.values():
        if jax.tree.structure(tensor) != jax.tree.structure(first):
            different = "is not packed in the same way as another expert's matrix: load another file"
            faults.append(f"{file_of(tensor)}: {jax.tree.leaves(tensor)[0].name} {different}")
            continue
        for one, other in zip(jax.tree.leaves(tensor), jax.tree.leaves(first), strict=True):
            if (one.dtype, one.shape) != (other.dtype, other.shape):
                texts = [f"{array.name} is {array.dtype}{list(array.shape)}" for array in (one, other)]
                faults.append(f"{one.file}: {texts[0]}, but {texts[1]}")
    return faults


def file_of(weight: Any) -> Path:
    """Return the file of a tensor, or of the first tensor of a packed weight."""
    return jax.tree.leaves(weight)[0].file
