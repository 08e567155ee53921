"""Write symmetric `Grouped` weights in the format compressed-tensors, which transformers and vLLM read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import flax.struct
import jax
import numpy as np

from convert.errors import CheckpointError
from convert.experts import on_host
from convert.tensors import CHUNK, STORED, Tensor, computed
from jaxgen.core.model.grouped import Grouped
from jaxgen.core.model.weights import Packed, Quantized

_NOT_LINEAR = "embed_tokens.weight"


@flax.struct.dataclass
class InFiles:
    """A `Grouped` weight as the tensors that are written; they are computed when they are read."""

    tensors: ClassVar[Mapping[str, str]] = {"_packed": "codes", "_scale": "scales", "_shape": "[F, D]"}

    packed: Any
    scale: Any
    shape: Any


def in_files(weights: Mapping[str, Any], is_divided: bool = False) -> dict[str, Any]:
    """Return weights, by their names in files, in the form in which they are written.

    Raises:
        CheckpointError: there are packed weights that files cannot contain. With `is_divided`, because they are divided
            over a mesh, these are all that are not `Quantized`.
    """
    packed = {name: w for name, w in weights.items() if isinstance(w, Packed) and not isinstance(w, Quantized)}
    for name, weight in packed.items():
        if is_divided:
            reason = "is packed and divided over a mesh: save it from one device, or use python -m convert"
            raise CheckpointError([f"params: {name} {reason}"])
        if not _is_writable(name, weight):
            advice = "load with quantize='none', 'int8' or 'int4' (--quantize) and write that"
            raise CheckpointError([f"{name} is a {weight.title} matrix in a form that is not written: {advice}"])
    return {name: _in_files(name, weight) if name in packed else weight for name, weight in weights.items()}


def config_of(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key `quantization_config` of the config.json for weights by their names in files, if it needs one."""
    sizes: dict[tuple[int, int | None], list[str]] = {}
    ignored = ["lm_head"]  # also if it is the embedding, and not in the files
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if isinstance(weight, Grouped):
            groups = weight.scales.shape[-1]
            size = None if groups == 1 else weight.shape[-1] // groups
            sizes.setdefault((weight.bits, size), []).append(module)
        elif len(weight.shape) == 2 and not name.endswith(_NOT_LINEAR) and module not in ignored:
            ignored.append(module)
    if not sizes:
        return {}
    groups = {
        f"group_{number}": _group(bits, size, ["Linear"] if len(sizes) == 1 else modules)
        for number, ((bits, size), modules) in enumerate(sizes.items())
    }
    description = {"config_groups": groups, "format": "pack-quantized", "ignore": ignored, "kv_cache_scheme": None}
    description |= {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    return {"quantization_config": description}


def _group(bits: int, size: int | None, targets: list[str]) -> dict[str, Any]:
    """Return one of `config_groups`; `size` is None if each row has one scale."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False, "group_size": size}
    weights |= {"strategy": "channel" if size is None else "group"}
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}


def _is_writable(name: str, weight: Any) -> bool:
    is_grouped = isinstance(weight, Grouped) and weight.zeros is None and weight.order is None
    return is_grouped and len(weight.shape) == 2 and not name.endswith(_NOT_LINEAR)


def _in_files(name: str, weight: Any) -> InFiles:
    rows, columns = weight.shape
    words, scales, bits = weight.words, weight.scales, weight.bits
    per_word, few = 32 // bits, max(1, CHUNK // columns)

    def codes(start: int, end: int) -> np.ndarray:
        own = _rows(words, start, end)
        found = [_codes(own[i : i + few], columns, bits) for i in range(0, len(own), few)]
        return np.concatenate(found).view(np.int32)

    def shape(start: int, end: int) -> np.ndarray:
        return np.array([rows, columns], np.int64)[start:end]

    def later(suffix: str, shape: tuple[int, ...], dtype: Any, compute: Callable[[int, int], np.ndarray]) -> Tensor:
        first = jax.tree.leaves(weight)[0]
        source = first if isinstance(first, Tensor) else Tensor(Path("params"), name, "U8", (), 0, 0)
        return computed(name + suffix, shape, dtype, compute, source, rows)

    return InFiles(
        later("_packed", (rows, columns // per_word), np.int32, codes),
        later("_scale", scales.shape, STORED.get(scales.dtype, scales.dtype), lambda *rows: _rows(scales, *rows)),
        later("_shape", (2,), np.int64, shape),
    )


def _rows(array: Any, start: int, end: int) -> np.ndarray:
    """Return rows of an array in a file or in memory."""
    if isinstance(array, Tensor):
        return array.read(None, (slice(start, end), slice(None)))
    return on_host(array)[start:end]


def _codes(words: np.ndarray, columns: int, bits: int) -> np.ndarray:
    """Return the codes of some rows as uint32[n, columns * bits / 32], lowest bits first."""
    ones: Any = np.ones((len(words), 1), np.float32)
    numbers = Grouped(words, ones, None, None, bits, np.dtype(np.float32)).to_matrix()  # pyright: ignore
    codes = (numbers + 2 ** (bits - 1)).astype(np.uint32).reshape(len(words), -1, 32 // bits)
    return np.bitwise_or.reduce(codes << (np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)), axis=-1)
