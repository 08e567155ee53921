"""Attention by cuDNN's kernel, on NVIDIA GPUs: no scores are stored, and a row's keys are read up to its length.

`jax.nn.dot_product_attention` calls the same kernel, but expects keys and values as `[B, S, K, H]`. A cache stores them
as `[B, K, S, H]`, and would be copied at every step. The function of jax that accepts both is private: see `kernel`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.core.model.cache import KeysValues
from jaxgen.core.model.cache_storage import ScaledSlots, as_numbers
from jaxgen.core.model.masks import Visibility

_OLDEST_GPU = (8, 0)  # compute capability
_LARGEST_HEAD = 128
_FEW_QUERIES = 16
# For a few queries, the kernel reads the keys of a row and kv head in one thread block. If there are fewer such blocks,
# about the number of an H100's multiprocessors, the keys are divided among several.
_FULL_GPU, _SMALLEST_BLOCK = 128, 128
# A step of fewer rows with at most this many slots is as fast with general operations, measured on an H200.
_FEW_SLOTS = 4096
_LOWEST = jnp.finfo(jnp.float32).min


@flax.struct.dataclass
class NewTokens:
    """The new tokens, if every row fills each part of the cache from the first slot on, and no token is hidden.

    Attributes:
        keys, values: `[B, K, T, H]`; padding comes last in each row.
        before: for each part, int32[B], the number of slots that are filled with earlier tokens.
    """

    keys: jax.Array
    values: jax.Array
    before: tuple[jax.Array, ...]


def fits(q: jax.Array, parts: Sequence[KeysValues], visible: Visibility, new: NewTokens | None) -> bool:
    """Return True if `attend` supports these arguments and is expected to be faster than general operations."""
    batch, _, steps, width = q.shape
    if new is None or kernel() is None or visible.softcap is not None or width > _LARGEST_HEAD or width % 8:
        return False
    if any(isinstance(part.keys, ScaledSlots) or jnp.dtype(part.dtype).itemsize != 2 for part in parts):
        return False
    hides_keys = visible.window is not None and visible.window < sum([part.slots for part in parts])
    if hides_keys and (steps == 1 or _earlier_parts(parts, visible)):
        return False
    fills_gpu = batch * new.keys.shape[1] >= _FULL_GPU // 2
    return steps > _FEW_QUERIES or fills_gpu or max([part.slots for part in parts]) > _FEW_SLOTS


def attend(q: jax.Array, parts: Sequence[KeysValues], visible: Visibility, new: NewTokens) -> jax.Array:
    """Attend from the queries `q [B, A, T, H]`; return `[B, A, T, H]` in q's dtype.

    All queries of a row see its earlier tokens, and each new token sees the new tokens up to itself. The kernel is
    called for each part with earlier tokens and for the new ones. A single query also sees all slots that are filled
    after its own token has been stored, so it needs no call for the new tokens.
    """
    scale = q.shape[-1] ** -0.5 if visible.scale is None else visible.scale
    of_parts = functools.partial(_over_part, scale=scale)
    if q.shape[2] == 1:
        lengths = (*new.before[:-1], new.before[-1] + 1)
        return _merged([of_parts(q, part, length) for part, length in zip(parts, lengths, strict=True)], q)
    earlier = _earlier_parts(parts, visible)
    results = [of_parts(q, part, length) for part, length in zip(earlier, new.before, strict=False)]
    window = None if visible.window is None or visible.window >= q.shape[2] else visible.window
    keys, values = (x.astype(q.dtype) for x in (new.keys, new.values))
    return _merged([*results, _call(q, keys, values, scale=scale, causal=True, window=window)], q)


def _earlier_parts(parts: Sequence[KeysValues], visible: Visibility) -> Sequence[KeysValues]:
    """Return the parts that may have earlier tokens."""
    return parts[:-1] if visible.start == 0 else parts


def _over_part(q: jax.Array, part: KeysValues, lengths: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Attend to the first `lengths int32[B]` slots of a part. Rows without such slots get the lowest sums."""
    batch, heads, steps, width = q.shape
    rows, kv_heads, slots, _ = part.keys.shape
    keys, values = (as_numbers(x, part.dtype).astype(q.dtype) for x in (part.keys, part.values))
    # The kernel sees the queries of all rows that read the same keys as those of one row.
    own = batch // rows
    lengths = jnp.minimum(lengths[::own], slots)
    q = q.reshape(rows, own, kv_heads, -1, steps, width).transpose(0, 2, 3, 1, 4, 5)
    q = q.reshape(rows, kv_heads, -1, own * steps, width)
    blocks = _key_blocks(rows * kv_heads, slots) if own * steps <= _FEW_QUERIES else 1
    if blocks == 1:
        out, sums = _call(q.reshape(rows, heads, -1, width), keys, values, scale=scale, lengths=jnp.maximum(lengths, 1))
        sums = jnp.where((lengths > 0)[:, None, None], sums, _LOWEST)
    else:
        out, sums = _over_key_blocks(q, keys, values, lengths, scale, blocks)
    out = out.reshape(rows, heads, own, steps, width).swapaxes(1, 2).reshape(batch, heads, steps, width)
    return out, sums.reshape(rows, heads, own, steps).swapaxes(1, 2).reshape(batch, heads, steps)


