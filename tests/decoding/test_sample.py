"""Sampling follows the distribution, and what a row draws depends on that row alone."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import GenerationConfig, generate
from jaxgen.core.decoding.logprobs import logprobs_of
from jaxgen.core.decoding.rng import prompt_keys, sequence_keys
from jaxgen.core.decoding.sample import draw
from tests.support.models import generated, left_pad, slow
from tests.support.small import MODEL, PARAMS

CFG = GenerationConfig(
    model=MODEL, do_sample=True, temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.1, max_new_tokens=12,
    eos_token_id=[5, 6], pad_token_id=0,
)  # fmt: skip
SHAPE = re.compile(r"(\w+):f32\[([\d,]+)\]")
PROMPTS = [
    np.random.default_rng(seed).integers(1, 97, length).tolist()
    for seed, length in enumerate([3, 11, 1, 30, 7, 2, 19, 5])
]


@pytest.mark.parametrize(("vocab", "count"), [(7, 10_000), *slow(*((vocab, 50_000) for vocab in (7, 512, 513, 2000)))])
def test_draws_follow_the_distribution(vocab, count):
    rng = np.random.default_rng(vocab)
    scores = rng.normal(size=vocab).astype(np.float32) * 2
    scores[rng.random(vocab) < 0.3] = -np.inf
    keys = jax.random.split(jax.random.key(1), count)
    tokens = np.asarray(jax.jit(draw)(keys, jnp.int32(3), jnp.broadcast_to(jnp.asarray(scores), (count, vocab))))
    probs = np.exp(scores.astype(np.float64) - scores.max())
    probs /= probs.sum()
    seen = np.bincount(tokens, minlength=vocab)
    assert np.all(seen[probs == 0] == 0)
    # Pearson's statistic over tokens that are expected at least five times. The other tokens are pooled.
    common = probs * count >= 5
    expected = np.append(probs[common], probs[~common].sum()) * count
    observed = np.append(seen[common], seen[~common].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    statistic = np.sum((observed - expected) ** 2 / expected)
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations


def test_only_possible_token_is_always_drawn():
    scores = jnp.full((1000, 3000), -jnp.inf).at[:, 2999].set(-1e30)
    assert set(np.asarray(jax.jit(draw)(jax.random.split(jax.random.key(0), 1000), jnp.int32(0), scores))) == {2999}


@pytest.mark.parametrize(
    "function",
    [
        lambda scores: draw(jax.random.split(jax.random.key(0), 8), jnp.int32(0), scores),
        lambda scores: logprobs_of(scores, jnp.zeros(8, jnp.int32), jnp.ones(8, bool), 0),
    ],
)
def test_draw_reduces_the_scores_twice(function):
    """Each reduction is a pass over the scores: the highest score, and the sum of exponentials."""
    program = str(jax.make_jaxpr(function)(jnp.zeros((8, 3000))))
    lines = [line for line in program.splitlines() if re.search(r" (reduce_\w+|argmax)\[", line)]
    sizes = {name: math.prod(map(int, re.findall(r"\d+", dims))) for name, dims in SHAPE.findall(program)}
    assert sum(sizes[line.split()[-1]] >= 8 * 3000 for line in lines) == 2


def test_row_keys_are_derived_as_documented():
    key = jax.random.key(7)
    keys = sequence_keys(prompt_keys(key, 2), 3)
    for prompt in range(2):
        for copy in range(3):
            expected = jax.random.fold_in(jax.random.fold_in(key, prompt), copy)
            assert jax.random.key_data(keys[prompt * 3 + copy]).tolist() == jax.random.key_data(expected).tolist()
    given = sequence_keys(prompt_keys(jax.random.split(key, 2), 2), 1)
    assert (
        jax.random.key_data(given[1]).tolist()
        == jax.random.key_data(jax.random.fold_in(jax.random.split(key, 2)[1], 0)).tolist()
    )


@pytest.mark.parametrize("do_sample", [True, False], ids=["sample", "greedy"])
@pytest.mark.slow
def test_row_does_not_depend_on_its_batch(do_sample):
    each = {"repetition_penalty": np.linspace(0.8, 1.5, 8)}
    if do_sample:
        each |= {
            "temperature": np.linspace(0.5, 1.5, 8),
            "top_k": np.arange(20, 28),
            "top_p": np.linspace(0.8, 0.95, 8),
        }
    cfg = CFG if do_sample else CFG.replace(do_sample=False, temperature=1.0, top_k=50, top_p=1.0)
    key = jax.random.key(3) if do_sample else None
    ids, mask = left_pad(PROMPTS)
    one_by_one, cfg = cfg, cfg.replace(**each)
    batch = generate(PARAMS, ids, key, cfg, attention_mask=mask)
    wide_ids, wide_mask = left_pad(PROMPTS, width=100)  # larger buckets for prompts and new tokens
    longer = cfg.replace(max_new_tokens=[12] * 7 + [200])
    wide = generate(PARAMS, wide_ids, key, longer, attention_mask=wide_mask)
    for row, prompt in enumerate(PROMPTS):
        row_key = None if key is None else jax.random.fold_in(key, row)[None]
        own = one_by_one.replace(**{name: values[row] for name, values in each.items()})
        expected = generated(generate(PARAMS, [prompt], row_key, own), 0)
        assert generated(batch, row) == expected
        assert generated(wide, row)[:12] == expected
        if row < 7:
            assert generated(wide, row) == expected
    assert len({tuple(generated(batch, row)) for row in range(8)}) > 4


@pytest.mark.slow
def test_sequence_i_of_n_is_the_same_for_any_n_and_alone():
    key = jax.random.key(5)
    ids, mask = left_pad(PROMPTS[:3])
    cfg = CFG.replace(num_return_sequences=4)
    out = generate(PARAMS, ids, key, cfg, attention_mask=mask)
    assert out.sequences.shape == (12, ids.shape[1] + 12)
    fewer = generate(PARAMS, ids, key, cfg.replace(num_return_sequences=2), attention_mask=mask)
    for prompt in range(3):
        row_key = jax.random.fold_in(key, prompt)[None]
        alone = generate(PARAMS, [PROMPTS[prompt]], row_key, cfg)
        for copy in range(4):
            assert generated(out, prompt * 4 + copy) == generated(alone, copy)
            if copy < 2:
                assert generated(out, prompt * 4 + copy) == generated(fewer, prompt * 2 + copy)
        single = generate(PARAMS, [PROMPTS[prompt]], row_key, CFG)
        assert generated(single, 0) == generated(out, prompt * 4)
    assert len({tuple(generated(out, copy)) for copy in range(4)}) == 4


@pytest.mark.slow
def test_only_the_same_key_gives_the_same_tokens():
    cfg = CFG.replace(output_scores=True, output_logits=True)
    first, again, other = (generate(PARAMS, [PROMPTS[1]], jax.random.key(s), cfg).sequences.tolist() for s in (0, 0, 1))
    assert first == again
    assert first != other


def test_tokens_are_drawn_from_the_processed_scores():
    out = generate(PARAMS, [PROMPTS[1]], jax.random.key(0), CFG.replace(output_scores=True, output_logits=True))
    for step, token in enumerate(generated(out, 0)):
        assert np.isfinite(out.scores[step, 0, token])
        assert 1 <= np.isfinite(np.asarray(out.scores[step, 0])).sum() <= 20
        assert np.isfinite(np.asarray(out.logits[step, 0])).all()


@pytest.mark.slow
def test_jit_gives_the_same_draws():
    key = jax.random.key(2)
    ids, mask = left_pad(PROMPTS)
    cfg = CFG.replace(temperature=np.full(8, 0.9), repetition_penalty=np.full(8, 1.1))
    cfg = cfg.replace(top_k=np.full(8, 20), top_p=np.full(8, 0.95))
    eager = generate(PARAMS, ids, key, cfg, attention_mask=mask)
    traced = jax.jit(lambda p, k: generate(p, ids, k, cfg, attention_mask=mask))(PARAMS, key)
    np.testing.assert_array_equal(traced.sequences, eager.sequences)
