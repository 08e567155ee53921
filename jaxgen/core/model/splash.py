"""Splash attention, jax's kernel for many queries on TPUs; see `flash.Kernel`."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxgen.core.model.cache import KeysValues

_LANES = 128  # the kernel divides queries, keys and heads into multiples of this number
_BLOCKS = (512, 256, 128)


def fits(q: jax.Array, parts: Sequence[KeysValues]) -> bool:
    """Return True if the kernel supports these arguments."""
    steps, width = q.shape[2:]
    sizes = (steps, width, *[part.slots for part in parts])
    return _is_installed() and all(isinstance(size, int) and size % _LANES == 0 for size in sizes)


def key_blocks(pairs: int, slots: int, queries: int) -> int:
    """Return 1, because the kernel itself divides the keys into blocks."""
    return 1


def call(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    lengths: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Call the kernel; see `flash.Kernel.call`. With `interpret`, run it without a TPU."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
        splash_attention_mask as masks,
    )

    batch, heads, steps, width = q.shape
    kv_heads, slots = keys.shape[1:3]
    shape = (steps, slots)
    mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    if window is not None:
        mask = masks.LocalMask(shape, (window - 1, 0), 0)
    of_queries, of_keys = (next(block for block in _BLOCKS if size % block == 0) for size in shape)
    blocks = kernels.BlockSizes(of_queries, of_keys)
    of_group = masks.MultiHeadMask([mask] * (heads // kv_heads))
    kernel = kernels.make_splash_mqa_single_device(
        of_group, block_sizes=blocks, save_residuals=True, interpret=interpret
    )
    # A query sees the keys of its own segment.
    segments = None
    if lengths is not None:
        ends = jnp.arange(slots, dtype=jnp.int32)[None] >= lengths[:, None]
        segments = kernels.SegmentIds(jnp.zeros((batch, steps), jnp.int32), ends.astype(jnp.int32))
    q = (q.astype(jnp.float32) * scale).astype(q.dtype).reshape(batch, kv_heads, -1, steps, width)
    of_rows = jax.vmap(jax.vmap(kernel, in_axes=(0, 0, 0, None)))
    out, (sums,) = of_rows(q, keys, values, segments)
    return out.reshape(batch, heads, steps, width), sums.reshape(batch, heads, steps)


@functools.cache
def _is_installed() -> bool:
    """Return True if there is a TPU or its compiler. For other machines, the kernel is not even traced."""
    return importlib.util.find_spec("libtpu") is not None
