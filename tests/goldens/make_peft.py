"""Make the goldens for LoRA adapters with peft 0.11.1 and transformers 4.41.1 (see README.md for the format).

Usage, with the packages of requirements-peft.txt installed: python make_peft.py --seed N --out DIR.
"""

from __future__ import annotations

import numpy as np
import torch
from oracle import Checkpoint, Oracle, shape, start
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, Qwen2Config

CHECKPOINTS = {
    "qwen2-tied": Checkpoint(
        Qwen2Config(**shape(61, 16, 24, 3, 4, 2), tie_word_embeddings=True, max_position_embeddings=64), std=0.3
    ),
    "llama": Checkpoint(LlamaConfig(**shape(53, 16, 20, 2, 2, 1), max_position_embeddings=64), std=0.3),
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "qwen2-tied": {
        "all": {"r": 4, "lora_alpha": 8, "target_modules": ALL},
        "attention": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
        "rslora": {"r": 4, "lora_alpha": 4, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]},
        "patterns": {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 5, "layers.1.mlp.up_proj": 1},
            "alpha_pattern": {"down_proj": 2.5, "model.layers.0.self_attn.k_proj": 9},
        },
        "layers": {"r": 2, "target_modules": ALL, "layers_to_transform": [0, 2]},
    },
    "llama": {
        "regular-expression": {"r": 3, "lora_alpha": 6, "target_modules": r".*\.(gate_proj|v_proj)"},
        "head": {"r": 2, "lora_alpha": 5, "target_modules": ["lm_head", "k_proj"]},
    },
}
PROMPTS = 3


def main() -> None:
    """Write each checkpoint, its adapters, and the logits with each adapter."""
    seed, out = start("4.41.1")
    rng = np.random.default_rng(seed)
    for name, checkpoint in CHECKPOINTS.items():
        checkpoint.save(out / "checkpoints" / name, rng)
        prompts = [rng.integers(0, checkpoint.config.vocab_size, rng.integers(3, 12)) for _ in range(PROMPTS)]
        for adapter, options in ADAPTERS[name].items():
            base = Oracle(out / "checkpoints" / name).model
            model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "lora_" in key:
                        values = rng.normal(0, 0.3, parameter.shape).astype(np.float32)
                        parameter.copy_(torch.from_numpy(values))
            folder = out / "adapters" / name / adapter
            model.save_pretrained(folder, save_embedding_layers=False)
            (folder / "README.md").unlink()
            logits = {}
            with torch.no_grad():
                for number, ids in enumerate(prompts):
                    logits[f"ids_{number}"] = ids.astype(np.int32)
                    logits[f"logits_{number}"] = model(torch.from_numpy(ids)[None]).logits[0].numpy()
            np.savez(out / "logits" / f"{name}.{adapter}.npz", **logits)


if __name__ == "__main__":
    main()
