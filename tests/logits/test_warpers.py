"""Warpers, compared with transformers' formulas on sorted rows, and with its recorded outputs if available."""

import functools
import json
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from jaxgen.core.logits import order_statistics, processors, warpers
from tests.support.models import slow
from tests.support.rows import history_of, process, warp

ROWS, VOCAB = 2, 29
SCORES = hnp.arrays(
    np.float32,
    (ROWS, VOCAB),
    elements=st.one_of(
        st.floats(-8, 8, width=32, allow_subnormal=False), st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.just(-np.inf)
    ),
).filter(lambda scores: np.all(np.isfinite(scores).any(-1)))
KEEP = st.sampled_from([1, 2, 5])


def with_one_value(name, candidates=order_statistics.CANDIDATES):
    """Return a warper that takes one value for all rows, and examines the top `candidates` scores before it bisects."""

    def run(scores, value, keep=1):
        with mock.patch.object(order_statistics, "CANDIDATES", candidates):
            return warp(name, scores, value, keep=keep)

    return jax.jit(run, static_argnums=2)


top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff, temperature, top_h = map(
    with_one_value,
    ("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "temperature", "top_h"),
)


@functools.partial(jax.jit, static_argnums=(3, 4))
def top_k_top_p_in_both_ways(scores, k, p, keep, candidates):
    """Return the results of the combined warper and of the two warpers in sequence."""
    with mock.patch.object(order_statistics, "CANDIDATES", candidates):
        apart = warp("top_p", warp("top_k", scores, k, keep=keep), p, keep=keep)
        return warp("top_k_top_p", scores, k, p, keep=keep), apart


ALL_OF = {name: [with_one_value(name, candidates) for candidates in (256, 3, 1)] for name in ("top_k", "top_p")}


def kept(scores):
    return np.isfinite(np.asarray(scores))


@pytest.mark.parametrize("candidates", [3, *slow(1, 256)])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_top_k_and_top_p_together_equal_both_in_sequence(candidates, data):
    scores, k, p = data.draw(SCORES), data.draw(st.integers(0, VOCAB + 3)), data.draw(st.floats(2**-7, 1, width=32))
    keep = data.draw(KEEP)
    together, apart = top_k_top_p_in_both_ways(scores, np.int32(k), np.float32(p), keep, candidates)
    np.testing.assert_array_equal(together, apart)


@pytest.mark.parametrize("top_k", [*ALL_OF["top_k"][:2], *slow(ALL_OF["top_k"][2])])
@settings(max_examples=200, deadline=None)
@given(SCORES, st.integers(0, VOCAB + 3), KEEP)
def test_top_k_keeps_all_scores_equal_to_the_kth(top_k, scores, k, keep):
    out = np.asarray(top_k(scores, np.int32(k), keep))
    k = VOCAB if k == 0 else min(max(k, keep), VOCAB)
    expected = np.where(scores >= np.sort(scores)[:, [-k]], scores, -np.inf)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.slow
@pytest.mark.parametrize("top_p", [*ALL_OF["top_p"][:2], ALL_OF["top_p"][2]])
@settings(max_examples=300, deadline=None)
@given(SCORES, st.floats(0, 1, width=32), KEEP)
def test_top_p_matches_a_stable_sort(top_p, scores, p, keep):
    out = kept(top_p(scores, np.float32(p), keep))
    for row, got in zip(scores, out, strict=True):
        order = np.argsort(row, kind="stable")
        probs = np.exp(row.astype(np.float64) - row.max())
        probs /= probs.sum()
        above = np.cumsum(probs[order][::-1])[::-1] - probs[order]  # probability of all tokens sorted after this one
        if np.any(np.abs(above - p) < 1e-5):
            continue  # float32 rounding may decide either way
        wanted = np.zeros(VOCAB, bool)
        wanted[order[above < p]] = True
        wanted[order[-keep:]] = True
        np.testing.assert_array_equal(got, np.isfinite(row) & (wanted | (p >= 1)))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(SCORES, st.floats(0, 1, width=32), KEEP)
def test_min_p_keeps_tokens_above_the_threshold(scores, p, keep):
    scores = scores + 0.0  # no -0.0, which top_k considers less than 0.0
    out = kept(min_p(scores, np.float32(p), keep))
    for row, got in zip(scores, out, strict=True):
        ratio = np.exp(row.astype(np.float64) - row.max())
        if np.any(np.abs(ratio - p) < 1e-6 * p):
            continue
        best = np.argsort(-row, kind="stable")[:keep]
        wanted = ratio >= p
        wanted[best] = True
        np.testing.assert_array_equal(got, np.isfinite(row) & wanted)


def log_softmax(row):
    row = row.astype(np.float64) - row.max()
    return row - np.log(np.sum(np.exp(row)))


def entropy_terms(logs):
    return -np.exp(logs) * np.where(np.isfinite(logs), logs, 0.0)


def typical_row(row, mass, keep):
    """Return the tokens that are kept, or None if float32 rounding may decide either way."""
    logs = log_softmax(row)
    distance = np.where(np.isfinite(row), np.abs(-logs - np.sum(entropy_terms(logs))), 1e9)
    order = np.argsort(distance, kind="stable")
    cumulated = np.cumsum(np.exp(logs)[order])
    last = order[min(np.sum(cumulated < mass), len(row) - 1)]
    edge = order[min(keep, len(row)) - 1]
    for token in {last, edge}:
        if np.any(row[np.abs(distance - distance[token]) < 1e-5] != row[token]):
            return None
    if np.any(np.abs(cumulated - mass) < 1e-5):
        return None
    wanted = distance <= distance[last]
    wanted[order[:keep]] = True
    return np.isfinite(row) & wanted


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(SCORES, st.floats(0.015625, 0.984375, width=32), KEEP)
def test_typical_p_matches_a_stable_sort(scores, mass, keep):
    out = kept(typical_p(scores, np.float32(mass), keep))
    for row, got in zip(scores, out, strict=True):
        wanted = typical_row(row, mass, keep)
        if wanted is not None:
            np.testing.assert_array_equal(got, wanted)


def test_typical_p_breaks_ties_by_the_lowest_index():
    scores = jnp.asarray([[0.0, 3.0, 3.0, -4.0, 3.0, 0.0]])
    assert kept(typical_p(scores, jnp.float32(0.01)))[0].tolist() == [False, True, True, False, True, False]
    assert kept(typical_p(scores, jnp.float32(0.01), 4))[0].tolist() == [True, True, True, False, True, False]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(SCORES, st.floats(0, 0.984375, width=32), KEEP)
def test_epsilon_and_eta_keep_tokens_above_the_threshold(scores, cutoff, keep):
    out, adapted = (
        kept(epsilon_cutoff(scores, np.float32(cutoff), keep)),
        kept(eta_cutoff(scores, np.float32(cutoff), keep)),
    )
    for row, got, got_adapted in zip(scores, out, adapted, strict=True):
        logs = log_softmax(row)
        least = min(cutoff, np.sqrt(cutoff) * np.exp(-np.sum(entropy_terms(logs))))
        for bound, result in ((cutoff, got), (least, got_adapted)):
            if np.any(np.abs(np.exp(logs) - bound) < 1e-6 * bound + 1e-9):
                continue  # float32 rounding may decide either way
            wanted = (np.exp(logs) >= bound) | (row >= np.sort(row)[-keep])
            np.testing.assert_array_equal(result, np.isfinite(row) & wanted)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    hnp.arrays(np.float32, (ROWS, 130), elements=st.integers(-20, 20).map(float) | st.just(-np.inf), fill=st.nothing()),
    st.floats(0.015625, 1, width=32),
)
def test_top_h_keeps_a_share_of_the_entropy(scores, value):
    scores[:, 0] = 20.0
    out = kept(top_h(scores, np.float32(value)))
    for row, got in zip(scores, out, strict=True):
        best = np.argsort(-row, kind="stable")[:100]
        entropy = np.cumsum(entropy_terms(log_softmax(row[best])))
        if value < 1 and np.any(np.abs(entropy - value * entropy[-1]) < 1e-5):
            continue  # float32 rounding may decide either way
        wanted = entropy <= value * entropy[-1]
        wanted[0] = True
        np.testing.assert_array_equal(np.flatnonzero(got), np.sort(best[wanted & np.isfinite(row[best])]))


