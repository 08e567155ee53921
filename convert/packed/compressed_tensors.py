"""Checkpoints in the format compressed-tensors, as llm-compressor writes them.

| `format` | tensors of a matrix [F, D] |
|---|---|
| pack-quantized | `weight_packed int32[F, D * bits / 32]`, lowest bits first, and `weight_shape` |
| int-quantized | `weight int8[F, D]` |
| float-quantized | `weight float8_e4m3fn[F, D]` |

All have `weight_scale`: one scale for the matrix, for each row, for each group of columns, or (8-bit floats) for each
block. Codes may have zero points (`weight_zero_point`); those of packed codes are packed along the rows. An entry is
`scale * (code - zero)`, rounded to the dtype of the scales. Models whose inputs are rounded to 8 bits too are read
without rounding the inputs, as in transformers with `CompressedTensorsConfig(dequantize=True)`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from convert.packed.formats import (
    NO_CACHE,
    NO_INPUTS,
    Parts,
    check,
    fp8,
    group_size,
    grouped,
    input_order,
    matrix_shape,
    patterns,
    rows_of,
    unpacked,
    whole,
)
from convert.tensors import DTYPES, STORED, Tensor
from jaxgen.errors import ConfigError, InputError, shown

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The form in which the matrices of one group of modules are stored.

    Attributes:
        targets: the names of modules, regular expressions after "re:", or names of classes.
        bits: 4 or 8.
        is_float: whether the codes are 8-bit floats.
        symmetric: whether there are no zero points.
        strategy: what shares a scale: tensor, channel, group or block.
        size: the number of columns in a group, or the sizes of a block.
    """

    targets: tuple[str, ...]
    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    size: Any = None

    @classmethod
    def of(cls, group: Any) -> Scheme:
        """Read one of `config_groups`."""
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ConfigError(f"weights must be an object, got {shown(weights)}")
        kind, strategy = weights.get("type", "int"), weights.get("strategy") or "tensor"
        size = group_size(weights, "group_size") if weights.get("group_size") is not None else None
        if weights.get("strategy") is None and weights.get("group_size") is not None:
            strategy = "group" if size else "channel"
        if kind not in ("int", "float"):
            raise ConfigError(f"type must be 'int' or 'float', got {shown(kind)}")
        bits = whole(weights, "num_bits", 8, (8,) if kind == "float" else (4, 8))
        allowed = ("tensor", "channel", "group", "block")
        if strategy not in allowed or (strategy == "block" and kind == "int"):
            raise ConfigError(
                f"strategy must be one of {', '.join(allowed)} (block: for floats), got {shown(strategy)}"
            )
        if strategy == "block":
            match weights.get("block_structure"):
                case [int(rows), int(columns)] if rows > 0 and columns > 0:
                    size = (rows, columns)
                case other:
                    raise ConfigError(f"block_structure must be two positive numbers, got {shown(other)}")
        if weights.get("dynamic", False) is not False:
            raise ConfigError(f"dynamic must be false for weights, got {shown(weights['dynamic'])}")
        symmetric = weights.get("symmetric", True)
        if not isinstance(symmetric, bool) or (kind == "float" and not symmetric):
            raise ConfigError(f"symmetric must be true (or false, for integers), got {shown(symmetric)}")
        return cls(patterns(group, "targets"), bits, kind == "float", symmetric, strategy, size)


