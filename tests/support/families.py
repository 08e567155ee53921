"""Small models of several families, with everything in use that differs from Llama."""

from jaxgen import ModelConfig
from tests.support.models import CONFIG

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 100.0}
_LONG = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
_GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
CONFIGS = {
    "gemma2": {
        "model_type": "gemma2",
        **_GEMMA,
        "query_pre_attn_scalar": 20,
        "sliding_window": 4,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_GEMMA,
        "query_pre_attn_scalar": 20,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 5.0,
        "rope_parameters": _NESTED,
    },
    "phi3": {
        "model_type": "phi3",
        "sliding_window": None,
        "original_max_position_embeddings": 40,
        "max_position_embeddings": 128,
        "rope_scaling": _LONG,
        "partial_rotary_factor": 0.5,
    },
    "phi3-long": {
        "model_type": "phi3",
        "sliding_window": None,
        "original_max_position_embeddings": 2,  # all rows with more tokens use the long factors
        "max_position_embeddings": 64,
        "rope_scaling": _LONG,
        "partial_rotary_factor": 0.5,
    },
    "granite": {
        "model_type": "granite",
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "smollm3": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "use_sliding_window": True,
        "sliding_window": 4,
    },
    "olmo3": {
        "model_type": "olmo3",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "rope_parameters": {
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}


def family_config(name: str, **changes) -> ModelConfig:
    """Return the model config of a family; `changes` are keys of config.json."""
    config = CONFIG | CONFIGS[name] | changes
    if "rope_parameters" in config:
        del config["rope_theta"]
    return ModelConfig.from_hf(config)
