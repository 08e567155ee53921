"""Packed checkpoints made by transformers' own packages are read as transformers reads them."""

import hashlib
import json

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_hf
from jaxgen import CausalLM
from jaxgen.core.model.weights import Packed
from jaxgen.errors import JaxgenWarning
from tests.support.goldens import GOLDENS

FOLDER = GOLDENS / "packed"
if not FOLDER.is_dir():
    pytest.skip("goldens of another seed may lack packed checkpoints", allow_module_level=True)
HASHES = json.loads((FOLDER / "packed.json").read_text())
IGNORED = {"w8a8", "float8-rows"}  # those with input_activations


def load(name, **options):
    if name not in IGNORED:
        return load_hf(FOLDER / name, **options)
    with pytest.warns(JaxgenWarning, match="scales of inputs are ignored"):
        return load_hf(FOLDER / name, **options)


def logits(params, cfg, ids) -> np.ndarray:
    params = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, params)
    return np.asarray(CausalLM(cfg.model).apply({"params": params}, ids).logits)  # pyright: ignore


@pytest.mark.parametrize("name", HASHES)
def test_matrices_and_logits_are_those_of_transformers(name):
    packed, _ = load(name)
    assert sum(isinstance(w, Packed) for w in flax.traverse_util.flatten_dict(packed, sep=".").values()) == 7
    for dtype, hashes in HASHES[name].items():
        params, cfg = load(name, quantize="none", dtype=dtype)
        arrays = flax.traverse_util.flatten_dict(params, sep=".")
        found = {key: hashlib.sha256(np.asarray(x, np.float32).tobytes()).hexdigest() for key, x in arrays.items()}
        assert found == hashes
        if dtype == "bfloat16":
            stored = np.load(FOLDER / "packed.npz")
            ids, expected = stored[f"{name}_ids"], stored[f"{name}_logits"]
            np.testing.assert_allclose(logits(params, cfg, ids), expected, atol=1e-4)
