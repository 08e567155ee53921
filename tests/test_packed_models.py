"""Whole models with packed weights."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxgen import export_generate, generate, shard_params
from jaxgen.core.model.grouped import Grouped
from tests.support.grouped import rounded_to_4_bits
from tests.test_export import call
from tests.test_meshes import CFG, IDS, MASK, PARAMS


def is_grouped(node):
    return isinstance(node, Grouped)


@pytest.fixture(scope="module")
def packed():
    return rounded_to_4_bits(PARAMS)


@pytest.fixture(scope="module")
def expected(packed):
    return tokens(jax.tree.map(lambda x: x.unpack() if is_grouped(x) else x, packed, is_leaf=is_grouped))


def tokens(params):
    return np.asarray(generate(params, IDS, None, CFG, attention_mask=MASK).sequences)


def test_tokens_are_those_of_the_unpacked_weights(packed, expected):
    np.testing.assert_array_equal(tokens(packed), expected)


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_mesh(packed, expected, shape):
    sharded = shard_params(packed, CFG, Mesh(np.array(jax.devices()[:4]).reshape(shape), ("data", "model")))
    np.testing.assert_array_equal(tokens(sharded), expected)
    # With one block of 64 columns, only the outputs can be divided.
    layer, parts = sharded["model"]["layers"]["0"], shape[1]
    for leaf in jax.tree.leaves(layer["self_attn"]["o_proj"]["weight"]):
        assert leaf.sharding.shard_shape(leaf.shape) == (leaf.shape[0] // parts, leaf.shape[1])
    down = layer["mlp"]["down_proj"]["weight"]
    assert down.input_unit == 64
    by_inputs = down.words.sharding.shard_shape(down.words.shape) == (64, 16 // parts)
    assert by_inputs == (parts == 2)


@pytest.mark.slow
def test_exported_programs(packed, expected):
    programs = export_generate(packed, CFG, batch=6, prompt_width=9, platforms=["cpu", "cuda", "tpu"])
    np.testing.assert_array_equal(call(programs, packed, ids=IDS, attention_mask=MASK)["sequences"], expected)
