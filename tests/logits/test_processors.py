"""Processors, checked with plain loops that follow the formulas of transformers and OpenAI."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from jaxgen import GenerationConfig, generate
from jaxgen.core.logits import processors
from jaxgen.shapes import token_set
from tests.support.compilations import compilations
from tests.support.models import counting_config, counting_params, generated, left_pad, model_config, random_params
from tests.support.rows import history_of, process

ROWS, VOCAB, WIDTH = 3, 11, 9
BANNED = -np.inf
VALUES = st.floats(-20, 20, width=32, allow_subnormal=False)
SCORES = hnp.arrays(np.float32, (ROWS, VOCAB), elements=VALUES | st.sampled_from([0.0, BANNED]))
# Most tokens are 0, 1 or 2, so that there are many repetitions.
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
OPERATIONS = ("ban", "allow_only", "force", "guidance", "log_softmax")
jitted = {name: jax.jit(getattr(processors, name)) for name in OPERATIONS}


@jax.jit
def add_biases(scores, ids, length, sequences, bias):
    return processors.add_biases(scores, history_of(ids, length, vocab=VOCAB), sequences, bias)


@jax.jit
def ban_continuations(scores, ids, length, end):
    return processors.ban_continuations(scores, history_of(ids, length, vocab=VOCAB), end, 2)


def check_scores(out, expected):
    """Check that bans are equal, that other values are equal within rounding, and that nothing is NaN."""
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


def shared(biases, rows=ROWS, **sizes):
    """Return the tables of `biases`, repeated for each row."""
    return [np.stack([array] * rows) for array in tables(biases, **sizes)]


# --- Sequences --------------------------------------------------------------------------------------------------------


def biased(row, tokens, biases):
    """Add each sequence's bias to the score of its last token if its other tokens are the last ones of `tokens`."""
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
    out = add_biases(scores, ids, length, *shared(biases))
    expected = [biased(s, i[:n].tolist(), biases) for s, i, n in zip(scores, ids, length, strict=True)]
    check_scores(out, expected)


@check()
@given(SCORES, IDS, LENGTHS, st.lists(BIASES, min_size=ROWS, max_size=ROWS))
def test_sequence_biases_of_each_row(scores, ids, length, biases):
    sequences, bias = (np.stack(tables) for tables in zip(*map(tables, biases), strict=True))
    out = add_biases(scores, ids, length, sequences, bias)
    expected = [biased(s, i[:n].tolist(), b) for s, i, n, b in zip(scores, ids, length, biases, strict=True)]
    check_scores(out, expected)


@check()
@given(SCORES, IDS, LENGTHS, BIASES.filter(len))
def test_sequence_bias_option_is_applied(scores, ids, length, biases):
    expected = [biased(s, i[:n].tolist(), biases) for s, i, n in zip(scores, ids, length, strict=True)]
    expected = np.minimum(expected, np.finfo(np.float32).max)  # an infinite score would make the probabilities NaN
    check_scores(process(scores, history_of(ids, length, vocab=VOCAB), sequence_bias=biases), expected)


def without_words(row, tokens, words, eos):
    return biased(row, tokens, {word: BANNED for word in words if not (len(word) == 1 and word[0] in eos)})


@check()
@given(
    SCORES, IDS, LENGTHS, st.lists(SEQUENCE, min_size=1, max_size=4), st.lists(st.integers(0, VOCAB - 1), max_size=3)
)
def test_bad_words_ids(scores, ids, length, words, eos):
    out = process(scores, history_of(ids, length, vocab=VOCAB), bad_words_ids=words, eos_token_id=eos or None)
    expected = [without_words(s, i[:n].tolist(), words, eos) for s, i, n in zip(scores, ids, length, strict=True)]
    np.testing.assert_array_equal(out, np.asarray(expected, np.float32))


