"""Rotary position embedding (RoFormer, arXiv 2104.09864) with transformers' methods for extending the context."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.rope_config import RopeConfig


def rope_angles(
    cfg: ModelConfig, rope: RopeConfig, positions: jax.Array, valid: jax.Array, dtype
) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines, `dtype[B, T, R]`, that rotate the first R dimensions of queries and keys.

    Args:
        cfg: the model's config.
        rope: one of the RoPEs of its layers.
        positions: int32[B, T].
        valid: bool[B, T], False for padding. Only the types `dynamic` and `longrope` use this mask, because they depend
            on the largest position in a row. (transformers uses the largest position in the batch.)
        dtype: the dtype of the result; angles are always float32.
    """
    width = rope.width(cfg.head_dim)
    if rope.type in ("dynamic", "longrope"):
        length = 1 + jnp.max(jnp.where(valid, positions, 0), axis=-1, keepdims=True)
        if rope.type == "dynamic":
            inv_freq, scale = _dynamic(cfg, rope, width, length.astype(jnp.float32)), 1.0
        else:
            first = jnp.min(jnp.where(valid, positions, length - 1), axis=-1, keepdims=True)
            inv_freq, scale = _longrope(cfg, rope, width, jnp.where(first > 0, first, length))
    else:
        frequencies, scale = inverse_frequencies(rope, width)
        inv_freq = jnp.asarray(frequencies)[None, None, :]
    angles = positions.astype(jnp.float32)[..., None] * inv_freq
    angles = jnp.concatenate([angles, angles], axis=-1)
    return (jnp.cos(angles) * scale).astype(dtype), (jnp.sin(angles) * scale).astype(dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate `x [B, heads, T, H]` by `cos` and `sin [B, T, R]`, pairing the two halves of R, as in transformers.

    Only the first R dimensions are rotated. If `cos` and `sin` are float32, so is the computation; the result is
    rounded to x's dtype.
    """
    width = cos.shape[-1]
    rest = None if width == x.shape[-1] else x[..., width:]
    turned = x if rest is None else x[..., :width]
    first, second = jnp.split(turned, 2, axis=-1)
    out = turned.astype(cos.dtype) * cos[:, None]
    out = (out + jnp.concatenate([-second, first], axis=-1).astype(sin.dtype) * sin[:, None]).astype(x.dtype)
    return out if rest is None else jnp.concatenate([out, rest], axis=-1)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Return the radians per position, float32[H/2], and a factor for the cosines and sines (1 except for yarn).

    The formulas are those of transformers' `ROPE_INIT_FUNCTIONS`. The types come from arXiv 2306.15595 (`linear`, which
    is position interpolation), the Llama 3.1 release (`llama3`), and arXiv 2309.00071 (`yarn`).
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = np.float32(1.0) / np.float32(rope.theta) ** exponent
    if rope.type == "linear":
        assert rope.factor is not None
        return plain / np.float32(rope.factor), 1.0
    if rope.type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.type == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain, 1.0


def _dynamic(cfg: ModelConfig, rope: RopeConfig, dim: int, length: jax.Array) -> jax.Array:
    """Return each row's radians per position, float32[B, 1, R/2], as in `LlamaDynamicNTKScalingRotaryEmbedding`."""
    longest = jnp.float32(cfg.max_position_embeddings)
    assert rope.factor is not None
    growth = rope.factor * jnp.maximum(length, longest) / longest - (rope.factor - 1)
    base = rope.theta * growth ** (dim / (dim - 2))
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (1.0 / base ** exponent[None, :])[:, None, :]


def _longrope(cfg: ModelConfig, rope: RopeConfig, dim: int, length: jax.Array) -> tuple[jax.Array, float]:
    """Return each row's radians per position, float32[B, 1, R/2], and the scale (LongRoPE, arXiv 2402.13753).

    A row uses the long factors if the pass that begins it has more than `original_max_position_embeddings` tokens.
    `length` is the number of the pass's tokens for a row that begins, and the number of earlier tokens for all others.
    (transformers 5 begins again with the long factors when the batch's longest row passes this length.)
    """
    original = rope.original_max_position_embeddings
    assert original is not None
    assert rope.short_factor is not None
    assert rope.long_factor is not None
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    base = np.float32(rope.theta) ** exponent
    short, long = (1 / (np.asarray(factors, np.float32) * base) for factors in (rope.short_factor, rope.long_factor))
    scale = rope.attention_factor
    if scale is None:
        stretch = rope.factor or cfg.max_position_embeddings / original
        scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return jnp.where(length > original, long[None, :], short[None, :])[:, None, :], scale


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Leave high frequencies unchanged, divide low frequencies by the factor, and blend in between."""
    assert rope.factor
    assert rope.low_freq_factor
    assert rope.high_freq_factor
    assert rope.original_max_position_embeddings
    turns = rope.original_max_position_embeddings * plain / np.float32(2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * plain / rope.factor + blend * plain).astype(np.float32)


def _yarn(rope: RopeConfig, plain: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    """Interpolate slowly rotating dimensions, extrapolate fast ones, and blend in between."""
    original = rope.original_max_position_embeddings
    assert rope.factor is not None
    assert original is not None

    def dimension_of(turns: float) -> float:
        ratio = original / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast or 32), dimension_of(rope.beta_slow or 1)
    if rope.truncate is None or rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    frequencies = (plain / rope.factor * ramp + plain * (1 - ramp)).astype(np.float32)
    return frequencies, _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    assert rope.factor is not None
    if rope.attention_factor is not None:
        return float(rope.attention_factor)

    def mscale(weight: float) -> float:
        assert rope.factor is not None
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
