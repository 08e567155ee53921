"""Small checkpoints, defined and written without the package."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = QWEN2 | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 6,
    "attention_bias": False,
    "use_sliding_window": True,
    "sliding_window": 5,
    "max_window_layers": 1,
}
MISTRAL = QWEN2 | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "tie_word_embeddings": False,
    "sliding_window": 5,
}
GENERATION = {"do_sample": True, "temperature": 0.5, "eos_token_id": [2, 3], "pad_token_id": 0}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Compute the parameters' shapes from a config of one of the models used here, without the package."""
    width, mlp = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    layer = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "mlp.gate_proj.weight": (mlp, width),
        "mlp.up_proj.weight": (mlp, width),
        "mlp.down_proj.weight": (width, mlp),
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
    }
    if config["model_type"] == "qwen2":
        layer |= {f"self_attn.{name}_proj.bias": (keys,) for name in "kv"} | {"self_attn.q_proj.bias": (queries,)}
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    result = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for number in range(config["num_hidden_layers"]):
        result |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (config["vocab_size"], width)
    return result


def weights(config: dict, dtype: str = "float32") -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=shape).astype(jnp.dtype(dtype)) for name, shape in shapes(config).items()}


def write(path: Path, config: dict | None, tensors: dict, generation: dict | None = None, shards: int = 1) -> Path:
    """Write a checkpoint as transformers does, using the safetensors library."""
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path
