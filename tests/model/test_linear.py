import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.model import linear as module
from jaxgen.model.linear import embed, linear


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tiles", [False, True], ids=["rows first", "weight first"])
@pytest.mark.parametrize("shape", [(1, 1, 24), (3, 24), (2, 9, 24)])
def test_product(shape, tiles, dtype, monkeypatch):
    monkeypatch.setattr(module, "_cpu_multiplies_tiles", lambda: tiles)
    rng = np.random.default_rng(0)
    x, weight, bias = (jnp.asarray(rng.normal(size=s), dtype) for s in (shape, (40, 24), (40,)))
    wide = [np.asarray(value, np.float64) for value in (x, weight, bias)]
    expected = wide[0] @ wide[1].T + wide[2]
    out = jax.jit(lambda x, weight, bias: linear(x, weight, bias))(x, weight, bias)  # a jit of its own
    assert out.dtype == x.dtype
    assert out.shape == expected.shape
    rounding = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=2 * rounding, atol=4 * rounding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_embed(dtype):
    table = jnp.asarray(np.random.default_rng(0).normal(size=(11, 6)), dtype)
    ids = jnp.asarray([[0, 10], [3, 11]])
    out = jax.jit(embed)(ids, table)
    assert out.dtype == table.dtype
    np.testing.assert_array_equal(out[:, 0], table[jnp.asarray([0, 3])])
    assert bool(jnp.all(jnp.isnan(out[1, 1])))