@dataclasses.dataclass(frozen=True)
class CompressedTensors:
    """The format of a checkpoint."""

    title: ClassVar[str] = "compressed-tensors"
    keys: ClassVar[Collection[str]] = frozenset(
        "quant_method format config_groups ignore kv_cache_scheme quantization_status sparsity_config transform_config "
        "global_compression_ratio version moe_sparsity_config dequantize run_compressed use_optimized_inference".split()
    )
    suffixes: ClassVar[Collection[str]] = (
        "weight_packed weight_scale weight_zero_point weight_shape weight_g_idx input_scale input_zero_point "
        "output_scale output_zero_point".split()
    )
    required: ClassVar[Sequence[Sequence[str]]] = (("weight", "weight_packed"), ("weight_scale",))
    ignored: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("input_scale", "input_zero_point", "output_scale", "output_zero_point"), NO_INPUTS
    )

    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]
    notes: Sequence[str]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> CompressedTensors:
        """Read a `quantization_config`."""
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ConfigError(f"config_groups must be an object, got {shown(groups)}")
        formats = [
            config.get("format"),
            *(group.get("format") for group in groups.values() if isinstance(group, Mapping)),
        ]
        for form in formats:
            if form not in (None, *_FORMATS):
                raise ConfigError(f"format must be one of {', '.join(_FORMATS)}, got {shown(form)}: load another file")
        sparsity, transform = config.get("sparsity_config"), config.get("transform_config")
        if sparsity and (not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense"):
            raise ConfigError(f"sparsity_config must be empty or dense, got {shown(sparsity)}: load another file")
        if transform and (not isinstance(transform, Mapping) or transform.get("config_groups", transform)):
            raise ConfigError(f"transform_config must be empty, got {shown(transform)}: load another file")
        if config.get("quantization_status", "compressed") not in ("compressed", None):
            status = shown(config["quantization_status"])
            raise ConfigError(f"quantization_status must be 'compressed', got {status}: save the compressed model")
        schemes = []
        for name, group in groups.items():
            try:
                schemes.append(Scheme.of(group))
            except ConfigError as error:
                raise ConfigError(f"config_groups: {name}: {error}") from error
        rounded = any(
            group.get(key) for group in groups.values() for key in ("input_activations", "output_activations")
        )
        notes = [NO_INPUTS] * rounded + [NO_CACHE] * bool(config.get("kv_cache_scheme"))
        return cls(tuple(schemes), patterns(config, "ignore"), notes)

    def is_packed(self, parts: Parts) -> bool:
        """Return True if a module has tensors of the format, or a matrix that does not consist of ordinary floats."""
        matrix = parts.get("weight")
        return any(name in parts for name in self.suffixes) or (matrix is not None and matrix.dtype not in DTYPES)

    def packs(self, module: str) -> bool | None:
        """Return True if the config says that a module's matrix is packed."""
        return self._scheme(module) is not None and not any(_matches(module, name) for name in self.ignore)

    def _scheme(self, module: str) -> Scheme | None:
        """Return a module's scheme: by its name or else by a regular expression or else by its class."""
        found = [
            (target != module, not target.startswith("re:"), number)
            for number, scheme in enumerate(self.schemes)
            for target in scheme.targets
            if _matches(module, target)
        ]
        return self.schemes[min(found)[2]] if found else None

    def weight(self, name: str, parts: Parts, dtype: Any) -> Any:
        """Return the matrix."""
        scheme = self._scheme(_module(parts))
        if scheme is None:
            raise InputError("is packed, but no group of config_groups has it as a target")
        if scheme.is_float:
            return _floats(name, parts, scheme, dtype)
        return self._packed(name, parts, scheme, dtype)

    def _packed(self, name: str, parts: Parts, scheme: Scheme, dtype: Any) -> Any:
        codes, scales, bits = parts.get("weight_packed"), parts["weight_scale"], scheme.bits
        if codes is not None:
            rows, columns = _shape(parts, bits)
            check("weight_packed", codes, ("I32",), (rows, -(-columns * bits // 32)))
        else:
            codes, bits = parts["weight"], 8
            rows, columns = matrix_shape("weight", codes)
            check("weight", codes, ("I8",), (rows, columns))
        size = (scheme.size if scheme.strategy == "group" else None) or columns
        if columns % size:
            raise InputError(f"has {columns} columns, which group_size {size} does not divide")
        groups = columns // size
        is_single = scheme.strategy == "tensor"
        check("weight_scale", scales, DTYPES, *([(), (1,)] if is_single else [(rows, groups)]))
        order = None
        if "weight_g_idx" in parts:
            check("weight_g_idx", parts["weight_g_idx"], ("I32", "I64"), (columns,))
            order = input_order(parts["weight_g_idx"].read(), groups)

        def codes_of(start: int, end: int) -> np.ndarray:
            found = rows_of(codes, start, end)
            found = _unsigned(found) if codes.dtype == "I8" else unpacked(found, bits)[:, :columns]
            return found if order is None else found[:, order]

        def scales_of(start: int, end: int) -> np.ndarray:
            if is_single:
                return np.full((end - start, 1), scales.read().reshape(()), STORED[scales.dtype])
            return rows_of(scales, start, end)

        arrays = {"codes": codes_of, "scales": scales_of}
        if "weight_zero_point" in parts:
            arrays["zeros"] = _zeros(parts["weight_zero_point"], bits, rows, groups, is_single, codes.dtype == "I8")
        elif not scheme.symmetric:
            raise InputError("has no weight_zero_point, although symmetric is false")
        return grouped(name, (rows, columns), bits, arrays, scales, groups, dtype, order)


def _module(parts: Parts) -> str:
    """Return a module's name in the file, which the config uses."""
    return next(iter(parts.values())).name.rpartition(".")[0]


def _matches(module: str, target: str) -> bool:
    """Return True if a target is a module's name, a regular expression for its beginning, or the class of matrices."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in (module, "Linear")


def _shape(parts: Parts, bits: int) -> tuple[int, int]:
    """Return the shape of a packed matrix."""
    words = parts["weight_packed"]
    rows, width = matrix_shape("weight_packed", words)
    if "weight_shape" not in parts:
        return rows, width * 32 // bits
    check("weight_shape", parts["weight_shape"], ("I64", "I32"), (2,))
    rows, columns = parts["weight_shape"].read().tolist()
    return max(1, rows), max(1, columns)


def _floats(name: str, parts: Parts, scheme: Scheme, dtype: Any) -> Any:
    values, scale = parts.get("weight"), parts["weight_scale"]
    if values is None or values.dtype != "F8_E4M3" or len(values.shape) != 2:
        found = "missing" if values is None else f"{values.dtype}{list(values.shape)}"
        raise InputError(f"has a weight that is {found}, wanted a matrix of F8_E4M3")
    rows, columns = values.shape
    sizes = {"tensor": (rows, columns), "channel": (1, columns), "group": (1, scheme.size or columns)}
    block = scheme.size if scheme.strategy == "block" else sizes[scheme.strategy]
    return fp8(name, values, scale, block, dtype, STORED.get(scale.dtype))


def _zeros(stored: Tensor, bits: int, rows: int, groups: int, is_single: bool, is_unpacked: bool) -> Any:
    """Return a function that reads the zero points of a range of rows, as uint8[rows, groups]."""
    per_word = 32 // bits
    if is_unpacked or is_single:
        check("weight_zero_point", stored, ("I8",), *([(), (1,)] if is_single else [(rows, groups)]))

        def shifted(start: int, end: int) -> np.ndarray:
            found = np.full((end - start, 1), stored.read().reshape(())) if is_single else rows_of(stored, start, end)
            return (found.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)

        return shifted
    check("weight_zero_point", stored, ("I32",), (-(-rows // per_word), groups))

    def zeros(start: int, end: int) -> np.ndarray:
        first = start // per_word
        values = unpacked(rows_of(stored, first, -(-end // per_word)).T, bits).T
        return values[start - first * per_word : end - first * per_word]

    return zeros


def _unsigned(codes: np.ndarray) -> np.ndarray:
    """Map signed numbers, as int8, to codes from 0 to 255."""
    return codes.view(np.uint8) ^ np.uint8(128)
