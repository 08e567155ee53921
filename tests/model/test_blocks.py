import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.core.model.blocks import FORMATS, Blocks
from jaxgen.core.model.context import Context
from jaxgen.core.model.expert_product import product_of_experts
from jaxgen.core.model.weights import input_unit, linear, look_up

# The places of the 16-bit floats in a block, which scale its numbers
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q8_0": (0,),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "IQ4_NL": (0,),
    "MXFP4": (),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def blocks(form: str, *shape: int) -> Blocks:
    """Return random numbers of moderate size, as `shape` rows of 512 columns."""
    rng, size = np.random.default_rng(len(form)), FORMATS[form].size
    data = rng.integers(0, 256, (*shape, 512 // FORMATS[form].count, size), np.uint8)
    for at in HALVES[form]:
        scales = rng.uniform(0.001, 0.01, (*data.shape[:-1], 1)).astype(np.float16)
        data[..., at : at + 2] = scales.view(np.uint8)
    if form == "MXFP4":
        data[..., 0] = rng.integers(120, 124, data.shape[:-1])
    return Blocks(jnp.asarray(data.reshape(*shape, -1)), form, np.dtype("float32"))  # pyright: ignore


def exact(weight: Blocks) -> np.ndarray:
    matrix = weight.to_matrix().astype(np.float64)
    assert np.isfinite(matrix).all()
    assert np.abs(matrix).max() < 100
    return matrix


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("form", FORMATS)
def test_products_equal_those_of_the_matrix(form, rows):
    weight = blocks(form, 24)
    x = np.random.default_rng(1).normal(size=(rows, 512)).astype(np.float32)
    matrix = exact(weight)
    for divided in (False, True):
        found = jax.jit(linear)(x, weight, None, Context(divided))
        np.testing.assert_allclose(found, x @ matrix.T, rtol=1e-4, atol=1e-4 * np.abs(matrix).max())
    narrow = jax.jit(linear)(jnp.asarray(x, jnp.bfloat16), weight, None, Context(False))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(narrow.astype(jnp.float32), x @ matrix.T, rtol=0.05, atol=np.abs(matrix).max())


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("form", ["Q4_K", "Q6_K", "Q5_0"])
def test_products_of_experts_equal_those_of_their_matrices(form, count):
    weight = blocks(form, 3, 16)
    rng = np.random.default_rng(2)
    x, experts = rng.normal(size=(count, 512)).astype(np.float32), rng.integers(-1, 4, count).astype(np.int32)
    matrix = exact(weight)
    wanted = np.einsum("nd,nfd->nf", x, matrix[np.clip(experts, 0, 2)]) * ((experts >= 0) & (experts < 3))[:, None]
    for divided in (False, True):
        found = jax.jit(product_of_experts)(x, experts, weight, Context(divided))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(matrix).max())


@pytest.mark.parametrize("form", FORMATS)
def test_rows_are_looked_up(form):
    weight = blocks(form, 8)
    found = np.asarray(jax.jit(look_up)(np.array([[0, 7], [8, -1]], np.int32), weight))
    np.testing.assert_allclose(found[0], weight.to_matrix()[[0, 7]], rtol=1e-6, atol=1e-6)
    assert np.isnan(found[1]).all()


def test_gradients_of_rows_equal_those_of_the_matrix():
    weight = blocks("Q4_K", 24)
    x = np.random.default_rng(1).normal(size=(3, 512)).astype(np.float32)
    found = jax.jit(jax.grad(lambda x: jnp.sum(linear(x, weight) ** 2)))(x)
    matrix = exact(weight)
    wanted = 2 * (x @ matrix.T) @ matrix
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("form", FORMATS)
def test_inputs_are_divided_between_blocks(form):
    assert input_unit(blocks(form, 8)) == FORMATS[form].count
