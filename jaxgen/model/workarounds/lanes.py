"""Products of one or two rows with 16-bit or 8-bit weights on a CPU.

XLA's own product of few rows packs the weights at each call, which takes longer than reading them. Here they are read
once, as they are stored. `_LANES` adjacent columns are added to as many separate sums by vector instructions; one sum
over adjacent columns could not use these.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.model.workarounds.cpu import in_branch, rounded
from jaxgen.shapes import at_most

_LANES = 32
_FEW_ROWS = 2
# XLA divides a sum of more than 32 terms into several passes, which store every product. Even counts are unrolled best.
_FEWEST_TERMS, _MOST_TERMS = 4, 28


def fits(rows: int, columns: int) -> bool:
    """Return True if `product` handles this many rows of this many columns."""
    return at_most(rows, _FEW_ROWS) and columns % _LANES == 0 and _terms(columns) > 0


def product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply `rows [n, D]` by the transposed `weight [F, D]`: float32[n, F]."""
    return in_branch(_product, rows, weight)


def _product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    features, columns = weight.shape
    terms = _terms(columns)
    groups = (columns // (terms * _LANES), terms, _LANES)
    sums = weight.astype(jnp.float32).reshape(1, features, *groups) * rows.astype(jnp.float32).reshape(-1, 1, *groups)
    # The terms, the lanes, the groups. XLA joins sums with equal initial values into one of too many terms. A barrier
    # prevents that too, but since jax 0.11.1 also keeps the sums from being fused, and each of them is stored.
    for axis, initial in ((3, 0.0), (3, -0.0), (2, 0.0)):
        sums = _sum(sums, axis, initial)
    return sums


def _terms(columns: int) -> int:
    """Return the largest suitable number of terms in a lane's sum, 0 if there is none."""
    groups = columns // _LANES
    counts = range(_FEWEST_TERMS, _MOST_TERMS + 1, 2)
    return max([count for count in counts if groups % count == 0], default=0)


def _sum(x: jax.Array, axis: int, initial: float) -> jax.Array:
    """Sum over one axis, from either zero.

    XLA's CPU compiler gives a plain sum, together with the products that it adds, to a library that is slow for these
    shapes. A sum that also rounds stays with the compiler. Devices cannot add up the parts of such a sum, so no axis
    may be divided over a mesh.
    """
    return lax.reduce(x, np.float32(initial), lambda a, b: rounded(a + b), (axis,))
