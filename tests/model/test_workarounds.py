"""Workarounds for XLA's CPU compiler: what they compute, and what the compiler would do without them.

If a test of the compiler fails, the compiler has improved. The workaround can be removed once the oldest supported jax
release no longer needs it. A version number in a test is the first release that does not need the workaround.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxgen.core.model import attention, cache, cache_storage, int8, weights, workarounds
from jaxgen.core.model.causal_lm import CausalLM, forward
from jaxgen.core.model.workarounds import in_branch, recomputed
from tests.support.models import model_config

SIDE = 896  # of a square weight


def _temporaries(function, *arguments) -> int:
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_a_branch_does_not_change_the_result_and_nan_stays_nan():
    def double(x, y):
        return 2 * x + y, y

    x, y = jnp.arange(3.0), jnp.ones(3)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(functools.partial(in_branch, double))(x, y), double(x, y))
    outs = in_branch(double, jnp.full(3, jnp.nan), y)
    assert all(bool(jnp.all(jnp.isnan(out))) for out in outs)


@pytest.mark.slow
def test_gradients_of_recomputed_functions_equal_those_of_the_functions():
    def plain(x, index, pair):
        return (x[index] ** 3) * pair["a"] + pair["b"]

    def looped(x, index, pair):  # a loop of unknown length cannot be differentiated
        cubed = jax.lax.fori_loop(0, jnp.sum(index) + 1, lambda _, y: y * x[index], jnp.ones(2))
        return cubed * pair["a"] + pair["b"]

    index = jnp.array([2, 0])
    arguments = jnp.arange(1.0, 5.0), {"a": jnp.array([1.0, 3.0]), "b": jnp.ones(2)}

    def total(form, x, pair):
        return jnp.sum(form(x, index, pair) ** 2)

    for form in (recomputed(plain), recomputed(looped, plain)):
        of_form, wanted = (jax.grad(functools.partial(total, f), argnums=(0, 1)) for f in (form, plain))
        jax.tree.map(np.testing.assert_allclose, jax.jit(of_form)(*arguments), wanted(*arguments))
        twice, wanted_twice = (jax.jacrev(gradient)(*arguments) for gradient in (of_form, wanted))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), twice, wanted_twice)


def _layer_temporaries(steps: int) -> float:
    """Return how many more bytes the gradient's program stores for each additional layer."""
    cfg = model_config(num_attention_heads=8, num_key_value_heads=2)
    ids = jax.ShapeDtypeStruct((1, steps), jnp.int32)

    def temporaries(layers: int) -> int:
        model = dataclasses.replace(cfg, num_hidden_layers=layers, layers=cfg.layers[:1] * layers)
        params = jax.eval_shape(lambda: CausalLM(model).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
        return _temporaries(jax.grad(lambda p, ids: forward(model, p, ids, labels=ids).loss), params["params"], ids)

    return (temporaries(6) - temporaries(2)) / 4


@pytest.mark.slow
@pytest.mark.parametrize("steps", [pytest.param(256, id="at once"), pytest.param(600, id="in blocks")])
def test_a_layer_stores_no_scores_for_its_gradient(steps):
    assert _layer_temporaries(steps) < 4 * 8 * steps * steps


@pytest.mark.slow
def test_a_layer_stores_scores_after_a_checkpoint(monkeypatch):
    monkeypatch.setattr(attention, "_recomputed_at_once", jax.checkpoint(attention._short_inputs))
    jax.clear_caches()  # discards traced layers
    stored = _layer_temporaries(256)
    jax.clear_caches()
    assert stored >= 4 * 8 * 256 * 256 or jax.__version_info__ >= (0, 12)


def _steps(product, rows: int, dtype: str) -> int:
    """Return how many bytes are stored by a loop that multiplies rows by two weights."""

    def steps(x, weights):
        def step(_, x):
            for weight in weights:
                x = product(x, weight).astype(x.dtype)
            return x

        return lax.fori_loop(0, 3, step, x)

    weights = [jax.ShapeDtypeStruct((SIDE, SIDE), dtype)] * 2
    return _temporaries(steps, jax.ShapeDtypeStruct((rows, SIDE), jnp.bfloat16), weights)


def _converted(rows, values):
    return int8._converted(rows, values, False)


PRODUCTS = {
    "the lanes' branch, bfloat16": (workarounds.in_lanes, workarounds.lane_product, 1, "bfloat16"),
    "the lanes' branch, int8": (workarounds.in_lanes, workarounds.lane_product, 1, "int8"),
    "two rows for one": (functools.partial(workarounds.two_rows, weights._contract), weights._contract, 1, "bfloat16"),
    "8-bit weights converted in a branch": (functools.partial(in_branch, _converted), _converted, 16, "int8"),
}


@pytest.mark.parametrize(("form", "plain", "rows", "dtype"), PRODUCTS.values(), ids=PRODUCTS)
def test_loop_without_the_workaround_stores_converted_weights(form, plain, rows, dtype):
    assert _steps(form, rows, dtype) < 4 * SIDE * SIDE
    assert _steps(plain, rows, dtype) >= 4 * SIDE * SIDE


@pytest.mark.parametrize(
    ("product", "dtype"), [(weights._contract, "bfloat16"), (weights._contract, "float32"), (int8._contract, "int8")]
)
def test_operands_are_swapped_without_rounding_or_a_barrier(product, dtype):
    def left_operands(function) -> set[str]:
        program = jax.jit(function).lower(jnp.ones((8, 64), dtype), jnp.ones((640, 64), dtype)).compile().as_text()
        return set(re.findall(r"= (?:f32|s32)\[(\d+),\d+\]\S* dot\(", program))

    assert left_operands(functools.partial(workarounds.weight_first, product)) == {"640"}
    assert left_operands(lambda rows, weight: product(weight, rows).T) == {"8"}


def test_a_loop_stores_a_converted_table_without_a_branch():
    def stored(look_up) -> int:
        def steps(ids, table):
            return lax.fori_loop(0, 3, lambda _, ids: jnp.argmax(look_up(ids, table), -1).astype(jnp.int32), ids)

        return _temporaries(steps, jnp.zeros((1, 1), jnp.int32), jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16))

    assert stored(functools.partial(workarounds.look_up, weights._gather)) < 4 * 4096 * 64
    assert stored(weights._gather) >= 4 * 4096 * 64 or jax.__version_info__ >= (0, 12)


