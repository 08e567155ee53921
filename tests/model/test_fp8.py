import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxgen.core.model import packed_product
from jaxgen.core.model.context import Context
from jaxgen.core.model.expert_product import product_of_experts
from jaxgen.core.model.fp8 import _as_sums, _floats, _floats_of_platform
from jaxgen.core.model.weights import linear, look_up
from tests.support.grouped import check_product, fp8

ONE_DEVICE = Context(False)


def rows(count, columns, dtype="float32"):
    return jnp.asarray(np.random.default_rng(count).normal(size=(count, columns)), dtype)


@pytest.mark.parametrize("convert", [_floats, _floats_of_platform])
def test_every_number(convert):
    values = np.arange(256, dtype=np.uint8)
    exact = values.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(convert)(values), exact)
    np.testing.assert_array_equal(np.signbit(jax.jit(convert)(values[[0, 128]])), [False, True])


SHAPES = [(40, 128, 128), (24, 576, 128), (24, 320, 64), (16, 256, 256), (8, 100, 100), (24, 100, 32), (8, 192, 256)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 3, 9])
def test_products_equal_those_of_the_matrix(shape, count):
    weight, matrix = fp8(*shape)
    np.testing.assert_allclose(jax.tree.map(np.asarray, weight).to_matrix(), matrix, rtol=1e-6)
    x = rows(count, shape[1])
    check_product(jax.jit(lambda x, weight: weight.product(x, ONE_DEVICE))(x, weight), x, matrix, 2e-6)
    check_product(_as_sums(x[:1], weight), x[:1], matrix, 2e-6)


@pytest.mark.parametrize("count", [2, 9])
def test_row_does_not_depend_on_the_values_of_others(count):
    weight, _ = fp8(40, 256, 128)
    x = rows(count, 256)
    run = jax.jit(lambda x: weight.product(x, ONE_DEVICE))
    np.testing.assert_array_equal(run(x)[0], run(x.at[1:].multiply(-100))[0])


def test_rows_are_looked_up():
    weight, matrix = fp8(40, 192, 128)
    found = look_up(jnp.asarray([[0, 39, 7], [40, -1, 2**31 - 1]], jnp.int32), weight)
    np.testing.assert_allclose(found[0], matrix[[0, 39, 7]], rtol=1e-6)
    assert np.all(np.isnan(found[1]))


@pytest.mark.parametrize("count", [1, 3, 20])
def test_a_loop_does_not_store_unpacked_weights(count, monkeypatch):
    monkeypatch.setattr(packed_product, "_ENTRIES_ON_CPU", 1 << 16)
    weights = [fp8(512, 896, 128)[0]] * 2

    def steps(x, weights):
        def step(_, x):
            for weight in weights:
                x = x + jnp.sum(weight.product(x, ONE_DEVICE), axis=1, keepdims=True).astype(x.dtype)
            return x

        return jax.lax.fori_loop(0, 3, step, x)

    analysis = jax.jit(steps).lower(rows(count, 896, "bfloat16"), weights).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 512 * 896 * (0.25 if count < 20 else 2)


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("divided", [False, True])
def test_gradients_with_respect_to_the_rows(count, divided):
    weight, matrix = fp8(40, 192, 128)
    change = rows(count, 40)
    found = jax.grad(lambda x: jnp.sum(linear(x, weight, context=Context(divided)) * change))(rows(count, 192))
    exact = np.asarray(change, np.float64) @ matrix
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("count", [1, 6, 7, 50])
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("columns", [256, 192])
def test_experts(count, divided, columns):
    weight, matrices = fp8(24, columns, 128, experts=(6,))
    x, experts = rows(count, columns), jnp.asarray(np.random.default_rng(1).integers(-1, 7, count), jnp.int32)
    own = np.concatenate([matrices, np.zeros((2, 24, columns))])[experts]  # 6 and -1 are no experts
    run = jax.jit(lambda x: product_of_experts(x, experts, weight, Context(divided)))
    exact = np.einsum("nd,nfd->nf", np.asarray(x, np.float64), own)
    np.testing.assert_allclose(run(x), exact, atol=1e-5 * np.abs(exact).max())
    to_rows = jax.grad(lambda x: jnp.sum(run(x)))(x)
    np.testing.assert_allclose(to_rows, own.sum(axis=1), atol=1e-5 * np.abs(own.sum(axis=1)).max() + 1e-6)


def test_inputs_are_split_between_blocks():
    assert [fp8(8, *size)[0].input_unit for size in ((256, 128), (192, 128), (256, 256))] == [128, 192, 256]