@check(max_examples=30)
@given(SCORES, IDS, LENGTHS, st.lists(SEQUENCE, min_size=1, max_size=4))
def test_bad_words_ids_of_each_row(scores, ids, length, words):
    history, eos = history_of(ids, length, vocab=VOCAB), [[2], [], [0, 1]]
    each = [words, words[:1], words[::-1]]
    shared = process(scores, history, bad_words_ids=words, eos_token_id=eos)
    own = process(scores, history, bad_words_ids=np.stack([table(row) for row in each]), eos_token_id=eos)
    for row, (s, i, n) in enumerate(zip(scores, ids, length, strict=True)):
        np.testing.assert_array_equal(own[row], without_words(s, i[:n].tolist(), each[row], eos[row]))
        np.testing.assert_array_equal(shared[row], without_words(s, i[:n].tolist(), words, eos[row]))


@check(max_examples=30)
@given(SCORES, IDS, LENGTHS, BIASES)
def test_padding_of_a_bias_table_changes_nothing(scores, ids, length, biases):
    narrow, wide = shared(biases), shared(biases, entries=8, width=7)
    np.testing.assert_array_equal(*(add_biases(scores, ids, length, *each) for each in (narrow, wide)))


def test_sequences_as_long_as_the_row_or_longer():
    scores, ids = np.zeros((1, VOCAB), np.float32), np.asarray([[5, 3, 5, 3]], np.int32)
    biases = {(5, 3, 1): 4.0}
    for length, applies in ((1, False), (2, True), (3, False), (4, True)):
        out = add_biases(scores, ids, np.asarray([length], np.int32), *shared(biases, rows=1))
        assert out[0].tolist() == [0.0, 4.0 * applies, *[0.0] * (VOCAB - 2)]


# --- n-grams ----------------------------------------------------------------------------------------------------------


def without_ngrams(row, tokens, source, n):
    out = row.copy()
    start = tokens[len(tokens) - (n - 1) :] if len(tokens) >= n - 1 else None
    for i in range(len(source) - n + 1):
        if source[i : i + n - 1] == start:
            out[source[i + n - 1]] = BANNED
    return out


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3, WIDTH, WIDTH + 1])
def test_no_repeat_ngram_size(n):
    @check()
    @given(SCORES, IDS, LENGTHS)
    def run(scores, ids, length):
        out = process(scores, history_of(ids, length, vocab=VOCAB), no_repeat_ngram_size=n)
        rows = [(s, i[:end].tolist()) for s, i, end in zip(scores, ids, length, strict=True)]
        np.testing.assert_array_equal(out, [without_ngrams(s, tokens, tokens, n) for s, tokens in rows])

    run()


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 4])
def test_encoder_no_repeat_ngram_size(n):
    @check()
    @given(SCORES, IDS, LENGTHS, LENGTHS)
    def run(scores, ids, length, prompt_length):
        prompt_length = np.minimum(prompt_length, length)
        history = history_of(ids, length, prompt_length, vocab=VOCAB)
        out = process(scores, history, encoder_no_repeat_ngram_size=n)
        rows = [
            (s, i[:end].tolist(), i[:prompt].tolist())
            for s, i, end, prompt in zip(scores, ids, length, prompt_length, strict=True)
        ]
        np.testing.assert_array_equal(out, [without_ngrams(s, tokens, prompt, n) for s, tokens, prompt in rows])

    run()


@check(max_examples=30)
@given(SCORES, IDS, LENGTHS, GARBAGE, BIASES.filter(len))
def test_ids_after_the_end_are_ignored(scores, ids, length, garbage, biases):
    other = np.where(np.arange(WIDTH) < length[:, None], ids, garbage)
    half = length // 2
    for fields in (
        {"sequence_bias": biases},
        {"bad_words_ids": list(biases)},
        {"no_repeat_ngram_size": 1},
        {"no_repeat_ngram_size": 3},
        {"encoder_no_repeat_ngram_size": 2},
        {"frequency_penalty": 0.5, "presence_penalty": 0.25},
    ):
        outs = [process(scores, history_of(row, length, half, vocab=VOCAB), **fields) for row in (ids, other)]
        np.testing.assert_array_equal(*outs)


# --- Penalties and sets -----------------------------------------------------------------------------------------------


PENALTIES = hnp.arrays(np.float32, ROWS, elements=st.sampled_from([1.0, 0.25, 1.3, 2.0]))
SIGNED = hnp.arrays(np.float32, ROWS, elements=st.sampled_from([0.0, 0.5, -1.25, 2.0]))