def test_a_loop_converts_a_cache_of_floats(monkeypatch):
    def conversions() -> int:
        """Count how often the whole cache is converted to its own dtype after a write."""

        def steps(buffer, x):
            def step(slot, carry):
                buffer, x = carry
                buffer = cache.write(buffer, cache_storage.as_stored(x, "bfloat16"), jnp.full((2, 1), slot))
                keys = cache_storage.as_numbers(buffer, "bfloat16")
                scores = jnp.einsum("bkqh,bksh->bkqs", x, keys, preferred_element_type=jnp.float32)
                return buffer, scores[..., :32].astype(jnp.bfloat16)

            return lax.fori_loop(0, 9, step, (buffer, x))

        buffer = cache_storage.empty_slots((2, 2, 512, 32), "bfloat16", int8=False)
        x = jnp.ones((2, 2, 1, 32), jnp.bfloat16)
        program = jax.jit(steps, donate_argnums=0).lower(buffer, x).compile().as_text()
        return len(re.findall(r"= bf16\[2,2,512,32\]\S* convert\(", program))

    assert conversions() == 0
    monkeypatch.setattr(cache_storage, "stored_dtype", np.dtype)
    assert conversions() > 0 or jax.__version_info__ >= (0, 12)


def test_a_slice_of_top_k_is_a_sort_without_a_barrier():
    def sorts(top_k) -> bool:
        def some(x):
            best, place = top_k(x, 4)
            return best[:, :2], place[:, :3]

        return " sort(" in jax.jit(some).lower(jnp.ones((2, 5000))).compile().as_text()

    assert not sorts(workarounds.top_k)
    assert sorts(lax.top_k)
