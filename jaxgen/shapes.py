"""Array functions shared by several packages: resize axes, and read or write given positions in each row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


def short_repr(self: Any) -> str:
    """Format a dataclass on one line, for `__repr__`. Show arrays as dtype and shape, and omit fields that are None."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    return f"{type(self).__name__}({', '.join(f'{name}={_short(x)}' for name, x in fields.items() if x is not None)})"


def _short(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple) and len(parts := set(map(_short, value))) == 1:
        return f"{len(value)} x {parts.pop()}"
    return repr(value)


def where(mask: jax.Array, new: Any, old: Any) -> Any:
    """Return a tree with the entries of `new` where `mask` is True, and those of `old` elsewhere.

    The axes of the mask are the leading axes of each array.
    """

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(*mask.shape, *[1] * (new.ndim - mask.ndim)), new, old)

    return jax.tree.map(choose, new, old)


def at_most(size: int, most: int) -> bool:
    """Return True if `size <= most`; False for a symbolic size, so that a `jax.export` program works for any size."""
    return isinstance(size, int) and size <= most


def repeat_rows(x: jax.Array, rows: int) -> jax.Array:
    """Repeat each row of `x [n, ...]`, like `numpy.repeat`, to obtain `rows` rows. `rows` must be a multiple of n."""
    return x if x.shape[0] == rows else jnp.repeat(x, rows // x.shape[0], axis=0, total_repeat_length=rows)


def put(x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """Write `values [B, n, ...]` to the positions `index int32[B, n]` of each row of `x [B, N, ...]`.

    Positions past the end are dropped. Values for the same position must be equal. To write one position per row, use
    `index int32[B]` and `values [B, ...]`. Each row is written by a separate scatter operation, so under a mesh, no row
    leaves its device.
    """
    unique = index.ndim == 1

    def put_row(row: jax.Array, position: jax.Array, new: jax.Array) -> jax.Array:
        return row.at[position].set(new, mode="drop", unique_indices=unique)

    return jax.vmap(put_row)(x, index, values)


def token_set(ids: jax.Array, vocab_size: int) -> jax.Array:
    """Return bool[rows, V], True for the tokens that occur in each row of `ids int32[rows, n]`."""
    ids = jnp.where(ids < 0, vocab_size, ids)
    return jax.vmap(lambda row: jnp.zeros(vocab_size, bool).at[row].set(True, mode="drop"))(ids)


def add(x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    """Add `values float32[B, n]` at the positions `index int32[B, n]` of each row of `x [B, N]`.

    Positions past the end are dropped. If a position occurs several times, all its values are added. See `put`.
    """
    return jax.vmap(lambda row, position, new: row.at[position].add(new, mode="drop"))(x, index, values)


def take(x: jax.Array, rows: jax.Array, groups: int) -> jax.Array:
    """Return the rows of `x [n, ...]` at the indices `rows int32[m]`.

    `x` and `rows` each consist of `groups` equal parts. Part i of `rows` contains only indices of rows in part i of
    `x`. Under a mesh, a part whose rows are on one device stays on that device.
    """
    if groups == 1:
        return x[rows]
    size = x.shape[0] // groups
    first = jnp.arange(groups, dtype=jnp.int32)[:, None] * size
    own = rows.reshape(groups, -1) - first
    taken = jax.vmap(lambda part, row: part[row])(x.reshape(groups, size, *x.shape[1:]), own)
    return taken.reshape(rows.shape[0], *x.shape[1:])


def resize_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Truncate one axis of `x` to `size`, or pad it with zeros at the end."""
    return pad_axis(jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis), axis, size)


def pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Pad one axis of `x` with zeros at the end, up to `size`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
