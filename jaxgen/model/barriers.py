"""Barriers against optimizations of XLA, mostly of its CPU compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Products on a CPU come from another library since jax 0.11 (measured with 0.11.1, 0.11.2 and 0.12.0).
NEW_CPU_PRODUCTS = jax.__version_info__ >= (0, 11)


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

    After `jax.checkpoint`, XLA's CPU compiler may compute the rest again at once, and so store it after all. Here that
    has to wait for the gradient of the result. Forward-mode differentiation is not supported.

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
