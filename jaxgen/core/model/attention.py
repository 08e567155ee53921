"""Grouped-query attention over a cache of one or more parts.

For short inputs, all scores are computed at once. A CPU may instead process one block of queries at a time and skip the
keys after that block. Longer inputs are processed in blocks of queries, blocks of keys (with a running softmax), or
both, so that no array grows quadratically with the length. A GPU or a TPU may use a library's kernel instead: see
`flash`. The choice of method depends only on the platform, on installed libraries, and on static values, such as
shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.control import fori_loop
from jaxgen.core.model import flash, workarounds
from jaxgen.core.model.cache import KeysValues
from jaxgen.core.model.cache_storage import ScaledSlots, Slots, as_numbers
from jaxgen.core.model.flash import NewTokens
from jaxgen.core.model.masks import Visibility
from jaxgen.core.model.weights import precision
from jaxgen.shapes import repeat_rows

# The maximum numbers of queries and slots for which all scores are computed at once.
_AT_ONCE_QUERIES, _AT_ONCE_SLOTS = 512, 1024
# A pass with at most this many queries, such as a decode step, processes all rows and heads of a key block together.
_FEW_QUERIES = 16
_QUERY_BLOCK, _KEY_BLOCK = 256, 512
_CPU_QUERY_BLOCK, _CPU_KEY_BLOCK = 128, 256  # block sizes for processing one kv head of one row at a time
# With at most this many queries and slots, a CPU computes all scores of a block of queries at once.
_CPU_QUERIES, _CPU_SLOTS = 768, 1024
# The number of queries per block in `_without_later_keys`, which reads the keys up to the block's last query.
_CAUSAL_BLOCK = 128
_ACCELERATOR_BLOCK = 4096
_LOWEST = jnp.finfo(jnp.float32).min


def attention(
    q: jax.Array,
    parts: Sequence[KeysValues],
    visible: Visibility,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
    with_weights: bool = False,
    new: NewTokens | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attend from the queries `q [B, A, T, H]` to the keys and values of all parts.

    Args:
        q: rotated queries; head a reads kv head a // (A/K).
        parts: the parts of the cache, in order.
        visible: the keys that each query may see.
        dropout: applied to the attention weights during training.
        with_weights: also return the attention weights. Weights and dropout require computing all scores at once.
        new: the new tokens, if a library's kernel may be called.

    Returns:
        The attended values `[B, A, T, H]` in q's dtype, and the weights float32[B, A, T, S] or None. S is the number of
        slots in all parts. Only a padding token's query can have no visible keys; the result is then arbitrary, but
        finite.
    """
    if dropout is not None or with_weights:
        out, weights = _at_once(q, parts, visible, dropout)
        return out, weights if with_weights else None
    steps, slots = q.shape[2], sum([part.slots for part in parts])
    if all_at_once(steps, slots):
        return _recomputed_at_once(q, tuple(parts), visible), None
    return _recomputed_in_blocks(q, tuple(parts), visible, new), None


def all_at_once(steps: int, slots: int) -> bool:
    """Return True if the scores of `steps` queries and `slots` slots are computed in one array."""
    # A decode step over more than one block of keys is computed in blocks, so that it can skip empty blocks.
    most = _KEY_BLOCK if steps <= _FEW_QUERIES else _AT_ONCE_SLOTS
    return steps <= _AT_ONCE_QUERIES and slots <= most


