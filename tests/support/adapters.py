"""Random LoRA adapters, in memory and in PEFT's format."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxgen.core.model.causal_lm import param_shapes

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def factors(model, rank: int, seed: int, targets=ALL, scale: float = 0.3) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return each module's factors A and B, keyed by the module's name."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in param_shapes(model).items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rpartition(".")[2] in targets:
            a, b = rng.normal(size=(rank, shape[1])), rng.normal(size=(shape[0], rank))
            found[module] = (a * scale).astype(np.float32), (b * scale).astype(np.float32)
    return found


def write(folder: Path, updates, **config) -> Path:
    """Write an adapter. `config` overrides fields of its adapter_config.json."""
    folder.mkdir(parents=True)
    rank = next(iter(updates.values()))[0].shape[0]
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(updates), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    arrays = {}
    for name, (a, b) in updates.items():
        arrays[f"base_model.model.{name}.lora_A.weight"] = a
        arrays[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(arrays, folder / "adapter_model.safetensors")
    return folder


def merged(params, updates, scale=1.0):
    """Return the parameters with an adapter merged into them. `scale` can be a function of a module's name."""

    def walk(node, path):
        if not isinstance(node, dict):
            module = ".".join(path[:-1])
            if module in updates and path[-1] == "weight":
                a, b = updates[module]
                factor = scale(module) if callable(scale) else scale
                return jnp.asarray((np.asarray(node, np.float32) + factor * b @ a).astype(node.dtype))
            return node
        return {key: walk(child, (*path, key)) for key, child in node.items()}

    return walk(params, ())