def test_top_h_considers_100_tokens():
    scores = jnp.zeros((1, 130))
    assert np.flatnonzero(kept(top_h(scores, jnp.float32(1.0)))).tolist() == list(range(100))
    assert np.flatnonzero(kept(top_h(scores, jnp.float32(0.305)))).tolist() == list(range(30))


@pytest.mark.slow
def test_a_value_per_row():
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(4, VOCAB)), jnp.float32)
    scores = scores.at[3, 7].set(30.0)  # its probability is exactly 1 in float32
    column = jnp.asarray([[0.2], [0.5], [0.9], [1.0]])
    cutoff = jnp.asarray([[0.2], [0.05], [0.9], [0.0]])
    for warper, values in (
        (temperature, column),
        (top_k, jnp.asarray([[1], [3], [VOCAB], [0]])),
        (top_p, column),
        (min_p, cutoff),
        (typical_p, column),
        (epsilon_cutoff, cutoff),
        (eta_cutoff, cutoff),
        (top_h, column),  # 1.0 keeps up to 100 tokens, which is more than VOCAB
    ):
        together = warper(scores, values)
        for row in range(4):
            np.testing.assert_array_equal(together[row], warper(scores[row : row + 1], values[row, 0])[0])
        np.testing.assert_array_equal(together[3], scores[3], err_msg="a value that is off")
        assert np.any(together[0] != scores[0])


