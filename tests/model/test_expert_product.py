import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks.targets import device_for, lower_for
from jaxgen.core.model import expert_product
from jaxgen.core.model.context import Context
from jaxgen.core.model.expert_product import product_of_experts
from jaxgen.core.model.int8 import Int8
from jaxgen.core.model.lowrank import LowRank

E, F = 6, 48
WIDTHS = [128, 40]  # single rows with the first width fit the vector lanes
ONE_DEVICE, DIVIDED = Context(divided=False), Context(divided=True)
CONTEXTS = [ONE_DEVICE, DIVIDED, Context(divided=False, portable=True)]
FORMS = {
    "lanes or tiles": functools.partial(expert_product._on_cpu, axis=2, lanes=True, portable=False),
    "tiles": functools.partial(expert_product._on_cpu, axis=2, lanes=False, portable=False),
    "gathered": expert_product._gathered,
    "one by one": expert_product._one_by_one,
    "rounds": functools.partial(expert_product.in_rounds, axis=2),
}


def operands(count: int, width: int, dtype, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rows, experts and a weight; some of the experts are just outside the range."""
    rng = np.random.default_rng(seed)
    rows, weight = rng.normal(size=(count, width)), rng.normal(size=(E, F, width))
    experts = rng.integers(-1, E + 1, count)
    return jnp.asarray(rows, dtype), jnp.asarray(experts, jnp.int32), jnp.asarray(weight, dtype)


def dense(rows, experts, weight) -> np.ndarray:
    """Return the product in float64, computed with every expert."""
    every = np.einsum("nd,efd->enf", np.asarray(rows, np.float64), np.asarray(weight, np.float64))
    chosen = np.asarray(experts)[None] == np.arange(len(every))[:, None]
    return np.sum(every * chosen[..., None], axis=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, E, 50])
@pytest.mark.parametrize("width", WIDTHS)
def test_each_row_is_multiplied_by_its_own_expert(width, count, dtype):
    arguments = operands(count, width, dtype)
    exact = dense(*arguments)
    for context in CONTEXTS:
        found = jax.jit(product_of_experts)(*arguments, context)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, exact, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "int8"])
def test_the_forms_of_all_platforms_agree(kind, form):
    rows, experts, weight = operands(20, 128, "bfloat16" if kind == "int8" else kind)
    if kind == "int8":
        weight = jnp.round(weight * 40).astype(jnp.int8)
    found = jax.jit(FORMS[form])(rows, experts, weight)
    np.testing.assert_allclose(found, dense(rows, experts, weight), rtol=1e-5, atol=1e-2 if kind == "int8" else 1e-4)


@pytest.mark.parametrize("experts", [[0] * 40, [-1] * 40, [5] * 33 + [0] * 7, list(range(E)) * 8])
@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_rows_may_choose_an_expert(form, experts):
    rows, _, weight = operands(len(experts), 128, "float32")
    found = jax.jit(FORMS[form])(rows, jnp.asarray(experts, jnp.int32), weight)
    np.testing.assert_allclose(found, dense(rows, experts, weight), atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("context", [ONE_DEVICE, DIVIDED], ids=["one device", "divided"])
@pytest.mark.parametrize("width", WIDTHS)
def test_neighbors_change_no_bits(width, context, dtype):
    """A row's result is the same in any order, next to other rows, and next to rows of NaN."""
    multiply = jax.jit(product_of_experts)
    for count in (E, 50):
        rows, experts, weight = operands(count, width, dtype)
        found = np.asarray(multiply(rows, experts, weight, context))
        order = np.random.default_rng(1).permutation(count)
        np.testing.assert_array_equal(multiply(rows[order], experts[order], weight, context), found[order])
        for place in (0, count - 1):
            others, choices, _ = operands(count, width, dtype, seed=2)
            for other in (others, jnp.full_like(others, jnp.nan)):
                mixed = multiply(other.at[place].set(rows[0]), choices.at[place].set(experts[0]), weight, context)
                np.testing.assert_array_equal(mixed[place], found[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(dtype):
    """All of these batches have at most E rows."""
    rows, experts, weight = operands(E, 128, dtype)
    multiply = jax.jit(product_of_experts)
    together = np.asarray(multiply(rows, experts, weight, ONE_DEVICE))
    for i in range(E):
        np.testing.assert_array_equal(multiply(rows[i : i + 1], experts[i : i + 1], weight, ONE_DEVICE)[0], together[i])


@pytest.mark.parametrize("count", [2, 100])
def test_int8_experts_equal_their_matrices(count):
    rng = np.random.default_rng(0)
    values, scales = rng.integers(-127, 128, (E, F, 128)).astype(np.int8), rng.uniform(0.001, 0.1, (E, F))
    weight = Int8(jnp.asarray(values), jnp.asarray(scales, jnp.float32), np.dtype("bfloat16"))
    rows, experts, _ = operands(count, 128, "bfloat16")
    exact = dense(rows, experts, values * scales[..., None])
    for context in CONTEXTS:
        np.testing.assert_allclose(jax.jit(product_of_experts)(rows, experts, weight, context), exact, atol=1e-2)
    gradient = jax.jit(jax.grad(lambda rows: jnp.sum(product_of_experts(rows, experts, weight, ONE_DEVICE))))(rows)
    chosen = (np.asarray(experts)[:, None] == np.arange(E)) @ np.sum(values * scales[..., None], axis=1)
    np.testing.assert_allclose(gradient.astype(jnp.float32), chosen, rtol=0.02, atol=0.2)


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-5), ("bfloat16", 0.01)])
@pytest.mark.parametrize("count", [4, 100])
def test_gradients_equal_those_of_a_dense_product(count, dtype, within):
    rows, experts, weight = operands(count, 128, dtype)
    change = np.random.default_rng(1).normal(size=(count, F)).astype(np.float32)
    is_own = (np.asarray(experts)[:, None] == np.arange(E)).astype(np.float32)
    exact = (
        np.einsum("ne,nf,efd->nd", is_own, change, np.asarray(weight, np.float32)),
        np.einsum("ne,nf,nd->efd", is_own, change, np.asarray(rows, np.float32)),
    )
    for context in (ONE_DEVICE, DIVIDED):
        found = jax.jit(
            jax.grad(lambda *x: jnp.sum(product_of_experts(x[0], experts, x[1], context) * change), (0, 1))  # noqa: B023
        )(rows, weight)
        for one, other in zip(found, exact, strict=True):
            assert one.dtype == dtype
            assert np.max(np.abs(one.astype(jnp.float32) - other)) <= within * np.max(np.abs(other))


