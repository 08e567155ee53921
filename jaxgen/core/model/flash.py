"""Attention by a library's kernel, on a GPU or a TPU, which stores no scores.

A kernel attends either to keys that all of a row's queries see, or causally to the new tokens. Results for different
keys are combined by their sums of exponentials.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.core.model import cudnn, splash
from jaxgen.core.model.cache import KeysValues
from jaxgen.core.model.cache_storage import ScaledSlots, as_numbers
from jaxgen.core.model.masks import Visibility

_LOWEST = jnp.finfo(jnp.float32).min


@flax.struct.dataclass
class NewTokens:
    """Keys and values of the new tokens.

    They exist only if each row's tokens fill the first slots of each part of the cache, and no token is hidden.

    Attributes:
        keys, values: `[B, K, T, H]`; padding comes last in each row.
        before: for each part, int32[B], the number of slots that are filled with earlier tokens.
    """

    keys: jax.Array
    values: jax.Array
    before: tuple[jax.Array, ...]


class Kernel(Protocol):
    """A library's kernel."""

    def fits(self, q: jax.Array, parts: Sequence[KeysValues]) -> bool:
        """Return True if the kernel supports these arguments and is expected to be faster than general operations."""
        ...

    def call(
        self,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        *,
        scale: float,
        causal: bool = False,
        window: int | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the attended values `[B, A, T, H]` and the logarithms of the sums of exponentials, float32[B, A, T].

        Args:
            q: `[B, A, T, H]`.
            keys, values: `[B, K, S, H]`.
            scale: the factor of the scores.
            causal: whether query i sees keys 0 to i, and not all keys.
            window: the maximum number of keys that a query sees, if `causal` is True.
            lengths: int32[B], at least 1: the number of keys of each row; None for all.
        """
        ...

    def key_blocks(self, pairs: int, slots: int, queries: int) -> int:
        """Return the number of equal blocks of keys into which a call should be divided.

        `pairs` is the number of pairs of a row and a kv head, and `queries` the number of queries per row.
        """
        ...


KERNELS: dict[str, Kernel] = {"cuda": cudnn, "tpu": splash}


def kernels(q: jax.Array, parts: Sequence[KeysValues], visible: Visibility) -> dict[str, Kernel]:
    """Return the kernels that can compute attention with these arguments, by platform."""
    if visible.softcap is not None:
        return {}
    if any(isinstance(part.keys, ScaledSlots) or jnp.dtype(part.dtype).itemsize != 2 for part in parts):
        return {}
    hides_keys = visible.window is not None and visible.window < sum([part.slots for part in parts])
    if hides_keys and (q.shape[2] == 1 or _earlier_parts(parts, visible)):
        return {}
    return {platform: kernel for platform, kernel in KERNELS.items() if kernel.fits(q, parts)}


def attend(q: jax.Array, parts: Sequence[KeysValues], visible: Visibility, new: NewTokens, kernel: Kernel) -> jax.Array:
    """Attend from the queries `q [B, A, T, H]`; return `[B, A, T, H]` in q's dtype.

    All queries of a row see its earlier tokens, and each new token sees the new tokens up to itself. The kernel is
    called for each part with earlier tokens and for the new ones. A single query also sees all slots that are filled
    after its own token has been stored, so it needs no call for the new tokens.
    """
    scale = q.shape[-1] ** -0.5 if visible.scale is None else visible.scale
    of_parts = functools.partial(_over_part, scale=scale, kernel=kernel)
    if q.shape[2] == 1:
        lengths = (*new.before[:-1], new.before[-1] + 1)
        return _merged([of_parts(q, part, length) for part, length in zip(parts, lengths, strict=True)], q)
    earlier = _earlier_parts(parts, visible)
    results = [of_parts(q, part, length) for part, length in zip(earlier, new.before, strict=False)]
    window = None if visible.window is None or visible.window >= q.shape[2] else visible.window
    keys, values = (x.astype(q.dtype) for x in (new.keys, new.values))
    return _merged([*results, kernel.call(q, keys, values, scale=scale, causal=True, window=window)], q)


def _earlier_parts(parts: Sequence[KeysValues], visible: Visibility) -> Sequence[KeysValues]:
    """Return the parts that may have earlier tokens."""
    return parts[:-1] if visible.start == 0 else parts


def _over_part(
    q: jax.Array, part: KeysValues, lengths: jax.Array, scale: float, kernel: Kernel
) -> tuple[jax.Array, jax.Array]:
    """Attend to the first `lengths int32[B]` slots of a part. Rows without such slots get the lowest sums."""
    batch, heads, steps, width = q.shape
    rows, kv_heads, slots, _ = part.keys.shape
    keys, values = (as_numbers(x, part.dtype).astype(q.dtype) for x in (part.keys, part.values))
    # The kernel sees the queries of all rows that read the same keys as those of one row.
    own = batch // rows
    lengths = jnp.minimum(lengths[::own], slots)
    q = q.reshape(rows, own, kv_heads, -1, steps, width).transpose(0, 2, 3, 1, 4, 5)
    q = q.reshape(rows, kv_heads, -1, own * steps, width)
    blocks = kernel.key_blocks(rows * kv_heads, slots, own * steps)
    if blocks == 1:
        call = functools.partial(kernel.call, scale=scale, lengths=jnp.maximum(lengths, 1))
        out, sums = call(q.reshape(rows, heads, -1, width), keys, values)
        sums = jnp.where((lengths > 0)[:, None, None], sums, _LOWEST)
    else:
        out, sums = _over_key_blocks(functools.partial(kernel.call, scale=scale), q, keys, values, lengths, blocks)
    out = out.reshape(rows, heads, own, steps, width).swapaxes(1, 2).reshape(batch, heads, steps, width)
    return out, sums.reshape(rows, heads, own, steps).swapaxes(1, 2).reshape(batch, heads, steps)


def _over_key_blocks(
    call: Callable, q: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array, blocks: int
) -> tuple[jax.Array, jax.Array]:
    """Attend from `q [n, K, G, T, H]` to each block of the keys `[n, K, S, H]`, and combine the results."""
    rows, kv_heads, group, steps, width = q.shape
    size = keys.shape[2] // blocks
    begin = jnp.arange(blocks, dtype=jnp.int32) * size
    filled = jnp.broadcast_to(jnp.clip(lengths[:, None] - begin[None], 0, size)[:, None], (rows, kv_heads, blocks))
    repeated = jnp.broadcast_to(q[:, :, None], (rows, kv_heads, blocks, group, steps, width))
    out, sums = call(
        repeated.reshape(-1, group, steps, width),
        *[x.reshape(-1, 1, size, width) for x in (keys, values)],
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
