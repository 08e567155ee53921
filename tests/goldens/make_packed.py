"""Make tiny packed checkpoints (FP8, compressed-tensors), and record what transformers loads from them.

Run with a Python that has requirements-packed.txt. `--out` gets a directory for each checkpoint, and `packed.json` and
`packed.npz` with the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import shutil

import numpy as np
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Qwen3Config

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
PROMPTS, TOKENS = 2, 7


def arguments(bits: int, kind: str = "int", **more) -> dict:
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False} | more


INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
SCHEMES = {
    "w4a16": ("pack-quantized", arguments(4, strategy="group", group_size=16), None),
    "w4a16-asymmetric": ("pack-quantized", arguments(4, strategy="group", group_size=16, symmetric=False), None),
    "w8a8": ("int-quantized", arguments(8, strategy="channel"), INPUTS | {"type": "int"}),
    "float8-rows": ("float-quantized", arguments(8, "float", strategy="channel"), INPUTS),
    "float8-blocks": ("float-quantized", arguments(8, "float", strategy="block", block_structure=[16, 16]), None),
}


def model(draw: np.random.Generator) -> torch.nn.Module:
    """Return a random model whose linear layers have bfloat16 values."""
    config = Qwen3Config(**SIZES, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.from_numpy(draw.standard_normal(parameter.shape, dtype=np.float32))
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.35 * noise)
    return made.to(torch.bfloat16)


def save_fp8(path: pathlib.Path, made: torch.nn.Module, block: int) -> None:
    """Write a model in the layout of Qwen3-*-FP8, by its rule: scale = largest absolute value / 448."""
    made.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].float().reshape(rows // block, block, columns // block, block)
        scales = (blocks.abs().amax((1, 3)) / 448).to(torch.bfloat16)
        values = (blocks / scales.float()[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = values.reshape(rows, columns), scales
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [block, block],
        "modules_to_not_convert": ["lm_head"],
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))


def save_compressed(path: pathlib.Path, made: torch.nn.Module, form: str, weights: dict, inputs: dict | None) -> None:
    """Write a model with the package compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"], format=form)
    apply_quantization_config(made, config)
    for module in made.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.weights is None:
            continue
        args, weight = scheme.weights, module.weight.detach().float()
        rows, columns = weight.shape
        if args.block_structure:
            high, wide = args.block_structure
            pieces = weight.reshape(rows // high, high, columns // wide, wide).transpose(1, 2).flatten(2)
        else:
            pieces = weight.reshape(rows, -1, args.group_size or columns)
        scale, zero = calculate_qparams(pieces.amin(-1), pieces.amax(-1), args)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(made, form)
    compressor.compress_model(made)
    made.save_pretrained(path)
    compressor.update_config(path)


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of the values as float32."""
    return hashlib.sha256(tensor.detach().float().numpy().tobytes()).hexdigest()


def record(path: pathlib.Path, draw: np.random.Generator) -> tuple[dict, dict]:
    """Load a checkpoint; return hashes of all parameters, and logits.

    The logits are computed in float32, from the parameters that were loaded in bfloat16. transformers 5.23.0 loads the
    matrices of FP8 checkpoints in bfloat16 only.
    """
    compressed = "compressed" in json.loads((path / "config.json").read_text())["quantization_config"]["quant_method"]
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if compressed else {}
    hashes, arrays = {}, {}
    for dtype in ("float32", "bfloat16") if compressed else ("bfloat16",):
        loaded = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="eager", **options
        )
        hashes[dtype] = {name: digest(tensor) for name, tensor in loaded.state_dict().items()}
        if dtype == "bfloat16":
            ids = draw.integers(0, SIZES["vocab_size"], (PROMPTS, TOKENS))
            with torch.no_grad():
                logits = loaded.float()(torch.from_numpy(ids)).logits.numpy()
            arrays = {"ids": ids.astype(np.int32), "logits": logits}
    return hashes, arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    draw = np.random.default_rng(args.seed)
    save_fp8(args.out / "fp8", model(draw), 16)
    for name, scheme in SCHEMES.items():
        save_compressed(args.out / name, model(draw), *scheme)
    hashes, arrays = {}, {}
    for name in ("fp8", *SCHEMES):
        hashes[name], own = record(args.out / name, draw)
        arrays |= {f"{name}_{key}": array for key, array in own.items()}
        (args.out / name / "generation_config.json").unlink(missing_ok=True)
    (args.out / "packed.json").write_text(json.dumps(hashes, indent=1) + "\n")
    np.savez_compressed(args.out / "packed.npz", **arrays)


if __name__ == "__main__":
    main()
