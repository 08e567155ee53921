import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen.core.model import packed_product
from jaxgen.core.model.context import Context
from jaxgen.core.model.expert_product import product_of_experts
from jaxgen.core.model.grouped import Grouped, _as_sums, check_groups, run_length
from jaxgen.core.model.lowrank import LowRank
from jaxgen.core.model.weights import linear, look_up, product
from jaxgen.errors import InputError
from tests.support.grouped import check_product, grouped

ONE_DEVICE = Context(False)


def rows(count, columns, dtype="float32"):
    return jnp.asarray(np.random.default_rng(count).normal(size=(count, columns)), dtype)


@jax.jit
def multiply(x, weight):
    return weight.product(x, ONE_DEVICE)


@pytest.mark.parametrize("columns", [8, 24, 40, 64, 128, 136, 896])
def test_words_unpack_to_adjacent_columns(columns):
    codes = np.random.default_rng(0).integers(0, 16, (3, columns)).astype(np.uint8)
    words, run = Grouped.pack(codes, 4), run_length(columns)
    assert (words.shape, words.dtype) == ((3, columns // 8), np.uint32)
    for place in range(8):
        found = (words >> np.uint32(4 * place)) & 15
        np.testing.assert_array_equal(found.reshape(3, -1, run), codes.reshape(3, -1, 8, run)[:, :, place])
    np.testing.assert_array_equal(words[1:], Grouped.pack(codes[1:], 4))


def test_codes_of_8_bits_become_signed():
    found = Grouped.pack(np.arange(256, dtype=np.uint8)[None], 8)
    np.testing.assert_array_equal(found, np.arange(-128, 128, dtype=np.int8)[None])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("zeros", [None, "integers", "floats"])
@pytest.mark.parametrize("bits", [4, 8])
def test_matrix(bits, zeros, ordered):
    weight, matrix = grouped(24, 96, 32, bits, zeros, ordered, scales="float32")
    found = jax.tree.map(np.asarray, weight).to_matrix()
    assert (weight.shape, found.dtype) == ((24, 96), np.float32)
    np.testing.assert_allclose(found, matrix, rtol=1e-6, atol=1e-6)
    assert len(weight.tensors) == len(jax.tree.leaves(weight))


# Steps of 128 and of 64 columns; groups that divide a step, and that a step divides; others, which do not fit lanes.
SHAPES = [(40, 256, 32), (24, 192, 64), (16, 896, 128), (16, 512, 256), (8, 320, 320), (24, 136, 8), (16, 96, 24)]


@pytest.mark.parametrize(
    "shape", [SHAPES[0], SHAPES[3], *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES[1:3] + SHAPES[4:])]
)
@pytest.mark.parametrize("zeros", [None, "integers", "floats"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_products_equal_those_of_the_matrix(shape, bits, zeros, count):
    weight, matrix = grouped(*shape, bits, zeros, ordered=count == 3)
    x = rows(count, shape[1])
    check_product(multiply(x, weight), x, matrix, 2e-6)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_products_of_any_shape(data):
    bits = data.draw(st.sampled_from([4, 8]))
    columns = data.draw(st.integers(1, 40)) * 8
    group = data.draw(st.sampled_from([size for size in range(1, columns + 1) if columns % size == 0]))
    zeros = data.draw(st.sampled_from([None, "integers", "floats"]))
    features, count = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 12))
    scales = data.draw(st.sampled_from(["float16", "bfloat16", "float32"]))
    weight, matrix = grouped(features, columns, group, bits, zeros, data.draw(st.booleans()), scales=scales)
    x = rows(count, columns)
    check_product(multiply(x, weight), x, matrix, 2e-6)
    check_product(packed_product._at_once(x, weight.replace(order=None)), x, ordered_back(matrix, weight), 2e-6)


def ordered_back(matrix, weight):
    return matrix if weight.order is None else matrix[:, weight.order]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("count", [1, 4, 20])
def test_rows_of_16_bits(dtype, count):
    weight, matrix = grouped(40, 256, 32, zeros="integers")
    x = rows(count, 256, dtype)
    check_product(multiply(x, weight), x, matrix, 2e-6)  # on a CPU, entries are not rounded to the dtype of the rows
    assert linear(x, weight).dtype == dtype


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [None, "integers", "floats"])
@pytest.mark.parametrize("group", [32, 128])
def test_kernel_for_a_gpu(bits, zeros, group):
    """The form for a GPU gives the same results on a CPU."""
    weight, matrix = grouped(40, 384, group, bits, zeros)
    x = rows(1, 384)
    check_product(_as_sums(x, weight), x, matrix, 2e-6)


@pytest.mark.parametrize("count", [2, 8, 9, 33])
@pytest.mark.parametrize("columns", [256, 96])
def test_row_does_not_depend_on_the_values_of_others(count, columns):
    weight, _ = grouped(40, columns, 32, zeros="floats")
    x = rows(count, columns)
    others = x.at[1:].set(rows(count + 1, columns)[2:] * 100)
    np.testing.assert_array_equal(multiply(x, weight)[0], multiply(others, weight)[0])


