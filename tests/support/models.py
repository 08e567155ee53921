"""Models for tests: random ones, and one that counts."""

import dataclasses
import functools

import flax.traverse_util
import jax
import numpy as np
import pytest

from jaxgen import CausalLM, GenerationConfig, ModelConfig
from jaxgen.core.model.causal_lm import param_shapes

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


def model_config(**changes) -> ModelConfig:
    return ModelConfig.from_hf({**CONFIG, **changes})


def random_params(cfg: ModelConfig, seed: int = 0, scale: float = 0.3):
    """Return random parameters. Biases are not 0, and the weights of norms are not 1."""
    rng = np.random.default_rng(seed)
    flat = {}
    for name, shape in param_shapes(cfg).items():
        values = rng.normal(size=shape) * scale
        values += 1.0 if "norm" in name else 0.0
        flat[name] = jax.device_put(values.astype(cfg.dtype))  # compiles nothing
    return flax.traverse_util.unflatten_dict(flat, sep=".")


def counting_config(vocab_size: int = 50, **fields) -> GenerationConfig:
    """Return the config of a model whose likeliest next token is the last one plus one, or 0 after the largest."""
    model = model_config(
        vocab_size=vocab_size, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1
    )
    return GenerationConfig(model=model, **fields)


def counting_params(cfg: GenerationConfig, peak: float = 20.0):
    """Return parameters with one-hot embeddings. Attention and MLP add nothing, and the head shifts by one."""
    assert cfg.model is not None
    vocab, width = cfg.model.vocab_size, cfg.model.hidden_size
    one_hot = np.eye(vocab, width, dtype=np.float32)
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), random_params(cfg.model))
    params["model"]["norm"]["weight"] = np.ones(width, np.float32)
    params["model"]["embed_tokens"]["weight"] = one_hot
    # RMSNorm turns the 1 of a one-hot vector into sqrt(width).
    params["lm_head"]["weight"] = np.roll(one_hot, 1, axis=0) * np.float32(peak / width**0.5)
    return jax.tree.map(jax.device_put, params)


def with_layers(cfg: ModelConfig, layers: int) -> ModelConfig:
    return dataclasses.replace(cfg, num_hidden_layers=layers, layers=cfg.layers[:1] * layers)


def last_logits(model: ModelConfig, params, inputs_embeds) -> jax.Array:
    """Return the logits that follow embeddings `[T, D]`, float32[V]. One program serves all T up to 64."""
    return _last_logits(model, params, padded(inputs_embeds)[None], np.int32(len(inputs_embeds) - 1))


def padded(inputs_embeds) -> np.ndarray:
    """Pad [T, D] to [64, D] without compiling a program for each T."""
    inputs_embeds = np.asarray(inputs_embeds)
    return np.pad(inputs_embeds, ((0, 64 - len(inputs_embeds)), (0, 0)))


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(model, params, inputs_embeds, last):
    mask = np.arange(inputs_embeds.shape[1])[None] <= last  # longrope's factors depend on the row's length
    return (
        CausalLM(model)
        .apply({"params": params}, attention_mask=mask, inputs_embeds=inputs_embeds, logits_to_keep=last[None, None])
        .logits[0, 0]
    )


def left_pad(rows: list[list[int]], width: int | None = None, pad: int = 0):
    width = width or max(len(row) for row in rows)
    ids = np.full((len(rows), width), pad, np.int32)
    mask = np.zeros((len(rows), width), np.int32)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = 1
    return ids, mask


def generated(out, row: int) -> list[int]:
    """Return the tokens that were generated for a row, without padding."""
    start = out.prompt_width
    return np.asarray(out.sequences)[row, start : start + int(out.lengths[row])].tolist()


def all_generated(out) -> list[list[int]]:
    """Return the tokens that were generated for each row, without padding."""
    return [generated(out, row) for row in range(out.lengths.shape[0])]


def slow(*values):
    """Mark each of these test parameters as slow. A tuple contains the values of several arguments."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow) for v in values]
