"""Shapes: rounding sizes up, so that few programs serve all requests, and repeating rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


def power_of_two(size: int, least: int) -> int:
    """Round a size up to a power of two, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())


def prompt_bucket(width: int) -> int:
    """Round a prompt's width up: to a power of two, from 256 on to the half between two of them as well."""
    power = power_of_two(width, 32)
    return power * 3 // 4 if power >= 512 and width <= power * 3 // 4 else power


def capacity_for(new_tokens: int, recorded: bool) -> int:
    """Round the number of new tokens up; less where scores of the whole vocabulary are kept for each."""
    return -(-new_tokens // 16) * 16 if recorded else prompt_bucket(max(new_tokens, 128))


def repeat_rows(x: jax.Array, rows: int) -> jax.Array:
    """Repeat each row of `x [n, ...]` in place, as `numpy.repeat`, so that there are `rows`, a multiple of n."""
    import jax.numpy as jnp  # only here, as config and command round sizes without jax

    return x if x.shape[0] == rows else jnp.repeat(x, rows // x.shape[0], axis=0, total_repeat_length=rows)
