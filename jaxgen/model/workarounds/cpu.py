"""Workarounds for XLA's CPU compiler, measured with jax 0.10.2 and 0.12.0.1."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def in_branch(function: Callable, first: jax.Array, *rest: Any) -> Any:
    """Return `function(first, *rest)`, computed in a branch of a condition; `first` is an array of floats.

    XLA's CPU compiler moves operations out of loops, or to an earlier time, and has to store their results. It moves
    nothing out of a branch. This branch is taken unless all of `first` is NaN; then every float of the result is NaN.
    """

    def not_numbers(*arguments):
        return jax.tree.map(_not_numbers, jax.eval_shape(function, *arguments))

    return lax.cond(jnp.any(first == first), function, not_numbers, first, *rest)


def rounded(x: jax.Array) -> jax.Array:
    """Round float32 numbers to their own precision. That changes none, but XLA takes it for an operation.

    So XLA combines what comes before it with nothing that comes after it, and may still make one kernel of both. An
    `optimization_barrier` prevents both since jax 0.11.1; in older releases it is gone before the last combinations.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)


def _not_numbers(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(like.shape, jnp.nan if jnp.issubdtype(like.dtype, jnp.floating) else 0, like.dtype)


def recomputed(function: Callable, differentiate: Callable | None = None) -> Callable:
    """Return `function` with a gradient that stores only the arguments and computes the rest again.

    After `jax.checkpoint`, XLA's CPU compiler may compute the rest again at once, and so store it after all; with jax
    0.12.0.1 it was not seen to. Here that has to wait for the gradient of the result. Forward-mode differentiation is
    not supported.

    Args:
        function: a pure function with one array as its result.
        differentiate: an equal function that is differentiated in its place.
    """

    @jax.custom_vjp
    def run(*arguments):
        return function(*arguments)

    def keep(*arguments):
        return run(*arguments), arguments

    def gradients(arguments, change):
        def pull_back(change, *arguments):
            return jax.vjp(differentiate or function, *arguments)[1](change)

        def behind_barrier(*inputs):
            return pull_back(*lax.optimization_barrier(inputs))

        on_cpu = functools.partial(in_branch, pull_back)
        return lax.platform_dependent(change, *arguments, cpu=on_cpu, default=behind_barrier)

    run.defvjp(keep, gradients)
    return run


def two_rows(plain: Callable, row: jax.Array, weight: jax.Array, axis: int = 0) -> jax.Array:
    """Multiply one 16-bit row together with a row of zeros; `axis` is that of the rows in `row` and in the result.

    XLA's CPU product of one 16-bit row converts the weights to float32, and in a loop stores the float32 copy of all
    weights. With two rows or more it reads them without converting.
    """
    out = plain(jnp.concatenate([row, jnp.zeros_like(row)], axis), weight)
    return lax.slice_in_dim(out, 0, 1, axis=axis)


def weight_first(plain: Callable, rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply with the weight as the left operand: `plain(weight, rows)`, transposed.

    XLA's CPU product packs its right operand at each call, so the smaller operand should be the right one. Rounding, or
    for whole numbers a barrier, keeps XLA from swapping them.
    """
    out = plain(weight, rows)
    return (rounded(out) if out.dtype == jnp.float32 else lax.optimization_barrier(out)).T


def look_up(plain: Callable, ids: jax.Array, table: jax.Array) -> jax.Array:
    """Look up rows inside a branch, on a CPU: `plain(ids, table)`, NaN for an id past the table.

    XLA's CPU compiler converts a 16-bit table to float32 to gather from it and, in a loop, stores that whole copy. It
    does not move the conversion out of a branch, and there converts only the rows that are read. jax 0.12.0.1 does not
    need it.
    """
    if table.dtype == jnp.float32:
        return plain(ids, table)
    return lax.platform_dependent(ids, table, cpu=functools.partial(_look_up_in_branch, plain), default=plain)


def _look_up_in_branch(plain: Callable, ids: jax.Array, table: jax.Array) -> jax.Array:
    return lax.cond(jnp.any(ids < table.shape[0]), plain, _look_up_nothing, ids, table)


def _look_up_nothing(ids: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.full((*ids.shape, table.shape[1]), jnp.nan, table.dtype)


def stored_dtype(dtype: str) -> np.dtype:
    """Return the dtype of the arrays that store the keys and values of a cache: of 16-bit numbers, their bits.

    XLA's CPU compiler writes to an array of 16-bit floats by converting all of it, jax 0.12.0.1 does not. The bits are
    signed because XLA's GPU compiler does not fuse reading unsigned 16-bit numbers with attention.
    """
    return np.dtype(np.int16) if jnp.dtype(dtype).itemsize == 2 else jnp.dtype(dtype)


def top_k(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return `lax.top_k(x, count)`.

    Without the barrier, XLA takes a slice of the result for a part of a sort, and then sorts everything.
    """
    return lax.optimization_barrier(lax.top_k(x, count))
