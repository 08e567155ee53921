"""Samples and the tokens that warpers keep, compared with the distributions and warpers of transformers 4.41.1.

goldens/README.md describes the files that contain the scores and the kept tokens.
"""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxgen import GenerationConfig, generate
from jaxgen.core.config.generation_options import of_stage
from jaxgen.core.config.option import WARP
from jaxgen.core.decoding.rng import prompt_keys, sequence_keys
from jaxgen.core.decoding.sample import draw
from jaxgen.core.logits.history import History
from jaxgen.core.logits.pipeline import build_transform
from jaxgen.core.logits.row_options import RowOptions
from tests.support.goldens import GOLDENS, load
from tests.support.models import left_pad, model_config
from tests.support.rows import warp

SIGNIFICANCE = 1e-4
DRAWS, CHUNK = 50_000, 1000
COPIES = 5000  # sequences per prompt
SETTINGS = json.loads((GOLDENS / "441" / "statistics.json").read_text())


# --- Pearson's test -----------------------------------------------------------------------------------------------


def chi_square(seen, probs):
    """Return Pearson's statistic and its degrees of freedom. Cells with an expected count below five are pooled."""
    expected = probs * seen.sum()
    order = np.argsort(-expected, kind="stable")
    expected, seen = expected[order], seen[order]
    common = int(np.sum(expected >= 5))
    if 0 < expected[common:].sum() < 5:
        common = max(common - 1, 0)
    expected, seen = (np.append(x[:common], x[common:].sum()) for x in (expected, seen))
    expected, seen = expected[expected > 0], seen[expected > 0]
    return np.sum((seen - expected) ** 2 / expected), len(expected) - 1


def tail(statistic, freedom):
    """Approximate the probability of a larger statistic with Wilson and Hilferty's formula."""
    if freedom == 0:
        return 1.0
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))


def is_plausible(tokens, probs):
    """Return True if the distribution allows every drawn token and Pearson's test does not reject the draws."""
    seen = np.bincount(tokens, minlength=len(probs))
    return bool(np.all(seen[probs == 0] == 0)) and tail(*chi_square(seen, probs)) >= SIGNIFICANCE


def softmax(scores):
    scores = np.asarray(scores, np.float64)
    probs = np.exp(scores - scores.max())
    return probs / probs.sum()


# From a table: degrees of freedom, and the values that the statistic exceeds with probability 0.05 and 0.0001.
@pytest.mark.parametrize(
    ("freedom", "five_percent", "significant"),
    [(1, 3.841, 15.137), (2, 5.991, 18.421), (5, 11.070, 25.745), (10, 18.307, 35.564), (40, 55.758, 82.062)],
)
def test_the_tail_of_the_statistic(freedom, five_percent, significant):
    assert tail(five_percent, freedom) == pytest.approx(0.05, rel=0.06)
    assert SIGNIFICANCE < tail(significant, freedom) < 1.65 * SIGNIFICANCE  # the estimate is high for small `freedom`


def test_rare_cells_are_merged():
    probs = np.asarray([0.5, 0.0, 0.3, 0.01, 0.17, 0.02])
    seen = np.asarray([48, 0, 33, 2, 16, 1])
    statistic, freedom = chi_square(seen, probs)  # the two rarest cells expect only 3 draws, so a third joins them
    assert freedom == 2
    assert statistic == pytest.approx(4 / 50 + 9 / 30 + 1 / 20)
    assert chi_square(np.asarray([7, 0]), np.asarray([1.0, 0.0])) == (0, 0)


def test_the_test_detects_wrong_distributions():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=41) * 1.5
    probs = softmax(logits)
    assert is_plausible(rng.choice(41, DRAWS, p=probs), probs)
    best, second = np.argsort(-probs)[[0, 4]]
    swapped = probs.copy()
    swapped[[best, second]] = probs[[second, best]]
    shifted = probs.copy()
    shifted[best] *= 0.85
    without = np.where(np.arange(41) == second, 0, probs)
    mutated = {"swapped": swapped, "shifted": shifted, "colder": softmax(logits / 0.96), "without": without}
    for name, other in mutated.items():
        other = other / other.sum()
        assert not is_plausible(rng.choice(41, DRAWS, p=other), probs), name
        assert not is_plausible(rng.choice(41, DRAWS, p=probs), other), name


def test_the_test_rarely_fails():
    rng = np.random.default_rng(1)
    probs = softmax(rng.normal(size=41) * 1.5)
    tails = np.asarray([tail(*chi_square(rng.multinomial(DRAWS, probs), probs)) for _ in range(2000)])
    for share in (0.01, 0.1, 0.5, 0.9):
        assert np.mean(tails < share) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 2000))


# --- Draws --------------------------------------------------------------------------------------------------------


def settings(of_the_model):
    chosen = [setting for setting in SETTINGS if ("checkpoint" in setting) == of_the_model]
    for number, setting in enumerate(chosen):
        marks = [pytest.mark.slow] if number > 0 else []
        names = "-".join(f"{name}={value}" for name, value in setting["options"].items() if name != "sequence_bias")
        yield pytest.param(setting, id=f"{number}-{names}", marks=marks)


def config(setting, **fields):
    return GenerationConfig(do_sample=True, **{"top_k": 0, **setting["options"], **fields})


