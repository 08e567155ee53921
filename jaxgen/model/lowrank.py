"""Weights with low-rank updates that are stored separately (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgen.model.context import Context
from jaxgen.model.linear import look_up, product
from jaxgen.model.weights import Weight
from jaxgen.shapes import repeat_rows


class _Updated:
    """A matrix with updates: it has the shape and dtype of the matrix."""

    weight: jax.Array | Weight

    @property
    def shape(self) -> tuple[int, ...]:
        """[F, D]."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """The dtype of `weight`."""
        return self.weight.dtype

    def _specs(self, spec: PartitionSpec) -> Any:
        return self.weight.specs(spec) if isinstance(self.weight, Weight) else spec


@flax.struct.dataclass
class LowRank(_Updated):
    """The matrix `weight + b a`, without materialising the sum.

    Attributes:
        weight: `[F, D]`.
        a: `[r, D]`.
        b: `[F, r]`.
    """

    weight: jax.Array | Weight
    a: jax.Array
    b: jax.Array

    def specs(self, spec: PartitionSpec) -> LowRank:
        """Return how each array is divided over a mesh if the matrix is divided by `spec`."""
        outputs, inputs = spec or (None, None)
        factors: Any = PartitionSpec(None, inputs), PartitionSpec(outputs, None)
        return LowRank(self._specs(spec), *factors)

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


@flax.struct.dataclass
class Adapters(_Updated):
    """A matrix with several low-rank updates, of which each row of a batch has its own or none: see `Context.adapter`.

    All updates are multiplied, as one matrix of n*r columns, and those of other rows' adapters set to zero: that is one
    product, reads each update once, and no update is copied to the rows that share it.

    Attributes:
        weight: `[F, D]`.
        a: `[n, r, D]`, of n updates; one of a lower rank is padded with zeros.
        b: `[F, n, r]`.
    """

    weight: jax.Array | Weight
    a: jax.Array
    b: jax.Array

    def specs(self, spec: PartitionSpec) -> Adapters:
        """Return how each array is divided over a mesh if the matrix is divided by `spec`."""
        outputs, inputs = spec or (None, None)
        factors: Any = PartitionSpec(None, None, inputs), PartitionSpec(outputs, None, None)
        return Adapters(self._specs(spec), *factors)

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Multiply `rows [n, D]` by the transposed matrix of each row: float32[n, F]."""
        out = product(rows, self.weight, context)
        if context.adapter is None:
            return out
        count, rank, _ = self.a.shape
        narrow = product(rows, self.a.reshape(count * rank, -1), context)
        of_row = repeat_rows(context.adapter, rows.shape[0])
        is_own = of_row[:, None] == jnp.arange(count * rank, dtype=jnp.int32)[None, :] // rank
        narrow = jnp.where(is_own, narrow, 0.0).astype(rows.dtype)
        return out + product(narrow, self.b.reshape(-1, count * rank), context)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows `ids int32[B, T]` of `weight`, which has no updates here: `[B, T, D]`."""
        return look_up(ids, self.weight)


def adapter_count(params: Any) -> int:
    """Return how many adapters parameters have of which each row may have its own."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Adapters))
    return next((leaf.a.shape[0] for leaf in leaves if isinstance(leaf, Adapters)), 0)
