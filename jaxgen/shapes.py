"""Changes of shape that several packages need: repeating rows, cutting and padding an axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def repeat_rows(x: jax.Array, rows: int) -> jax.Array:
    """Repeat each row of `x [n, ...]`, like `numpy.repeat`, to `rows` rows, a multiple of n."""
    return x if x.shape[0] == rows else jnp.repeat(x, rows // x.shape[0], axis=0, total_repeat_length=rows)


def resize_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Cut one axis of `x` to `size`, or pad it with zeros at its end."""
    return pad_axis(jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis), axis, size)


def pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Pad one axis of `x` with zeros at its end, up to `size`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
