"""The form of a product for each platform."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.model.workarounds import lanes
from jaxgen.model.workarounds.cpu import two_rows, weight_first
from jaxgen.model.workarounds.gpu import row_sums
from jaxgen.shapes import at_most

# Products on a CPU come from another library since jax 0.11 (measured with 0.11.1, 0.11.2 and 0.12.0).
NEW_CPU_PRODUCTS = jax.__version_info__ >= (0, 11)

# On a CPU, a product of up to this many rows, if they are fewer than the weight's, has the weight as its left operand.
# Without AMX that is faster up to 256 rows; with AMX, 128 rows are 1.6 times faster as the left operand.
_SOME_ROWS = 32
# Since jax 0.11, up to this many 16-bit rows are multiplied faster as the left operand, unless they are wider than the
# result.
_ROWS_FIRST = 8 if NEW_CPU_PRODUCTS else 0

Product = Callable[[jax.Array, jax.Array], jax.Array]


def product(plain: Product, rows: jax.Array, weight: jax.Array, divided: bool | None) -> jax.Array:
    """Return `plain(rows, weight)`: the product of `rows [n, D]` with the transposed `weight [F, D]`, float32[n, F].

    `divided` says whether the weight is divided over a mesh: see `Context`.
    """
    on_cpu = _on_cpu(plain, rows.shape[0], weight, divided)
    on_gpu = functools.partial(row_sums, in_parts=divided is False) if rows.shape[0] == 1 else plain
    if on_cpu is plain and on_gpu is plain:
        return plain(rows, weight)
    return lax.platform_dependent(rows, weight, cpu=on_cpu, cuda=on_gpu, default=plain)


def _on_cpu(plain: Product, rows: int, weight: jax.Array, divided: bool | None) -> Product:
    """Return the function that multiplies this many rows with a weight on a CPU."""
    narrow = weight.dtype != jnp.float32
    if narrow and in_one_piece(divided) and lanes.fits(rows, weight.shape[1]):
        return lanes.product
    features, columns = weight.shape
    few = narrow and at_most(rows, _ROWS_FIRST) and columns <= features
    if not divided and not few and at_most(rows, _SOME_ROWS) and 1 < rows < features:
        return functools.partial(weight_first, plain)
    return functools.partial(two_rows, plain) if narrow and rows == 1 else plain


def in_one_piece(divided: bool | None) -> bool:
    """Return True if the weight of a product on a CPU is on one device: see `Context`.

    Under the caller's jit that is not known, unless this machine's CPU is only one device.
    """
    return jax.local_device_count("cpu") == 1 if divided is None else not divided