@pytest.mark.slow
def test_min_tokens_to_keep_may_exceed_the_vocabulary():
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(2, VOCAB)), jnp.float32)
    for warper in (top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff):
        np.testing.assert_array_equal(warper(scores, jnp.asarray(1) if warper is top_k else 0.5, VOCAB), scores)
        np.testing.assert_array_equal(warper(scores, jnp.asarray(1) if warper is top_k else 0.5, VOCAB + 2), scores)
    for warper in ALL_OF["top_p"]:
        np.testing.assert_array_equal(warper(scores, 0.5, VOCAB + 2), scores)


def test_fully_banned_row_stays_banned():
    scores = jnp.full((1, VOCAB), -jnp.inf)
    for warper in (temperature, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff, top_h):
        np.testing.assert_array_equal(warper(scores, jnp.float32(0.5)), scores)
    np.testing.assert_array_equal(top_k(scores, jnp.int32(3)), scores)


def test_top_p_splits_a_tie_in_favor_of_the_highest_index():
    scores = jnp.asarray([[0.0, 3.0, 3.0, 3.0, 3.0, 0.0]])
    assert kept(top_p(scores, jnp.float32(0.45)))[0].tolist() == [False, False, False, True, True, False]
    assert kept(top_p(scores, jnp.float32(0.0)))[0].tolist() == [False] * 4 + [True, False]


@pytest.mark.slow
def test_a_tie_among_the_candidates_needs_no_bisection():
    scores, best = jnp.asarray([[3.0, 3.0, 1.0, 3.0, 2.0, 1.0]]), jnp.asarray([[3.0, 3.0, 3.0, 2.0]])
    ids = jnp.asarray([[3, 0, 1, 4]])  # equal scores may be in any order
    for p, tokens, is_known in [(0.45, [1, 3], True), (0.8, [0, 1, 3], True), (0.9, [0, 1, 3, 4], False)]:
        out, known = warpers._nucleus(scores, best, ids, jnp.full((1, 1), p), jnp.ones((1, 1), jnp.int32))
        assert np.flatnonzero(kept(out)[0]).tolist() == tokens
        assert known.tolist() == [[is_known]]  # a score that equals the lowest candidate may be more frequent


@pytest.mark.parametrize("p", [0.9999999, np.nextafter(np.float32(1), np.float32(0))])
def test_top_p_keeps_all_tokens_if_their_sum_is_below_p(p):
    scores = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)
    np.testing.assert_array_equal(top_p(scores, np.float32(p)), scores)


def test_top_p_of_a_row_does_not_depend_on_the_others():
    """Only the flat row is bisected. In the other rows, the boundary is a candidate, and rounding could move it."""
    scores = np.round(np.random.default_rng(0).normal(size=(500, 1024)) * 8, 1).astype(np.float32)
    p = np.float32(0.9999)
    beside = top_p(np.concatenate([scores, np.zeros((1, 1024), np.float32)]), p)[:-1]
    np.testing.assert_array_equal(beside, top_p(scores, p))


