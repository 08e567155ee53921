"""Alternative forms of the model's operations that work around limitations of XLA's compilers.

A function whose first argument is `plain` returns the same result as the operation `plain`. On some platforms, the
function computes the result with different operations. The CPU workarounds were measured with jax 0.10.2 and 0.12.0.1,
and the GPU workarounds with jax 0.10.2 to 0.11.2, in programs compiled for an H100.

`tests/model/test_workarounds.py` and `tests/model/test_lanes.py` check that CPU workarounds are still needed, and
`tests/test_compilers.py` checks GPU workarounds. When a workaround becomes unnecessary, its test fails, and the
workaround can be removed. Tests do not check that `in_lanes` and `weight_first` are faster; to measure the speed, run
`python -m benchmarks workarounds`. No test checks whether `add_updates` is still needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.control import alike, cond
from jaxgen.cpu import cpu_flags
from jaxgen.shapes import at_most

# Since jax 0.11, XLA uses a different library for matrix products on a CPU (measured with 0.11.1, 0.11.2 and 0.12.0).
NEW_CPU_PRODUCTS = jax.__version_info__ >= (0, 11)

# On a CPU, the weight is the left operand of a product if the other operand has at most this many rows, and fewer than
# the weight. Without AMX, this order is faster up to 256 rows; with AMX, it is 1.6 times slower for 128 rows.
_SOME_ROWS = 32
# Since jax 0.11, a product with at most this many 16-bit rows is faster on a CPU if the rows are the left operand,
# unless a row is wider than the result.
_ROWS_FIRST = 8 if NEW_CPU_PRODUCTS else 0

# Since jax 0.11, `lax.top_k` may return equal entries in any order.
_UNSTABLE: dict[str, Any] = {"is_stable": False} if jax.__version_info__ >= (0, 11) else {}

_LANES = 32
_LANES_ROWS = 2
_UNITS = {"bfloat16": "amx_bf16"}  # the flags of CPUs that have a unit for matrices of these dtypes
# XLA splits a sum of more than 32 products and stores every product. A loop over an even number of terms unrolls best.
_FEWEST_TERMS, _MOST_TERMS = 4, 28

# A sum of more terms is split into two GPU kernels. An example is the sum over a 7B model's MLP width, 18,944.
_LONGEST_SUM = 9472
# Keys or values of at most this many bytes are assumed to still be in a GPU's cache when they are read again.
_CACHED_BYTES = 8 << 20
# For up to this many slots, a GPU computes a query's softmax and the weighted sum of the values in one kernel.
_ONE_KERNEL_SLOTS = 1024
# With up to this many rows, a GPU multiplies each row only by the update of its own adapter.
_FEW_ROWS = 32


# --- Barriers to the CPU compiler's code motion and fusion ------------------------------------------------------------


def in_branch(function: Callable, first: Any, *rest: Any) -> Any:
    """Return `function(first, *rest)`, computed in a branch of a conditional; `first` is a tree of arrays of floats.

    XLA's CPU compiler may hoist operations out of a loop or run them early, and must then store their results. XLA does
    not move operations out of a branch. If the tree's first array is all NaN, the branch is not taken, and all floats
    in the result are NaN.
    """

    def not_numbers(*arguments):
        return jax.tree.map(_not_numbers, jax.eval_shape(function, *arguments))

    one = jax.tree.leaves(first)[0]
    return cond(jnp.any(one == one), function, not_numbers, first, *rest)


def rounded(x: jax.Array) -> jax.Array:
    """Round float32 numbers to float32, to keep XLA from combining the operations before and after the rounding.

    The rounding changes no value, but XLA treats it as an operation. XLA may still fuse the operations before and
    after the rounding into one kernel. Since jax 0.11.1, an `optimization_barrier` also prevents fusion; older releases
    drop the barrier before combining operations.
    """
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)


def _not_numbers(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(like.shape, jnp.nan if jnp.issubdtype(like.dtype, jnp.floating) else 0, like.dtype)


def recomputed(function: Callable, differentiate: Callable | None = None) -> Callable:
    """Return `function` with a gradient that stores only the arguments and recomputes the rest.

    With `jax.checkpoint`, XLA's CPU compiler may recompute values long before they are used, so the program must store
    them in the meantime. With jax 0.12.0.1, no early recomputation was observed. Here, recomputation must wait for the
    gradient of the result. Forward-mode differentiation is not supported.

    Args:
        function: a pure function that returns one array.
        differentiate: an equivalent function that is differentiated instead.
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
    return lambda *arguments: run(*alike(*arguments))


