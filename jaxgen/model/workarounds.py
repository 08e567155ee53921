"""Other forms of the model's operations, for the sake of XLA's compilers.

The rest of the model calls them by name. A function whose first argument is `plain` computes what `plain` does with the
other arguments; on the platform that it is for, in another form. The forms for a CPU were measured with jax 0.10.2 and
0.12.0.1, those for a GPU on the compiler for an H100 with jax 0.10.2 to 0.11.2.

`tests/model/test_workarounds.py` and `tests/model/test_lanes.py` compile for a CPU without each form, and
`tests/test_compilers.py` for a GPU. A test fails if the compiler has learnt what the form is for, and then it can go.
What only a clock shows, that `in_lanes` and `weight_first` are faster, `python -m benchmarks workarounds` measures. No
test compiles without `add_updates`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.shapes import at_most

# Products on a CPU come from another library since jax 0.11 (measured with 0.11.1, 0.11.2 and 0.12.0).
NEW_CPU_PRODUCTS = jax.__version_info__ >= (0, 11)

# On a CPU, a product of up to this many rows, if they are fewer than the weight's, has the weight as its left operand.
# Without AMX that is faster up to 256 rows; with AMX, 128 rows are 1.6 times faster as the left operand.
_SOME_ROWS = 32
# Since jax 0.11, up to this many 16-bit rows are multiplied faster as the left operand, unless they are wider than the
# result.
_ROWS_FIRST = 8 if NEW_CPU_PRODUCTS else 0

_LANES = 32
_LANES_ROWS = 2
# XLA divides a sum of more than 32 terms into several passes, which store every product. Even counts are unrolled best.
_FEWEST_TERMS, _MOST_TERMS = 4, 28

# On a GPU, one kernel sums up to this many numbers; 18,944, the width of a 7B model, take two.
_LONGEST_SUM = 9472
# Keys or values of up to this many bytes are assumed to come from a GPU's cache when they are read again.
_CACHED_BYTES = 8 << 20
# Up to this many slots, a GPU computes the softmax of a query's scores and the sum of the values in one kernel.
_ONE_KERNEL_SLOTS = 1024
# On a GPU, up to this many rows each add the product with the update of their own adapter.
_FEW_ROWS = 32


# --- What a CPU's compiler must not move or combine -------------------------------------------------------------------


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


# --- Products ---------------------------------------------------------------------------------------------------------


def product(plain: Callable, rows: jax.Array, weight: jax.Array, divided: bool | None) -> jax.Array:
    """Return `plain(rows, weight)`: the product of `rows [n, D]` with the transposed `weight [F, D]`, float32[n, F].

    `divided` says whether the weight is divided over a mesh: see `Context`.
    """
    count, (features, columns) = rows.shape[0], weight.shape
    narrow = weight.dtype != jnp.float32
    few = narrow and at_most(count, _ROWS_FIRST) and columns <= features
    on_cpu = plain
    if narrow and in_one_piece(divided) and fits_lanes(count, columns):
        on_cpu = in_lanes
    elif not divided and not few and at_most(count, _SOME_ROWS) and 1 < count < features:
        on_cpu = functools.partial(weight_first, plain)
    elif narrow and count == 1:
        on_cpu = functools.partial(two_rows, plain)
    on_gpu = functools.partial(row_sums, in_parts=divided is False) if count == 1 else plain
    if on_cpu is plain and on_gpu is plain:
        return plain(rows, weight)
    return lax.platform_dependent(rows, weight, cpu=on_cpu, cuda=on_gpu, default=plain)


def in_one_piece(divided: bool | None) -> bool:
    """Return True if the weight of a product on a CPU is on one device: see `Context`.

    Under the caller's jit that is not known, unless this machine's CPU is only one device.
    """
    return jax.local_device_count("cpu") == 1 if divided is None else not divided


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


def fits_lanes(rows: int, columns: int) -> bool:
    """Return True if `in_lanes` handles this many rows of this many columns."""
    return at_most(rows, _LANES_ROWS) and columns % _LANES == 0 and _terms(columns) > 0


def in_lanes(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply one or two rows, `[n, D]`, by the transposed 16-bit or 8-bit `weight [F, D]` on a CPU: float32[n, F].

    XLA's own product of few rows packs the weights at each call, which takes longer than reading them. Here they are
    read once, as they are stored. `_LANES` adjacent columns are added to as many separate sums by vector instructions;
    one sum over adjacent columns could not use these.
    """
    return in_branch(_in_lanes, rows, weight)


