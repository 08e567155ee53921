"""FP8 checkpoints (`quant_method` fp8), such as Qwen3-8B-FP8, and the older ones of AutoFP8.

A matrix has `weight float8_e4m3fn[F, D]` and one scale for each block of 128 x 128 entries (`weight_scale_inv`), or one
scale for the whole matrix (`weight_scale_inv`, or AutoFP8's `weight_scale`). An entry is `weight * scale`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from convert.packed.formats import NO_INPUTS, Parts, fp8, is_excluded, patterns
from jaxgen.errors import ConfigError, InputError, shown


@dataclasses.dataclass(frozen=True)
class Fp8Blocks:
    """The format of a checkpoint; `block` is None if each matrix has a single scale."""

    title: ClassVar[str] = "FP8"
    keys: ClassVar[Collection[str]] = frozenset(
        "quant_method activation_scheme fmt weight_block_size modules_to_not_convert ignored_layers scale_fmt "
        "expert_dtype dequantize modules_to_convert kv_cache_scheme".split()
    )
    suffixes: ClassVar[Collection[str]] = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
    required: ClassVar[Sequence[Sequence[str]]] = (("weight",), ("weight_scale_inv", "weight_scale"))
    ignored: ClassVar[Mapping[str, str]] = {"input_scale": NO_INPUTS}

    block: tuple[int, int] | None
    excluded: tuple[str, ...]
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Fp8Blocks:
        """Read a `quantization_config`."""
        for key, allowed in (("fmt", "e4m3"), ("scale_fmt", "float"), ("expert_dtype", "fp8")):
            if config.get(key, allowed) not in (allowed, None):
                raise ConfigError(f"{key} must be {allowed!r}, got {shown(config[key])}: load the original model")
        if config.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
            raise ConfigError(
                f"activation_scheme must be 'dynamic' or 'static', got {shown(config['activation_scheme'])}"
            )
        if config.get("modules_to_convert"):
            raise ConfigError(f"modules_to_convert must be null, got {shown(config['modules_to_convert'])}")
        block = config.get("weight_block_size", [128, 128])
        if block is not None:
            match block:
                case [int(rows), int(columns)] if rows > 0 and columns > 0:
                    block = (rows, columns)
                case _:
                    raise ConfigError(f"weight_block_size must be null or two positive numbers, got {shown(block)}")
        return cls(block, patterns(config, "modules_to_not_convert", "ignored_layers"))

    def is_packed(self, parts: Parts) -> bool:
        """Return True if a module has a matrix of 8-bit floats, or scales."""
        matrix = parts.get("weight")
        return any(name in parts for name in self.suffixes) or (matrix is not None and matrix.dtype.startswith("F8_"))

    def packs(self, module: str) -> bool | None:
        """Return True if the config says that a module's matrix is packed; transformers never packs the head."""
        return not is_excluded(module, self.excluded) and not module.endswith("lm_head")

    def weight(self, name: str, parts: Parts, dtype: Any) -> Any:
        """Return the matrix, whose entries are rounded once, to the model's dtype."""
        values = parts["weight"]
        if values.dtype != "F8_E4M3":
            raise InputError(f"has a weight of {values.dtype}, wanted F8_E4M3")
        if "activation_scale" in parts:
            raise InputError("has a static activation_scale, which is not read: load a file with dynamic scales")
        scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
        assert scale is not None, "required"
        is_single = self.block is None or "weight_scale" in parts
        return fp8(name, values, scale, values.shape if is_single else self.block, dtype, None)  # pyright: ignore
