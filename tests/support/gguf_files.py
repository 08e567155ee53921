"""Write small GGUF files, without the package: a container, three quantizers, and a converter for models."""

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

Stored = tuple[str, tuple[int, ...], bytes]  # a tensor's type, its shape with rows first, and its bytes
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12}
TYPES |= {"Q5_K": 13, "Q6_K": 14, "IQ2_XS": 17, "IQ4_NL": 20, "BF16": 30, "MXFP4": 39}
_ARRAYS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}

# The tensors of a layer by their names in memory
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
GEMMA2 = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OLMO = LAYER | {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
PERMUTED = ("llama", "granite", "smollm3")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, value: Any) -> bytes:
    if isinstance(value, bool):
        content = struct.pack("<IB", 7, value)
    elif isinstance(value, int):
        content = struct.pack("<IQ", 10, value) if value >= 2**32 else struct.pack("<II", 4, value)
    elif isinstance(value, float):
        content = struct.pack("<If", 6, value)
    elif isinstance(value, str):
        content = struct.pack("<I", 8) + text(value)
    elif isinstance(value, list):
        content = struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    else:
        kind = _ARRAYS[value.dtype.str[1:]]
        content = struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()
    return text(key) + content


def content(
    metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...], bytes]], version: int = 3
) -> bytes:
    """Return the bytes of a file."""
    alignment = metadata.get("general.alignment", 32)
    table, data = b"", b""
    for name, (kind, shape, values) in tensors.items():
        data += bytes(-len(data) % alignment)
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        table += text(name) + axes + struct.pack("<IQ", TYPES[kind], len(data))
        data += values
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    head += b"".join(pair(key, value) for key, value in metadata.items()) + table
    return head + bytes(-len(head) % alignment) + data


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Stored]) -> Path:
    path.write_bytes(content(metadata, tensors))
    return path


def stored(array: np.ndarray, kind: str = "F32") -> Stored:
    """Return a tensor for `write_gguf`, quantized if `kind` is Q4_0, Q4_1 or Q8_0."""
    array = np.asarray(array, np.float32)
    if kind == "F32":
        return kind, array.shape, array.tobytes()
    if kind == "F16":
        return kind, array.shape, array.astype(np.float16).tobytes()
    if kind == "BF16":
        return kind, array.shape, (array.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    groups = array.reshape(-1, 32)
    if kind == "Q8_0":
        scales = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float16)
        codes = np.rint(groups / scales.astype(np.float32)).astype("i1").view(np.uint8)
        return kind, array.shape, np.concatenate([scales.view(np.uint8), codes], 1).tobytes()
    low = groups.min(1, keepdims=True)
    scales = ((groups.max(1, keepdims=True) - low) / 15).astype(np.float16)
    offsets = low.astype(np.float16)
    if kind == "Q4_0":
        scales = (np.abs(groups).max(1, keepdims=True) / 8).astype(np.float16)
        low = -8 * scales.astype(np.float32)
    codes = np.clip(np.rint((groups - low) / scales.astype(np.float32)), 0, 15).astype(np.uint8)
    parts = [scales.view(np.uint8), *([offsets.view(np.uint8)] if kind == "Q4_1" else [])]
    return kind, array.shape, np.concatenate([*parts, codes[:, :16] | codes[:, 16:] << 4], 1).tobytes()


def pairs_of(array: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of queries or keys as llama.cpp's converter does for Llama."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def model_tensors(
    flat: dict[str, np.ndarray], name: str, heads: int, kv_heads: int, kind: str = "F32"
) -> dict[str, Stored]:
    """Return the tensors of a model of architecture `name`, given its parameters by their names in memory.

    Matrices have the type `kind`; vectors and routers are F32.
    """
    layer = GEMMA2 if name in ("gemma2", "gemma3") else OLMO if name == "olmo2" else LAYER
    tables = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    tensors = {}
    for own, values in flat.items():
        module, suffix = own.rsplit(".", 1)
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
            given = f"blk.{match[1]}.{layer[match[2]]}.{suffix}"
        else:
            given = f"{tables[module]}.{suffix}"
        if name in PERMUTED and ".attn_q." in given:
            values = pairs_of(values, heads)
        if name in PERMUTED and ".attn_k." in given:
            values = pairs_of(values, kv_heads)
        if name.startswith("gemma") and given.endswith("norm.weight"):
            values = values + np.float32(1)
        if given.endswith("ffn_gate_inp_shexp.weight"):
            values = values[0]
        is_matrix = values.ndim > 1 and "ffn_gate_inp" not in given
        tensors[given] = stored(values, kind if is_matrix else "F32")
    return tensors