# --- Products ---------------------------------------------------------------------------------------------------------


def product(
    plain: Callable, rows: jax.Array, weight: jax.Array, divided: bool | None, portable: bool = False
) -> jax.Array:
    """Return `plain(rows, weight)`, which is `rows [n, D]` times the transposed `weight [F, D]`, as float32[n, F].

    `divided` says whether the weight is split across a mesh, and `portable` whether the program may run on a different
    kind of CPU: see `Context`.
    """
    count, (features, columns) = rows.shape[0], weight.shape
    narrow = weight.dtype != jnp.float32
    few = narrow and at_most(count, _ROWS_FIRST) and columns <= features
    on_cpu = plain
    if narrow and multiplies_in_lanes(rows, _UNITS.get(weight.dtype.name), divided, portable):
        on_cpu = in_lanes
    else:
        padded = narrow and count == 1
        if not divided and not few and at_most(count, _SOME_ROWS) and (padded or count > 1) and count < features:
            on_cpu = functools.partial(weight_first, plain)
        if padded:
            on_cpu = functools.partial(two_rows, on_cpu)
    if features == 1:
        on_cpu = one_output
    on_gpu = functools.partial(row_sums, in_parts=divided is False) if count == 1 else plain
    if on_cpu is plain and on_gpu is plain:
        return plain(rows, weight)
    return lax.platform_dependent(rows, weight, cpu=on_cpu, cuda=on_gpu, default=plain)


def in_one_piece(divided: bool | None) -> bool:
    """For a product on a CPU, return True if the weight is known to be on a single device; see `Context`.

    Under the caller's jit, the weight's placement is known only if jax presents the machine's CPU as a single device.
    """
    return jax.local_device_count("cpu") == 1 if divided is None else not divided


def two_rows(plain: Callable, row: jax.Array, weight: jax.Array, axis: int = 0) -> jax.Array:
    """Append a row of zeros to a single 16-bit row, multiply both by `weight`, and return the first row's product.

    `axis` is the row axis of both `row` and the result. To multiply one 16-bit row on a CPU, XLA converts the weights
    to float32 and, if the product is in a loop, stores the converted weights. For two or more rows, XLA reads the
    weights without converting them.
    """
    out = plain(jnp.concatenate([row, jnp.zeros_like(row)], axis), weight)
    return lax.slice_in_dim(out, 0, 1, axis=axis)