def expected(setting, scores):
    """Return the distribution of the scores, after top_h if it is on; transformers 4.41.1 lacks this warper."""
    probs = softmax(scores)
    if "top_h" not in setting["options"]:
        return probs
    order = np.argsort(-probs, kind="stable")
    entropy = np.cumsum(-probs[order] * np.log(probs[order]))
    kept = entropy <= setting["options"]["top_h"] * entropy[-1]
    kept[0] = True
    probs[order[~kept]] = 0
    return probs / probs.sum()


@jax.jit
def many_draws(key, scores):
    """Draw int32[DRAWS] tokens from `scores`, float32[1, V], as the loop does."""
    keys = sequence_keys(prompt_keys(key, 1), DRAWS).reshape(-1, CHUNK)
    rows = jnp.broadcast_to(scores, (CHUNK, scores.shape[1]))
    return lax.map(lambda keys: draw(keys, jnp.full(CHUNK, 2, jnp.int32), rows), keys).reshape(-1)


@pytest.mark.parametrize("setting", list(settings(of_the_model=False)))
@pytest.mark.slow
def test_draws_from_processed_scores(setting):
    logits = np.asarray(setting["logits"], np.float32)
    cfg = config(setting, model=model_config(vocab_size=logits.shape[1]))
    ids, prompt = setting["ids"], setting["prompt_length"]

    @jax.jit
    def process(cfg, ids, logits):
        length = jnp.asarray([prompt], jnp.int32)
        history = History.begin(cfg, ids, length, jnp.asarray([16], jnp.int32))
        for column in range(prompt, ids.shape[1]):
            history = history.push(ids[:, column], jnp.ones(1, bool))
        return build_transform(RowOptions.of(cfg, 1))(history, logits)

    tokens = np.asarray(many_draws(jax.random.key(0), process(cfg, np.asarray([ids], np.int32), logits)))
    assert is_plausible(tokens, expected(setting, setting["scores"][0]))


@pytest.mark.slow
@pytest.mark.parametrize("setting", list(settings(of_the_model=True)))
def test_draws_of_generate(setting):
    params, cfg = load(GOLDENS / "441" / "checkpoints" / setting["checkpoint"])
    cfg = config(setting, model=cfg.model, max_new_tokens=1, num_return_sequences=COPIES)
    ids, mask = left_pad(setting["prompts"])

    @jax.jit  # under jit, the arrays have space for one token, not for a whole bucket
    def drawn(params, key):
        return generate(params, ids, key, cfg, attention_mask=mask).sequences[:, -1]

    tokens = np.asarray(drawn(params, jax.random.key(1))).reshape(len(ids), COPIES)
    probs = [softmax(scores) for scores in setting["scores"]]
    for row in range(len(ids)):
        assert is_plausible(tokens[row], probs[row])
        assert not is_plausible(tokens[row], probs[row - 1])


# --- Kept tokens --------------------------------------------------------------------------------------------------

# The warpers of 4.41.1 that remove tokens.
WARPERS = [option.name for option in of_stage(WARP) if option.since == "" and option.name != "temperature"]


@functools.cache
def kept_by(name):
    """Return scores float32[rows, V], values, the tokens kept by jaxgen and transformers, and rows near a boundary."""
    with np.load(GOLDENS / "441" / "kept.npz") as arrays:
        scores, vocab = arrays["scores"], arrays["vocab"]
        values, near = arrays[f"{name}_value"], arrays[f"{name}_near"]
        theirs = np.unpackbits(arrays[f"{name}_kept"], axis=-1).astype(bool)
    values = values.astype(np.int32) if name == "top_k" else values
    ours = np.zeros(scores.shape, bool)
    for size in np.unique(vocab):
        rows = vocab == size
        given = scores[rows, :size]
        out = np.asarray(jax.jit(functools.partial(warp, name))(given, values[rows, None]))
        ours[rows, :size] = np.isfinite(out)
        np.testing.assert_array_equal(out, np.where(np.isfinite(out), given, -np.inf))
    return scores, values, ours, theirs, near


@pytest.mark.parametrize("name", WARPERS)
def test_kept_tokens_match_transformers(name):
    scores, _, ours, theirs, near = kept_by(name)
    assert len(scores) >= 500
    values, wanted = (np.sort(np.where(kept, scores, -np.inf), axis=-1) for kept in (ours, theirs))
    differ = np.any(values != wanted, axis=-1)
    assert not np.any(differ & ~near), f"rows {np.flatnonzero(differ & ~near)[:10]}"
    assert near.sum() <= max(3, 0.002 * len(near)), "too many rows are near a boundary, where rounding decides"


def parts_equal_scores(scores, kept):
    """Return True if only some of several equal scores are kept. Scores are float32[V]."""
    return bool(np.intersect1d(scores[kept], scores[~kept & np.isfinite(scores)]).size)


@pytest.mark.parametrize("name", WARPERS)
def test_only_top_p_separates_equal_scores(name):
    scores, _, ours, _, _ = kept_by(name)
    parted = sum(map(parts_equal_scores, scores, ours))
    assert parted >= 10 if name == "top_p" else parted == 0


def test_top_p_keeps_the_tokens_of_a_stable_ascending_sort():
    scores, values, ours, _, near = kept_by("top_p")
    order = np.argsort(scores, axis=-1, kind="stable")
    probs = np.exp(scores.astype(np.float64) - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    removed = np.cumsum(np.take_along_axis(probs, order, axis=-1), axis=-1) <= 1 - values[:, None].astype(np.float64)
    removed[:, -1] = False
    kept = np.zeros(scores.shape, bool)
    np.put_along_axis(kept, order, ~removed, axis=-1)
    kept &= np.isfinite(scores)
    np.testing.assert_array_equal(ours[~near], kept[~near])