@check()
@given(SCORES, IDS, LENGTHS, LENGTHS, PENALTIES)
def test_repetition_penalties(scores, ids, length, prompt_length, penalty):
    prompt_length = np.minimum(prompt_length, length)
    history = history_of(ids, length, prompt_length, vocab=VOCAB)
    expected = {"repetition_penalty": scores.copy(), "encoder_repetition_penalty": scores.copy()}
    for row, by in enumerate(penalty):
        for token in set(ids[row, : length[row]]):
            score = scores[row, token]
            expected["repetition_penalty"][row, token] = score * by if score < 0 else score / by
        for token in set(ids[row, : prompt_length[row]]):
            score = scores[row, token]
            expected["encoder_repetition_penalty"][row, token] = score / by if score < 0 else score * by
    for name, values in expected.items():
        out = process(scores, history, **{name: penalty})
        check_scores(out, values)
        np.testing.assert_array_equal(out[penalty == 1], scores[penalty == 1])


@pytest.mark.slow
@check()
@given(SCORES, IDS, LENGTHS, LENGTHS, SIGNED, SIGNED)
def test_frequency_and_presence_penalty(scores, ids, length, prompt_length, frequency, presence):
    prompt_length = np.minimum(prompt_length, length)
    history = history_of(ids, length, prompt_length, vocab=VOCAB)
    expected = scores.astype(np.float64)
    for row in range(ROWS):
        generated_tokens = ids[row, prompt_length[row] : length[row]].tolist()
        for token in set(generated_tokens):
            expected[row, token] -= generated_tokens.count(token) * frequency[row] + presence[row]
    check_scores(process(scores, history, frequency_penalty=frequency, presence_penalty=presence), expected)
    for penalties in ({"frequency_penalty": frequency}, {"presence_penalty": presence}):
        (values,) = penalties.values()
        out = process(scores, history, **penalties)
        np.testing.assert_array_equal(out[values == 0], scores[values == 0])
        for row in range(ROWS):
            alone = history_of(*(x[row : row + 1] for x in (ids, length, prompt_length)), vocab=VOCAB)
            number = {name: float(value[row]) for name, value in penalties.items()}
            np.testing.assert_array_equal(process(scores[row : row + 1], alone, **number)[0], out[row])


def test_diversity_penalty_counts_choices_of_earlier_groups():
    scores = np.zeros((2, VOCAB), np.float32)
    history = history_of(np.zeros((2, 1), np.int32), np.ones(2, np.int32), vocab=VOCAB)
    history = dataclasses.replace(history, chosen=jnp.asarray([[3, 5, 3], [0, 0, 0]]))
    expected = scores.copy()
    expected[0, [3, 5]], expected[1, 0] = [-1.0, -0.5], -1.5
    check_scores(process(scores, history, diversity_penalty=0.5), expected)


