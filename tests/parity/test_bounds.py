"""Warpers compared with transformers 4.41.1, from the smallest positive value to the largest below the limit.

Both libraries are checked against a float64 definition. They sum in float32, in different orders, so either may keep or
remove a token whose exact value is within rounding of the threshold: `MASS` for a sum of probabilities, and a relative
error of `RATIO` for a single one. (transformers computes 151,936 tokens in float64, because torch's float32 sums over
so many tokens are less exact.) On a CPU, XLA's float32 has no numbers between 0 and `TINY`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.support.goldens import GOLDENS
from tests.support.rows import warp

MASS, RATIO, TINY = 2e-6, 1e-5, 1e-37
WARPERS = ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
ON_MESH = ("top_k", "top_p")  # the warpers that accept a mesh
VOCABULARIES = (7, 1024, pytest.param(151_936, marks=pytest.mark.slow))


@functools.cache
def goldens():
    with np.load(GOLDENS / "441" / "bounds.npz") as arrays:
        return dict(arrays)


def kept_by(name, scores, values, mesh=None):
    """Return bool[values, rows, V]: the tokens that the warper keeps for each value. It sees them in random order."""
    ids = np.random.default_rng(0).permutation(scores.shape[1])
    given, value = np.tile(scores[:, ids], (len(values), 1)), np.repeat(values, len(scores))[:, None]
    placed = given
    if mesh is not None:
        placed = jax.device_put(given, NamedSharding(mesh, PartitionSpec("data", ("model", "copies"))))
    known = {"mesh": mesh} if name in ON_MESH else {}
    out = np.asarray(jax.jit(functools.partial(warp, name, **known))(placed, jnp.asarray(value)))
    np.testing.assert_array_equal(out, np.where(np.isfinite(out), given, -np.inf))
    kept = np.empty(given.shape, bool)
    kept[:, ids] = np.isfinite(out)
    return kept.reshape(len(values), *scores.shape)


def definition(name, scores, counts, value):
    """Return, for each distinct score, how many of its `counts` tokens must be kept, and how many may be kept."""
    value = float(value)
    weights = np.exp(scores - scores.max())
    probs = np.maximum(weights / np.sum(weights * counts), 1e-300)
    entropy = -np.sum(probs * counts * np.log(probs))
    if name == "top_k":
        kept = np.cumsum(counts[::-1])[::-1] - counts < value
        return kept * counts, kept * counts
    if name == "top_p":
        rest = 1 - value - (np.cumsum(probs * counts) - probs * counts)
        least, most = (counts - np.clip((rest + e) // probs, 0, counts) for e in (MASS, -MASS))
        least[-1], most[-1] = max(least[-1], 1), max(most[-1], 1)
        return least, most
    if name == "typical_p":
        distance = np.abs(-np.log(probs) - entropy)
        others = counts * probs * ~np.eye(len(scores), dtype=bool)
        masses = (np.sum(others * (distance < distance[:, None] + e), axis=-1) for e in (RATIO, -RATIO))
        least, most = (mass + e < value for mass, e in zip(masses, (MASS, -MASS), strict=True))
        return least * counts, most * counts
    if name == "min_p":
        probs, bound = weights, value
    else:
        bound = value if name == "epsilon_cutoff" else min(value, np.sqrt(value) * np.exp(-entropy))
    least, most = probs >= max(bound * (1 + RATIO), TINY), (probs >= bound * (1 - RATIO)) | (bound < TINY)
    least[-1] = most[-1] = True
    return least * counts, most * counts


def check(name, scores, values, kept):
    """Compare the kept tokens, bool[values, rows, V], with the definition."""
    for row, of_row in zip(scores, kept.swapaxes(0, 1), strict=True):
        finite = np.isfinite(row)
        different, first, counts = np.unique(row[finite].astype(np.float64), return_index=True, return_counts=True)
        for value, of_value in zip(values, of_row, strict=True):
            found = np.add.reduceat(of_value[finite].astype(int), first)
            least, most = definition(name, different, counts, value)
            assert found.any()
            assert np.all((least <= found) & (found <= most)), f"{name} = {value}"


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("name", WARPERS)
def test_kept_tokens_match_transformers(name, vocab):
    scores = goldens()[f"{vocab}_scores"]
    values = goldens()[f"{vocab}_counts" if name == "top_k" else "values"]
    theirs = np.unpackbits(goldens()[f"{vocab}_{name}"], axis=-1, count=vocab).astype(bool)
    check(name, scores, values, theirs)
    check(name, scores, values, kept_by(name, scores, values))


@pytest.mark.parametrize("name", WARPERS)
def test_kept_tokens_on_a_mesh(name):
    scores = goldens()["1024_scores"]
    values = goldens()["1024_counts" if name == "top_k" else "values"]
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "model", "copies"))
    check(name, scores, values, kept_by(name, scores, values, mesh))


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_top_h_keeps_between_1_and_100_tokens(vocab):
    scores = goldens()[f"{vocab}_scores"]
    kept = kept_by("top_h", scores, np.append(goldens()["values"], np.float32(1)))
    counts = kept.sum(axis=-1)
    # If only one token of a row is possible, the entropy is 0, and keeping more tokens does not exceed any share of it.
    first, second = np.sort(scores, axis=-1)[:, :-3:-1].T
    is_certain = np.exp(second - first) < np.finfo(np.float32).tiny
    assert np.all((counts[0] == 1) | is_certain)
    assert not np.all(is_certain)
    assert np.all(np.diff(counts, axis=0) >= 0)
    np.testing.assert_array_equal(counts[-1], np.minimum(np.isfinite(scores).sum(axis=-1), 100))
    lowest = np.min(np.where(kept, scores, np.inf), axis=-1, keepdims=True)
    assert np.all(kept | (scores <= lowest)), "a kept token is less likely than a removed one"
