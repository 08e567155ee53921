"""Processors against plain loops over rows, tokens and sequences, written from transformers' formulas."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from jaxgen.logits import processors

ROWS, VOCAB, WIDTH = 3, 11, 9
BANNED = -np.inf
VALUES = st.floats(-20, 20, width=32, allow_subnormal=False)
SCORES = hnp.arrays(np.float32, (ROWS, VOCAB), elements=VALUES | st.sampled_from([0.0, BANNED]))
# Of few different tokens, so that much repeats; but a history can hold any.
IDS = hnp.arrays(np.int32, (ROWS, WIDTH), elements=st.integers(0, 2) | st.integers(0, VOCAB - 1))
LENGTHS = hnp.arrays(np.int32, ROWS, elements=st.integers(0, WIDTH))
SETS = hnp.arrays(bool, (ROWS, VOCAB))
SOME_ROWS = hnp.arrays(bool, ROWS)
NUMBERS = hnp.arrays(np.float32, (ROWS, 1), elements=st.sampled_from([1.0, 0.25, 1.3, 2.0]))
GARBAGE = hnp.arrays(np.int32, (ROWS, WIDTH), elements=st.sampled_from([-7, 0, 1, 2, VOCAB, 2**31 - 1]))

SEQUENCE = st.lists(st.integers(0, 2), max_size=3).flatmap(
    lambda start: st.integers(0, VOCAB - 1).map(lambda last: (*start, last))
)
BIAS = st.sampled_from([0.0, 0.5, -2.0, 7.25, BANNED, np.inf])
BIASES = st.dictionaries(SEQUENCE, BIAS, max_size=4)

check = partial(settings, deadline=None, max_examples=60)
jitted = {name: jax.jit(function) for name, function in vars(processors).items() if inspect.isfunction(function)}
jitted["no_repeat_ngram"] = jax.jit(processors.no_repeat_ngram, static_argnums=3)
jitted["encoder_no_repeat_ngram"] = jax.jit(processors.encoder_no_repeat_ngram, static_argnums=4)


def same(out, expected):
    """Bans are equal, values up to rounding, and nothing is NaN."""
    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-5, atol=1e-5, equal_nan=False)


def log_softmax(row):
    if np.all(row == BANNED):
        return row
    row = row.astype(np.float64) - row.max()
    return row - np.log(np.sum(np.exp(row)))


def table(sequences, entries=4, width=4):
    out = np.full((entries, width), -1, np.int32)
    for entry, sequence in zip(out, sequences, strict=False):
        entry[: len(sequence)] = sequence
    return out


def tables(biases, entries=4, width=4):
    bias = np.zeros(entries, np.float32)
    bias[: len(biases)] = list(biases.values())
    return table(biases, entries, width), bias


# --- Sequences --------------------------------------------------------------------------------------------------------


def biased(row, tokens, biases):
    """One row of scores with the biases of the sequences that its tokens lead to."""
    out = row.astype(np.float64)
    banned = set()
    for (*start, last), bias in biases.items():
        if start == tokens[len(tokens) - len(start) :]:
            out[last] = out[last] + bias if bias != BANNED and out[last] != BANNED else out[last]
            banned |= {last} if bias == BANNED else set()
    out[list(banned)] = BANNED
    return out


@check()
@given(SCORES, IDS, LENGTHS, BIASES)
def test_sequence_bias(scores, ids, length, biases):
    out = jitted["sequence_bias"](scores, ids, length, *tables(biases))
    expected = [biased(s, i[:n].tolist(), biases) for s, i, n in zip(scores, ids, length, strict=True)]
    same(out, expected)


@check()
@given(SCORES, IDS, LENGTHS, st.lists(BIASES, min_size=ROWS, max_size=ROWS))
def test_sequence_biases_of_each_row(scores, ids, length, biases):
    sequences, bias = (np.stack(tables) for tables in zip(*map(tables, biases), strict=True))
    out = jitted["sequence_bias"](scores, ids, length, sequences, bias)
    expected = [biased(s, i[:n].tolist(), b) for s, i, n, b in zip(scores, ids, length, biases, strict=True)]
    same(out, expected)


@check()
@given(SCORES, IDS, LENGTHS, st.lists(SEQUENCE, max_size=4), st.lists(st.integers(0, VOCAB - 1), max_size=3))
def test_bad_words(scores, ids, length, words, eos):
    ends = np.asarray([*eos, *[-1] * (3 - len(eos))], np.int32)
    out = jitted["bad_words"](scores, ids, length, table(words), ends)
    biases = {word: BANNED for word in words if not (len(word) == 1 and word[0] in eos)}
    expected = [biased(s, i[:n].tolist(), biases) for s, i, n in zip(scores, ids, length, strict=True)]
    np.testing.assert_array_equal(out, np.asarray(expected, np.float32))
    if not eos:
        np.testing.assert_array_equal(out, jitted["bad_words"](scores, ids, length, table(words), None))


@check(max_examples=30)
@given(SCORES, IDS, LENGTHS, st.lists(SEQUENCE, max_size=4))
def test_bad_words_of_each_row(scores, ids, length, words):
    eos = np.asarray([[2, -1], [-1, -1], [0, 1]], np.int32)
    shared = jitted["bad_words"](scores, ids, length, table(words), eos)
    each = np.stack([table(words), table(words[:1]), table(words[::-1])])
    own = jitted["bad_words"](scores, ids, length, each, eos)
    for row, (out, given_words) in enumerate(zip(own, (words, words[:1], words[::-1]), strict=True)):
        alone = [x[row : row + 1] for x in (scores, ids, length)]
        np.testing.assert_array_equal(out, jitted["bad_words"](*alone, table(given_words), eos[row])[0])
        np.testing.assert_array_equal(shared[row], jitted["bad_words"](*alone, table(words), eos[row])[0])


@check(max_examples=30)
@given(SCORES, IDS, LENGTHS, BIASES)
def test_a_table_with_more_room_is_the_same_table(scores, ids, length, biases):
    narrow, wide = tables(biases), tables(biases, entries=8, width=7)
    for function in (jitted["sequence_bias"], lambda s, i, n, t, b: jitted["bad_words"](s, i, n, t, t[0, :1])):
        np.testing.assert_array_equal(function(scores, ids, length, *narrow), function(scores, ids, length, *wide))


def test_a_sequence_as_long_as_the_row_and_one_more():
    scores, ids = np.zeros((1, VOCAB), np.float32), np.asarray([[5, 3, 5, 3]], np.int32)
    biases = {(5, 3, 1): 4.0}
    for length, applies in ((1, False), (2, True), (3, False), (4, True)):
        out = jitted["sequence_bias"](scores, ids, np.asarray([length], np.int32), *tables(biases))
        assert out[0].tolist() == [0.0, 4.0 * applies, *[0.0] * (VOCAB - 2)]


# --- n-grams ----------------------------------------------------------------------------------------------------------


def without_ngrams(row, tokens, source, n):
    out = row.copy()
    start = tokens[len(tokens) - (n - 1) :] if len(tokens) >= n - 1 else None
    for i in range(len(source) - n + 1):
        if source[i : i + n - 1] == start:
            out[source[i + n - 1]] = BANNED
    return out


@pytest.mark.parametrize("n", [1, 2, 3, WIDTH, WIDTH + 1])
def test_no_repeat_ngram(n):
    @check()
    @given(SCORES, IDS, LENGTHS)
    def run(scores, ids, length):
        out = jitted["no_repeat_ngram"](scores, ids, length, n)
        rows = [(s, i[:end].tolist()) for s, i, end in zip(scores, ids, length, strict=True)]
        np.testing.assert_array_equal(out, [without_ngrams(s, tokens, tokens, n) for s, tokens in rows])

    run()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_encoder_no_repeat_ngram(n):
    @check()
    @given(SCORES, IDS, LENGTHS, LENGTHS)
    def run(scores, ids, length, prompt_length):
        prompt_length = np.minimum(prompt_length, length)
        out = jitted["encoder_no_repeat_ngram"](scores, ids, length, prompt_length, n)
        rows = [
            (s, i[:end].tolist(), i[:prompt].tolist())
            for s, i, end, prompt in zip(scores, ids, length, prompt_length, strict=True)
        ]
        np.testing.assert_array_equal(out, [without_ngrams(s, tokens, prompt, n) for s, tokens, prompt in rows])

    run()


@check()
@given(SCORES, IDS, LENGTHS, GARBAGE, BIASES)
def test_what_is_behind_the_end_changes_nothing(scores, ids, length, garbage, biases):
    other = np.where(np.arange(WIDTH) < length[:, None], ids, garbage)
    sequences, bias = tables(biases)
    for function in (
        lambda ids: jitted["sequence_bias"](scores, ids, length, sequences, bias),
        lambda ids: jitted["bad_words"](scores, ids, length, sequences, None),
        lambda ids: jitted["no_repeat_ngram"](scores, ids, length, 1),
        lambda ids: jitted["no_repeat_ngram"](scores, ids, length, 3),
        lambda ids: jitted["encoder_no_repeat_ngram"](scores, ids, length, length // 2, 2),
    ):
        np.testing.assert_array_equal(function(ids), function(other))


# --- Penalties and sets -----------------------------------------------------------------------------------------------


@check()
@given(SCORES, SETS, NUMBERS)
def test_penalties(scores, seen, penalty):
    expected = {"repetition_penalty": scores.copy(), "encoder_repetition_penalty": scores.copy()}
    for row, token in np.argwhere(seen):
        score, by = scores[row, token], penalty[row, 0]
        expected["repetition_penalty"][row, token] = score * by if score < 0 else score / by
        expected["encoder_repetition_penalty"][row, token] = score / by if score < 0 else score * by
    for name, values in expected.items():
        out = jitted[name](scores, seen, penalty)
        same(out, values)
        off = penalty[:, 0] == 1
        np.testing.assert_array_equal(np.asarray(out)[off], scores[off])


@check()
@given(SCORES, SETS, SOME_ROWS)
def test_ban_allow_and_force(scores, tokens, rows):
    banned, allowed, forced = scores.copy(), scores.copy(), scores.copy()
    for row in range(ROWS):
        for token in range(VOCAB):
            if rows[row] and tokens[row, token]:
                banned[row, token] = BANNED
            if not tokens[row, token]:
                allowed[row, token] = BANNED
            if rows[row] and tokens[row].any():
                forced[row, token] = 0 if tokens[row, token] else BANNED
    np.testing.assert_array_equal(jitted["ban"](scores, tokens, rows), banned)
    np.testing.assert_array_equal(jitted["allow_only"](scores, tokens), allowed)
    np.testing.assert_array_equal(jitted["force"](scores, tokens, rows), forced)
    for name in ("ban", "force"):
        one_for_all = jitted[name](scores, tokens[0], rows)
        np.testing.assert_array_equal(one_for_all, jitted[name](scores, np.stack([tokens[0]] * ROWS), rows))


@check(max_examples=30)
@given(hnp.arrays(np.int32, (ROWS, 5), elements=st.integers(-1, VOCAB - 1)))
def test_token_set(ids):
    each = np.asarray(processors.token_set(jnp.asarray(ids), VOCAB))
    for row, out in zip(ids, each, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(out), sorted(set(row[row >= 0].tolist())))
        np.testing.assert_array_equal(out, processors.token_set(jnp.asarray(row), VOCAB))


# --- Whole distributions ----------------------------------------------------------------------------------------------


@check()
@given(SCORES, SCORES, hnp.arrays(np.float32, (ROWS, 1), elements=st.sampled_from([1.0, 0.0, -0.5, 1.5, 7.0])))
def test_guidance(cond, uncond, scale):
    out = jitted["guidance"](cond, uncond, scale)
    expected = np.empty((ROWS, VOCAB))
    for row in range(ROWS):
        c, u, by = log_softmax(cond[row]), log_softmax(uncond[row]), scale[row, 0]
        for token in range(VOCAB):
            infinite = BANNED in (c[token], u[token])
            expected[row, token] = c[token] if infinite or by == 1 else by * (c[token] - u[token]) + u[token]
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4, equal_nan=False)
    off = scale[:, 0] == 1
    np.testing.assert_array_equal(np.asarray(out)[off], np.asarray(jitted["renormalize"](cond))[off])


@check()
@given(SCORES)
def test_renormalize(scores):
    same(jitted["renormalize"](scores), [log_softmax(row) for row in scores])


def test_a_row_of_bans_alone_stays_one():
    scores = np.full((ROWS, VOCAB), BANNED, np.float32)
    ids, length = np.zeros((ROWS, WIDTH), np.int32), np.ones(ROWS, np.int32)
    everything, number = np.ones((ROWS, VOCAB), bool), np.full((ROWS, 1), 2.0, np.float32)
    for out in (
        jitted["guidance"](scores, scores, number),
        jitted["sequence_bias"](scores, ids, length, *tables({(1,): np.inf, (0, 2): 3.0})),
        jitted["encoder_repetition_penalty"](scores, everything, number),
        jitted["repetition_penalty"](scores, everything, number),
        jitted["exponential_decay"](scores, everything, length, number),
        jitted["renormalize"](scores),
    ):
        np.testing.assert_array_equal(out, scores)


@check()
@given(hnp.arrays(np.float32, (ROWS, VOCAB), elements=VALUES | st.sampled_from([np.inf, BANNED, np.nan])))
def test_remove_invalid_values(scores):
    limits = np.finfo(np.float32)
    expected = [
        [0.0 if np.isnan(x) else limits.max if x == np.inf else limits.min if x == BANNED else x for x in row]
        for row in scores
    ]
    np.testing.assert_array_equal(jitted["remove_invalid_values"](scores), np.asarray(expected, np.float32))


@check()
@given(SCORES, SETS, hnp.arrays(np.int32, ROWS, elements=st.integers(-3, 60)), NUMBERS)
def test_exponential_decay(scores, eos, over, factor):
    out = jitted["exponential_decay"](scores, eos, over, factor)
    expected = scores.astype(np.float64)
    for row, token in np.argwhere(eos):
        score = expected[row, token]
        if over[row] > 0 and score != BANNED:
            expected[row, token] = score + abs(score) * (float(factor[row, 0]) ** int(over[row]) - 1)
    same(out, expected)
    one_for_all = jitted["exponential_decay"](scores, eos[0], over, factor[0, 0])
    repeated = jitted["exponential_decay"](scores, np.stack([eos[0]] * ROWS), over, np.stack([factor[0]] * ROWS))
    np.testing.assert_array_equal(one_for_all, repeated)


def test_a_decay_beyond_float32_is_not_added():
    scores, eos = jnp.asarray([[1.0, -1.0, BANNED, 0.0]]), jnp.ones(4, bool)
    out = processors.exponential_decay(scores, eos, jnp.asarray([1000]), jnp.float32(2.0))
    assert out.tolist() == scores.tolist()


@check(max_examples=30)
@given(SCORES, SCORES, IDS, LENGTHS, SETS, NUMBERS)
def test_a_row_is_alone(scores, others, ids, length, tokens, number):
    rows = np.asarray([True, False, True])
    calls = {
        "guidance": (scores, others, number),
        "encoder_repetition_penalty": (scores, tokens, number),
        "repetition_penalty": (scores, tokens, number),
        "no_repeat_ngram": (scores, ids, length, 2),
        "encoder_no_repeat_ngram": (scores, ids, length, length // 2, 2),
        "ban": (scores, tokens, rows),
        "allow_only": (scores, tokens),
        "force": (scores, tokens, rows),
        "remove_invalid_values": (scores,),
        "exponential_decay": (scores, tokens, length, number),
        "renormalize": (scores,),
    }
    for name, arguments in calls.items():
        together = jitted[name](*arguments)
        for row in range(ROWS):
            alone = [x[row : row + 1] if isinstance(x, np.ndarray) else x for x in arguments]
            same(together[row], jitted[name](*alone)[0])