def _in_lanes(rows: jax.Array, weight: jax.Array) -> jax.Array:
    features, columns = weight.shape
    terms = _terms(columns)
    groups = (columns // (terms * _LANES), terms, _LANES)
    sums = weight.astype(jnp.float32).reshape(1, features, *groups) * rows.astype(jnp.float32).reshape(-1, 1, *groups)
    # The terms, the lanes, the groups. XLA joins sums with equal initial values into one of too many terms. A barrier
    # prevents that too, but since jax 0.11.1 also keeps the sums from being fused, and each of them is stored.
    for axis, initial in ((3, 0.0), (3, -0.0), (2, 0.0)):
        sums = _lane_sum(sums, axis, initial)
    return sums


def _terms(columns: int) -> int:
    """Return the largest suitable number of terms in a lane's sum, 0 if there is none."""
    groups = columns // _LANES
    counts = range(_FEWEST_TERMS, _MOST_TERMS + 1, 2)
    return max([count for count in counts if groups % count == 0], default=0)


def _lane_sum(x: jax.Array, axis: int, initial: float) -> jax.Array:
    """Sum over one axis, from either zero.

    XLA's CPU compiler gives a plain sum, together with the products that it adds, to a library that is slow for these
    shapes. A sum that also rounds stays with the compiler. Devices cannot add up the parts of such a sum, so no axis
    may be divided over a mesh.
    """
    return lax.reduce(x, np.float32(initial), lambda a, b: rounded(a + b), (axis,))


def row_sums(row: jax.Array, weight: jax.Array, in_parts: bool) -> jax.Array:
    """Multiply one row, `[1, D]`, as sums of products, which XLA's GPU compiler fuses with what comes before and after.

    Of a product with a large weight it makes a kernel of partial sums and one that adds them up. It does the same with
    long sums, unless they are `in_parts`: parts of equal length are one kernel. A weight that may be divided over a
    mesh is left in one part, because its columns may be on several devices.
    """
    columns = weight.shape[1]
    parts = -(-columns // _LONGEST_SUM) if in_parts else 1
    parts = next((count for count in range(parts, 4 * parts) if columns % count == 0), parts)
    weights = weight.astype(jnp.float32) * row.astype(jnp.float32)
    return functools.reduce(jnp.add, [jnp.sum(part, axis=1) for part in jnp.array_split(weights, parts, axis=1)])[None]


# --- Other operations of a model --------------------------------------------------------------------------------------


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


def norm(plain: Callable, rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Norm `rows [n, D]`: `plain(rows, weight)`."""
    if rows.shape[0] != 1:
        return plain(rows, weight)
    return lax.platform_dependent(rows, weight, cuda=functools.partial(_norm_of_two, plain), default=plain)


def _norm_of_two(plain: Callable, row: jax.Array, weight: jax.Array) -> jax.Array:
    """Norm a row together with a row of zeros.

    The compiler recognizes norms of several rows only, and fuses them with the product that follows, unless rows were
    concatenated before or cut out after.
    """
    is_first = jnp.arange(2)[:, None] == 0
    rows = plain(jnp.where(is_first, row, 0), weight)
    return jnp.sum(jnp.where(is_first, rows, 0), axis=0, keepdims=True)


def one_query(plain: Callable, x: jax.Array, part: jax.Array, values: bool) -> jax.Array:
    """Multiply queries with the keys, or weights with the values, `[n, K, S, H]` of a part: `plain(x, part)`.

    If one query of each row reads the part, the product is computed as sums on a GPU, whose compiler fuses sums of
    products with what comes before and after, so there are fewer kernels. Each head of a group reads the group's kv
    head separately.
    """
    is_read_once = x.shape[-2] == 1 and x.shape[0] == part.shape[0]
    is_long = values and part.shape[2] > _ONE_KERNEL_SLOTS
    if is_long or not is_read_once or not at_most(part.size * part.dtype.itemsize, _CACHED_BYTES):
        return plain(x, part)
    as_sums = _weighted_as_sums if values else _scores_as_sums
    return lax.platform_dependent(x, part, cuda=as_sums, default=plain)


def _scores_as_sums(q: jax.Array, keys: jax.Array) -> jax.Array:
    """Multiply one query per row and head, `q [B, A, 1, H]`, with `keys [B, K, S, H]`: float32[B, K, G, 1, S]."""
    batch, heads, _, size = q.shape
    kv_heads = keys.shape[1]
    q = q.astype(keys.dtype).reshape(batch, kv_heads, heads // kv_heads, 1, 1, size)
    return jnp.sum(q.astype(jnp.float32) * keys[:, :, None, None].astype(jnp.float32), axis=-1)


def _weighted_as_sums(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Sum `values [B, K, S, H]` with the weights of one query, `[B, K, G, 1, S]`: float32[B, K, G, 1, H]."""
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
    """Add to each row of `out [rows, F]` the update of its adapter: `plain(out, narrow, chosen)`; see `Adapters`."""
    if not at_most(out.shape[0], _FEW_ROWS):
        return plain(out, narrow, chosen)
    on_gpu = functools.partial(_add_of_each, b=b, ends=ends)
    return lax.platform_dependent(out, narrow, chosen, cuda=on_gpu, default=plain)


def _add_of_each(
    out: jax.Array, narrow: jax.Array, chosen: jax.Array, b: jax.Array, ends: tuple[int, ...]
) -> jax.Array:
    """Add the sums of products of `narrow [rows, n, p, r]` with the update of each row.

    XLA's GPU compiler makes one kernel of it (jax 0.10.2), for which all look-ups of `narrow` have to be one, with
    indices of one number, and `narrow` is not rounded. Parts of a fused matrix are used several times by what
    follows; without the barrier, each use would compute them again.
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
