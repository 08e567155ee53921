"""Weights with low-rank updates that are stored separately (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxgen.core.model import workarounds
from jaxgen.core.model.context import Context
from jaxgen.core.model.weights import Weight, input_unit, look_up, map_rows, precision, product
from jaxgen.shapes import repeat_rows


class _Updated:
    """Base class for matrices with low-rank updates. Updates do not change the matrix's shape or dtype."""

    weight: jax.Array | Weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [F, D]."""
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        """The dtype of `weight`."""
        return self.weight.dtype

    @property
    def input_unit(self) -> int:
        """The inputs can be split across a mesh at multiples of this number."""
        return input_unit(self.weight)

    def _specs(self, spec: PartitionSpec) -> Any:
        return self.weight.specs(spec) if isinstance(self.weight, Weight) else spec


@flax.struct.dataclass
class LowRank(_Updated):
    """The matrix `weight + b a`. The sum is never materialized.

    Attributes:
        weight: `[F, D]`.
        a: `[r, D]`.
        b: `[F, r]`.
    """

    weight: jax.Array | Weight
    a: jax.Array
    b: jax.Array

    def specs(self, spec: PartitionSpec) -> LowRank:
        """Return the `PartitionSpec` of each array, given the matrix's `spec`."""
        outputs, inputs = spec or (None, None)
        factors: Any = PartitionSpec(None, inputs), PartitionSpec(outputs, None)
        return LowRank(self._specs(spec), *factors)

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Return `rows [n, D]` times the transposed matrix, as float32[n, F]."""
        narrow = product(rows, self.a, context).astype(rows.dtype)
        return product(rows, self.weight, context) + product(narrow, self.b, context)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows with the indices `ids int32[B, T]`, as `[B, T, D]`."""
        narrow = look_up(ids, self.b)
        update = product(narrow.reshape(-1, narrow.shape[-1]), self.a.T)
        rows = look_up(ids, self.weight)
        return (rows.astype(jnp.float32) + update.reshape(rows.shape)).astype(rows.dtype)


@flax.struct.dataclass
class Adapters(_Updated):
    """A matrix with several low-rank updates. `Context.adapter` selects one update, or none, for each row of a batch.

    All rows are multiplied by all factors in `a` in a single matrix product, so `a` is read only once and never copied
    for each row.

    Attributes:
        weight: `[F, D]`.
        a: `[n, p, r, D]`, for n updates; updates of lower rank are padded with zeros. A matrix fused from p parts has
            separate factors for each part. If a matrix is not fused, p is 1.
        b: `[n, r, F]`.
        ends: static, the column at which each part ends; the last entry is F.
    """

    weight: jax.Array | Weight
    a: jax.Array
    b: jax.Array
    ends: tuple[int, ...] = flax.struct.field(pytree_node=False)

    @classmethod
    def fused(cls, weights: Sequence[Adapters]) -> Adapters:
        """Fuse several matrices, which must have the same number of updates, the same rank and the same D."""
        weight = map_rows(lambda *arrays: jnp.concatenate(arrays), *(one.weight for one in weights))
        a = jnp.concatenate([one.a for one in weights], axis=1)
        b = jnp.concatenate([one.b for one in weights], axis=2)
        return cls(weight, a, b, tuple(np.cumsum([one.shape[0] for one in weights]).tolist()))

    def part(self, number: int) -> Adapters:
        """Return the matrix that was `weights[number]` in the call to `fused`."""
        start, end = (0, *self.ends)[number], self.ends[number]
        weight = map_rows(lambda array: array[start:end], self.weight)
        return Adapters(weight, self.a[:, number : number + 1], self.b[:, :, start:end], (end - start,))

    def specs(self, spec: PartitionSpec) -> Adapters:
        """Return the `PartitionSpec` of each array, given the matrix's `spec`."""
        outputs, inputs = spec or (None, None)
        a: Any = PartitionSpec(None, None, None, inputs)
        b: Any = PartitionSpec(None, None, outputs)
        return Adapters(self._specs(spec), a, b, self.ends)

    def product(self, rows: jax.Array, context: Context) -> jax.Array:
        """Return `rows [n, D]` times the transposed `weight`, plus each row's own update, as float32[n, F]."""
        out = product(rows, self.weight, context)
        if context.adapter is None:
            return out
        narrow = product(rows, self.a.reshape(-1, self.a.shape[-1]), context).reshape(-1, *self.a.shape[:-1])
        chosen = repeat_rows(context.adapter, rows.shape[0])
        if context.divided is not False:
            return self._add_of_all(out, narrow, chosen)
        return workarounds.add_updates(self._add_of_all, out, narrow, chosen, self.b, self.ends)

    def _add_of_all(self, out: jax.Array, narrow: jax.Array, chosen: jax.Array) -> jax.Array:
        """Add `narrow [rows, n, p, r]` times `b` to `out`; updates that a row does not use contribute zeros."""
        is_own = chosen[:, None] == jnp.arange(self.a.shape[0], dtype=jnp.int32)[None, :]
        narrow = jnp.where(is_own[:, :, None, None], narrow, 0.0).astype(self.b.dtype)
        starts = (0, *self.ends[:-1])
        updates = [
            _contract(narrow[:, :, part], self.b[:, :, start:end])
            for part, (start, end) in enumerate(zip(starts, self.ends, strict=True))
        ]
        return out + jnp.concatenate(updates, axis=1)

    def look_up(self, ids: jax.Array) -> jax.Array:
        """Return the rows of `weight` at the indices `ids int32[B, T]`, as `[B, T, D]`. No updates are added."""
        return look_up(ids, self.weight)


def _contract(left: jax.Array, right: jax.Array) -> jax.Array:
    """Contract `left [rows, n, r]` and `right [n, r, F]` over n and r; return float32[rows, F]."""
    axes = (((1, 2), (0, 1)), ((), ()))
    return lax.dot_general(left, right, axes, precision=precision(right.dtype), preferred_element_type=jnp.float32)


def adapter_count(params: Any) -> int:
    """Return the number of adapters in `params` that rows can choose from; 0 if rows cannot choose."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Adapters))
    return next((leaf.a.shape[0] for leaf in leaves if isinstance(leaf, Adapters)), 0)
