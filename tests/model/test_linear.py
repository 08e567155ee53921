import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.core.model import weights as weights_module, workarounds
from jaxgen.core.model.context import Context
from jaxgen.core.model.weights import linear, look_up, product
from jaxgen.core.model.workarounds import in_branch
from tests.support.compilations import compilations

DIVIDED = [False, True, None]
DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divided", DIVIDED)
@pytest.mark.parametrize("shape", [(1, 1, 24), (3, 24), (2, 30, 24)])
def test_product_is_accurate(shape, divided, dtype):
    rng = np.random.default_rng(0)
    x, weight, bias = (jnp.asarray(rng.normal(size=s), dtype) for s in (shape, (40, 24), (40,)))
    wide = [np.asarray(value, np.float64) for value in (x, weight, bias)]
    expected = wide[0] @ wide[1].T + wide[2]
    out = jax.jit(lambda x, weight, bias: linear(x, weight, bias, Context(divided)))(x, weight, bias)
    assert out.dtype == x.dtype
    assert out.shape == expected.shape
    rounding = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2 * rounding, atol=4 * rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "in_parts", "parts"), [(8, True, 1), (24, True, 3), (25, True, 5), (23, True, 3), (24, False, 1)]
)
def test_sums_equal_the_product_for_one_row(columns, in_parts, parts, dtype, monkeypatch):
    """A GPU sums equal parts if a small number of parts divides the columns: 5 for 25, but 3 unequal ones for 23."""
    monkeypatch.setattr(workarounds, "_LONGEST_SUM", 8)
    rng = np.random.default_rng(2)
    row, weight = (jnp.asarray(rng.normal(size=s), dtype) for s in ((1, columns), (40, columns)))
    sums = functools.partial(workarounds.row_sums, in_parts=in_parts)
    assert str(jax.make_jaxpr(sums)(row, weight)).count("reduce_sum") == parts
    expected = np.asarray(row, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(sums(row, weight), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("divided", DIVIDED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_for_few_rows_are_accurate(rows, dtype, divided):
    rng = np.random.default_rng(1)
    x, weight, change = (jnp.asarray(rng.normal(size=s), dtype) for s in ((rows, 24), (40, 24), (rows, 40)))
    _, pull = jax.vjp(lambda x, weight: linear(x, weight, None, Context(divided)), x, weight)
    to_x, to_weight = jax.jit(pull)(change)
    wide = [np.asarray(value, np.float64) for value in (x, weight, change)]
    close = {"rtol": 0.02, "atol": 0.05} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(np.asarray(to_x, np.float64), wide[2] @ wide[1], **close)
    np.testing.assert_allclose(np.asarray(to_weight, np.float64), wide[2].T @ wide[0], **close)


def weight_is_first(x, weight, platform="cpu", divided=None):
    traced = jax.jit(lambda x, weight: weights_module.linear(x, weight, None, Context(divided))).trace(x, weight)
    return "reduce_precision" in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "first"), [(1, None), (3, True), (32, True), (33, False)])
def test_on_a_cpu_the_smaller_operand_is_the_right_one(rows, first, dtype, monkeypatch):
    monkeypatch.setattr(workarounds, "_ROWS_FIRST", 0)
    x, weight = jnp.ones((rows, 24), dtype), jnp.ones((40, 24), dtype)
    for platform in ("cpu", "cuda", "tpu"):
        for divided in DIVIDED:
            is_first = dtype == "bfloat16" if first is None else first  # a row of zeros is added to a 16-bit row
            expected = is_first and platform == "cpu" and not divided
            assert weight_is_first(x, weight, platform, divided) == expected


@pytest.mark.parametrize(
    ("rows", "features", "dtype", "first"),
    [(8, 40, "bfloat16", False), (8, 40, "float32", True), (9, 40, "bfloat16", True), (8, 20, "bfloat16", True)],
)
def test_few_16_bit_rows_are_the_left_operand_unless_the_weight_is_narrow(rows, features, dtype, first, monkeypatch):
    monkeypatch.setattr(workarounds, "_ROWS_FIRST", 8)
    assert weight_is_first(jnp.ones((rows, 24), dtype), jnp.ones((features, 24), dtype)) == first


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_may_be_the_result_of_a_branch(dtype):
    """Before jax 0.10.1, XLA swaps the operands in a branch despite the barrier, and then cannot multiply bfloat16."""
    x, weight = jnp.ones((3, 24), dtype), jnp.ones((40, 24), dtype)
    found = jax.jit(functools.partial(in_branch, functools.partial(product, context=Context(False))))(x, weight)
    np.testing.assert_array_equal(found, jnp.full((3, 40), 24.0))


def test_a_weight_of_few_rows_is_the_right_operand():
    x, weight = jnp.ones((20, 24)), jnp.ones((8, 24))
    program = jax.jit(linear).trace(x, weight).lower(lowering_platforms=("cpu",)).as_text()
    assert "reduce_precision" not in program


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_look_up_returns_rows_and_nan_for_bad_ids(dtype):
    table = jnp.asarray(np.random.default_rng(0).normal(size=(11, 6)), dtype)
    ids = jnp.asarray([[0, 10], [3, 11], [-1, 1]])
    out = jax.jit(look_up)(ids, table)
    assert out.dtype == table.dtype
    np.testing.assert_array_equal(out[:2, 0], table[jnp.asarray([0, 3])])
    np.testing.assert_array_equal(out[0, 1], table[10])
    assert bool(jnp.all(jnp.isnan(out[1, 1])))
    assert bool(jnp.all(jnp.isnan(out[2, 0])))


@pytest.mark.parametrize("divided", DIVIDED)
def test_a_second_eager_call_compiles_nothing(divided):
    x, weight = jnp.ones((1, 24), jnp.bfloat16), jnp.ones((40, 24), jnp.bfloat16)
    ids = jnp.zeros((1, 1), jnp.int32)

    def both():
        return linear(x, weight, None, Context(divided)), look_up(ids, weight)

    both()
    with compilations() as count:
        both()
    assert count == [0]