def _key_blocks(pairs: int, slots: int) -> int:
    """Return into how many equal blocks the keys of each pair of a row and a kv head are divided."""
    blocks = 1
    while pairs * blocks < _FULL_GPU and slots % (2 * blocks) == 0 and slots // (2 * blocks) >= _SMALLEST_BLOCK:
        blocks *= 2
    return blocks


def _over_key_blocks(
    q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array, scale: float, blocks: int
) -> tuple[jax.Array, jax.Array]:
    """Attend from `q [n, K, G, T, H]` to each block of the keys `[n, K, S, H]`, and combine the results."""
    rows, kv_heads, group, steps, width = q.shape
    size = keys.shape[2] // blocks
    begin = jnp.arange(blocks, dtype=jnp.int32) * size
    filled = jnp.broadcast_to(jnp.clip(lengths[:, None] - begin[None], 0, size)[:, None], (rows, kv_heads, blocks))
    repeated = jnp.broadcast_to(q[:, :, None], (rows, kv_heads, blocks, group, steps, width))
    out, sums = _call(
        repeated.reshape(-1, group, steps, width),
        *[x.reshape(-1, 1, size, width) for x in (keys, values)],
        scale=scale,
        lengths=jnp.maximum(filled.reshape(-1), 1),
    )
    out = out.reshape(repeated.shape)
    sums = jnp.where((filled > 0)[..., None, None], sums.reshape(repeated.shape[:-1]), _LOWEST)
    largest = jnp.max(sums, axis=2, keepdims=True)
    weights = jnp.exp(sums - largest)
    total = jnp.sum(weights, axis=2)
    out = jnp.sum(out.astype(jnp.float32) * weights[..., None], axis=2) / total[..., None]
    return out, largest[:, :, 0] + jnp.log(total)


def _merged(results: Sequence[tuple[jax.Array, jax.Array]], q: jax.Array) -> jax.Array:
    """Combine results for disjoint sets of keys: outputs `[B, A, T, H]` and logarithms of the sums of exponentials."""
    if len(results) == 1:
        return results[0][0].astype(q.dtype)
    largest = functools.reduce(jnp.maximum, [log_sums for _, log_sums in results])
    weights = [jnp.exp(log_sums - largest)[..., None] for _, log_sums in results]
    total = functools.reduce(jnp.add, weights)
    terms = [out.astype(jnp.float32) * weight for (out, _), weight in zip(results, weights, strict=True)]
    return (functools.reduce(jnp.add, terms) / total).astype(q.dtype)


def _call(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Call the kernel; return `[B, A, T, H]` and the logarithms of the sums of exponentials, float32[B, A, T].

    Args:
        q: `[B, A, T, H]`.
        keys, values: `[B, K, S, H]`.
        scale: the factor of the scores.
        causal: whether query i sees keys 0 to i, and not all keys.
        window: the maximum number of keys that a query sees, if `causal` is True.
        lengths: int32[B], at least 1: the number of keys of each row; None for all.
    """
    module = kernel()
    assert module is not None
    mask, of_rows = module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK, {}
    if lengths is not None:
        mask, of_rows = module.MaskType.PADDING, {"q_seqlen": jnp.full_like(lengths, q.shape[2]), "kv_seqlen": lengths}
    options = {"mask_type": mask, "sliding_window_length": window, "qkv_layout": "BNTH", "return_residual": True}
    return module.dot_product_attention(q, keys, values, **of_rows, scale=scale, **options)


@functools.cache
def kernel() -> Any | None:
    """Return jax's private module that calls the kernel; None without this module, cuDNN or a GPU that it supports.

    `tests/model/test_cudnn.py` fails if a release of jax does not have the module or changes the function's arguments.
    """
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module
    except ImportError:
        return None
    if module.cuda_versions is None:  # jax's plugin for CUDA is not installed
        return None
    try:
        module.cuda_versions.cudnn_get_version()
    except RuntimeError:  # cuDNN is not installed
        return None
    gpus = jax.devices() if jax.default_backend() == "gpu" else ()
    capabilities = [tuple(map(int, gpu.compute_capability.split("."))) for gpu in gpus]
    return module if all(capability >= _OLDEST_GPU for capability in capabilities) else None
