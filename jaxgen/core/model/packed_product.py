"""Products with packed weights, which are unpacked in blocks of rows, so that no unpacked matrix is stored.

Dimensions: n rows, F outputs, D inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.control import alike, fori_loop, scan
from jaxgen.core.model import workarounds
from jaxgen.core.model.context import Context
from jaxgen.core.model.weights import precision
from jaxgen.cpu import cpu_flags

# Up to this many rows are multiplied in vector lanes on a CPU; unpacking a matrix takes as long as eight of them.
FEW_ROWS = 8
# The number of entries that are unpacked at a time. On a CPU, they should stay in the cache. On accelerators, larger
# blocks need fewer operations; a block of bfloat16 takes 32 MiB.
_ENTRIES_ON_CPU, _ENTRIES = 1 << 18, 1 << 24


class Unpacked(Protocol):
    """A pytree whose arrays all have the matrix's rows as their first axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [F, D]."""
        ...

    def unpack(self) -> jax.Array:
        """Return the matrix as float32[F, D]."""
        ...


def packed_product(
    rows: jax.Array,
    weight: Unpacked,
    context: Context,
    in_lanes: Callable | None = None,
    as_sums: Callable | None = None,
) -> jax.Array:
    """Return `rows [n, D]` times the transposed matrix of `weight`, as float32[n, F]; differentiable in the rows only.

    Args:
        rows: [n, D].
        weight: a pytree with the method `unpack`.
        context: information about this pass through the model.
        in_lanes: a function of `rows` and `weight` that returns the same for these rows on a CPU, or None.
        as_sums: a function of `rows` and `weight` that returns the same for these rows on a GPU, or None.
    """
    leaves, structure = jax.tree.flatten(weight)
    rows, *leaves = alike(rows, *leaves)
    return _product(rows, structure.unflatten(leaves), Forms(in_lanes, as_sums, context.divided, context.portable))


class Forms(NamedTuple):
    """The static arguments of products: those of `packed_product`, and fields of the `Context`."""

    in_lanes: Callable | None
    as_sums: Callable | None
    divided: bool | None
    portable: bool
    expert_parts: int = 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(rows: jax.Array, weight: Any, forms: Forms) -> jax.Array:
    if workarounds.in_one_piece(forms.divided):
        in_blocks = functools.partial(_in_blocks, entries=_ENTRIES_ON_CPU, wide=not _narrow(rows, forms))
        on_cpu = forms.in_lanes or in_blocks
        default = functools.partial(_in_blocks, entries=_ENTRIES, wide=False)
    else:  # a loop over blocks would gather them on each device
        on_cpu = default = _at_once
    return lax.platform_dependent(rows, weight, cpu=on_cpu, cuda=forms.as_sums or default, default=default)


def _keep_operands(rows: jax.Array, weight: Any, forms: Forms) -> tuple[jax.Array, tuple[Any, ...]]:
    return _product(rows, weight, forms), (weight, rows[:0])


def _gradients(forms: Forms, operands: tuple[Any, ...], change: jax.Array) -> tuple[Any, Any]:
    """Differentiate with respect to the rows, in the rows' dtype."""
    weight, like = operands
    if not workarounds.in_one_piece(forms.divided):
        to_rows = _contract(change.astype(like.dtype), weight.unpack().astype(like.dtype), 0)
    else:
        change = change.astype(like.dtype)
        on_cpu = functools.partial(_sum_of_blocks, entries=_ENTRIES_ON_CPU, wide=not _narrow(like, forms))
        default = functools.partial(_sum_of_blocks, entries=_ENTRIES, wide=False)
        to_rows = lax.platform_dependent(change, weight, cpu=on_cpu, default=default)
    return to_rows.astype(like.dtype), jax.tree.map(no_gradient, weight)


_product.defvjp(_keep_operands, _gradients)