def test_the_most_likely_token_survives_the_lowest_temperature():
    scores = np.asarray([[3.0, 40.0, 20.0], [-np.inf, -7.0, -9.0]], np.float32)
    probs = jax.nn.softmax(temperature(scores, np.finfo(np.float32).tiny), axis=-1)
    assert probs.tolist() == [[0, 1, 0], [0, 1, 0]]


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
            # The tokens are the same, except for a few whose mass is within float32 rounding of the boundary.
            wanted = np.zeros(len(row), bool)
            wanted[order[above < p]] = True
            differing = np.flatnonzero(got != wanted)
            rank = np.empty(len(row), int)
            rank[order] = np.arange(len(row))
            assert np.all(np.abs(above[rank[differing]] - p) < 1e-5)
            np.testing.assert_array_equal(np.sort(rank[np.flatnonzero(got)]), np.arange(len(row) - got.sum(), len(row)))
    np.testing.assert_array_equal(kept(top_k(jnp.asarray(scores), jnp.int32(50))), scores >= np.sort(scores)[:, [-50]])


def test_typical_is_exact_in_a_large_vocabulary_with_ties():
    scores = np.round(np.random.default_rng(2).normal(size=(2, 151_936)), 1).astype(np.float32) * 3
    for mass in (0.2, 0.9):
        out = kept(typical_p(scores, np.float32(mass)))
        for row, got in zip(scores, out, strict=True):
            logs = log_softmax(row)
            distance = np.abs(-logs - np.sum(entropy_terms(logs)))
            order = np.argsort(distance, kind="stable")
            last = order[np.sum(np.cumsum(np.exp(logs)[order]) < mass)]
            np.testing.assert_array_equal(got, distance <= distance[last] + 1e-5)


# --- Recorded results of transformers' classes --------------------------------------------------------------------


# Cases that are not run here: they are rejected before these functions are called, or they need groups of beams.
ELSEWHERE = {
    "temperature=2 (int)",
    "temperature=0.0",
    "bad_words empty inner list",
    "bad_words token >= vocab",
    "bad_words []",
    "prefix_allowed fn -> []",
    "hamming penalty=.5, 4 beams, 2 groups, group 1",
}
# Cases that later releases corrected, with the scores that differ from the recorded ones: (row, token, score).
CORRECTED = {
    "encoder_repetition_penalty=1.3 with ONE encoder row for two score rows": [(1, 1, -0.2 / 1.3), (1, 5, 0.9 * 1.3)],
    "sequence_bias len == cur_len+1 (4.41.1 skips although the prefix is there)": [(0, 1, 5.0), (1, 1, 3.8)],
}


def by_value(name, scores, ids, length):
    """Run a case whose name looks like `top_p=0.3,min_keep=3`; return None for other names."""
    match = re.fullmatch(r"(\w+)=([\d.]+)(?:,min_keep=(\d))?", name)
    if match is None:
        return None
    name, value, keep = match[1], float(match[2]), int(match[3] or 1)
    if name == "temperature":
        return temperature(scores, np.float32(value))
    if name == "repetition_penalty":
        return process(scores, history_of(ids, length, vocab=8), repetition_penalty=value)
    if name == "no_repeat_ngram":
        return process(scores, history_of(ids, length, vocab=8), no_repeat_ngram_size=int(value))
    return globals()[name](scores, np.int32(value) if name == "top_k" else np.float32(value), keep)


