"""The block formats of GGUF files against the values that llama.cpp's package gguf computes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.core.model.blocks import FORMATS

GOLDENS = np.load(Path(__file__).resolve().parents[1] / "goldens" / "seed0" / "gguf" / "blocks.npz")


def test_every_format_has_goldens():
    assert {name for name in GOLDENS.files if not name.endswith("_values")} == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_equal_to_the_bit(name):
    blocks, values = GOLDENS[name], GOLDENS[f"{name}_values"]
    found = FORMATS[name].decode(blocks, np)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_values_in_a_compiled_program(name):
    blocks, values = GOLDENS[name], GOLDENS[f"{name}_values"]
    found = jax.jit(lambda blocks: FORMATS[name].decode(blocks, jnp))(blocks)
    largest = np.abs(values).max(1, keepdims=True)
    # A compiler may round a product and a sum once; and a CPU flushes the smallest numbers to zero.
    assert (np.abs(found - values) <= 2.0**-22 * largest + 2.0**-120).all()


def test_the_axes_before_the_bytes_are_kept():
    blocks = GOLDENS["Q4_K"][:4].reshape(2, 1, 2, -1)
    found = FORMATS["Q4_K"].decode(blocks, np)
    np.testing.assert_array_equal(found.reshape(4, -1), GOLDENS["Q4_K_values"][:4])
