"""Barriers for XLA's compilers, above all that for CPUs."""

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

    XLA's CPU compiler moves other operations out of loops, and to earlier times, and stores what they return. It moves
    nothing out of a branch. This one is always taken, unless all of `first` is NaN: then floats of the result are NaN
    too.
    """

    def not_numbers(*arguments):
        return jax.tree.map(_not_numbers, jax.eval_shape(function, *arguments))

    return lax.cond(jnp.any(first == first), function, not_numbers, first, *rest)


def _not_numbers(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(like.shape, jnp.nan if jnp.issubdtype(like.dtype, jnp.floating) else 0, like.dtype)


def own_sum(x: jax.Array, axis: int) -> jax.Array:
    """Sum `x`, an array of float32, over one axis.

    XLA's CPU compiler hands sums, and what they add, to a library that is slow for some, but only those sums that add
    and do nothing else. Rounding a float32 to the precision of a float32 changes no number.
    """
    return lax.reduce(x, np.float32(0), lambda a, b: lax.reduce_precision(a + b, 8, 23), (axis,))


def recomputed(function: Callable, differentiate: Callable | None = None) -> Callable:
    """Return `function` of arrays, whose gradients store its arguments alone and compute the rest again.

    After `jax.checkpoint` XLA's CPU compiler may compute the rest again at once, and so store it after all. Here that
    has to wait for the gradient of the result.

    Args:
        function: a pure function with one array as its result.
        differentiate: an equal function that is differentiated in its place.
    """

    @jax.custom_vjp
    def run(*arguments):
        return function(*arguments)

    def keep(*arguments):
        return function(*arguments), arguments

    def gradients(arguments, change):
        def pull_back(change, *arguments):
            return jax.vjp(differentiate or function, *arguments)[1](change)

        def behind_barrier(*inputs):
            return pull_back(*lax.optimization_barrier(inputs))

        on_cpu = functools.partial(in_branch, pull_back)
        return lax.platform_dependent(change, *arguments, cpu=on_cpu, default=behind_barrier)

    run.defvjp(keep, gradients)
    return run