@pytest.mark.slow
def test_penalties_of_generated_tokens_end_a_repetition():
    # The most likely next token is the last token again; the second most likely is the last token plus one.
    cfg = counting_config(max_new_tokens=6, pad_token_id=0)
    params = counting_params(cfg)
    weight = params["lm_head"]["weight"]
    params["lm_head"]["weight"] = jnp.roll(weight, -1, axis=0) + 0.9 * weight
    ids, mask = left_pad([[3], [9, 9, 3]])
    together = cfg.replace(frequency_penalty=[0.75, 0.0], presence_penalty=[0.0, 30.0])
    out = generate(params, ids, None, together, attention_mask=mask)
    alone = generate(params, [[3]], None, cfg.replace(frequency_penalty=0.75))
    assert generated(out, 0) == generated(alone, 0) == [3, 3, 3, 4, 4, 4]
    assert generated(out, 1) == [3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_changing_a_penalty_compiles_nothing():
    model = model_config(num_hidden_layers=1)
    params, ids = random_params(model), [[1, 2, 3], [4, 5, 6]]
    cfg = GenerationConfig(model=model, max_new_tokens=8, pad_token_id=0)
    first = generate(params, ids, None, cfg.replace(frequency_penalty=0.1, presence_penalty=-2), attention_mask=None)
    with compilations() as count:
        second = generate(params, ids, None, cfg.replace(frequency_penalty=2, presence_penalty=1.5))
    assert count[0] == 0
    assert first.sequences.tolist() != second.sequences.tolist()


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


@check(max_examples=30)
@given(hnp.arrays(np.int32, (ROWS, 5), elements=st.integers(-1, VOCAB - 1)))
def test_token_set(ids):
    each = np.asarray(token_set(jnp.asarray(ids), VOCAB))
    for row, out in zip(ids, each, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(out), sorted(set(row[row >= 0].tolist())))


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
    np.testing.assert_array_equal(np.asarray(out)[off], np.asarray(jitted["log_softmax"](cond))[off])


@check()
@given(SCORES)
def test_log_softmax(scores):
    check_scores(jitted["log_softmax"](scores), [log_softmax(row) for row in scores])


def test_fully_banned_row_stays_banned():
    scores = np.full((ROWS, VOCAB), BANNED, np.float32)
    history = history_of(np.zeros((ROWS, WIDTH), np.int32), np.ones(ROWS, np.int32), vocab=VOCAB)
    number = np.full(ROWS, 2.0, np.float32)
    for out in (
        jitted["guidance"](scores, scores, number[:, None]),
        process(scores, history, sequence_bias={(1,): np.inf, (0, 2): 3.0}),
        process(scores, history, encoder_repetition_penalty=number, repetition_penalty=number),
        process(scores, history, frequency_penalty=number, presence_penalty=number),
        process(scores, history, exponential_decay_length_penalty=([0] * ROWS, number), eos_token_id=[1, 2]),
        process(scores, history, renormalize_logits=True),
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
    np.testing.assert_array_equal(process(scores, remove_invalid_values=True), np.asarray(expected, np.float32))


STARTS = hnp.arrays(np.int32, ROWS, elements=st.integers(0, WIDTH))
STEPS = hnp.arrays(np.int32, ROWS, elements=st.integers(0, 60))
FACTORS = hnp.arrays(np.float32, ROWS, elements=st.sampled_from([1.0, 0.25, 1.3, 2.0]))


@check()
@given(SCORES, STEPS, STARTS, FACTORS, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4, unique=True))
def test_exponential_decay_length_penalty(scores, step, start, factor, eos):
    one = np.ones(ROWS, np.int32)
    history = history_of(np.zeros((ROWS, WIDTH), np.int32), one + step, one, vocab=VOCAB)
    out = process(scores, history, exponential_decay_length_penalty=(start, factor), eos_token_id=eos)
    expected = scores.astype(np.float64)
    for row in range(ROWS):
        over = int(step[row] - start[row])
        for token in eos:
            score = expected[row, token]
            if over > 0 and score != BANNED:
                expected[row, token] = score + abs(score) * (float(factor[row]) ** over - 1)
    check_scores(out, expected)


def test_a_decay_beyond_float32_raises_scores_to_the_largest_number():
    scores = np.asarray([[1.0, -1.0, BANNED, 0.0]], np.float32)
    history = history_of([[0]], [1001], [1], vocab=4)
    out = process(scores, history, exponential_decay_length_penalty=(0, 2.0), eos_token_id=[0, 1, 2, 3])
    largest = float(np.finfo(np.float32).max)
    assert out.tolist() == [[largest, largest, BANNED, 0.0]]


@check(max_examples=30)
@given(SCORES, SCORES, IDS, LENGTHS, SETS, NUMBERS)
def test_rows_are_independent(scores, others, ids, length, tokens, number):
    rows = np.asarray([True, False, True])
    calls = {
        jitted["guidance"]: (scores, others, number),
        ban_continuations: (scores, ids, length, length // 2),
        jitted["ban"]: (scores, tokens, rows),
        jitted["allow_only"]: (scores, tokens),
        jitted["force"]: (scores, tokens, rows),
        jitted["log_softmax"]: (scores,),
    }
    for operation, arguments in calls.items():
        together = operation(*arguments)
        for row in range(ROWS):
            check_scores(together[row], operation(*(x[row : row + 1] for x in arguments))[0])
