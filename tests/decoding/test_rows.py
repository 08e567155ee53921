"""The state of rows: what belongs to a prompt follows all of its sequences."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen import GenerationConfig
from jaxgen.decoding.extensions import Extensions
from jaxgen.decoding.loop import prefill
from jaxgen.decoding.rows import Rows
from jaxgen.request.prepare import CallInputs, prepare
from tests.support.models import model_config, random_params

MODEL = model_config()
PARAMS = random_params(MODEL)
PROMPTS = np.random.default_rng(0).integers(3, MODEL.vocab_size, (4, 5), np.int32)
KEYS = jax.random.split(jax.random.key(0), 4)


def rows_of(prompts: list[int]) -> Rows:
    """Two sequences of each of these prompts."""
    cfg = GenerationConfig(
        **{"model": MODEL, "do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4, "pad_token_id": 0},
        **{"temperature": [0.5 + prompt for prompt in prompts], "output_hidden_states": True, "eos_token_id": 1},
    )
    number = np.array(prompts)
    inputs = CallInputs(PROMPTS[number], KEYS[number], attention_mask=np.ones_like(PROMPTS[number]))
    prepared = prepare(PARAMS, cfg, inputs, Extensions(), eager=True)
    return jax.jit(lambda run, request: prefill(run, request).rows.fork(2))(prepared.run, prepared.request)


def assert_equal(rows: Rows, expected: Rows) -> None:
    assert rows.cache_ids is not None
    assert rows.recording.hidden_states is not None
    assert rows.keys is not None
    wanted, structure = jax.tree.flatten(expected)
    assert jax.tree.structure(rows) == structure
    for got, leaf in zip(jax.tree.leaves(rows), wanted, strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            got, leaf = jax.random.key_data(got), jax.random.key_data(leaf)
        # Products of another number of rows may differ in their last bits.
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(leaf, np.float32), atol=1e-5)


def key_data(rows: Rows) -> np.ndarray:
    assert rows.keys is not None
    return np.asarray(jax.random.key_data(rows.keys))


def test_a_prompt_with_all_of_its_sequences_is_replaced():
    replaced = rows_of([0, 1, 2]).insert(rows_of([3]), jnp.asarray([2, 3]))
    assert_equal(replaced, rows_of([0, 3, 2]))


def test_row_numbers_out_of_range_replace_nothing():
    rows = rows_of([0, 1, 2])
    assert_equal(rows.insert(rows_of([3, 1]), jnp.asarray([6, 6, 4, 5])), rows_of([0, 1, 1]))


def test_sequences_of_a_prompt_share_what_belongs_to_it():
    rows = rows_of([0, 1])
    selected = rows.select(jnp.asarray([1, 0, 3, 3]))
    assert rows.cache_ids is not None
    assert selected.cache_ids is rows.cache_ids
    np.testing.assert_array_equal(key_data(selected), key_data(rows)[[1, 0, 3, 3]])
