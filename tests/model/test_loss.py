import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgen.core.model.loss import next_token_loss


def _loss(logits, labels):
    return next_token_loss(logits, jnp.asarray(labels))[0]


@pytest.mark.slow
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

    got, gradient = jax.value_and_grad(lambda logits: _loss(logits, labels))(logits)
    wanted, wanted_gradient = jax.value_and_grad(plain)(logits)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-6)


def test_the_gradient_of_the_loss_stores_one_extra_array_as_large_as_the_logits():
    logits = jax.ShapeDtypeStruct((1, 64, 4096), jnp.float32)
    labels = jax.ShapeDtypeStruct((1, 64), jnp.int32)
    used = jax.jit(jax.grad(_loss)).lower(logits, labels).compile().memory_analysis().temp_size_in_bytes
    assert used < 1.1 * logits.size * 4


def test_a_confident_token_has_a_small_loss_wherever_the_logits_are():
    logits = jnp.full((1, 2, 4), 1000.0).at[0, 0, 2].set(1008)
    np.testing.assert_allclose(_loss(logits, [[-100, 2]]), np.log1p(3 * np.exp(-8.0)), rtol=1e-4)


@pytest.mark.slow
def test_a_position_without_a_label_has_no_gradient_whatever_its_logits_are():
    logits = jnp.ones((1, 3, 4)).at[0, 1:].set(jnp.nan)
    gradient = jax.grad(_loss)(logits, jnp.asarray([[1, 2, -100]]))
    np.testing.assert_allclose(gradient[0, 0], [0.25, 0.25, -0.75, 0.25])
    assert bool(jnp.all(gradient[0, 1:] == 0))


def test_a_label_outside_the_vocabulary_makes_the_gradient_nan():
    for label in (-1, 4):
        assert bool(jnp.all(jnp.isnan(jax.grad(_loss)(jnp.ones((1, 2, 4)), jnp.asarray([[0, label]]))[0, 0])))
