"""Tests that the watermark's hash looks random, and that only watermarked text is detected."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import GenerationConfig, WatermarkDetector, WatermarkingConfig, generate
from jaxgen.core.logits.watermark import green, watermark
from jaxgen.errors import ConfigError, InputError
from tests.support.compilations import compilations
from tests.support.models import model_config, random_params
from tests.support.rows import history_of

VOCAB = 1000
SCHEMES = [("lefthash", 1), ("lefthash", 3), ("selfhash", 1), ("selfhash", 2), ("selfhash", 4)]
PINNED = {
    "lefthash": [3, 16, 21, 23, 24, 29, 31, 37, 40, 46, 52, 56, 57, 58, 60, 61],
    "selfhash": [0, 5, 6, 7, 9, 10, 16, 20, 21, 22, 34, 39, 40, 44, 45, 48, 56, 59, 60],
}
each_scheme = pytest.mark.parametrize(("scheme", "width"), SCHEMES, ids=lambda value: str(value))


def watermarked(scores, ids, length, cfg):
    history = history_of(ids, length, vocab=scores.shape[1])
    return watermark(scores, history.last(cfg.context_width), cfg)


marked_scores = jax.jit(watermarked)


def config(scheme="lefthash", width=1, **fields):
    return WatermarkingConfig(seeding_scheme=scheme, context_width=width, **fields)


def bell(found, expected, variance):
    """Return how many standard deviations a count is from its expected value."""
    return abs(found - expected) / math.sqrt(variance)


def draws(seed, count, width, vocab=151_936):
    rng = np.random.default_rng(seed)
    return rng.integers(0, vocab, (count, width)), rng.integers(0, vocab, count)


# --- The hash ---------------------------------------------------------------------------------------------------------


@each_scheme
@pytest.mark.parametrize("ratio", [0.01, 0.25, 0.5, 0.9])
def test_ratio_of_green_tokens_holds_for_every_key(scheme, width, ratio):
    count = 100_000
    for key in (0, 1, 15485863, 2**31, 2**32 - 1):
        greens = green(*draws(key, count, width), config(scheme, width, greenlist_ratio=ratio, hashing_key=key)).sum()
        assert bell(greens, count * ratio, count * ratio * (1 - ratio)) < 4.5


@pytest.mark.parametrize(("scheme", "width"), [("lefthash", 1), ("selfhash", 3)])
def test_lists_of_neighboring_contexts_vary_like_random_ones(scheme, width):
    contexts, tokens = np.arange(400)[:, None, None] + np.arange(width), np.arange(4000)[None, :]
    sizes = [green(contexts, tokens, config(scheme, width, hashing_key=key)).sum(axis=1) for key in range(5)]
    deviations = (np.ravel(sizes) - 1000) / math.sqrt(4000 * 0.25 * 0.75)
    # With "selfhash", the color of a third of the tokens depends only on the token, so the lists of contexts overlap.
    assert (0.95 if scheme == "lefthash" else 0.6) < deviations.std() < 1.05
    assert np.mean(np.abs(deviations) > 3) < 0.006


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_green_lists_are_independent(ratio):
    tokens = np.arange(20_000)
    both = ratio**2

    def greens(context, key=7, scheme="lefthash", shift=0):
        where = np.full((len(tokens), 1), context)
        return green(where, tokens + shift, config(scheme, greenlist_ratio=ratio, hashing_key=key))

    for bit in range(18):
        for other in (greens(64 ^ 1 << bit), greens(64, key=7 ^ 1 << bit), greens(64, shift=1 << bit)):
            overlap = np.sum(greens(64) & other)
            assert bell(overlap, len(tokens) * both, len(tokens) * both * (1 - both)) < 4.5
    overlap = np.sum(greens(64, scheme="selfhash") & greens(64, key=8, scheme="selfhash"))
    assert bell(overlap, len(tokens) * both, len(tokens) * both * (1 - both)) < 4.5


def test_a_key_marks_the_same_tokens_in_every_release():
    tokens = np.arange(64)
    for scheme, greens in PINNED.items():
        found = green(np.full((64, 1), 9707), tokens, config(scheme, width=2))
        assert np.flatnonzero(found).tolist() == greens


@each_scheme
def test_lefthash_looks_back_one_token_and_selfhash_over_its_window(scheme, width):
    contexts, tokens = draws(0, 3000, 6, VOCAB)
    found = green(contexts, tokens, config(scheme, width))
    reach = 1 if scheme == "lefthash" else width - 1
    for back in range(1, 7):
        other = contexts.copy()
        other[:, -back] += 1
        changed = np.mean(green(other, tokens, config(scheme, width)) != found)
        assert (changed > 0.05) == (back <= reach)


# --- Marking ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_scheme
def test_green_tokens_get_the_bias_and_others_nothing(scheme, width):
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(5, VOCAB)).astype(np.float32)
    scores[:, ::7] = -np.inf
    ids = rng.integers(0, VOCAB, (5, 8)).astype(np.int32)
    length = np.asarray([0, width - 1, width, 6, 8], np.int32)
    cfg = config(scheme, width, bias=1.5)
    out = np.asarray(marked_scores(scores, ids, length, cfg))
    for row in range(5):
        expected = scores[row].copy()
        if length[row] >= width:
            text = ids[row, : length[row]]
            for token in range(VOCAB):
                expected[token] += 1.5 * bool(green(text[None], np.asarray([token]), cfg)[0])
        np.testing.assert_array_equal(out[row], expected)
    garbage = np.where(np.arange(8) < length[:, None], ids, -7)
    np.testing.assert_array_equal(out, marked_scores(scores, garbage, length, cfg))


def test_rows_are_independent():
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.normal(size=(4, VOCAB)), jnp.float32)
    ids, length = jnp.asarray(rng.integers(0, VOCAB, (4, 5)), jnp.int32), jnp.asarray([5, 2, 3, 1])
    for scheme, width in SCHEMES:
        cfg = config(scheme, width)
        together = marked_scores(scores, ids, length, cfg)
        for row in range(4):
            alone = slice(row, row + 1)
            np.testing.assert_array_equal(together[alone], marked_scores(scores[alone], ids[alone], length[alone], cfg))


def test_changing_numbers_compiles_nothing():
    scores, ids, length = np.zeros((1, 11), np.float32), np.zeros((1, 2), np.int32), np.ones(1, np.int32)
    marked_scores(scores, ids, length, config())
    with compilations() as count:
        for ratio, bias, key in ((0.5, 1, 3), (np.float64(0.1), np.float32(2), 2**32 - 1), (0.9, -1.0, np.int64(5))):
            out = marked_scores(scores, ids, length, config(greenlist_ratio=ratio, bias=bias, hashing_key=key))
            assert set(np.unique(out)) <= {0.0, np.float32(bias)}
    assert count[0] == 0


def test_numbers_may_be_traced():
    scores, ids, length = jnp.zeros((1, 300)), jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32)

    @jax.jit
    def run(ratio, bias, key):
        return watermarked(scores, ids, length, config(greenlist_ratio=ratio, bias=bias, hashing_key=key))

    expected = watermarked(scores, ids, length, config(greenlist_ratio=0.6, bias=3.0, hashing_key=77))
    np.testing.assert_array_equal(run(0.6, 3, 77), expected)


def test_watermark_does_not_sort():
    scores, ids, length = jnp.zeros((2, 300)), jnp.zeros((2, 3), jnp.int32), jnp.ones(2, jnp.int32)
    for scheme, width in SCHEMES:
        program = str(jax.make_jaxpr(watermarked)(scores, ids, length, config(scheme, width)))
        assert "gather[" in program  # the printed form of a primitive
        assert "sort[" not in program
        assert "top_k[" not in program


# --- Detecting --------------------------------------------------------------------------------------------------------


def drawn(cfg, rows, steps, peak=0.0):
    """Return text sampled with the watermark, from equal scores or, with a `peak`, with a few likely tokens."""
    logits = jax.random.normal(jax.random.key(1), (rows, 4 * VOCAB)) * peak

    def step(carry, key):
        ids, length = carry
        tokens = jax.random.categorical(key, watermarked(logits, ids, length, cfg))
        return (ids.at[:, length[0]].set(tokens.astype(jnp.int32)), length + 1), None

    ids = jnp.zeros((rows, steps), jnp.int32)
    keys = jax.random.split(jax.random.key(0), steps)
    return np.asarray(jax.jit(lambda: jax.lax.scan(step, (ids, jnp.zeros(rows, jnp.int32)), keys))()[0][0])


@pytest.mark.slow
@each_scheme
def test_marked_text_is_detected_only_with_its_key(scheme, width):
    cfg = config(scheme, width)
    text = drawn(cfg, rows=8, steps=80)
    out = WatermarkDetector(cfg)(text)
    assert out.prediction.all()
    # With equal scores, a green token is drawn with probability r e^b / (r e^b + 1 - r) = 0.71.
    assert 0.66 < out.green_fraction.mean() < 0.76
    assert out.z_score.min() > 5
    for key in (15485862, 15485864, 15485863 + 2**31, 0):
        other = WatermarkDetector(config(scheme, width, hashing_key=key))(text)
        assert other.prediction.sum() <= 1
        assert abs(other.z_score.mean()) < 1.2
    assert not WatermarkDetector(cfg)(np.random.default_rng(0).integers(0, VOCAB, (20, 100))).prediction.any()


def test_part_of_a_marked_text_is_detected():
    text = drawn(config("selfhash", 3), rows=5, steps=120, peak=2.0)
    assert WatermarkDetector(config("selfhash", 3))(text[:, 47:]).prediction.all()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("lefthash", 1), ("selfhash", 3)])
def test_unmarked_text_is_detected_no_more_often_than_by_chance(scheme, width):
    rows, tokens = 6000, 200
    text = np.random.default_rng(5).integers(0, 151_936, (rows, tokens + width - (scheme == "selfhash")))
    out = WatermarkDetector(config(scheme, width))(text)
    assert (out.num_tokens_scored == tokens).all()
    exact = [math.comb(tokens, k) * 0.25**k * 0.75 ** (tokens - k) for k in range(tokens + 1)]
    for threshold in (1.0, 2.0, 3.0):
        least = math.floor(50 + threshold * math.sqrt(tokens * 0.25 * 0.75)) + 1
        rate = sum(exact[least:])
        found = np.sum(out.z_score > threshold)
        assert bell(found, rows * rate, rows * rate * (1 - rate)) < 4
        assert threshold != 3.0 or 0.0005 < rate < 0.003
    assert bell(out.z_score.mean(), 0, 1 / rows) < 4
    assert 0.95 < out.z_score.std() < 1.05
    np.testing.assert_array_equal(out.prediction, out.z_score > 3)


def test_detector_statistics_of_a_row():
    cfg = config(greenlist_ratio=0.4)
    text = np.random.default_rng(0).integers(0, 50, (1, 60))
    greens = sum(bool(green(text[:, i : i + 1], text[:, i + 1], cfg)[0]) for i in range(59))
    out = WatermarkDetector(cfg)(text, z_threshold=-50)
    z = (greens - 0.4 * 59) / math.sqrt(59 * 0.4 * 0.6)
    assert (out.num_tokens_scored[0], out.num_green_tokens[0]) == (59, greens)
    np.testing.assert_allclose([out.green_fraction[0], out.z_score[0]], [greens / 59, z])
    assert out.prediction.tolist() == [True]
    np.testing.assert_allclose(out.p_value + out.confidence, 1)
    grid = np.linspace(z, z + 12, 200_001)
    tail = np.exp(-(grid**2) / 2).sum() * (grid[1] - grid[0]) / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(out.p_value, tail, rtol=1e-3)


@each_scheme
def test_detector_ignores_padding_and_bos(scheme, width):
    text = np.random.default_rng(0).integers(1, 50, (3, 20))
    detect = WatermarkDetector(config(scheme, width), bos_token_id=0)
    padded, mask = np.zeros((3, 30), np.int64), np.zeros((3, 30), np.int64)
    columns = [np.arange(20), np.arange(10, 30), np.r_[0:7, 15:28]]  # padding on the right, on the left, in the middle
    for row, places in enumerate(columns):
        padded[row, places], mask[row, places] = text[row], 1
    begun = np.concatenate([np.zeros((3, 1), np.int64), text], axis=1)
    for out in (detect(padded, mask), detect(begun), detect(begun, np.ones((3, 21), bool))):
        np.testing.assert_array_equal(out.z_score, detect(text).z_score)
    for row in range(3):
        assert detect(text[row : row + 1]).z_score == detect(text).z_score[row]
    assert (
        WatermarkDetector(config(scheme, width))(begun).num_tokens_scored == detect(text).num_tokens_scored + 1
    ).all()


def test_repeated_ngrams_count_once_if_requested():
    colours = green(np.full((50, 1), 3), np.arange(50), config())
    token = int(np.flatnonzero(colours)[-1])
    back = green(np.full((1, 1), token), np.asarray([3]), config())
    text = np.tile([3, token], 100)[None]
    out = WatermarkDetector(config())(text)
    assert (out.num_tokens_scored[0], out.num_green_tokens[0]) == (199, 100 + 99 * back[0])
    assert out.prediction[0]
    once = WatermarkDetector(config(), ignore_repeated_ngrams=True)(text)
    assert (once.num_tokens_scored[0], once.num_green_tokens[0]) == (2, 1 + back[0])


def test_detector_refuses_bad_arguments():
    detect = WatermarkDetector(config(width=3), bos_token_id=7)
    with pytest.raises(InputError, match="row 1 has 3 tokens"):
        detect([[1, 2, 3, 4], [7, 2, 3, 4]])
    with pytest.raises(InputError, match="row 0 has 0 tokens"):
        detect([[1, 2, 3, 4]], [[0, 0, 0, 0]])
    with pytest.raises(InputError, match=r"\[B, L\]"):
        detect([1, 2, 3, 4])
    with pytest.raises(InputError, match="attention_mask"):
        detect([[1, 2, 3, 4]], [1, 1, 1, 1])
    with pytest.raises(TypeError, match="WatermarkingConfig"):
        WatermarkDetector(GenerationConfig())


# --- The config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("seeding_scheme", "righthash", ConfigError),
        ("greenlist_ratio", -0.1, ConfigError),
        ("greenlist_ratio", 1.1, ConfigError),
        ("greenlist_ratio", 1, ConfigError),
        ("greenlist_ratio", float("nan"), ConfigError),
        ("greenlist_ratio", [0.25, 0.5], ConfigError),
        ("greenlist_ratio", "0.25", TypeError),
        ("bias", float("inf"), ConfigError),
        ("bias", True, TypeError),
        ("bias", None, TypeError),
        ("hashing_key", -1, ConfigError),
        ("hashing_key", 2**32, ConfigError),
        ("hashing_key", 10**40, ConfigError),
        ("hashing_key", 1.0, TypeError),
        ("context_width", 0, ConfigError),
        ("context_width", 1.0, TypeError),
        ("context_width", True, TypeError),
    ],
)
def test_config_refuses_bad_values(field, value, error):
    with pytest.raises(error, match=field):
        WatermarkingConfig(**{field: value})


def test_config_round_trips_to_transformers_form():
    fields = {"greenlist_ratio": 0.3, "bias": 2, "hashing_key": 2**32 - 1}
    fields |= {"seeding_scheme": "selfhash", "context_width": 4}
    cfg = WatermarkingConfig.from_hf(fields)
    assert cfg.to_hf() == fields
    assert cfg == WatermarkingConfig.from_hf(json.loads(json.dumps(cfg.to_hf())))
    assert cfg != WatermarkingConfig()
    assert WatermarkingConfig().to_hf() == {
        "greenlist_ratio": 0.25,
        "bias": 2.0,
        "hashing_key": 15485863,
        "seeding_scheme": "lefthash",
        "context_width": 1,
    }
    with pytest.raises(ConfigError, match="'biass': known are greenlist_ratio, bias"):
        WatermarkingConfig.from_hf({"biass": 1})
    with pytest.raises(ConfigError, match="'ngram_len'"):
        WatermarkingConfig.from_hf({"ngram_len": 5})


def test_the_config_is_a_pytree():
    cfg = WatermarkingConfig(greenlist_ratio=0.3, seeding_scheme="selfhash", context_width=2)
    leaves, structure = jax.tree.flatten(cfg)
    assert [(leaf.dtype, leaf.shape) for leaf in leaves] == [("float32", ()), ("float32", ()), ("uint32", ())]
    again = jax.jit(lambda tree: tree)(cfg)
    assert jax.tree.structure(again) == structure
    assert (again.seeding_scheme, again.context_width, int(again.hashing_key)) == ("selfhash", 2, 15485863)
    assert again.to_hf()["greenlist_ratio"] == pytest.approx(0.3)
    assert jax.tree.structure(WatermarkingConfig()) != structure


@pytest.mark.slow
def test_generated_text_is_detected():
    model = model_config(num_hidden_layers=1)
    params = random_params(model, scale=0.02)
    mark = {"bias": 4.0, "seeding_scheme": "selfhash", "context_width": 2}
    cfg = GenerationConfig(model=model, do_sample=True, max_new_tokens=60, watermarking_config=mark)
    ids = [[1, 2, 3], [4, 5, 6]]
    out = generate(params, ids, jax.random.key(0), cfg)
    detect = WatermarkDetector(mark, ignore_repeated_ngrams=True)
    found = detect(out.sequences[:, out.prompt_width :], out.attention_mask[:, out.prompt_width :])
    assert found.prediction.all()
    assert not WatermarkDetector({**mark, "hashing_key": 1})(out.sequences[:, out.prompt_width :]).prediction.any()