def no_gradient(array: jax.Array) -> Any:
    """Return the gradient of an array that counts as constant."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)


def _narrow(rows: jax.Array, forms: Forms) -> bool:
    """Return True if a CPU has a unit for products of 16-bit numbers; otherwise, products in float32 are faster."""
    return rows.dtype == jnp.bfloat16 and "amx_bf16" in cpu_flags() and not forms.portable


def _contract(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Contract the last axis of `rows` with an axis of `matrix`; the result is float32."""
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(
        rows, matrix, dimensions, precision=precision(matrix.dtype), preferred_element_type=jnp.float32
    )


def _block(weight: Any, first: jax.Array, size: int) -> Any:
    return jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, first, size), weight)


def _sizes(weight: Unpacked, entries: int) -> tuple[int, int]:
    """Return the number of rows in a block, and the number of blocks. The last two blocks may overlap."""
    features, columns = weight.shape
    count = max(1, math.ceil(features * columns / entries))
    size = -(-features // count)
    size = min(features, -(-size // 8) * 8)
    return size, -(-features // size)


def _at_once(rows: jax.Array, weight: Unpacked) -> jax.Array:
    return _contract(rows, weight.unpack().astype(rows.dtype), 1)


def _in_blocks(rows: jax.Array, weight: Any, entries: int, wide: bool) -> jax.Array:
    """Multiply block by block. With `wide`, products are those of float32 numbers."""
    features, _ = weight.shape
    size, count = _sizes(weight, entries)
    rows = rows.astype(jnp.float32) if wide else rows

    def multiply(rows: jax.Array, block: Any) -> jax.Array:
        return _contract(rows, block.unpack().astype(rows.dtype), 1)

    if count == 1:
        return multiply(rows, weight)

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        first = jnp.minimum(number * size, features - size)
        part = multiply(rows, _block(weight, first, size))
        return lax.dynamic_update_slice_in_dim(out, part, first, 1)

    out = jnp.zeros((rows.shape[0], features), jnp.float32)
    return fori_loop(jnp.int32(0), jnp.int32(count), step, out, (rows, weight))


def _sum_of_blocks(change: jax.Array, weight: Any, entries: int, wide: bool) -> jax.Array:
    """Return `change [n, F]` times the matrix, block by block, as float32[n, D]."""
    features, columns = weight.shape
    size, count = _sizes(weight, entries)
    change = change.astype(jnp.float32) if wide else change

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        first = jnp.minimum(number * size, features - size)
        part = lax.dynamic_slice_in_dim(change, first, size, axis=1)
        is_new = first + jnp.arange(size, dtype=jnp.int32) >= number * size
        matrix = _block(weight, first, size).unpack().astype(change.dtype)
        return out + _contract(jnp.where(is_new[None, :], part, 0), matrix, 0)

    out = jnp.zeros((change.shape[0], columns), jnp.float32)
    return fori_loop(jnp.int32(0), jnp.int32(count), step, out, (change, weight))


def each_row(of_row: Callable, pieces: tuple[jax.Array, ...], weight: Any) -> jax.Array:
    """Return `of_row(pieces of a row, weight)`, float32[F], for each row of `pieces [n, ...]`, as float32[n, F].

    Rows are computed one by one on a CPU, each in a branch: XLA would unpack the weight before a loop over rows.
    """

    def step(carry: Any, row: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        return carry, workarounds.in_branch(of_row, row, weight)

    if pieces[0].shape[0] == 1:
        return step((), tuple(piece[0] for piece in pieces))[1][None]
    return scan(step, (), pieces)[1]


def look_up_packed(ids: jax.Array, weight: Any) -> jax.Array:
    """Return the rows of a packed matrix with the indices `ids int32[B, T]`, as `[B, T, D]`, unpacking only these.

    An id outside [0, F) gives NaN.
    """
    features = weight.shape[0]
    own = jnp.clip(ids.reshape(-1), 0, features - 1)
    found = jax.tree.map(lambda array: array[own], weight).unpack().reshape(*ids.shape, -1)
    is_row = (ids >= 0) & (ids < features)
    return jnp.where(is_row[..., None], found, jnp.nan).astype(weight.dtype)