def test_low_rank_updates_of_experts_are_refused():
    rows, experts, weight = operands(2, 128, "float32")
    with pytest.raises(TypeError, match="LowRank cannot represent experts"):
        product_of_experts(rows, experts, LowRank(weight, weight[:, :4], weight[..., :4]))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("count", [8, 64])
def test_a_loop_on_a_cpu_copies_few_matrices(count, kind):
    """Few rows are multiplied without copying a matrix; for more rows, a copy of one matrix at a time is stored."""
    experts, features, columns = 32, 256, 512
    weight = jax.ShapeDtypeStruct((experts, features, columns), kind)
    rows = jax.ShapeDtypeStruct((count, columns), "float32" if kind == "float32" else "bfloat16")
    multiply = functools.partial(expert_product._product, form=expert_product._Form(divided=False))

    def steps(rows, chosen, weight):
        def step(_, x):
            return x + jnp.mean(multiply(x, chosen, weight), axis=1, keepdims=True).astype(x.dtype)

        return jax.lax.fori_loop(0, 3, step, rows)

    compiled = jax.jit(steps).lower(rows, jax.ShapeDtypeStruct((count,), jnp.int32), weight).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    matrix = features * columns * 4
    assert analysis.temp_size_in_bytes < (matrix if count <= experts else 4 * matrix)


def test_devices_with_a_part_of_the_experts_add_up():
    """Each device multiplies by its own experts; rows of other experts become zeros."""
    rows, experts, weight = operands(20, 128, "float32")
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def of_part(rows, experts, part):
        own = experts - jax.lax.axis_index("model") * part.shape[0]
        return jax.lax.psum(product_of_experts(rows, own, part, ONE_DEVICE), "model")

    specs = (PartitionSpec(), PartitionSpec(), PartitionSpec("model"))
    multiply = jax.jit(jax.shard_map(of_part, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    np.testing.assert_allclose(multiply(rows, experts, weight), dense(rows, experts, weight), atol=1e-4)


@pytest.mark.parametrize("count", [2, 100])
def test_experts_divided_over_a_mesh_stay_where_they_are(count):
    rows, experts, weight = operands(count, 128, "float32")
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = jax.device_put(weight, NamedSharding(mesh, PartitionSpec("model")))
    multiply = jax.jit(product_of_experts).lower(rows, experts, divided, Context(divided=True)).compile()
    assert f"[{E},{F},128]" not in multiply.as_text()
    np.testing.assert_allclose(
        multiply(rows, experts, divided, Context(divided=True)), dense(rows, experts, weight), atol=1e-4
    )


@pytest.mark.compilers
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # it cannot load such programs
@pytest.mark.parametrize("target", ["h100", "v5e:2x2"])
@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_accelerators_multiply_few_rows_without_copying_a_matrix(kind, count, target):
    """The shape is that of the projections of Qwen3-30B-A3B, for 1 and 8 tokens."""
    if target == "h100":
        pytest.importorskip("jax_cuda13_plugin", reason="benchmarks/README.md says how to install the compiler")
    device = device_for(target)
    here = SingleDeviceSharding(device)
    rows, experts, weight = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=here)
        for shape, dtype in [((count, 2048), "bfloat16"), ((count,), "int32"), ((128, 1536, 2048), kind)]
    )
    traced = jax.jit(product_of_experts).trace(rows, experts, weight, ONE_DEVICE)
    compiled = lower_for(device, traced).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 1e6
    if target == "h100":
        program = compiled.as_text().partition("ENTRY")[2]
        assert program.count(" fusion(") <= 2  # the second one replaces the results of rows without an expert
        assert " while(" not in program
