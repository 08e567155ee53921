"""Products with the matrices of experts: each row is multiplied by the matrix of the expert chosen for it.

No row is dropped, and no row waits for another: an expert accepts any number of rows.

Dimensions: n rows (pairs of a token and an expert), E experts, F outputs, D inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.control import alike, fori_loop
from jaxgen.core.model import workarounds
from jaxgen.core.model.context import NO_CONTEXT, Context
from jaxgen.core.model.weights import Weight, precision
from jaxgen.cpu import cpu_flags
from jaxgen.shapes import at_most

# On a CPU, up to this many rows share one read of an expert's matrix. A product with 32 rows is not faster per row, and
# a smaller tile wastes less work on experts with few rows.
_TILE = 16
# Up to this many rows per expert are multiplied in one batched product.
_FEWEST_SLOTS, _MOST_SLOTS = 8, 256


@runtime_checkable
class ExpertWeight(Weight, Protocol):
    """A `Weight` that can also represent a matrix for each expert: E is then an additional first axis of each array."""

    def product_of_experts(self, rows: jax.Array, experts: jax.Array, context: Context) -> jax.Array:
        """Return `product_of_experts(rows, experts, self, context)`."""
        ...


def product_of_experts(
    rows: jax.Array, experts: jax.Array, weight: jax.Array | Weight, context: Context = NO_CONTEXT
) -> jax.Array:
    """Multiply each row by its own expert's transposed matrix; return float32[n, F].

    Products are accumulated in float32. For at most E rows, only the matrices of the chosen experts are read, unless
    `context` says that the weight is split across a mesh. A row's result does not depend on the other rows. It may
    depend on whether there are more than E rows, because the sums are then computed in a different order. Where the
    weight is one device's part of the experts (`context.expert_parts`), these rows and E are those of all devices.

    Args:
        rows: [n, D].
        experts: int32[n]. A row whose expert is outside [0, E) becomes a row of zeros and, except on a GPU, reads no
            matrix, so a device that stores only some of the experts can multiply by these.
        weight: [E, F, D], an array of floats or of 8-bit integers, or an `ExpertWeight`.
        context: information about this pass through the model.

    Raises:
        TypeError: the kind of weight cannot represent experts.
    """
    if isinstance(weight, ExpertWeight):
        return weight.product_of_experts(rows, experts, context)
    if isinstance(weight, Weight):
        raise TypeError(f"a weight of type {type(weight).__name__} cannot represent experts: use an array of floats")
    form = _Form(context.divided, context.portable, context.expert_parts)
    return _product(*alike(rows, experts, weight), form)  # pyright: ignore


# --- Products and their gradients -------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """The fields of a `Context` that decide how a product is computed."""

    divided: bool | None
    portable: bool = False
    parts: int = 1


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(rows: jax.Array, experts: jax.Array, matrices: jax.Array, form: _Form) -> jax.Array:
    """Multiply using the platform's implementation; the gradient multiplies in the operands' dtype."""
    by_rounds = functools.partial(in_rounds, axis=2, parts=form.parts)
    if form.divided:  # a loop over matrices would gather all of them on each device
        return by_rounds(rows, experts, matrices)
    count = matrices.shape[0]
    few = at_most(rows.shape[0], count * form.parts)
    on_cpu = by_rounds
    if workarounds.in_one_piece(form.divided):
        on_cpu = functools.partial(_on_cpu, axis=2, lanes=few, portable=form.portable)
    on_tpu = _one_by_one if few else by_rounds
    # On a GPU, rows without an expert on this device cost as much as the others.
    on_gpu = _gathered if few and at_most(rows.shape[0], count) else by_rounds
    return lax.platform_dependent(rows, experts, matrices, cpu=on_cpu, tpu=on_tpu, default=on_gpu)


def _keep_operands(
    rows: jax.Array, experts: jax.Array, matrices: jax.Array, form: _Form
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _product(rows, experts, matrices, form), (rows, experts, matrices)


def _gradients(form: _Form, operands: tuple[jax.Array, ...], change: jax.Array) -> tuple:
    """Differentiate with respect to the rows and the matrices; 8-bit matrices have no gradient.

    Beside the gradients, this stores the matrices' gradient in float32, and nothing else of its size.
    """
    rows, experts, matrices = operands
    is_integer = jnp.issubdtype(matrices.dtype, jnp.integer)
    change = change.astype(rows.dtype if is_integer else matrices.dtype)
    by_rounds = functools.partial(in_rounds, axis=1, parts=form.parts)
    if not workarounds.in_one_piece(form.divided):
        to_rows = by_rounds(change, experts, matrices)
    else:
        on_cpu = functools.partial(_on_cpu, axis=1, lanes=False, portable=form.portable)
        to_rows = lax.platform_dependent(change, experts, matrices, cpu=on_cpu, default=by_rounds)
    if is_integer:
        to_matrices = np.zeros(matrices.shape, jax.dtypes.float0)
    else:
        to_matrices = _sums_of_products(change, rows, experts, matrices.shape[0], form.parts)
        to_matrices = to_matrices.astype(matrices.dtype)
    return to_rows.astype(rows.dtype), np.zeros(experts.shape, jax.dtypes.float0), to_matrices


_product.defvjp(_keep_operands, _gradients)


# --- Rows sorted by expert --------------------------------------------------------------------------------------------


@flax.struct.dataclass
class _Groups:
    """Rows sorted by expert.

    Attributes:
        order: int32[n], the rows' indices, sorted by expert; rows without an expert are last.
        starts: int32[E], the first position in `order` of each expert's rows.
        counts: int32[E], the number of rows of each expert.
    """

    order: jax.Array
    starts: jax.Array
    counts: jax.Array


def _groups(experts: jax.Array, count: int) -> _Groups:
    experts = jnp.where((experts >= 0) & (experts < count), experts, count)
    every = jnp.arange(count, dtype=jnp.int32)[:, None]
    starts = jnp.sum(experts[None] < every, axis=1, dtype=jnp.int32)
    counts = jnp.sum(experts[None] == every, axis=1, dtype=jnp.int32)
    return _Groups(jnp.argsort(experts).astype(jnp.int32), starts, counts)


# --- Implementations --------------------------------------------------------------------------------------------------


def contract(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Contract `rows [..., n, D]` with an axis of `matrix [..., F, D]`; any leading axis is a batch."""
    batch = tuple(range(matrix.ndim - 2))
    dimensions = (((rows.ndim - 1,), (axis - 3 + matrix.ndim,)), (batch, batch))
    return lax.dot_general(
        rows, matrix, dimensions, precision=precision(matrix.dtype), preferred_element_type=jnp.float32
    )


