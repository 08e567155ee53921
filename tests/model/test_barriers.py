import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.model.barriers import in_branch, recomputed
from jaxgen.model.causal_lm import CausalLM, forward
from tests.support.models import model_config


def _temporaries(function, *arguments) -> int:
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_in_a_branch_the_result_is_the_same_and_nan_stays_nan():
    def double(x, y):
        return 2 * x + y, y

    x, y = jnp.arange(3.0), jnp.ones(3)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(functools.partial(in_branch, double))(x, y), double(x, y))
    outs = in_branch(double, jnp.full(3, jnp.nan), y)
    assert all(bool(jnp.all(jnp.isnan(out))) for out in outs)


def test_gradients_of_what_is_recomputed_are_those_of_the_function():
    def plain(x, index, pair):
        return (x[index] ** 3) * pair["a"] + pair["b"]

    def looped(x, index, pair):  # a loop of unknown length has no gradient of its own
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


@pytest.mark.parametrize(
    "steps", [pytest.param(256, id="at once"), pytest.param(600, id="in blocks", marks=pytest.mark.slow)]
)
def test_a_layer_stores_no_scores_for_its_gradient(steps):
    cfg = model_config(num_attention_heads=8, num_key_value_heads=2)
    ids = jax.ShapeDtypeStruct((1, steps), jnp.int32)

    def temporaries(layers: int) -> int:
        model = dataclasses.replace(cfg, num_hidden_layers=layers, windows=(None,) * layers)
        params = jax.eval_shape(lambda: CausalLM(model).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
        return _temporaries(jax.grad(lambda p, ids: forward(model, p, ids, labels=ids).loss), params["params"], ids)

    scores = 4 * 8 * steps * steps
    assert temporaries(6) - temporaries(2) < 4 * scores
