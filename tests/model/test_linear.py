import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxgen.model import linear as module
from jaxgen.model.linear import for_this_machine, linear, look_up
from tests.support.compilations import compilations
from tests.support.models import model_config

FORMS = ["any", "tiles", "divided"]
DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cpu", FORMS)
@pytest.mark.parametrize("shape", [(1, 1, 24), (3, 24), (2, 9, 24)])
def test_product(shape, cpu, dtype):
    rng = np.random.default_rng(0)
    x, weight, bias = (jnp.asarray(rng.normal(size=s), dtype) for s in (shape, (40, 24), (40,)))
    wide = [np.asarray(value, np.float64) for value in (x, weight, bias)]
    expected = wide[0] @ wide[1].T + wide[2]
    out = jax.jit(lambda x, weight, bias: linear(x, weight, bias, cpu=cpu))(x, weight, bias)
    assert out.dtype == x.dtype
    assert out.shape == expected.shape
    rounding = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2 * rounding, atol=4 * rounding)


@pytest.mark.parametrize("cpu", FORMS)
@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_of_few_rows(rows, cpu):
    rng = np.random.default_rng(1)
    x, weight, change = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((rows, 24), (40, 24), (rows, 40)))
    _, pull = jax.vjp(lambda x, weight: linear(x, weight, cpu=cpu), x, weight)
    to_x, to_weight = jax.jit(pull)(change)
    wide = [np.asarray(value, np.float64) for value in (x, weight, change)]
    np.testing.assert_allclose(np.asarray(to_x, np.float64), wide[2] @ wide[1], rtol=0.02, atol=0.05)
    np.testing.assert_allclose(np.asarray(to_weight, np.float64), wide[2].T @ wide[0], rtol=0.02, atol=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_look_up(dtype):
    table = jnp.asarray(np.random.default_rng(0).normal(size=(11, 6)), dtype)
    ids = jnp.asarray([[0, 10], [3, 11], [-1, 1]])
    out = jax.jit(look_up)(ids, table)
    assert out.dtype == table.dtype
    np.testing.assert_array_equal(out[:2, 0], table[jnp.asarray([0, 3])])
    np.testing.assert_array_equal(out[0, 1], table[10])
    assert bool(jnp.all(jnp.isnan(out[1, 1])))
    assert bool(jnp.all(jnp.isnan(out[2, 0])))


@pytest.mark.parametrize("cpu", FORMS)
def test_a_second_eager_call_compiles_nothing(cpu):
    x, weight = jnp.ones((1, 24), jnp.bfloat16), jnp.ones((40, 24), jnp.bfloat16)
    ids = jnp.zeros((1, 1), jnp.int32)

    def both():
        return linear(x, weight, cpu=cpu), look_up(ids, weight)

    both()
    with compilations() as count:
        both()
    assert count == [0]


@pytest.mark.parametrize("tiles", [False, True])
def test_only_the_eager_driver_depends_on_the_machine(tiles, monkeypatch):
    monkeypatch.setattr(module, "_has_tiles", lambda: tiles)
    model = model_config()
    assert model.cpu_form == "any"
    assert for_this_machine(model) == dataclasses.replace(model, cpu_form="tiles" if tiles else "any")
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
    assert for_this_machine(model, mesh) == dataclasses.replace(model, cpu_form="divided")
    assert for_this_machine(model).to_hf() == model.to_hf()
