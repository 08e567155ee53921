"""`score_many`: many continuations of many contexts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import ConfigError, GenerationConfig, InputError, score, score_many
from jaxgen.core.scoring import score_many as many
from tests.support.compilations import compilations
from tests.support.models import last_logits, model_config, random_params, slow

MODEL = model_config(vocab_size=61)
CFG = GenerationConfig(model=MODEL)
PARAMS = random_params(MODEL, scale=0.3)
TABLE = np.asarray(PARAMS["model"]["embed_tokens"]["weight"])


def requests(seed: int, contexts: int, longest: int = 40):
    rng = np.random.default_rng(seed)
    for _ in range(contexts):
        context = rng.integers(0, 61, rng.integers(1, longest)).tolist()
        for _ in range(rng.integers(1, 6)):
            yield context, rng.integers(0, 61, rng.integers(1, 14)).tolist()


def alone(params, context, continuation, cfg=CFG):
    """Score one continuation in a single forward pass."""
    ids = np.array([[*context, *continuation]])
    scores = score(params, ids, cfg, attention_mask=np.ones_like(ids), top_logprobs=1)
    start = len(context)
    likeliest = np.asarray(scores.top_tokens)[0, start:, 0]
    return np.asarray(scores.logprobs)[0, start:], likeliest == continuation


def check(params, asked, found, cfg=CFG):
    assert len(found) == len(asked)
    for request, scores in zip(asked, found, strict=True):
        logprobs, is_greedy = alone(params, *request, cfg)
        # Most differences are below 5e-6, but 2.1e-5 has been seen where the random weights amplify rounding.
        np.testing.assert_allclose(scores.logprobs, logprobs, atol=5e-5)
        np.testing.assert_array_equal(scores.is_greedy, is_greedy)
        assert scores.total == pytest.approx(float(logprobs.sum()), abs=1e-4)


@pytest.mark.parametrize("batch_tokens", [100, *slow(1, 8192)])
def test_each_continuation_is_scored_as_if_alone(batch_tokens):
    asked = list(requests(0, 12))
    check(PARAMS, asked, score_many(PARAMS, asked, CFG, batch_tokens=batch_tokens))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 8), st.sampled_from([30, 300]))
def test_random_requests_match_the_reference(seed, contexts, batch_tokens):
    asked = list(requests(seed, contexts))
    asked += asked[:2]  # some requests twice
    check(PARAMS, asked, score_many(PARAMS, asked, CFG, batch_tokens=batch_tokens))


def test_greedy_continuations_are_found():
    ids = [3]
    for _ in range(6):
        ids.append(int(jnp.argmax(last_logits(MODEL, PARAMS, TABLE[ids]))))
    (found, other) = score_many(PARAMS, [(ids[:1], ids[1:]), (ids[:1], [(ids[1] + 1) % 61, *ids[2:]])], CFG)
    assert found.is_greedy.all()
    assert not other.is_greedy[0]


def test_first_of_equal_scores_is_greedy():
    params = jax.tree.map(jnp.zeros_like, PARAMS)
    found = score_many(params, [([1], [0]), ([1], [1])], CFG)
    assert [scores.is_greedy.tolist() for scores in found] == [[True], [False]]


@pytest.mark.slow
def test_a_sliding_window():
    model = model_config(vocab_size=61, sliding_window=9, use_sliding_window=True, max_window_layers=0)
    assert set(model.windows) == {9}
    asked = list(requests(1, 6))
    cfg = CFG.replace(model=model)
    check(PARAMS, asked, score_many(PARAMS, asked, cfg), cfg)


@pytest.fixture
def batches(monkeypatch):
    """Return a list that receives the mask of the contexts and the continuations of each scored batch."""
    found, original = [], many.continuation_logprobs

    def spy(params, contexts, context_mask, ids, *rest, **sizes):
        found.append((np.asarray(context_mask), ids))
        return original(params, contexts, context_mask, ids, *rest, **sizes)

    monkeypatch.setattr(many, "continuation_logprobs", spy)
    return found


def test_a_context_is_read_once(batches):
    context = list(range(20))
    asked = [(context, [i, i + 1]) for i in range(30)] + [([5, *context], [1]), (context, [7])]
    check(PARAMS, asked, score_many(PARAMS, asked, CFG))
    assert sum(np.sum(mask[:, -2]) for mask, _ in batches) == 2  # contexts of more than one token


def test_logits_of_many_short_continuations_are_bounded(batches, monkeypatch):
    monkeypatch.setattr(many, "LOGITS_AT_ONCE", 16 * 61)
    asked = [([i], [j]) for i in range(20) for j in range(4)]
    check(PARAMS, asked, score_many(PARAMS, asked, CFG))
    assert max(len(ids) for _, ids in batches) == 16


@pytest.mark.slow
def test_continuations_of_one_context_are_bounded(batches):
    asked = [([7], [n % 61 for n in range(length)]) for length in range(40, 72)]
    check(PARAMS, asked, score_many(PARAMS, asked, CFG, batch_tokens=256))
    assert max(ids.size for _, ids in batches) <= 256 + 4  # up to 4 rows, whose last columns are not read


@pytest.mark.slow
def test_ten_thousand_texts_at_once(batches):
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 61, size).tolist() for size in rng.integers(2, 100, 10_000)]
    asked = [(text[:1], text[1:]) for text in texts]
    found = score_many(PARAMS, asked, CFG, batch_tokens=1024)
    assert len(found) == len(asked)
    check(PARAMS, asked[::500], found[::500])
    assert max(ids.size for _, ids in batches) <= 1024
    assert len({ids.shape for _, ids in batches}) < 40


@pytest.mark.slow
def test_many_requests_share_few_programs():
    with compilations() as first:
        score_many(PARAMS, list(requests(3, 200)), CFG, batch_tokens=512)
    with compilations() as again:
        score_many(PARAMS, list(requests(3, 200)), CFG, batch_tokens=512)
    assert first[0] <= 16
    assert again[0] == 0


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ([([1], [2]), ([], [1])], InputError, "the context of request 1 has no tokens"),
        ([([1], [])], InputError, "the continuation of request 0 has no tokens"),
        ([([1], [61])], InputError, "the continuation of request 0 contains the token"),
        ([[1, 2, 3]], TypeError, "request 0 must be a pair"),
    ],
)
def test_bad_requests_are_refused(asked, error, message):
    with pytest.raises(error, match=message):
        score_many(PARAMS, asked, CFG)


def test_no_requests():
    assert score_many(PARAMS, [], CFG) == []


def test_dynamic_rope_is_refused():
    model = model_config(vocab_size=61, rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(ConfigError, match="dynamic RoPE"):
        score_many(PARAMS, [([1], [2])], CFG.replace(model=model))
