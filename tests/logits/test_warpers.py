"""Warpers against what transformers' formulas say, by sorting; and against its own numbers where they are at hand."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxgen.logits import processors, warpers

ROWS, VOCAB = 2, 29
SCORES = hnp.arrays(
    np.float32,
    (ROWS, VOCAB),
    elements=st.one_of(
        st.floats(-8, 8, width=32, allow_subnormal=False), st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.just(-np.inf)
    ),
).filter(lambda scores: np.all(np.isfinite(scores).any(-1)))
KEEP = st.sampled_from([1, 2, 5])


top_k = jax.jit(warpers.top_k, static_argnums=2)
top_p = jax.jit(warpers.top_p, static_argnums=2)
min_p = jax.jit(warpers.min_p, static_argnums=2)


def kept(scores):
    return np.isfinite(np.asarray(scores))


@settings(max_examples=200, deadline=None)
@given(SCORES, st.integers(0, VOCAB + 3), KEEP)
def test_top_k_keeps_all_that_reach_the_kth(scores, k, keep):
    out = np.asarray(top_k(scores, np.int32(k), keep))
    k = VOCAB if k == 0 else min(max(k, keep), VOCAB)
    expected = np.where(scores >= np.sort(scores)[:, [-k]], scores, -np.inf)
    np.testing.assert_array_equal(out, expected)


@settings(max_examples=300, deadline=None)
@given(SCORES, st.floats(0, 1, width=32), KEEP)
def test_top_p_keeps_what_a_stable_sort_keeps(scores, p, keep):
    out = kept(top_p(scores, np.float32(p), keep))
    for row, got in zip(scores, out, strict=True):
        order = np.argsort(row, kind="stable")
        probs = np.exp(row.astype(np.float64) - row.max())
        probs /= probs.sum()
        above = np.cumsum(probs[order][::-1])[::-1] - probs[order]  # the mass of all that are sorted behind
        if np.any(np.abs(above - p) < 1e-5):
            continue  # float32 may fall on either side
        wanted = np.zeros(VOCAB, bool)
        wanted[order[above < p]] = True
        wanted[order[-keep:]] = True
        np.testing.assert_array_equal(got, np.isfinite(row) & (wanted | (p >= 1)))


@settings(max_examples=200, deadline=None)
@given(SCORES, st.floats(0, 1, width=32), KEEP)
def test_min_p_keeps_what_is_likely_enough(scores, p, keep):
    out = kept(min_p(scores, np.float32(p), keep))
    for row, got in zip(scores, out, strict=True):
        ratio = np.exp(row.astype(np.float64) - row.max())
        if np.any(np.abs(ratio - p) < 1e-6 * p):
            continue
        best = np.argsort(-row, kind="stable")[:keep]
        wanted = ratio >= p
        wanted[best] = True
        np.testing.assert_array_equal(got, np.isfinite(row) & wanted)


def test_a_knob_per_row():
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(4, VOCAB)), jnp.float32)
    column = jnp.asarray([[0.2], [0.5], [0.9], [1.0]])
    k = jnp.asarray([[1], [3], [0], [VOCAB]])
    for warp, knob in (
        (warpers.top_p, column),
        (warpers.min_p, column),
        (warpers.temperature, column),
        (warpers.top_k, k),
    ):
        together = warp(scores, knob)
        for row in range(4):
            np.testing.assert_array_equal(together[row], warp(scores[row : row + 1], knob[row, 0])[0])


def test_top_p_splits_a_tie_in_favour_of_the_highest_index():
    scores = jnp.asarray([[0.0, 3.0, 3.0, 3.0, 3.0, 0.0]])
    assert kept(warpers.top_p(scores, jnp.float32(0.45)))[0].tolist() == [False, False, False, True, True, False]
    assert kept(warpers.top_p(scores, jnp.float32(0.0)))[0].tolist() == [False] * 4 + [True, False]


def test_a_large_vocabulary_with_ties_is_exact():
    rng = np.random.default_rng(1)
    scores = np.round(rng.normal(size=(3, 151_936)), 1).astype(np.float32) * 3  # many equal values
    for p in (0.1, 0.5, 0.95):
        out = kept(top_p(scores, np.float32(p)))
        for row, got in zip(scores, out, strict=True):
            order = np.argsort(row, kind="stable")
            probs = np.exp(row.astype(np.float64) - row.max())
            probs /= probs.sum()
            above = np.cumsum(probs[order][::-1])[::-1] - probs[order]
            # The same tokens but for the few whose mass lies within float32's error of the boundary.
            wanted = np.zeros(len(row), bool)
            wanted[order[above < p]] = True
            differing = np.flatnonzero(got != wanted)
            rank = np.empty(len(row), int)
            rank[order] = np.arange(len(row))
            assert np.all(np.abs(above[rank[differing]] - p) < 1e-5)
            np.testing.assert_array_equal(np.sort(rank[np.flatnonzero(got)]), np.arange(len(row) - got.sum(), len(row)))
    np.testing.assert_array_equal(
        kept(warpers.top_k(jnp.asarray(scores), jnp.int32(50))), scores >= np.sort(scores)[:, [-50]]
    )


def test_repetition_penalty():
    scores = jnp.asarray([[2.0, -2.0, 0.0, 1.0, -jnp.inf]])
    seen = jnp.asarray([[True, True, True, False, True]])
    out = processors.repetition_penalty(scores, seen, jnp.float32(2.0))
    assert out.tolist() == [[1.0, -4.0, 0.0, 1.0, -np.inf]]


def test_token_set_ignores_entries_that_stand_for_none():
    assert processors.token_set(jnp.asarray([3, -1, 0, -1]), 5).tolist() == [True, False, False, True, False]


# --- The numbers of transformers' own classes, where the folder of real data has them -----------------------------


def test_recorded_outputs_of_the_real_classes(data):
    path = data.parent / "spec" / "goldens" / "logits_441.json"
    if not path.exists():
        pytest.skip("no recorded outputs beside the real data")
    recorded = json.loads(path.read_text())
    scores = jnp.asarray(recorded["scores"], jnp.float32)
    seen = np.zeros(scores.shape, bool)
    np.put_along_axis(seen, np.asarray(recorded["input_ids"]), True, axis=1)
    run = {
        "temperature": lambda value, keep: warpers.temperature(scores, value),
        "top_k": lambda value, keep: warpers.top_k(scores, value.astype(int), keep),
        "top_p": lambda value, keep: warpers.top_p(scores, value, keep),
        "min_p": lambda value, keep: warpers.min_p(scores, value, keep),
        "repetition_penalty": lambda value, keep: processors.repetition_penalty(scores, jnp.asarray(seen), value),
    }
    compared = 0
    for case in recorded["cases"]:
        match = re.fullmatch(r"(\w+)=([\d.]+)(?:,min_keep=(\d))?", case["name"])
        if match is None or match[1] not in run or "out" not in case:
            continue
        out = run[match[1]](np.float32(match[2]), int(match[3] or 1))
        expected = np.asarray([[float(x) for x in row] for row in case["out"]], np.float32)
        np.testing.assert_allclose(out, expected, rtol=1e-6, err_msg=case["name"])
        compared += 1
    assert compared == 19
