"""generate() cannot be differentiated, but calling it in a differentiated function does not change the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import InputError, generate, score
from tests.support import counting
from tests.support.compilations import compilations
from tests.support.counting import PARAMS

CFG = counting.CFG.replace(max_new_tokens=4, repetition_penalty=1.1)
IDS = jnp.asarray([[3], [7]], jnp.int32)


def drawn(params=PARAMS, cfg=CFG, **given):
    return generate(params, given.pop("ids", IDS), None, cfg.replace(output_logprobs="logits"), **given)


LOSSES = {
    "parameters": (lambda params: drawn(params).logprobs.sum(), PARAMS),
    "an option": (lambda x: drawn(cfg=CFG.replace(repetition_penalty=x)).logprobs.sum(), np.float32(1.2)),
    "embeddings": (lambda x: drawn(ids=None, inputs_embeds=x).logprobs.sum(), jnp.zeros((2, 1, 64))),
    "the cache": (lambda params: drawn(params).cache.kv.keys[0].sum(), PARAMS),
}
WAYS = {
    "grad": jax.grad,
    "grad of jit": lambda loss: jax.grad(jax.jit(loss)),
    "jit of grad": lambda loss: jax.jit(jax.grad(loss)),
    "value_and_grad": jax.value_and_grad,
    "jvp": lambda loss: lambda x: jax.jvp(loss, (x,), (jax.tree.map(np.ones_like, x),)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("loss", "at"), LOSSES.values(), ids=LOSSES)
def test_derivatives_are_refused_before_compilation(loss, at, way):
    derivative, at = way(loss), jax.tree.map(jnp.asarray, at)
    with compilations() as count, pytest.raises(InputError, match=r"cannot be differentiated.* score\(params, out"):
        derivative(at)
    assert count[0] <= 1  # converting a number compiles a program, but the loop is not compiled


@pytest.mark.slow
@pytest.mark.parametrize("way", ["grad", "grad of jit", "jit of grad"])
def test_generating_inside_the_differentiated_function(way):
    def loss(params, sequences=None):
        if sequences is None:
            sequences = drawn(jax.lax.stop_gradient(params)).sequences
        return score(params, sequences, CFG).logprobs.sum()

    gradient = WAYS[way](loss)(PARAMS)
    wanted = jax.grad(loss)(PARAMS, drawn().sequences)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