def _at_once(
    q: jax.Array,
    parts: Sequence[KeysValues],
    visible: Visibility,
    dropout: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with all scores in one array; also return the weights."""
    batch, heads, steps, size = q.shape
    blocks = [(_numbers(part.keys, part.dtype), _numbers(part.values, part.dtype)) for part in parts]
    scores = jnp.concatenate([_scores(q, k) for k, _ in blocks], axis=-1)
    mask = jnp.concatenate([visible.mask(index) for index in range(len(parts))], axis=-1)
    weights = jax.nn.softmax(_masked(visible.scores(scores, size), mask), axis=-1)
    if dropout is not None:
        weights = dropout(weights)

    out, start = jnp.zeros((), jnp.float32), 0
    for _, v in blocks:
        out = out + _weighted(weights[..., start : start + v.shape[2]], v)
        start += v.shape[2]
    return out.astype(q.dtype).reshape(batch, heads, steps, size), weights.reshape(batch, heads, steps, -1)


def _short_inputs(q: jax.Array, parts: tuple[KeysValues, ...], visible: Visibility) -> jax.Array:
    """Compute attention for short inputs, using the platform's implementation."""
    return lax.platform_dependent(q, parts, visible, cpu=_without_later_keys, default=_output_at_once)


def _output_at_once(q: jax.Array, parts: tuple[KeysValues, ...], visible: Visibility) -> jax.Array:
    return _at_once(q, parts, visible)[0]


def _without_later_keys(q: jax.Array, parts: tuple[KeysValues, ...], visible: Visibility) -> jax.Array:
    """Process one block of queries at a time, skipping the last part's slots after the block's last query."""
    steps, start, (*before, last) = q.shape[2], visible.start, parts
    if start is None or steps <= _CAUSAL_BLOCK:
        return _output_at_once(q, parts, visible)

    def attend(begin: int) -> jax.Array:
        end = min(begin + _CAUSAL_BLOCK, steps)
        seen = jax.tree.map(lambda x: x[:, :, : start + end], last)
        return _output_at_once(q[:, :, begin:end], (*before, seen), visible.of_queries(begin, end, seen.slots))

    return jnp.concatenate([attend(begin) for begin in range(0, steps, _CAUSAL_BLOCK)], axis=2)


def _in_blocks(q: jax.Array, parts: tuple[KeysValues, ...], visible: Visibility, new: NewTokens | None) -> jax.Array:
    """Attend block by block, using the platform's implementation, which may be a library's if `new` is not None."""
    if q.shape[2] <= _FEW_QUERIES:
        forms = {"cpu": functools.partial(_over_keys, size=_KEY_BLOCK), "default": _on_accelerator}
    else:
        forms = {"cpu": _on_cpu, "default": _over_queries}
    if new is not None:
        for platform, kernel in flash.kernels(q, parts, visible).items():
            forms[platform] = functools.partial(flash.attend, new=new, kernel=kernel)
    return lax.platform_dependent(q, parts, visible, **forms)


def _on_cpu(q: jax.Array, parts: tuple[KeysValues, ...], visible: Visibility) -> jax.Array:
    """Compute attention for many queries, using the faster of two implementations."""
    steps, (*before, _), start = q.shape[2], parts, visible.start
    if start is None or steps > _CPU_QUERIES or sum([part.slots for part in before]) + start + steps > _CPU_SLOTS:
        return _over_rows_and_heads(q, parts, visible)
    return _without_later_keys(q, parts, visible)


def _on_accelerator(q: jax.Array, parts: tuple[KeysValues, ...], visible: Visibility) -> jax.Array:
    """Attend from a few queries to thousands of slots at once. A loop over smaller blocks would take longer."""
    if max(part.slots for part in parts) <= _ACCELERATOR_BLOCK:
        return _at_once(q, parts, visible)[0]
    return _over_keys(q, parts, visible, _ACCELERATOR_BLOCK)


def _over_queries(q: jax.Array, parts: tuple[KeysValues, ...], visible: Visibility) -> jax.Array:
    """Process one block of queries at a time, computing all scores of the block at once."""

    def attend(q: jax.Array, visible: Visibility) -> jax.Array:
        return _output_at_once(q, parts, visible)

    return _block_by_block(attend, q, visible, _QUERY_BLOCK)


def _over_rows_and_heads(q: jax.Array, parts: tuple[KeysValues, ...], visible: Visibility) -> jax.Array:
    """Process one row and kv head at a time, so that each product multiplies two plain matrices.

    On a CPU, XLA computes such products several times faster than batched ones. Blocks past a row's end are skipped.
    """
    batch, heads, steps, width = q.shape
    kv_heads = parts[0].keys.shape[1]

    def attend(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        index, q = inputs
        row, head = index // kv_heads, index % kv_heads
        owners = [(row // (batch // part.keys.shape[0]), head) for part in parts]
        in_row = visible.of_row(row)

        def attend_block(q: jax.Array, visible: Visibility) -> jax.Array:
            return _over_keys(q, parts, visible, _CPU_KEY_BLOCK, owners)

        return _block_by_block(attend_block, q[None], in_row, _CPU_QUERY_BLOCK)[0]

    q = q.reshape(batch * kv_heads, heads // kv_heads, steps, width)
    return lax.map(attend, (jnp.arange(batch * kv_heads), q)).reshape(batch, heads, steps, width)


def _block_by_block(attend: Callable, q: jax.Array, visible: Visibility, size: int) -> jax.Array:
    """Apply `attend(q, visible)` to `size` queries at a time. For gradients, blocks are recomputed one at a time."""
    batch, heads, steps, width = q.shape
    size = min(size, steps)

    @jax.checkpoint
    def attend_block(block: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        q, queries, first = block
        return attend(q, dataclasses.replace(visible, queries=queries, first=first))

    q = jnp.pad(q, ((0, 0), (0, 0), (0, -steps % size), (0, 0)))
    q = jnp.moveaxis(q.reshape(batch, heads, -1, size, width), 2, 0)
    out = jnp.moveaxis(lax.map(attend_block, (q, *visible.query_blocks(size))), 0, 2)
    return out.reshape(batch, heads, -1, width)[:, :, :steps]


def _over_keys(
    q: jax.Array,
    parts: tuple[KeysValues, ...],
    visible: Visibility,
    size: int,
    owners: Sequence[tuple[jax.Array, jax.Array]] | None = None,
) -> jax.Array:
    """Attend to one block of `size` slots at a time with a running softmax, skipping blocks that no query sees.

    If `owners` is set, all queries `q [1, G, T, H]` read the same row and kv head of a part: `owners[i]` in part i.
    """
    batch, heads, steps, width = q.shape
    kv_heads = parts[0].keys.shape[1] if owners is None else 1
    shape = (batch, kv_heads, heads // kv_heads, steps)
    state = (jnp.full((*shape, 1), _LOWEST), jnp.zeros((*shape, 1)), jnp.zeros((*shape, width)))

    for index, part in enumerate(parts):
        block = min(size, part.slots)

        def absorb(number: jax.Array | int, state, index=index, part=part, block=block):
            start = jnp.minimum(number * block, part.slots - block)
            k, v = _block(part, start, block, None if owners is None else owners[index])
            mask = visible.of_keys(index, start, block).mask(0)
            if part.slots % block:  # the last block overlaps the previous one
                mask &= (start + jnp.arange(block) >= number * block)[None, None, :]
            scores = visible.scores(_scores(q, k), width)
            return _absorb(state, _masked(scores, mask), v)

        if block == part.slots:
            state = absorb(0, state)
        else:
            begin, end = visible.span(index)
            state = fori_loop(begin // block, (end + block - 1) // block, absorb, state, reads=q)
    _, total, out = state
    # If no key is visible to any query, there may be no block to process. The total is then 0.
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return out.astype(q.dtype).reshape(batch, heads, steps, width)


def _block(part: KeysValues, start: jax.Array | int, size: int, owner: tuple[jax.Array, jax.Array] | None = None):
    """Return the keys and values of `size` slots as floats, for all rows and kv heads or only for `owner`.

    `owner` is a pair (row, kv head).
    """
    rows, heads, _, width = part.keys.shape
    row, head = owner or (0, 0)
    shape = (rows, heads, size, width) if owner is None else (1, 1, size, width)

    def cut(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, (row, head, start, 0)[: x.ndim], shape[: x.ndim])

    keys, values = jax.tree.map(cut, (part.keys, part.values))
    return _numbers(keys, part.dtype), _numbers(values, part.dtype)


def _numbers(x: Slots, dtype: str) -> Slots:
    """Return keys or values as floats. 8-bit ones are returned unscaled, together with their scales."""
    if isinstance(x, ScaledSlots):
        return ScaledSlots(x.values.astype(dtype), x.scales)
    return as_numbers(x, dtype)


def _absorb(state: tuple[jax.Array, jax.Array, jax.Array], scores: jax.Array, v: Slots):
    """Add a block to a running softmax (the largest score, the sum of exponentials, the weighted sum of values)."""
    largest, total, out = state
    new = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
    weights, faded = jnp.exp(scores - new), jnp.exp(largest - new)
    total = total * faded + jnp.sum(weights, axis=-1, keepdims=True)
    return new, total, out * faded + _weighted(weights, v)


def _masked(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Where `mask bool[B, T, S]` is False, set the scores `[B, K, G, T, S]` to the lowest float32 number.

    The scores must already be scaled. If scores were scaled after masking, the scaled `_LOWEST` could be rounded in two
    different ways. The exponential of the difference between the two results would then overflow.
    """
    return jnp.where(mask[:, None, None], scores, _LOWEST)


def _scores(q: jax.Array, keys: Slots) -> jax.Array:
    """Return `q [B, A, T, H]` times the keys `[n, K, S, H]` of a part, as float32[B, K, G, T, S]."""
    if isinstance(keys, ScaledSlots):
        return _scores(q, keys.values) * repeat_rows(keys.scales, q.shape[0])[:, :, None, None, :]
    products = functools.partial(_product, equation="bkqh,bksh->bkqs")
    return workarounds.one_query(products, q, keys, values=False)


def _weighted(weights: jax.Array, values: Slots) -> jax.Array:
    """Return the sum of a part's values `[n, K, S, H]`, weighted by `[B, K, G, T, S]`, as float32[B, K, G, T, H]."""
    if isinstance(values, ScaledSlots):
        scales = repeat_rows(values.scales, weights.shape[0])[:, :, None, None, :]
        return _weighted(weights * scales, values.values)
    products = functools.partial(_product, equation="bkqs,bksh->bkqh")
    return workarounds.one_query(products, weights, values, values=True)


def _product(x: jax.Array, part: jax.Array, equation: str) -> jax.Array:
    """Multiply `x [B, A, T, ...]` (or `[B, K, G, T, ...]`) by `part [n, K, S, H]`; return float32[B, K, G, T, ...].

    Queries that read the same `[S, H]` matrix of `part` are stacked as the rows of one matrix. The rows are ordered
    by head, so they stay on their devices if a mesh splits the heads.
    """
    owners, kv_heads = part.shape[:2]
    batch, steps, last = x.shape[0], *x.shape[-2:]
    x = x.astype(part.dtype).reshape(owners, batch // owners, kv_heads, -1, steps, last)
    x = jnp.moveaxis(x, 1, 3).reshape(owners, kv_heads, -1, last)
    contract = functools.partial(
        jnp.einsum, equation, precision=precision(part.dtype), preferred_element_type=jnp.float32
    )
    single = x.shape[2] == 1 and part.dtype != jnp.float32
    out = workarounds.two_rows(contract, x, part, axis=2) if single else contract(x, part)
    out = out.reshape(owners, kv_heads, -1, batch // owners, steps, out.shape[-1])
    return jnp.moveaxis(out, 3, 1).reshape(batch, kv_heads, -1, steps, out.shape[-1])


_recomputed_at_once = workarounds.recomputed(_short_inputs)
_recomputed_in_blocks = workarounds.recomputed(
    _in_blocks, lambda q, parts, visible, new: _over_queries(q, parts, visible)
)
