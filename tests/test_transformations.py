"""generate inside jax.shard_map, with its default checks, and with old-style keys under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxgen import Engine, GenerationConfig, generate, score
from jaxgen.core.model.int8 import Int8
from jaxgen.training import lora
from tests.support.models import slow
from tests.test_meshes import CFG, IDS, KEY, MASK, MODES, PARAMS

SAMPLING = {"do_sample": True, "num_return_sequences": 2, "top_k": 30, "top_p": 0.9, "typical_p": 0.9}
SHARDED = MODES | {"sampling": SAMPLING, "slots": {"slots": 1, "do_sample": True}, "chunks": {"prefill_chunk_size": 4}}
KEYS = jax.random.split(KEY, len(IDS))
DATA = P("data")


def on_two_devices(function):
    """Return a jitted function of parameters, ids, mask and keys that divides the prompts between two devices."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P(), DATA, DATA, DATA), out_specs=DATA))


@pytest.mark.parametrize("name", ["sampling", *slow(*(name for name in SHARDED if name != "sampling"))])
def test_generate_in_shard_map(name):
    cfg = CFG.replace(**SHARDED[name])
    sharded = on_two_devices(lambda params, *rest: generate(params, rest[0], rest[2], cfg, attention_mask=rest[1]))
    out = sharded(PARAMS, jnp.asarray(IDS), jnp.asarray(MASK), KEYS)
    expected = jax.jit(lambda params: generate(params, IDS, KEYS, cfg, attention_mask=MASK))(PARAMS)
    np.testing.assert_array_equal(out.sequences, expected.sequences)


@pytest.mark.slow
def test_score_in_shard_map():
    cfg = CFG.replace(do_sample=True, top_p=0.9, repetition_penalty=1.1)
    more = {"of": "scores", "prompt_width": 6}
    sharded = on_two_devices(lambda params, ids, mask, _: score(params, ids, cfg, attention_mask=mask, **more))
    out = sharded(PARAMS, jnp.asarray(IDS), jnp.asarray(MASK), KEYS)
    expected = jax.jit(lambda params: score(params, IDS, cfg, attention_mask=MASK, **more))(PARAMS)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("updates", [False, True], ids=["weights", "updates of 8-bit weights"])
def test_gradients_in_shard_map(updates):
    """The gradient of a sum over all prompts is the same, on each device or of all devices together."""
    trained, base = PARAMS, jax.tree.map(jnp.asarray, jax.tree.map(_int8, PARAMS))
    if updates:
        trained = jax.tree.map(lambda x: x + 0.1, lora.init(base, 2, jax.random.key(1)))

    def loss(trained, ids, mask):
        params = lora.attach(base, trained, 0.5) if updates else trained
        return jnp.sum(score(params, ids, CFG, attention_mask=mask, prompt_width=2).logprobs)

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (P(), DATA, DATA), "out_specs": P()}
    inside = jax.shard_map(jax.grad(lambda *of: jax.lax.psum(loss(*of), "data")), **specs)
    outside = jax.grad(jax.shard_map(lambda *of: jax.lax.psum(loss(*of), "data"), **specs))
    expected = jax.jit(jax.grad(loss))(trained, jnp.asarray(IDS), jnp.asarray(MASK))
    for sharded in (inside, outside):
        found = jax.jit(sharded)(trained, jnp.asarray(IDS), jnp.asarray(MASK))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), found, expected)


def _int8(weight):
    return Int8.from_matrix(np.asarray(weight), np.dtype(np.float32)) if weight.ndim == 2 else weight


@pytest.mark.slow
def test_old_style_keys_are_accepted():
    cfg = CFG.replace(do_sample=True, temperature=2.0)
    draw = jax.jit(lambda key: generate(PARAMS, IDS, key, cfg, attention_mask=MASK).sequences)
    old = jax.random.PRNGKey(3)
    expected = draw(jax.random.key(3))
    np.testing.assert_array_equal(draw(old), expected)
    np.testing.assert_array_equal(draw(np.asarray(old)), expected)
    eager = generate(PARAMS, IDS, old, cfg, attention_mask=MASK)
    np.testing.assert_array_equal(eager.sequences, expected)
    several = jax.random.split(old, len(IDS))
    np.testing.assert_array_equal(draw(several), draw(jax.random.wrap_key_data(several)))
    with pytest.raises(TypeError, match=r"a jax\.random\.key, or a jax\.random\.PRNGKey .*, got uint32\[3\]"):
        draw(jnp.zeros(3, jnp.uint32))
    with pytest.raises(TypeError, match=r"got int32\[2\]"):
        draw(jnp.zeros(2, jnp.int32))


@pytest.mark.slow
def test_engine_accepts_old_style_keys():
    cfg = GenerationConfig(model=CFG.model, do_sample=True, temperature=2.0, max_new_tokens=5)
    sizes = {"slots": 1, "prompt_width": 8, "prompt_options": ()}
    with Engine(PARAMS, cfg, jax.random.PRNGKey(3), **sizes) as engine:
        prompt = {"ids": [5, 6], "index": 2}
        expected = jax.random.fold_in(jax.random.key(3), 2)
        first, second, third = (
            engine.submit(prompt | own).result(60)[0].tokens
            for own in ({}, {"key": expected}, {"key": jax.random.key_data(expected)})
        )
    assert first == second == third
