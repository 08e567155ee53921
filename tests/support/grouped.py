"""Random packed weights, and the matrices that they represent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.model.fp8 import Fp8
from jaxgen.core.model.grouped import Grouped


def grouped(
    features: int,
    columns: int,
    group: int,
    bits: int = 4,
    zeros: str | None = None,
    ordered: bool = False,
    experts: tuple[int, ...] = (),
    scales: str = "float16",
    dtype: str = "float32",
) -> tuple[Grouped, np.ndarray]:
    """Return a weight and its matrix, as float64. `zeros` is "integers", "floats" or None."""
    rng = np.random.default_rng(features * columns + group)
    codes = rng.integers(0, 2**bits, (*experts, features, columns)).astype(np.uint8)
    shape = (*experts, features, columns // group)
    scale = jnp.asarray(rng.uniform(0.01, 0.1, shape), scales)
    offset, zero = None, np.float64(2 ** (bits - 1))
    if zeros == "integers":
        offset = jnp.asarray(rng.integers(0, 2**bits, shape), jnp.uint8)
        zero = np.asarray(offset, np.float64)[..., None]
    elif zeros == "floats":
        offset = jnp.asarray(rng.normal(size=shape), scales)
    wide = codes.reshape(*shape, group).astype(np.float64)
    factor = np.asarray(scale, np.float64)[..., None]
    matrix = factor * (wide - zero)
    if zeros == "floats":
        matrix = factor * wide + np.asarray(offset, np.float64)[..., None]
    matrix, order = matrix.reshape(*experts, features, columns), None
    if ordered:
        order = jnp.asarray(rng.permutation(columns), jnp.int32)
        matrix = matrix[..., np.argsort(order)]
    words = jnp.asarray(Grouped.pack(codes, bits))
    return Grouped(words, scale, offset, order, bits, np.dtype(dtype)), matrix


def fp8(features: int, columns: int, block: int, experts: tuple[int, ...] = ()) -> tuple[Fp8, np.ndarray]:
    """Return a weight and its matrix, as float64."""
    rng = np.random.default_rng(features * columns + block)
    values = rng.integers(0, 127, (*experts, features, columns)) + rng.choice([0, 128], (*experts, features, columns))
    scales = rng.uniform(0.01, 0.1, (*experts, features, -(-columns // block))).astype(np.float32)
    weight = Fp8(values.astype(np.uint8), scales, block, np.dtype("float32"))
    floats = weight.values.view(jnp.float8_e4m3fn).astype(np.float64)
    matrix = floats * scales.astype(np.float64).repeat(block, axis=-1)[..., :columns]
    return jax.tree.map(jnp.asarray, weight), matrix


def check_product(found: jax.Array, x: jax.Array, matrix: np.ndarray, within: float) -> None:
    """Check a product of `x [n, D]`. An error counts in proportion to the sum of the terms' absolute values."""
    wide = np.asarray(x, np.float64)
    error = np.abs(np.asarray(found, np.float64) - wide @ matrix.T)
    assert found.dtype == jnp.float32
    assert np.all(error <= within * (np.abs(wide) @ np.abs(matrix).T))


def rounded_to_4_bits(params: Any, group: int = 16) -> Any:
    """Return parameters whose matrices are packed codes of 4 bits, near to the original numbers."""

    def pack(matrix: jax.Array) -> Any:
        if matrix.ndim != 2:
            return matrix
        wide = np.asarray(matrix, np.float32)
        groups = wide.reshape(len(wide), -1, group)
        scales = np.maximum(np.abs(groups).max(axis=-1) / 7, np.float32(1e-6))
        codes = (np.rint(groups / scales[..., None]) + 8).astype(np.uint8).reshape(wide.shape)
        words = jnp.asarray(Grouped.pack(codes, 4))
        return Grouped(words, jnp.asarray(scales), None, None, 4, np.dtype(matrix.dtype))

    return jax.tree.map(pack, params)