def one_output(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply `rows [n, D]` by the transposed `weight [1, D]`, computing each result as a sum of products.

    With XLA's product of a matrix and a vector on a CPU, the bits of a row's result depend on the row's index.
    """
    return jnp.sum(rows.astype(jnp.float32) * weight.astype(jnp.float32), axis=1, keepdims=True)


def weight_first(plain: Callable, rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the transpose of `plain(weight, rows)`, a product with the weight as the left operand.

    Each time a CPU computes a product, the right operand is packed, so the smaller operand should be on the right.
    Rounding keeps XLA from swapping float operands, and a barrier does the same for integers.
    """
    out = plain(weight, rows)
    return (rounded(out) if out.dtype == jnp.float32 else lax.optimization_barrier(out)).T


def multiplies_in_lanes(rows: jax.Array, unit: str | None, divided: bool | None, portable: bool) -> bool:
    """Return True if `in_lanes` is the fastest way to multiply `rows [n, D]` by a 16- or 8-bit weight on a CPU.

    A CPU with AMX multiplies small matrices of some dtypes in a separate unit. With one row padded to two, this unit is
    1.5 times faster than `in_lanes`. Without AMX, `in_lanes` is twice as fast, so programs that may run on another
    machine use `in_lanes`. `unit` is the flag of CPUs that have a unit for the weight's dtype, or None if no CPU has
    one. The other arguments are as in `product`.
    """
    has_unit = rows.dtype != jnp.float32 and unit in cpu_flags()
    return in_one_piece(divided) and fits_lanes(*rows.shape) and (portable or not has_unit)


def fits_lanes(rows: int, columns: int) -> bool:
    """Return True if `in_lanes` supports this number of rows and columns."""
    return at_most(rows, _LANES_ROWS) and columns % _LANES == 0 and _terms(columns) > 0


def in_lanes(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """On a CPU, multiply one or two rows `[n, D]` by the transposed 16- or 8-bit `weight [F, D]`; return float32[n, F].

    For one or two rows, XLA's own matrix multiplication packs the weights in every call, and packing takes longer than
    reading the weights. Here, the weights are read once, as stored. Vector instructions add the products of `_LANES`
    adjacent columns to `_LANES` separate sums; a single sum over adjacent columns could not use such instructions.
    """
    return in_branch(lane_product, rows.astype(jnp.float32), weight)  # otherwise converted again for each output


def lane_product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `in_lanes(rows, weight)`, but without a branch: the caller must call this function in a branch."""
    features, columns = weight.shape
    terms = _terms(columns)
    groups = (columns // (terms * _LANES), terms, _LANES)
    sums = weight.astype(jnp.float32).reshape(1, features, *groups) * rows.astype(jnp.float32).reshape(-1, 1, *groups)
    # Sum over terms, lanes and groups. XLA would merge two successive sums with the same initial value into a single
    # sum, which would have too many terms. A barrier would also keep the sums separate. However, since jax 0.11.1, a
    # barrier prevents fusion, so each sum would be stored.
    for axis, initial in ((3, 0.0), (3, -0.0), (2, 0.0)):
        sums = _lane_sum(sums, axis, initial)
    return sums


def sum_lanes(terms: jax.Array) -> jax.Array:
    """On a CPU, sum `terms [F, n, lanes]` over the last two axes in vector lanes. The caller must do so in a branch.

    The terms are not stored: each is computed where it is added.
    """
    features, count, lanes = terms.shape
    inner = max(size for size in range(1, _MOST_TERMS + 1) if count % size == 0)
    sums = terms.reshape(features, count // inner, inner, lanes)
    for axis, initial in ((3, 0.0), (2, -0.0), (1, 0.0)):  # see `lane_product`
        sums = _lane_sum(sums, axis, initial)
    return sums


def _terms(columns: int) -> int:
    """Return how many terms each lane adds: the largest allowed divisor of `columns // _LANES`, or 0 if none exists."""
    groups = columns // _LANES
    counts = range(_FEWEST_TERMS, _MOST_TERMS + 1, 2)
    return max([count for count in counts if groups % count == 0], default=0)


def _lane_sum(x: jax.Array, axis: int, initial: float) -> jax.Array:
    """Sum over one axis, starting from 0.0 or -0.0.

    XLA's CPU compiler leaves a plain sum of products to a library that is slow for these shapes. If each addition is
    rounded, XLA generates its own code for the sum instead of using the library. With this rounding, devices cannot
    combine partial sums, so no axis of `x` may be split across a mesh.
    """
    return lax.reduce(x, np.float32(initial), lambda a, b: rounded(a + b), (axis,))


def row_sums(row: jax.Array, weight: jax.Array, in_parts: bool) -> jax.Array:
    """Multiply `row [1, D]` by the transposed `weight [F, D]`, computing each of the F results as a sum of products.

    XLA's GPU compiler can fuse the sums with other operations. The compiler splits a product with a large weight into
    one kernel for partial sums and one that adds them up. The compiler also splits long sums. If `in_parts` is True, a
    long sum is cut into equal parts that share one kernel. `in_parts` must be False if the weight's columns may be on
    several devices of a mesh.
    """
    columns = weight.shape[1]
    parts = -(-columns // _LONGEST_SUM) if in_parts else 1
    parts = next((count for count in range(parts, 4 * parts) if columns % count == 0), parts)
    weights = weight.astype(jnp.float32) * row.astype(jnp.float32)
    return functools.reduce(jnp.add, [jnp.sum(part, axis=1) for part in jnp.array_split(weights, parts, axis=1)])[None]


# --- Other operations of a model --------------------------------------------------------------------------------------


def look_up(plain: Callable, ids: jax.Array, table: jax.Array) -> jax.Array:
    """Return `plain(ids, table)`; ids past the table's end give NaN. On a CPU, read a 16-bit table inside a branch.

    To read a 16-bit table in a loop, XLA's CPU compiler converts the whole table to float32 and stores the copy, except
    in jax 0.12.0.1. Inside a branch, the conversion covers only the rows that are read, and is not hoisted.
    """
    if table.dtype == jnp.float32:
        return plain(ids, table)
    return lax.platform_dependent(ids, table, cpu=functools.partial(_look_up_in_branch, plain), default=plain)


def _look_up_in_branch(plain: Callable, ids: jax.Array, table: jax.Array) -> jax.Array:
    return cond(jnp.any(ids < table.shape[0]), plain, _look_up_nothing, ids, table)


def _look_up_nothing(ids: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.full((*ids.shape, table.shape[1]), jnp.nan, table.dtype)


def stored_dtype(dtype: str) -> np.dtype:
    """Return the dtype in which a cache stores keys and values of `dtype`: int16 for 16-bit floats, otherwise `dtype`.

    To write to an array of 16-bit floats, XLA's CPU compiler converts the whole array to float32 and back, except in
    jax 0.12.0.1. The integers are signed, because XLA's GPU compiler did not fuse reads of unsigned integers with
    attention before jax 0.11.2.
    """
    return np.dtype(np.int16) if jnp.dtype(dtype).itemsize == 2 else jnp.dtype(dtype)


def top_k(x: jax.Array, count: int, stable: bool = True) -> tuple[jax.Array, jax.Array]:
    """Return `lax.top_k(x, count)`; if `stable` is False, equal entries may be in any order.

    Without barriers, XLA mistakes a slice of the result for part of a sort, and then sorts everything. In a program for
    several CPU devices, the compiler of jax 0.10 fails if one barrier follows both results. Since jax 0.11, a GPU finds
    the largest entries (up to 128) without sorting if equal entries may be in any order.
    """
    best, place = lax.top_k(x, count, **({} if stable else _UNSTABLE))
    return lax.optimization_barrier(best), lax.optimization_barrier(place)


def norm(plain: Callable, rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Return `plain(rows, weight)`, the normalized `rows [n, D]`."""
    if rows.shape[0] != 1:
        return plain(rows, weight)
    return lax.platform_dependent(rows, weight, cuda=functools.partial(_norm_of_two, plain), default=plain)


def _norm_of_two(plain: Callable, row: jax.Array, weight: jax.Array) -> jax.Array:
    """Append a row of zeros to a single row, normalize both, and return the first.

    XLA's GPU compiler recognizes a norm only if the norm's input has several rows. The compiler then fuses the norm
    with the product after it, unless rows are concatenated before the norm or sliced after it.
    """
    is_first = jnp.arange(2)[:, None] == 0
    rows = plain(jnp.where(is_first, row, 0), weight)
    return jnp.sum(jnp.where(is_first, rows, 0), axis=0, keepdims=True)


def for_head(x: jax.Array) -> jax.Array:
    """Return the normalized hidden states `x`, the head's input.

    A GPU kernel for the logits reads the weights more slowly if the kernel also computes the norm of a single row. For
    the 0.5B model, a step on an H200 takes 687 us instead of 711 us if the norm is not fused with the head.
    """
    if x.shape[:-1] != (1, 1):
        return x
    return lax.platform_dependent(x, cuda=lax.optimization_barrier, default=lambda x: x)


def one_query(plain: Callable, x: jax.Array, part: jax.Array, values: bool) -> jax.Array:
    """Return `plain(x, part)`: queries times keys or, if `values` is True, attention weights times values.

    If each row has one query and does not share the part with other rows, a GPU may use sums of products instead of a
    matrix product. The compiler fuses sums of products with the operations before and after them, so fewer kernels are
    needed. Each head of a group then reads the group's kv head separately. The shape of `part` is [n, K, S, H].
    """
    is_read_once = x.shape[-2] == 1 and x.shape[0] == part.shape[0]
    is_long = values and part.shape[2] > _ONE_KERNEL_SLOTS
    if is_long or not is_read_once or not at_most(part.size * part.dtype.itemsize, _CACHED_BYTES):
        return plain(x, part)
    as_sums = _weighted_as_sums if values else _scores_as_sums
    return lax.platform_dependent(x, part, cuda=as_sums, default=plain)


def _scores_as_sums(q: jax.Array, keys: jax.Array) -> jax.Array:
    """Multiply `q [B, A, 1, H]`, one query per row and head, by `keys [B, K, S, H]`; return float32[B, K, G, 1, S]."""
    batch, heads, _, size = q.shape
    kv_heads = keys.shape[1]
    q = q.astype(keys.dtype).reshape(batch, kv_heads, heads // kv_heads, 1, 1, size)
    return jnp.sum(q.astype(jnp.float32) * keys[:, :, None, None].astype(jnp.float32), axis=-1)


def _weighted_as_sums(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Return the sum of `values [B, K, S, H]`, weighted by `weights [B, K, G, 1, S]`, as float32[B, K, G, 1, H]."""
    weights = weights.astype(values.dtype).astype(jnp.float32)[..., None]
    return jnp.sum(weights * values[:, :, None, None].astype(jnp.float32), axis=-2)


def add_updates(
    plain: Callable,
    out: jax.Array,
    narrow: jax.Array,
    chosen: jax.Array,
    b: jax.Array,
    ends: tuple[int, ...],
) -> jax.Array:
    """Return `plain(out, narrow, chosen)`, which adds each row's update to `out [rows, F]`; see `Adapters`."""
    if not at_most(out.shape[0], _FEW_ROWS):
        return plain(out, narrow, chosen)
    on_gpu = functools.partial(_add_of_each, b=b, ends=ends)
    return lax.platform_dependent(out, narrow, chosen, cuda=on_gpu, default=plain)


def _add_of_each(
    out: jax.Array, narrow: jax.Array, chosen: jax.Array, b: jax.Array, ends: tuple[int, ...]
) -> jax.Array:
    """Add each row's update to `out [rows, F]`, using sums of products instead of a matrix product.

    A row's update is the entry of `narrow [rows, n, p, r]` for the row and its adapter, times the adapter's matrix `b`.
    With jax 0.10.2, XLA's GPU compiler fuses the update into one kernel if `narrow` is not rounded and is read by a
    single gather with scalar indices. The product with a fused matrix is used several times; without the barrier, each
    use would recompute the sums.
    """
    rows, (_, count, parts, rank) = out.shape[0], narrow.shape
    part = np.repeat(np.arange(parts, dtype=np.int32), np.diff(ends, prepend=0))
    own = jnp.maximum(chosen, 0)
    first = ((jnp.arange(rows, dtype=jnp.int32) * count + own)[:, None] * parts + part[None, :]) * rank
    index = first[:, None, :] + jnp.arange(rank, dtype=jnp.int32)[None, :, None]
    narrow = jnp.take(narrow.reshape(-1), index, mode="clip")
    update = jnp.sum(narrow * b[own].astype(jnp.float32), axis=1)
    out = out + jnp.where(chosen[:, None] >= 0, update, 0.0)
    return lax.optimization_barrier(out) if parts > 1 else out