def by_name(name, scores, ids, length):
    """Run one of the other cases by its name."""
    biases = {(1,): -2.0, (3, 4): 5.0, (5, 3, 6): 7.0, (5, 3, 4): 1.5}
    prompt = np.asarray([[3, 1, 3, 2], [7, 0, 7, 5]], np.int32)

    def run(prompt_length=None, budget=None, ids=ids, **fields):
        length = np.full(len(ids), np.shape(ids)[1], np.int32)
        prompt_length = None if prompt_length is None else np.full(len(ids), prompt_length, np.int32)
        return process(scores, history_of(ids, length, prompt_length, budget=budget, vocab=8), **fields)

    def encoder_penalty(prompt):
        return run(ids=np.asarray(prompt, np.int32), encoder_repetition_penalty=1.3)

    def decay(start, eos):
        return run(prompt_length=3, exponential_decay_length_penalty=(start, 1.1), eos_token_id=eos)

    return {
        "min_length=6,eos=[3,5] (cur_len 5 < 6)": lambda: run(min_length=6, eos_token_id=[3, 5]),
        "min_length=5,eos=3 (cur_len 5, not <)": lambda: run(min_length=5, eos_token_id=3),
        "min_new_tokens=2,prompt=4,eos=3": lambda: run(prompt_length=4, min_new_tokens=2, eos_token_id=3),
        "encoder_repetition_penalty=1.3 enc=[[1,5],[2,4]]": lambda: encoder_penalty([[1, 5], [2, 4]]),
        "encoder_repetition_penalty=1.3 with ONE encoder row for two score rows": lambda: encoder_penalty([[1, 5]] * 2),
        # The recorded ids do not include the prompt, but here they must follow it.
        "encoder_no_repeat_ngram=2 enc=[[3,1,3,2],[7,0,7,5]]": lambda: run(
            prompt_length=4, ids=np.concatenate([prompt, ids], axis=1), encoder_no_repeat_ngram_size=2
        ),
        "sequence_bias {(1,):-2,(3,4):5,(5,3,6):7,(5,3,4):1.5}": lambda: run(sequence_bias=biases),
        "sequence_bias len == cur_len (matches, applied)": lambda: run(sequence_bias={(5, 3, 1): 4.0}),
        "sequence_bias len == cur_len+1 (4.41.1 skips although the prefix is there)": lambda: run(
            sequence_bias={(5, 3, 1): 4.0}
        ),
        "bad_words [[1],[3,4],[5]] eos=5 (eos-only entry filtered)": lambda: run(
            bad_words_ids=[[1], [3, 4], [5]], eos_token_id=5
        ),
        "bad_words all filtered": lambda: run(bad_words_ids=[[5]], eos_token_id=5),
        "prefix_allowed fn -> [1,2] / [7]": lambda: processors.allow_only(
            scores, np.asarray([[token in row for token in range(8)] for row in ([1, 2], [7])])
        ),
        "forced_bos=4 cur_len=5 (no effect)": lambda: run(forced_bos_token_id=4),
        "forced_bos=4 cur_len=1": lambda: run(forced_bos_token_id=4),
        "forced_eos=[3,5] max_length=6 cur_len=5": lambda: run(0, length + 1, forced_eos_token_id=[3, 5]),
        "forced_eos=3 max_length=7 cur_len=5": lambda: run(0, length + 2, forced_eos_token_id=3),
        "remove_invalid_values": lambda: run(remove_invalid_values=True),
        "exp_decay (1,1.1) eos=[3,6] prompt=3 (cur_len 5 > 4)": lambda: decay(1, [3, 6]),
        "exp_decay (2,1.1) eos=3 prompt=3 (cur_len 5 == 5: no effect)": lambda: decay(2, [3]),
        "suppress [0,7]": lambda: run(suppress_tokens=[0, 7]),
        "begin_suppress [0,7] begin=5": lambda: run(prompt_length=5, begin_suppress_tokens=[0, 7]),
        "begin_suppress [0,7] begin=4": lambda: run(prompt_length=4, begin_suppress_tokens=[0, 7]),
        "renormalize": lambda: run(renormalize_logits=True),
        "cfg guidance=1.5 uncond=roll(S,1)": lambda: processors.guidance(
            scores, np.roll(scores, 1, axis=1), np.float32(1.5)
        ),
    }[name]()


@pytest.mark.slow
def test_recorded_outputs_of_the_real_classes(data):
    path = data.parent / "spec" / "goldens" / "logits_441.json"
    if not path.exists():
        pytest.skip("no recorded outputs next to the real data")
    recorded = json.loads(path.read_text())
    left_out, compared = set(), 0
    for case in recorded["cases"]:
        name = case["name"]
        if name in ELSEWHERE:
            left_out.add(name)
            continue
        scores, ids = case.get("scores", recorded["scores"]), case.get("input_ids", recorded["input_ids"])
        scores, ids = np.asarray(scores, np.float32), np.asarray(ids, np.int32)
        length = np.full(ids.shape[0], ids.shape[1], np.int32)
        out = by_value(name, scores, ids, length)
        out = by_name(name, scores, ids, length) if out is None else out
        expected = np.asarray(case["out"], float)
        for row, token, score in CORRECTED.get(name, ()):
            expected[row, token] = score
        np.testing.assert_allclose(out, expected, rtol=1e-5, equal_nan=False, err_msg=name)
        compared += 1
    assert left_out == ELSEWHERE
    assert compared == len(recorded["cases"]) - 7 == 58
