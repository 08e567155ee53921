"""Loops and conditionals that also work inside `jax.shard_map`, where each value varies over a set of mesh axes.

The axes of a loop's carry must not change from step to step, and both branches of a conditional must return values that
vary over the same axes. Here, all of these values vary over the union of their axes. Outside of `jax.shard_map`, no
value varies, and these functions are those of `jax.lax`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def while_loop(test: Callable, body: Callable, begin: Any) -> Any:
    """Call `jax.lax.while_loop`."""
    if not (axes := _axes(begin)):
        return lax.while_loop(test, body, begin)
    return lax.while_loop(test, _over(axes, body), _varying(axes, begin))


def fori_loop(first: Any, end: Any, body: Callable, begin: Any, reads: Any = ()) -> Any:
    """Call `jax.lax.fori_loop`. `reads` contains arrays that the body reads and that `begin` does not depend on."""
    if not (axes := _axes((first, end, begin, reads))):
        return lax.fori_loop(first, end, body, begin)
    first, end = _varying(axes, (first, end)) if _axes((first, end)) else (first, end)
    return lax.fori_loop(first, end, _over(axes, body), _varying(axes, begin))


def scan(body: Callable, begin: Any, inputs: Any, reads: Any = ()) -> Any:
    """Call `jax.lax.scan`. `reads` contains arrays that the body reads and that `begin` does not depend on."""
    if not (axes := _axes((begin, inputs, reads))):
        return lax.scan(body, begin, inputs)
    return lax.scan(_over(axes, body), _varying(axes, begin), inputs)


def cond(test: Any, yes: Callable, no: Callable, *operands: Any) -> Any:
    """Call `jax.lax.cond`."""
    if not (axes := _axes((test, operands))):
        return lax.cond(test, yes, no, *operands)
    return lax.cond(test, _over(axes, yes), _over(axes, no), *operands)


def alike(*values: Any) -> tuple[Any, ...]:
    """Return the arguments of a function with a gradient of its own, all varying over the same axes.

    `jax.custom_vjp` expects a gradient to vary over the axes of its argument.
    """
    axes = _axes(values)
    return _varying(axes, values) if axes else values


def varies(tree: Any) -> bool:
    """Return True inside `jax.shard_map` if any value in a tree varies over a mesh axis."""
    return bool(_axes(tree))


def _axes(tree: Any) -> frozenset[str]:
    """Return the names of the mesh axes over which any value in a tree varies."""
    return frozenset().union(*[jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(tree)])


def _varying(axes: frozenset[str], tree: Any) -> Any:
    """Mark the values in a tree as varying over at least the given axes."""

    def mark(leaf: Any) -> Any:
        missing = axes - jax.typeof(leaf).manual_axis_type.varying
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def _over(axes: frozenset[str], function: Callable) -> Callable:
    return lambda *arguments: _varying(axes, function(*arguments))
