import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.core.model import workarounds
from jaxgen.core.model.context import Context
from jaxgen.core.model.int8 import Int8
from jaxgen.core.model.weights import linear

# Hidden and intermediate sizes of Qwen2.5 0.5B, 1.5B, 3B, 7B, 14B, 32B and 72B, and of Llama 1B and 8B.
SIZES = [896, 4864, 1536, 8960, 2048, 11008, 3584, 18944, 5120, 13824, 27648, 8192, 29568, 4096, 14336]


@pytest.mark.parametrize("columns", SIZES)
def test_sizes_of_real_models_fit_lanes(columns):
    assert workarounds.fits_lanes(1, columns)
    assert workarounds.fits_lanes(2, columns)


@pytest.mark.parametrize("size", [(3, 896), (1, 96), (1, 130), (1, 7 * 32), (2, 37 * 64)])
def test_other_sizes_do_not_fit_lanes(size):
    assert not workarounds.fits_lanes(*size)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("columns", [128, 448, 896, 37 * 128])
def test_product_in_lanes_is_accurate(columns, rows, dtype):
    rng = np.random.default_rng(columns)
    weight = jnp.asarray(rng.integers(-127, 128, (24, columns)), dtype)
    x = jnp.asarray(rng.normal(size=(rows, columns)), jnp.bfloat16)
    found = jax.jit(workarounds.in_lanes)(x, weight)
    wide = [np.asarray(value, np.float64) for value in (x, weight)]
    size = np.abs(wide[0]) @ np.abs(wide[1]).T
    assert found.dtype == jnp.float32
    np.testing.assert_array_less(np.abs(found - wide[0] @ wide[1].T), 1e-6 * size)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_with_infinity_and_nan(rows):
    weight = jnp.ones((8, 128), jnp.bfloat16)
    x = jnp.ones((rows, 128), jnp.bfloat16)
    assert bool(jnp.all(jnp.isposinf(workarounds.in_lanes(x.at[:, 5].set(jnp.inf), weight))))
    assert bool(jnp.all(jnp.isnan(workarounds.in_lanes(x.at[:, 5].set(jnp.nan), weight))))
    assert bool(jnp.all(jnp.isnan(workarounds.in_lanes(x * jnp.nan, weight))))
    assert np.all(np.isnan(workarounds.in_lanes(x.at[0].set(jnp.nan), weight)[0]))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("columns", [896, 4864, 18944])
def test_a_loop_reads_each_weight_once_as_it_is_stored(columns, dtype, rows):
    """The loop does not store converted weights, packed weights, or unsummed products."""
    weights = [jax.ShapeDtypeStruct((512, columns), dtype)] * 2
    x = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)

    def steps(x, weights):
        def step(_, x):
            for weight in weights:
                x = x + jnp.sum(workarounds.in_lanes(x, weight), axis=1, keepdims=True).astype(x.dtype)
            return x

        return jax.lax.fori_loop(0, 3, step, x)

    compiled = jax.jit(steps).lower(x, weights).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 512 * columns / 4
    assert not given_to_the_library(compiled.as_text(), f"[512,{columns}]")


def test_xla_gives_a_plain_sum_to_its_library():
    """If this fails, jax has changed, and `_lane_sum` in workarounds.py may no longer need its rounding."""
    x, weight = jnp.ones((1, 896), jnp.bfloat16), jnp.ones((512, 896), jnp.bfloat16)
    multiply = jax.jit(lambda x, weight: jnp.sum(weight.astype(jnp.float32) * x.astype(jnp.float32), axis=1))
    assert given_to_the_library(multiply.lower(x, weight).compile().as_text(), "[512,896]")


@pytest.mark.parametrize(("initial", "sums"), [(0.0, 1), (-0.0, 2)])
def test_sums_are_joined_unless_their_initial_values_differ(initial, sums):
    """If this fails, jax has changed, and `lane_product` in workarounds.py may need a different form."""
    double = jax.jit(lambda x: workarounds._lane_sum(workarounds._lane_sum(x, 2, 0.0), 1, initial))
    assert double.lower(jnp.ones((4, 5, 6))).compile().as_text().count(" reduce(") == sums


def given_to_the_library(program: str, shape: str) -> list[str]:
    """Return the computations of XLA's kernel library (YNNPACK) that have an argument of this shape."""
    names = re.findall(r"calls=%([\w.\-]+),.*__ynn_fusion", program)
    heads = [line for line in program.splitlines() if line.endswith("{")]
    return [head for name in names for head in heads if head.startswith(f"%{name} (") and shape in head]


def test_gradients_are_accurate():
    rng = np.random.default_rng(1)
    x, weight, change = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((1, 128), (40, 128), (1, 40)))
    _, pull = jax.vjp(linear, x, weight)
    to_x, to_weight = pull(change)
    wide = [np.asarray(value, np.float64) for value in (x, weight, change)]
    np.testing.assert_allclose(np.asarray(to_x, np.float64), wide[2] @ wide[1], rtol=0.02, atol=0.05)
    np.testing.assert_allclose(np.asarray(to_weight, np.float64), wide[2].T @ wide[0], rtol=0.02, atol=0.05)


def test_only_cpus_multiply_in_lanes(monkeypatch):
    monkeypatch.setattr(workarounds, "cpu_flags", lambda: {"avx512f"})
    x, weight = jnp.ones((1, 128), jnp.bfloat16), jnp.ones((40, 128), jnp.bfloat16)
    for platform in ("cpu", "cuda", "tpu"):
        # None (unknown) counts as divided if there are several CPU devices, as in the tests.
        for divided in (False, True, None):
            traced = jax.jit(linear).trace(x, weight, None, Context(divided))
            program = traced.lower(lowering_platforms=(platform,)).as_text()
            in_lanes = "reduce_precision" in program and "dot_general" not in program
            assert in_lanes == (platform == "cpu" and divided is False)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("flags", [set(), {"amx_bf16"}, {"amx_int8"}, {"amx_bf16", "amx_int8"}])
def test_matrix_unit_of_a_cpu_is_preferred(rows, dtype, flags, monkeypatch):
    """The rows become the right operand, of 16 bits or of pairs of 8 bits, unless the program may run elsewhere."""
    monkeypatch.setattr(workarounds, "cpu_flags", lambda: flags)
    monkeypatch.setattr(workarounds, "_ROWS_FIRST", 0)
    x, weight = jnp.ones((rows, 128), jnp.float16 if dtype == "float16" else jnp.bfloat16), jnp.ones((40, 128), dtype)
    if dtype == "int8":
        weight = Int8(weight, jnp.ones(40), jnp.bfloat16)
    has_unit = {"bfloat16": "amx_bf16", "int8": "amx_int8"}.get(dtype) in flags
    bits, count = ("xi8", 2 * rows) if dtype == "int8" else ("xbf16", 2)
    in_unit = rf"dot_general .*\(tensor<40x128{bits}>, tensor<{count}x128{bits}>\)"
    for portable in (False, True):
        run = jax.jit(functools.partial(linear, context=Context(False, portable=portable)))
        program = run.trace(x, weight).lower(lowering_platforms=("cpu",)).as_text()
        assert bool(re.search(in_unit, program)) == (has_unit and not portable)
        np.testing.assert_array_equal(run(x, weight), np.full((rows, 40), 128.0))