def _floats(matrix: jax.Array, rows: jax.Array) -> jax.Array:
    """Convert 8-bit numbers to the dtype of the rows, which is exact."""
    return matrix.astype(rows.dtype) if jnp.issubdtype(matrix.dtype, jnp.integer) else matrix


def _on_cpu(
    rows: jax.Array, experts: jax.Array, matrices: jax.Array, axis: int, lanes: bool, portable: bool
) -> jax.Array:
    """Multiply tile by tile, where a tile consists of rows of one expert.

    A matrix is read in a branch, because XLA would convert all matrices before the loop. Single rows are multiplied in
    vector lanes: for other forms, XLA copies the matrix first. Without a unit for 16-bit matrices, products with a copy
    of the matrix in float32 are faster, and they are exact.
    """
    if lanes and workarounds.fits_lanes(1, rows.shape[1]):
        return in_tiles(rows.astype(jnp.float32), experts, matrices, axis, 1, workarounds.lane_product)
    narrow = "amx_bf16" in cpu_flags() and not portable

    def multiply(rows: jax.Array, matrix: jax.Array) -> jax.Array:
        if not narrow:
            rows, matrix = rows.astype(jnp.float32), matrix.astype(jnp.float32)
        if axis == 1:
            return contract(rows, _floats(matrix, rows), axis)
        return workarounds.weight_first(functools.partial(contract, axis=2), rows, _floats(matrix, rows))

    return in_tiles(rows, experts, matrices, axis, _TILE, multiply)


def in_tiles(
    rows: jax.Array, experts: jax.Array, matrices: Any, axis: int, size: int, multiply: Callable, branch: bool = True
) -> jax.Array:
    """Multiply in a loop over tiles of up to `size` rows of one expert. Experts without rows have no tiles.

    `matrices` is an array, or a packed weight whose arrays have a first axis for experts. With `branch`, a
    tile is multiplied in a branch of a conditional, as a CPU needs.

    The last tile of an expert may reach into the rows of the next one. The next tile replaces these results.
    """
    count = rows.shape[0]
    groups = _groups(experts, matrices.shape[0])
    tiles = (groups.counts + size - 1) // size
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    rows = jnp.pad(rows[groups.order], ((0, size), (0, 0)))

    def tile_product(rows: jax.Array, matrices: Any, expert: jax.Array) -> jax.Array:
        own = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, expert, keepdims=False), matrices)
        return multiply(rows, own)

    def step(tile: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= tile, dtype=jnp.int32)
        first = groups.starts[expert] + (tile - ends[expert] + tiles[expert]) * size
        part = lax.dynamic_slice_in_dim(rows, first, size)
        if branch:
            part = workarounds.in_branch(tile_product, part, matrices, expert)
        else:
            part = tile_product(part, matrices, expert)
        return lax.dynamic_update_slice_in_dim(out, part, first, 0)

    out = jnp.zeros((count + size, matrices.shape[3 - axis]), jnp.float32)
    out = fori_loop(0, ends[-1], step, out, (rows, matrices, groups, tiles, ends))
    has_expert = jnp.arange(count + size) < jnp.sum(groups.counts)
    places = jnp.zeros(count, jnp.int32).at[groups.order].set(jnp.arange(count, dtype=jnp.int32), unique_indices=True)
    return jnp.where(has_expert[:, None], out, 0)[places]


