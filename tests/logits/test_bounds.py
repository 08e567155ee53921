"""Every numeric option at its bounds and beyond: the value is refused, or the scores stay usable.

The values are one per prompt, so that one compiled program per option applies all values to all rows of scores.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import GenerationConfig
from jaxgen.core.decoding.logprobs import logprobs_of
from jaxgen.core.decoding.sample import draw
from jaxgen.errors import JaxgenError
from tests.support.rows import history_of, process, warp

VOCAB, EOS = 12, [4, 7]
BANNED = -np.inf
FLOAT = np.finfo(np.float32)
LARGEST, TINY, BFLOAT16 = float(FLOAT.max), float(FLOAT.tiny), float.fromhex("0x1.fep127")
SMALL = [5e-324, 1e-46, 1e-45, 1e-39, 1e-38, TINY, 2 * TINY, 1e-37, 1e-30, 1e-7]
MIDDLE = [0.5, 1 - 1e-9, float(np.nextafter(np.float32(1), np.float32(0))), 1.0, 1 + 1e-7, 2.0, 1000.0]
LARGE = [1e30, 8.5e37, 1e38, 3.4e38, LARGEST, 1e39, 1e308, np.inf]
INTEGERS = [0, 1, 2, 3, VOCAB, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**40, 10**400, 10**5000]
POSITIVE = [*SMALL, *MIDDLE, *LARGE, *INTEGERS]
VALUES = [*POSITIVE, *(-value for value in POSITIVE), -0.0, np.nan, True, False, "1"]


def rows_of_scores():
    """Return float32[rows, V], with at least one possible token in each row."""
    plain = np.random.default_rng(0).permutation(np.linspace(-4, 4, VOCAB))
    token = np.arange(VOCAB)
    rows = [
        plain,
        plain - 9,
        np.where(token == 3, 3.0, BANNED),
        np.where(token == 3, -3.0, BANNED),
        np.where(token < 6, BANNED, plain),
        np.zeros(VOCAB),
        np.full(VOCAB, 1.5),
        np.where(token == 5, 3e38, plain),
        np.where(token == 5, 3e38, np.where(token == 6, 2e38, -1.0)),
        np.where(token % 3, -BFLOAT16, BFLOAT16),
        np.full(VOCAB, -LARGEST),
        np.where(token == 2, LARGEST, -LARGEST),
        plain * 1e-36,
    ]
    return np.stack(rows).astype(np.float32)


SCORES = rows_of_scores()
# In each row, tokens 3, 5, 7 and 1 have occurred; 7 and 3 are the prompt, and 5 was generated twice.
IDS = np.tile(np.asarray([[7, 3, 5, 3, 5, 7, 1, 0]], np.int32), (len(SCORES), 1))
OPTIONS = {
    "temperature": lambda value: {"do_sample": True, "temperature": value},
    "top_h": lambda value: {"do_sample": True, "top_h": value},
    "top_k": lambda value: {"do_sample": True, "top_k": value},
    "top_p": lambda value: {"do_sample": True, "top_p": value},
    "min_p": lambda value: {"do_sample": True, "min_p": value},
    "typical_p": lambda value: {"do_sample": True, "typical_p": value},
    "epsilon_cutoff": lambda value: {"do_sample": True, "epsilon_cutoff": value},
    "eta_cutoff": lambda value: {"do_sample": True, "eta_cutoff": value},
    "encoder_repetition_penalty": lambda value: {"encoder_repetition_penalty": value},
    "repetition_penalty": lambda value: {"repetition_penalty": value},
    "frequency_penalty": lambda value: {"frequency_penalty": value},
    "presence_penalty": lambda value: {"presence_penalty": value},
    "decay": lambda value: {"exponential_decay_length_penalty": (2, value), "eos_token_id": EOS},
    "start of the decay": lambda value: {"exponential_decay_length_penalty": (value, 2.0), "eos_token_id": EOS},
    "min_length": lambda value: {"min_length": value, "eos_token_id": [11]},
    "min_new_tokens": lambda value: {"min_new_tokens": value, "eos_token_id": [11]},
    "sequence_bias": lambda value: {"sequence_bias": {(9,): value, (1, 8): value, (2,): 1.0}},
    "bias of the watermark": lambda value: {"watermarking_config": {"bias": value}},
    "ratio of the watermark": lambda value: {"watermarking_config": {"greenlist_ratio": value}},
    "key of the watermark": lambda value: {"watermarking_config": {"hashing_key": value}},
}
WARPERS = list(OPTIONS)[:8]


def processed(fields):
    """Return the processed scores, or None if the value is refused by a clear error."""
    refusal = ""
    try:
        GenerationConfig(**fields)
    except (JaxgenError, TypeError) as error:
        refusal = str(error)
    if refusal:
        assert re.fullmatch(r".* must .*, got .*", refusal)
        assert len(refusal) < 300
        return None
    history = history_of(IDS, np.full(len(IDS), 7, np.int32), np.full(len(IDS), 2, np.int32), vocab=VOCAB)
    return process(SCORES, history, **fields)


def check(out, case):
    """Check that a token can be chosen from each row, and that no banned token can."""
    assert not np.isnan(out).any(), case
    assert np.all((out.max(axis=-1) > BANNED) & (out.max(axis=-1) < np.inf)), case
    assert np.all(out[np.isneginf(SCORES)] == BANNED), case


@pytest.mark.parametrize("name", OPTIONS)
def test_extreme_number_is_refused_or_gives_usable_scores(name):
    accepted = 0
    for value in VALUES:
        if (out := processed(OPTIONS[name](value))) is not None:
            check(out, f"{name} = {value!r}" if isinstance(value, float) else name)
            accepted += 1
    assert accepted >= 3


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_options_together_give_usable_scores(data):
    """The values are operands, so all examples use one compiled program."""
    positive = st.sampled_from([*SMALL[2:], *LARGE[:5], 0.5, 1.5])
    any_sign = positive | positive.map(lambda value: -value)
    share = st.sampled_from([*SMALL[2:], 0.5, MIDDLE[2]])
    kinds = {"temperature": positive, "repetition_penalty": positive, "encoder_repetition_penalty": positive}
    kinds |= dict.fromkeys(("frequency_penalty", "presence_penalty"), any_sign)
    kinds |= dict.fromkeys(("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), share)
    drawn = {
        name: data.draw(st.lists(kind, min_size=len(SCORES), max_size=len(SCORES))) for name, kind in kinds.items()
    }
    fields = drawn | {
        "do_sample": True,
        "top_k": data.draw(st.sampled_from([1, 2, VOCAB, 2**31 - 1])),
        "sequence_bias": {(9,): data.draw(any_sign), (2,): data.draw(any_sign)},
        "watermarking_config": {"bias": data.draw(any_sign)},
        "exponential_decay_length_penalty": (data.draw(st.sampled_from([0, 2, 2**31 - 1])), data.draw(positive)),
        "eos_token_id": EOS,
        "renormalize_logits": True,
    }
    check(processed(fields), drawn)


# --- The limits are the right ones ------------------------------------------------------------------------------------


def flushed(numbers):
    """Replace numbers below TINY with 0, as XLA does on a CPU."""
    return np.where(np.abs(numbers) < TINY, np.float32(0), numbers)


@pytest.mark.parametrize("value", [*SMALL[2:], *MIDDLE, *LARGE[:5]])
def test_temperature_divides_exactly_as_float32_does(value):
    """In transformers too, the quotient is rounded once."""
    with np.errstate(over="ignore"):
        expected = flushed(SCORES / np.float32(value))
    expected = np.where(np.isneginf(SCORES), BANNED, np.maximum(expected, -LARGEST))
    out = processed({"do_sample": True, "temperature": value})
    fits = (expected.max(axis=-1) < np.inf) & (expected.max(axis=-1) > -LARGEST)
    assert fits.any() or value < 1e-38
    np.testing.assert_array_equal(out[fits], expected[fits])


@pytest.mark.parametrize("value", SMALL[2:-1])
def test_a_tiny_temperature_draws_the_most_likely_tokens(value):
    out = processed({"do_sample": True, "temperature": value})[:-1]  # the last row has tiny differences
    keys = jax.random.split(jax.random.key(0), 50)
    drawn = jax.jit(jax.vmap(lambda key: draw(jnp.broadcast_to(key, len(out)), jnp.int32(0), out)))(keys)
    for tokens, scores in zip(np.asarray(drawn).T, SCORES, strict=False):
        best = np.flatnonzero(scores == scores.max())
        assert set(tokens) <= set(best)
        assert len(set(tokens)) > len(best) / 2, "tied tokens are equally likely"


def test_a_tiny_temperature_shifts_all_beams_of_a_search_or_none():
    """Otherwise, a beam whose scores overflow would become better than the others."""
    scores = np.asarray([[-2.0, -3.0], [-5.0, -6.0], [-2.0, -3.0], [-3.0, BANNED]], np.float32)
    out = np.asarray(warp("temperature", scores, np.float32(1e-38), beams=2))
    one = np.float32(1) / np.float32(1e-38)
    np.testing.assert_array_equal(out[:2], [[0, -one], [0, -one]])
    np.testing.assert_array_equal(out[2:], scores[2:] / np.float32(1e-38))


@pytest.mark.parametrize("name", ["repetition_penalty", "encoder_repetition_penalty"])
@pytest.mark.parametrize("value", [*SMALL[2:], *MIDDLE, *LARGE[:5]])
def test_penalties_equal_float32_arithmetic(name, value):
    seen = np.isin(np.arange(VOCAB), [3, 7] if name.startswith("encoder") else [1, 3, 5, 7])
    with np.errstate(over="ignore", invalid="ignore"):
        product, quotient = SCORES * flushed(np.float32(value)), SCORES / np.float32(value)
    raised = (SCORES < 0) == name.startswith("encoder")
    expected = np.where(seen, np.where(raised, quotient, product), SCORES)
    expected = np.where(np.isneginf(SCORES), BANNED, np.clip(expected, -LARGEST, LARGEST))
    out = processed({name: value})
    np.testing.assert_array_equal(flushed(out), flushed(expected))


@pytest.mark.parametrize("value", [0.0, *SMALL])
def test_a_tiny_top_p_keeps_one_token(value):
    out = processed({"do_sample": True, "top_p": value})
    assert np.all(np.isfinite(out).sum(axis=-1) == 1)
    np.testing.assert_array_equal(out.max(axis=-1), SCORES.max(axis=-1))


@pytest.mark.parametrize("value", [2.0, 1e10, 1e30, LARGEST])
def test_length_penalty_of_any_size_raises_eos_scores(value):
    out = processed(OPTIONS["decay"](value))
    raised = np.isin(np.arange(VOCAB), EOS) & (SCORES > BANNED) & (SCORES != 0) & (SCORES < LARGEST)
    assert np.all(out[raised] > SCORES[raised])
    np.testing.assert_array_equal(out[~raised], SCORES[~raised])


@pytest.mark.parametrize(
    "fields",
    [
        {"no_repeat_ngram_size": 2**31 - 1},
        {"encoder_no_repeat_ngram_size": 2**31 - 1},
        {"watermarking_config": {"context_width": 2**31 - 1}},
        {"watermarking_config": {"context_width": 2**31 - 1, "seeding_scheme": "selfhash"}},
    ],
)
def test_minimum_lengths_beyond_any_row_are_harmless(fields):
    np.testing.assert_array_equal(processed(fields), SCORES)


# --- Log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e30])
def test_log_probabilities_of_scores_at_their_bounds(scale):
    with np.errstate(over="ignore"):
        scores = np.clip(SCORES * np.float32(scale), -LARGEST, LARGEST, where=np.isfinite(SCORES), out=SCORES.copy())
    tokens = np.arange(VOCAB)[None].repeat(len(scores), 0)
    out = jax.jit(lambda x: logprobs_of(x, tokens, np.ones(tokens.shape, bool), 3))(
        np.repeat(scores[:, None], VOCAB, 1)
    )
    assert not np.isnan(out.logprobs).any()
    assert not np.isnan(out.top_logprobs).any()
    with np.errstate(over="ignore"):
        exact = scores.astype(np.float64) - scores.max(axis=-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(np.exp(out.logprobs), np.exp(exact), atol=1e-6)
