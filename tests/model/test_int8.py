import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_hf, save_hf
from demo.corpus import conversations
from jaxgen import Tokenizer, score
from jaxgen.core.model import int8 as int8_module
from jaxgen.core.model.context import NO_CONTEXT, Context
from jaxgen.core.model.int8 import Int8
from jaxgen.core.model.weights import linear, look_up
from jaxgen.demo import PATH
from tests.support.outliers import with_outliers

F, D = 40, 64


def int8(dtype, seed=0) -> tuple[Int8, np.ndarray]:
    """Return a random weight and the matrix that it represents."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-127, 128, (F, D)).astype(np.int8)
    scales = rng.uniform(0.001, 0.1, F).astype(np.float32)
    return Int8(jnp.asarray(values), jnp.asarray(scales), np.dtype(dtype)), values * scales[:, None]


def rows(count: int, dtype, seed=1) -> jax.Array:
    x = np.random.default_rng(seed).normal(size=(count, D))
    x[:, 3] *= 50  # an outlier
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("count", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("divided", [False, True])
def test_products_equal_those_of_the_matrix(dtype, count, divided):
    weight, matrix = int8(dtype)
    x = rows(count, dtype)
    exact = np.asarray(x, np.float64) @ matrix.T.astype(np.float64)
    found = np.asarray(jax.jit(lambda x, weight: weight.product(x, Context(divided)))(x, weight))
    # An entry stored as two 8-bit numbers is off by at most 1/254**2 of its row's largest. Sums add rounding errors.
    size = np.abs(np.asarray(x, np.float64)).max(axis=1, keepdims=True) * np.abs(matrix).sum(axis=1)
    within = 1e-6 if dtype == jnp.float32 or count > 8 else 0.5 / 127 / 254
    assert np.all(np.abs(found - exact) <= (within + 1e-7) * size)


def test_order_of_operands_changes_no_bits(monkeypatch):
    weight, _ = int8(jnp.bfloat16)
    x, results, programs = rows(4, jnp.bfloat16), [], []
    for largest in (0, weight.values.size):
        monkeypatch.setattr(int8_module, "_LARGEST_LEFT", largest)
        product = jax.jit(lambda x, weight: weight.product(x, NO_CONTEXT))
        results.append(product(x, weight))
        programs.append(product.trace(x, weight).lower().as_text())
    assert "optimization_barrier" not in programs[0]
    assert "optimization_barrier" in programs[1]
    np.testing.assert_array_equal(*results)


@pytest.mark.slow
def test_rows_of_zeros_and_of_nan():
    weight, matrix = int8(jnp.bfloat16)
    x = rows(3, jnp.bfloat16).at[0].set(0).at[1, 5].set(jnp.nan)
    found = np.asarray(linear(x, weight), np.float32)
    assert np.all(found[0] == 0)
    assert np.all(np.isnan(found[1]))
    exact = np.asarray(x[2], np.float32) @ matrix.T
    np.testing.assert_allclose(found[2], exact, atol=0.01 * np.abs(exact).max())
    assert np.all(np.isnan(np.asarray(linear(jnp.full((20, D), jnp.nan, jnp.bfloat16), weight), np.float32)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_row_does_not_depend_on_its_batch(dtype):
    weight, matrix = int8(dtype)
    x = rows(5, dtype)
    alone = jnp.concatenate([linear(x[n : n + 1], weight) for n in range(5)])
    differences = np.abs(np.asarray(linear(x, weight) - alone, np.float32))
    # The order of a float32 sum of 64 products depends on the number of rows. Differences of five roundings were seen.
    size = np.abs(np.asarray(x, np.float32)) @ np.abs(matrix).T
    assert np.all(differences <= (8 * 2**-24 * size if dtype == jnp.float32 else 0))


def test_rows_are_looked_up():
    weight, matrix = int8(jnp.float32)
    found = look_up(jnp.asarray([[0, F - 1, 7], [F, -1, 2**31 - 1]], jnp.int32), weight)
    np.testing.assert_array_equal(found[0], matrix[[0, F - 1, 7]])
    assert np.all(np.isnan(found[1]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("count", [2, 20])
def test_gradients_with_respect_to_the_rows(dtype, count):
    weight, matrix = int8(dtype)
    change = rows(count, dtype, seed=2)[:, :F]
    found = jax.grad(lambda x: jnp.sum(linear(x, weight) * change))(rows(count, dtype))
    exact = np.asarray(change, np.float32) @ matrix
    tolerance = 1e-5 if dtype == jnp.float32 else 0.02
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=tolerance * np.abs(exact).max())


@pytest.fixture(scope="module")
def texts():
    tok = Tokenizer.from_pretrained(PATH)
    return tok.chat(list(itertools.islice(conversations(seed=11), 12)), add_generation_prompt=False)


def perplexity(params, cfg, batch) -> float:
    scored = np.cumsum(batch.attention_mask, axis=1) * batch.attention_mask > 1  # the first token is not scored
    logprobs = score(params, batch.ids, cfg, attention_mask=batch.attention_mask).logprobs
    return float(np.exp(-np.asarray(logprobs)[scored].mean(dtype=np.float64)))


@pytest.fixture(scope="module")
def reference(texts) -> float:
    return perplexity(*load_hf(PATH, dtype="float32"), texts)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantized_model_has_similar_loss(texts, reference, dtype):
    assert perplexity(*load_hf(PATH, dtype=dtype, quantize="int8"), texts) < 1.01 * reference


@pytest.mark.slow
def test_quantized_model_with_outliers_has_similar_loss(tmp_path, texts, reference):
    params, cfg = load_hf(PATH, dtype="float32")
    save_hf(with_outliers(params, cfg.model.num_hidden_layers), cfg, tmp_path / "outliers")
    assert perplexity(*load_hf(tmp_path / "outliers"), texts) == pytest.approx(reference, rel=1e-3)
    for dtype in ("float32", "bfloat16"):
        assert perplexity(*load_hf(tmp_path / "outliers", dtype=dtype, quantize="int8"), texts) < 1.02 * reference