def _gathered(rows: jax.Array, experts: jax.Array, matrices: jax.Array) -> jax.Array:
    """Multiply few rows on a GPU, as sums of products, which XLA fuses with the selection of the matrices.

    A batched product would first copy the selected matrices.
    """
    has_expert = (experts >= 0) & (experts < matrices.shape[0])
    chosen = matrices[jnp.where(has_expert, experts, 0)].astype(jnp.float32)
    out = jnp.sum(chosen * rows[:, None].astype(jnp.float32), axis=2)
    return jnp.where(has_expert[:, None], out, 0)


def _one_by_one(rows: jax.Array, experts: jax.Array, matrices: jax.Array) -> jax.Array:
    """Multiply few rows on a TPU, in a loop whose products read the matrices in place.

    For a gather of matrices, XLA's TPU compiler would copy them.
    """
    groups = _groups(experts, matrices.shape[0])

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        place = groups.order[i]
        matrix = lax.dynamic_index_in_dim(matrices, experts[place], keepdims=False)
        part = contract(lax.dynamic_slice_in_dim(rows, place, 1), _floats(matrix, rows), 2)
        return lax.dynamic_update_slice_in_dim(out, part, place, 0)

    out = jnp.zeros((rows.shape[0], matrices.shape[1]), jnp.float32)
    return fori_loop(0, jnp.sum(groups.counts), step, out, (rows, experts, matrices, groups))


def slots_for(count: Any, experts: int) -> int:
    """Return the number of rows of one expert in a round: about twice the average, rounded up to a power of two."""
    if not isinstance(count, int):
        return _FEWEST_SLOTS
    average = max(1, -(-count // experts))
    return min(max(1 << average.bit_length(), _FEWEST_SLOTS), _MOST_SLOTS)


def _round(groups: _Groups, number: Any, slots: int, count: Any) -> jax.Array:
    """Return the rows of one round, as int32[E, slots]; `count` marks an empty slot."""
    place = number * slots + jnp.arange(slots, dtype=jnp.int32)[None]
    row = groups.order.at[groups.starts[:, None] + place].get(mode="clip")
    return jnp.where(place < groups.counts[:, None], row, count)


def in_rounds(rows: jax.Array, experts: jax.Array, matrices: jax.Array, axis: int, parts: int = 1) -> jax.Array:
    """Multiply in rounds, in which every expert multiplies up to a fixed number of its rows.

    A round is one batched product that reads each matrix in place. Experts may be split across a mesh. `parts` is the
    number of devices that the rows' experts are on, where `matrices` has those of one.
    """
    count, slots = rows.shape[0], slots_for(rows.shape[0], matrices.shape[0] * parts)
    groups = _groups(experts, matrices.shape[0])

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        chosen = _round(groups, number, slots, count)
        part = contract(_rows_at(rows, chosen), _floats(matrices, rows), axis)
        return out.at[chosen].set(part, mode="drop")

    rounds = (jnp.max(groups.counts) + slots - 1) // slots
    out = jnp.zeros((count, matrices.shape[3 - axis]), jnp.float32)
    return fori_loop(0, rounds, step, out, (rows, matrices, groups))


def _sums_of_products(change: jax.Array, rows: jax.Array, experts: jax.Array, count: int, parts: int) -> jax.Array:
    """Sum the outer products of `change [n, F]` and `rows [n, D]` for each expert, as float32[E, F, D]."""
    slots, groups = slots_for(rows.shape[0], count * parts), _groups(experts, count)

    def step(number: jax.Array, out: jax.Array) -> jax.Array:
        chosen = _round(groups, number, slots, rows.shape[0])
        left, right = _rows_at(change, chosen), _rows_at(rows, chosen).astype(change.dtype)
        dimensions = (((1,), (1,)), ((0,), (0,)))
        return out + lax.dot_general(
            left, right, dimensions, precision=precision(change.dtype), preferred_element_type=jnp.float32
        )

    rounds = (jnp.max(groups.counts) + slots - 1) // slots
    out = jnp.zeros((count, change.shape[1], rows.shape[1]), jnp.float32)
    return fori_loop(0, rounds, step, out, (change, rows, groups))


def _rows_at(rows: jax.Array, places: jax.Array) -> jax.Array:
    return rows.at[places].get(mode="fill", fill_value=0)
