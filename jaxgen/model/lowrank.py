"""Weights with a low-rank update that is stored separately (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgen.model.context import Context
from jaxgen.model.linear import look_up, product


@flax.struct.dataclass
class LowRank:
    """The matrix `weight + b a`, without materialising the sum.

    Attributes:
        weight: `[F, D]`.
        a: `[r, D]`.
        b: `[F, r]`.
    """

    weight: jax.Array
    a: jax.Array
    b: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[F, D]."""
        return self.weight.shape

    @property
    def dtype(self):
        """The dtype of `weight`."""
        return self.weight.dtype

    def specs(self, spec: PartitionSpec) -> LowRank:
        """Return how each array is divided over a mesh if the matrix is divided by `spec`."""
        outputs, inputs = spec or (None, None)
        return LowRank(spec, PartitionSpec(None, inputs), PartitionSpec(outputs, None))  # pyright: ignore

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Multiply `rows [n, D]` by the transposed matrix: float32[n, F]."""
        narrow = product(rows, self.a, context).astype(rows.dtype)
        return product(rows, self.weight, context) + product(narrow, self.b, context)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows `ids int32[B, T]`: `[B, T, D]`."""
        narrow = look_up(ids, self.b)
        update = product(narrow.reshape(-1, narrow.shape[-1]), self.a.T)
        rows = look_up(ids, self.weight)
        return (rows.astype(jnp.float32) + update.reshape(rows.shape)).astype(rows.dtype)
