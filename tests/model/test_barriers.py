import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgen.model.barriers import in_branch, own_sum, recomputed
from jaxgen.model.causal_lm import CausalLM, forward
from jaxgen.model.loss import next_token_loss
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


def test_own_sum_is_the_sum():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 500)), jnp.float32)
    np.testing.assert_allclose(jax.jit(own_sum, static_argnums=1)(x, 1), jnp.sum(x, axis=1), rtol=1e-5, atol=1e-5)


def test_gradients_of_what_is_recomputed_are_those_of_the_function():
    def function(x, index, pair):
        return jnp.sin(x[index]) * pair["a"] + pair["b"]

    inputs = jnp.arange(4.0), jnp.array([2, 0]), {"a": jnp.array([1.0, 3.0]), "b": jnp.ones(2)}

    def total(form, x, pair):
        return jnp.sum(form(x, inputs[1], pair) ** 2)

    for form in (recomputed(function), recomputed(lambda *inputs: function(*inputs) * 1.0, function)):
        of_form, plain = (jax.grad(functools.partial(total, form), argnums=(0, 1)) for form in (form, function))
        arguments = inputs[0], inputs[2]
        jax.tree.map(np.testing.assert_allclose, jax.jit(of_form)(*arguments), plain(*arguments))
        twice, plain_twice = (jax.jacrev(gradient)(*arguments) for gradient in (of_form, plain))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), twice, plain_twice)


@pytest.mark.parametrize("steps", [256, 600], ids=["at once", "in blocks"])
def test_a_layer_stores_no_scores_for_its_gradient(steps):
    cfg = model_config(num_attention_heads=8, num_key_value_heads=2)
    ids = jax.ShapeDtypeStruct((1, steps), jnp.int32)

    def temporaries(layers: int) -> int:
        model = dataclasses.replace(cfg, num_hidden_layers=layers, windows=(None,) * layers)
        params = jax.eval_shape(lambda: CausalLM(model).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
        return _temporaries(jax.grad(lambda p, ids: forward(model, p, ids, labels=ids).loss), params["params"], ids)

    scores = 4 * 8 * steps * steps
    assert temporaries(6) - temporaries(2) < 4 * scores


def test_the_gradient_of_the_loss_is_that_of_the_cross_entropy():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(2, 5, 40)) * 4, jnp.float32)
    labels = rng.integers(0, 40, (2, 5))
    labels[0, 3] = labels[1, 1] = -100

    def plain(logits):
        counted = labels[:, 1:] != -100
        with jax.numpy_dtype_promotion("standard"):
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], np.maximum(labels[:, 1:], 0))
        return jnp.sum(jnp.where(counted, losses, 0))

    got, gradient = jax.value_and_grad(lambda logits: next_token_loss(logits, jnp.asarray(labels))[0])(logits)
    wanted, wanted_gradient = jax.value_and_grad(plain)(logits)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-6)


def test_the_gradient_of_the_loss_stores_one_more_array_of_the_logits_size():
    logits = jax.ShapeDtypeStruct((1, 64, 4096), jnp.float32)
    labels = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    used = _temporaries(jax.grad(lambda logits, labels: next_token_loss(logits, labels)[0]), logits, labels)
    assert used < 1.1 * logits.size * 4
