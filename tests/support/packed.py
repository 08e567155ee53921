"""Tiny packed checkpoints, written without the package: each packer returns tensors, and the matrix that they mean."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.checkpoints import QWEN2, weights

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    FLOAT8: "F8_E4M3",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}
MODEL = QWEN2 | {"tie_word_embeddings": False}
Packer = Callable[[np.ndarray, np.random.Generator], tuple[dict[str, np.ndarray], np.ndarray]]


def write_file(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file; the library does not write 8-bit floats from numpy."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": DTYPES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack codes along the last axis into int32, lowest bits first."""
    per_word = 32 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, per_word).astype(np.uint32)
    return sum(parts[..., i] << np.uint32(bits * i) for i in range(per_word)).astype(np.uint32).view(np.int32)  # pyright: ignore


def codes_of(matrix: np.ndarray, bits: int, group: int, symmetric: bool, dtype: Any) -> tuple[np.ndarray, ...]:
    """Quantize groups of columns: return codes [F, D], scales [F, G] of `dtype`, zero points [F, G], and the matrix."""
    rows, columns = matrix.shape
    groups, largest = matrix.reshape(rows, -1, group), 2**bits - 1
    if symmetric:
        scales = np.abs(groups).max(-1) / (2 ** (bits - 1) - 1)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = (high - low) / largest
        zeros = np.clip(np.rint(-low / scales), 1, largest - 1).astype(int)
    scales = scales.astype(dtype)
    wide = scales.astype(np.float32)
    codes = np.clip(np.rint(groups / wide[..., None]) + zeros[..., None], 0, largest).astype(int)
    meant = (codes - zeros[..., None]).astype(np.float32) * wide[..., None]
    return codes.reshape(rows, columns), scales, zeros, meant.reshape(rows, columns)


def gptq(
    bits: int = 4, group: int | None = 8, symmetric: bool = True, version: int = 1, act_order: bool = False
) -> Packer:
    """Pack as AutoGPTQ does (version 1) or GPTQModel (version 2)."""

    def pack(matrix: np.ndarray, draw: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        columns = matrix.shape[1]
        size = group or columns
        order = draw.permutation(columns) if act_order else np.arange(columns)  # column i of the sorted matrix
        codes, scales, zeros, meant = codes_of(matrix[:, order], bits, size, symmetric, np.float16)
        back = np.argsort(order)
        stored = (zeros.T - (1 if version == 1 else 0)).astype(np.uint8)
        parts = {
            "qweight": words(codes[:, back], bits).T,
            "qzeros": words(stored, bits),
            "scales": scales.T,
            "g_idx": (back // size).astype(np.int32),
        }
        # The rows in file order: words along the inputs, and outputs along the second axis
        return {name: np.ascontiguousarray(array) for name, array in parts.items()}, meant[:, back]

    return pack


def awq(group: int = 8) -> Packer:
    """Pack as AutoAWQ does in its format "gemm"."""

    def pack(matrix: np.ndarray, draw: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        codes, scales, zeros, meant = codes_of(matrix, 4, group, False, np.float16)

        def outputs(numbers: np.ndarray) -> np.ndarray:  # [n, F] -> int32[n, F / 8]
            result = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
            for bits, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                result |= numbers[:, output::8].astype(np.uint32) << np.uint32(4 * bits)
            return result.view(np.int32)

        parts = {"qweight": outputs(codes.T), "qzeros": outputs(zeros.T), "scales": np.ascontiguousarray(scales.T)}
        return parts, meant

    return pack


def w4a16(bits: int = 4, group: int | None = 8, symmetric: bool = True, act_order: bool = False) -> Packer:
    """Pack as compressed-tensors does in its format "pack-quantized"."""

    def pack(matrix: np.ndarray, draw: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        rows, columns = matrix.shape
        size = group or columns
        order = draw.permutation(columns) if act_order else np.arange(columns)
        codes, scales, zeros, meant = codes_of(matrix[:, order], bits, size, symmetric, ml_dtypes.bfloat16)
        back = np.argsort(order)
        parts = {
            "weight_packed": words(codes[:, back], bits),
            "weight_scale": scales,
            "weight_shape": np.array([rows, columns], np.int64),
        }
        if not symmetric:
            parts["weight_zero_point"] = np.ascontiguousarray(words(np.ascontiguousarray(zeros.T), bits).T)
        if act_order:
            parts["weight_g_idx"] = (back // size).astype(np.int32)
        return parts, meant[:, back]

    return pack


def integers(symmetric: bool = True, group: int | None = None) -> Packer:
    """Pack as compressed-tensors does in its format "int-quantized"."""

    def pack(matrix: np.ndarray, draw: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        codes, scales, zeros, meant = codes_of(matrix, 8, group or matrix.shape[1], symmetric, ml_dtypes.bfloat16)
        parts = {"weight": (codes - 128).astype(np.int8), "weight_scale": scales}
        return parts | ({} if symmetric else {"weight_zero_point": (zeros - 128).astype(np.int8)}), meant

    return pack


def floats(
    block: tuple[int, int] | None,
    name: str,
    dtype: Any = ml_dtypes.bfloat16,
    shape: tuple[int, ...] | None = None,
    **more: Any,
) -> Packer:
    """Pack as 8-bit floats with a scale for each block; None means a single one. `shape` is that of a single scale."""

    def pack(matrix: np.ndarray, draw: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
        rows, columns = matrix.shape
        high, wide = (min(a, b) for a, b in zip(block or matrix.shape, matrix.shape, strict=True))
        scales = np.zeros((-(-rows // high), -(-columns // wide)), dtype)
        values, meant = np.zeros(matrix.shape, FLOAT8), np.zeros(matrix.shape, np.float32)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scales[i, j] = np.abs(matrix[part]).max() / 448
                values[part] = (matrix[part] / np.float32(scales[i, j])).astype(FLOAT8)
                meant[part] = values[part].astype(np.float32) * np.float32(scales[i, j])
        return {"weight": values, name: scales if shape is None else scales.reshape(shape)} | more, meant

    return pack


def is_linear(name: str) -> bool:
    """Return True for matrices in layers, which all formats pack."""
    return name.endswith("_proj.weight")


def checkpoint(
    path: Path,
    packer: Packer,
    description: dict[str, Any] | None,
    config: dict[str, Any] = MODEL,
    dense: tuple[str, ...] = (),
    change: Callable[[dict[str, np.ndarray]], Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write a packed checkpoint, and return the float32 matrices and other parameters that it means.

    Modules whose names contain one of `dense` are not packed. `change` can modify the tensors in place.
    """
    draw, stored, meant = np.random.default_rng(0), {}, {}
    for name, matrix in (tensors or weights(config, config["torch_dtype"])).items():
        if is_linear(name) and not any(part in name for part in dense):
            parts, meant[name] = packer(matrix.astype(np.float32), draw)
            stored |= {f"{name.removesuffix('weight')}{suffix}": array for suffix, array in parts.items()}
        else:
            stored[name] = matrix
            meant[name] = matrix.astype(np.float32)
    if change is not None:
        change(stored)
    path.mkdir(exist_ok=True)
    write_file(path / "model.safetensors", stored)
    content = config if description is None else config | {"quantization_config": description}
    (path / "config.json").write_text(json.dumps(content))
    return meant


def scheme(kind: str = "int", bits: int = 4, strategy: str = "group", **more: Any) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors with one group of modules."""
    form = {"int4": "pack-quantized", "int8": "int-quantized", "float8": "float-quantized"}[f"{kind}{bits}"]
    inputs, form = more.pop("input_activations", None), more.pop("format", form)
    arguments = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False} | more
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