@pytest.mark.parametrize("count", [1, 2, 9])
def test_rows_of_nan_and_infinity(count):
    weight, _ = grouped(40, 256, 32)
    x = rows(count, 256)
    assert bool(jnp.all(jnp.isnan(multiply(x * jnp.nan, weight))))
    found = multiply(x.at[0, 5].set(jnp.nan), weight)
    assert bool(jnp.all(jnp.isnan(found[0])))
    assert not bool(jnp.any(jnp.isnan(found[1:])))


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize(("bits", "columns"), [(4, 896), (8, 896), (4, 4864)])
def test_a_loop_does_not_store_unpacked_weights(bits, columns, count, monkeypatch):
    """Beside the weights, a loop stores about one block of a matrix."""
    monkeypatch.setattr(packed_product, "_ENTRIES_ON_CPU", 1 << 16)
    weights = [grouped(512, columns, 32, bits)[0]] * 2

    def steps(x, weights):
        def step(_, x):
            for weight in weights:
                x = x + jnp.sum(weight.product(x, ONE_DEVICE), axis=1, keepdims=True).astype(x.dtype)
            return x

        return jax.lax.fori_loop(0, 3, step, x)

    analysis = jax.jit(steps).lower(rows(count, columns, "bfloat16"), weights).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 512 * columns * (0.25 if count < 20 else 2)


def test_a_row_on_a_cpu_is_multiplied_in_one_fusion():
    weight, _ = grouped(512, 896, 32)
    program = jax.jit(multiply).lower(rows(1, 896), weight).compile().as_text()
    assert "u32[512,112]" in program
    assert "f32[512,896]" not in program
    assert "ynn" not in program


def test_rows_are_looked_up():
    weight, matrix = grouped(40, 96, 32, zeros="integers", ordered=True)
    found = look_up(jnp.asarray([[0, 39, 7], [40, -1, 2**31 - 1]], jnp.int32), weight)
    np.testing.assert_allclose(found[0], matrix[[0, 39, 7]], rtol=1e-6)
    assert np.all(np.isnan(found[1]))
    table = jax.ShapeDtypeStruct((50_000, 112), jnp.uint32), jax.ShapeDtypeStruct((50_000, 28), jnp.float16)
    large = Grouped(*table, None, None, 4, np.dtype("bfloat16"))
    compiled = jax.jit(look_up).lower(jax.ShapeDtypeStruct((1, 7), jnp.int32), large).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1e5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("divided", [False, True])
def test_gradients_with_respect_to_the_rows(dtype, count, divided, monkeypatch):
    monkeypatch.setattr(packed_product, "_ENTRIES_ON_CPU", 1 << 10)
    weight, matrix = grouped(43, 96, 32, zeros="integers", ordered=True)
    change = rows(count, 43, dtype)
    found = jax.grad(lambda x: jnp.sum(linear(x, weight, context=Context(divided)) * change))(rows(count, 96, dtype))
    exact = np.asarray(change, np.float64) @ matrix
    tolerance = 1e-5 if dtype == "float32" else 0.02
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, atol=tolerance * np.abs(exact).max())


def test_low_rank_updates():
    weight, matrix = grouped(40, 96, 32)
    a, b, x = rows(4, 96), rows(40, 4), rows(3, 96)
    exact = np.asarray(x, np.float64) @ (matrix + np.asarray(b, np.float64) @ np.asarray(a, np.float64)).T
    updated = LowRank(weight, a, b)
    np.testing.assert_allclose(product(x, updated), exact, atol=1e-4)
    assert updated.input_unit == weight.input_unit == 32
    to_a = jax.grad(lambda a: jnp.sum(product(x, LowRank(weight, a, b))))(a)
    np.testing.assert_allclose(to_a, np.sum(b, axis=0)[:, None] * np.sum(x, axis=0)[None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 6, 7, 50])
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("columns", [128, 96])
def test_experts(bits, count, divided, columns):
    weight, matrices = grouped(24, columns, 32, bits, "integers", ordered=columns == 96, experts=(6,))
    x, experts = rows(count, columns), jnp.asarray(np.random.default_rng(1).integers(-1, 7, count), jnp.int32)
    own = np.concatenate([matrices, np.zeros((2, 24, columns))])[experts]  # 6 and -1 are no experts
    run = jax.jit(lambda x: product_of_experts(x, experts, weight, Context(divided)))
    np.testing.assert_allclose(run(x), np.einsum("nd,nfd->nf", np.asarray(x, np.float64), own), rtol=1e-4, atol=1e-4)
    to_rows = jax.grad(lambda x: jnp.sum(run(x)))(x)
    np.testing.assert_allclose(to_rows, own.sum(axis=1), rtol=1e-4, atol=1e-4)


def test_few_rows_unpack_no_experts():
    weight, _ = grouped(256, 512, 32, experts=(16,))
    for count in (8, 40):
        run = jax.jit(lambda x, e, w: product_of_experts(x, e, w, ONE_DEVICE))
        compiled = run.lower(rows(count, 512), jnp.zeros(count, jnp.int32), weight).compile()
        # For few rows, nothing is stored; for more, one matrix of 512 kB.
        assert compiled.memory_analysis().temp_size_in_bytes < (0.6e6 if count == 8 else 2e6)


def test_groups_must_divide_a_row():
    check_groups(96, 32)
    with pytest.raises(InputError, match="has 96 columns, which groups of 36 do not divide"):
        check_groups(96, 36)
