"""Workarounds for XLA's GPU compiler, measured for an H100 with jax 0.10.2 to 0.11.2.

They let the compiler make one kernel of several operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.shapes import at_most

# One kernel sums up to this many numbers; 18,944, the width of a 7B model, take two.
_LONGEST_SUM = 9472
# Keys or values of up to this many bytes are assumed to come from the GPU's cache when they are read again.
_CACHED_BYTES = 8 << 20
# With up to this many slots, the softmax of a query's scores and the sum of the values are one kernel.
_ONE_KERNEL_SLOTS = 1024
# Up to this many rows each add the product with the update of their own adapter.
_FEW_ROWS = 32


def row_sums(row: jax.Array, weight: jax.Array, in_parts: bool) -> jax.Array:
    """Multiply one row, `[1, D]`, as sums of products, which XLA's GPU compiler fuses with what comes before and after.

    Of a product with a large weight it makes a kernel of partial sums and one that adds them up. It does the same with
    long sums, unless they are `in_parts`: parts of equal length are one kernel. A weight that may be divided over a
    mesh is left in one part, because its columns may be on several devices.
    """
    columns = weight.shape[1]
    parts = -(-columns // _LONGEST_SUM) if in_parts else 1
    parts = next((count for count in range(parts, 4 * parts) if columns % count == 0), parts)
    weights = weight.astype(jnp.float32) * row.astype(jnp.float32)
    return functools.reduce(jnp.add, [jnp.sum(part, axis=1) for part in jnp.array_split(weights, parts, axis=1)])[None]


def norm(plain: Callable, rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Norm `rows [n, D]`: `plain(rows, weight)`."""
    if rows.shape[0] > 1:
        return plain(rows, weight)
    return lax.platform_dependent(rows, weight, cuda=functools.partial(_norm_of_two, plain), default=plain)


def _norm_of_two(plain: Callable, row: jax.Array, weight: jax.Array) -> jax.Array:
    """Norm a row together with a row of zeros.

    The compiler recognizes norms of several rows only, and fuses them with the product that follows, unless rows were
    concatenated before or cut out after.
    """
    is_first = jnp.arange(2)[:, None] == 0
    rows = plain(jnp.where(is_first, row, 0), weight)
    return jnp.sum(jnp.where(is_first, rows, 0), axis=0, keepdims=True)


def scores(plain: Callable, q: jax.Array, keys: jax.Array) -> jax.Array:
    """Multiply `q [B, A, T, H]` with `keys [n, K, S, H]`: `plain(q, keys)`, float32[B, K, G, T, S]."""
    if not _is_read_by_one_query(keys, q.shape[0], q.shape[2]):
        return plain(q, keys)
    return lax.platform_dependent(q, keys, cuda=_scores_as_sums, default=plain)


def weighted(plain: Callable, weights: jax.Array, values: jax.Array) -> jax.Array:
    """Sum `values [n, K, S, H]` with `weights [B, K, G, T, S]`: `plain(weights, values)`, float32[B, K, G, T, H]."""
    batch, _, _, steps, slots = weights.shape
    if slots > _ONE_KERNEL_SLOTS or not _is_read_by_one_query(values, batch, steps):
        return plain(weights, values)
    return lax.platform_dependent(weights, values, cuda=_weighted_as_sums, default=plain)


def _is_read_by_one_query(part: jax.Array, rows: int, steps: int) -> bool:
    """Return True if the queries' products with keys or values `[n, K, S, H]` are sums on a GPU.

    XLA's GPU compiler fuses sums of products with what comes before and after, so there are fewer kernels. The heads of
    a group read their kv head one by one.
    """
    return steps == 1 and rows == part.shape[0] and at_most(part.size * part.dtype.itemsize, _CACHED_BYTES)


def _scores_as_sums(q: jax.Array, keys: jax.Array) -> jax.Array:
    """Multiply one query per row and head, `q [B, A, 1, H]`, with `keys [B, K, S, H]`: float32[B, K, G, 1, S]."""
    batch, heads, _, size = q.shape
    kv_heads = keys.shape[1]
    q = q.astype(keys.dtype).reshape(batch, kv_heads, heads // kv_heads, 1, 1, size)
    return jnp.sum(q.astype(jnp.float32) * keys[:, :, None, None].astype(jnp.float32), axis=-1)


def _weighted_as_sums(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Sum `values [B, K, S, H]` with the weights of one query, `[B, K, G, 1, S]`: float32[B, K, G, 1, H]."""
    weights = weights.astype(values.dtype).astype(jnp.float32)[..., None]
    return jnp.sum(weights * values[:, :, None, None].astype(jnp.float32), axis=-2)


def add_updates(
    plain: Callable,
    out: jax.Array,
    narrow: jax.Array,
    chosen: jax.Array,
    b: jax.Array,
    ends: tuple[int, ...],
) -> jax.Array:
    """Add to each row of `out [rows, F]` the update of its adapter: `plain(out, narrow, chosen)`; see `Adapters`."""
    if not at_most(out.shape[0], _FEW_ROWS):
        return plain(out, narrow, chosen)
    on_gpu = functools.partial(_add_of_each, b=b, ends=ends)
    return lax.platform_dependent(out, narrow, chosen, cuda=on_gpu, default=plain)


def _add_of_each(
    out: jax.Array, narrow: jax.Array, chosen: jax.Array, b: jax.Array, ends: tuple[int, ...]
) -> jax.Array:
    """Add the sums of products of `narrow [rows, n, p, r]` with the update of each row.

    XLA's GPU compiler makes one kernel of it (jax 0.10.2), for which all look-ups of `narrow` have to be one, with
    indices of one number, and `narrow` is not rounded. Parts of a fused matrix are used several times by what
    follows; without the barrier, each use would compute them again.
    """
    rows, (_, count, parts, rank) = out.shape[0], narrow.shape
    part = np.repeat(np.arange(parts, dtype=np.int32), np.diff(ends, prepend=0))
    own = jnp.maximum(chosen, 0)
    first = ((jnp.arange(rows, dtype=jnp.int32) * count + own)[:, None] * parts + part[None, :]) * rank
    index = first[:, None, :] + jnp.arange(rank, dtype=jnp.int32)[None, :, None]
    narrow = jnp.take(narrow.reshape(-1), index, mode="clip")
    update = jnp.sum(narrow * b[own].astype(jnp.float32), axis=1)
    out = out + jnp.where(chosen[:, None] >= 0, update, 0.0)
    return lax.optimization_barrier(out) if parts > 1 else out
