"""Rows of a model with longrope: each uses the factors for its own length, and none changes them while it grows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import GenerationConfig, InputError, ModelConfig, generate, prefill, score
from jaxgen.core.model.causal_lm import forward
from jaxgen.core.scoring.score_many import score_many
from jaxgen.engine.engine import Engine
from tests.support.models import CONFIG, all_generated, generated, left_pad, random_params

SHORT = 16
ROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 6.0, 8.0, 10.0]}
MODEL = ModelConfig.from_hf(
    CONFIG
    | {"model_type": "phi3", "num_hidden_layers": 1, "rope_theta": 100.0, "rope_scaling": ROPE}
    | {"max_position_embeddings": 128, "original_max_position_embeddings": SHORT}
)
PARAMS = random_params(MODEL)
CFG = GenerationConfig(model=MODEL, max_new_tokens=5, pad_token_id=0)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(1, 97, size=n).tolist() for n in (11, 17, 3, 30)]
REFUSED = "longrope has other factors beyond 16 tokens"


@jax.jit
def _read(ids, mask):
    return forward(MODEL, PARAMS, ids, attention_mask=mask).logits[0]


def logits_of(row):
    """Return the logits of a row, read in one pass. One program serves all lengths."""
    ids = jnp.asarray(np.pad(row, (0, 40 - len(row)))[None])
    return _read(ids, jnp.arange(40)[None] < len(row))[: len(row)]


def expected(prompt, new=5):
    """Greedy tokens, each from a pass over the whole row."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(np.argmax(logits_of(tokens)[-1])))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def answers():
    return [expected(prompt) for prompt in PROMPTS]


def call(prompts, cfg=CFG, key=None, **more):
    ids, mask = left_pad(prompts)
    return generate(PARAMS, ids, key, cfg, attention_mask=mask, **more)


def test_each_row_uses_the_factors_for_its_length(answers):
    assert MODEL.short_length == SHORT
    assert all_generated(call(PROMPTS)) == answers
    long, short = (logits_of(row) for row in (PROMPTS[1], PROMPTS[1][:16]))
    assert np.abs(long[:16] - short).max() > 0.1


def test_a_row_that_would_change_its_factors_is_refused():
    with pytest.raises(InputError, match=f"may reach 18 tokens. {REFUSED}"):
        call([PROMPTS[0], PROMPTS[0] + [5, 6]])
    with pytest.raises(InputError, match=REFUSED):
        call([PROMPTS[1][:16]], CFG.replace(max_new_tokens=1))
    budgets = CFG.replace(max_new_tokens=[5, 3])
    assert len(generated(call([PROMPTS[0], PROMPTS[0] + [5, 6]], budgets), 1)) == 3


@pytest.mark.slow
def test_a_negative_prompt_that_would_change_its_factors_is_refused():
    cfg = CFG.replace(guidance_scale=1.5, max_new_tokens=14)
    more = {"negative_prompt_ids": [[5, 6, 7]]}
    with pytest.raises(InputError, match=f"may reach 17 tokens. {REFUSED}"):
        call([PROMPTS[1]], cfg, **more)
    call([PROMPTS[1]], cfg.replace(max_new_tokens=13), **more)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [{"slots": 1}, {"prefill_chunk_size": 4}])
def test_prompts_in_pieces_are_limited_to_the_short_length(answers, pieces):
    cfg = CFG.replace(**pieces)
    assert all_generated(call([PROMPTS[0], PROMPTS[2]], cfg)) == [answers[0], answers[2]]
    with pytest.raises(InputError, match=REFUSED):
        call(PROMPTS, cfg)


@pytest.mark.slow
def test_a_cache_keeps_the_factors_with_which_it_began(answers):
    ids, mask = left_pad([PROMPTS[3][:20]])
    cache = prefill(PARAMS, ids, CFG, attention_mask=mask)
    assert generated(call([PROMPTS[3][20:]], cache=cache), 0) == answers[3]
    cache = prefill(PARAMS, ids[:, :10], CFG)
    with pytest.raises(InputError, match=REFUSED):
        call([PROMPTS[3][10:]], cache=cache)
    cache = prefill(PARAMS, [PROMPTS[0][:6]], CFG)
    assert generated(call([PROMPTS[0][6:]], cache=cache), 0) == answers[0]


@pytest.mark.slow
def test_under_jit_the_sizes_must_fit_into_the_short_length(answers):
    def traced(ids):
        return jax.jit(lambda ids: generate(PARAMS, ids, None, CFG, attention_mask=jnp.ones_like(ids)))(ids)

    assert generated(traced(jnp.asarray([PROMPTS[0]])), 0) == answers[0]
    with pytest.raises(InputError, match=REFUSED):
        traced(jnp.asarray([PROMPTS[1]]))


@pytest.mark.slow
def test_drafts_do_not_change_the_factors(answers):
    cfg = CFG.replace(prompt_lookup_num_tokens=4)
    prompts = [[5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 5], PROMPTS[1]]
    assert all_generated(call(prompts, cfg)) == [expected(prompts[0]), answers[1]]


@pytest.mark.slow
def test_an_engine_is_limited_to_the_short_length(answers):
    with Engine(PARAMS, CFG, jax.random.key(0), slots=2, prompt_width=32) as engine:
        assert engine.submit(PROMPTS[0]).result()[0].tokens == answers[0]
        with pytest.raises(InputError, match="the prompt has 17 tokens, so it fills the context of 16"):
            engine.submit(PROMPTS[1])
        with pytest.raises(InputError, match="together more than the context of 16"):
            engine.submit(PROMPTS[0] + [5])


@pytest.mark.slow
def test_scores_of_a_row_are_those_of_one_pass():
    for row in (PROMPTS[0], PROMPTS[3]):
        scores = score(PARAMS, np.asarray([row]), CFG)
        logprobs = np.take_along_axis(
            np.asarray(jax.nn.log_softmax(logits_of(row)))[:-1], np.asarray(row)[1:, None], axis=1
        )
        np.testing.assert_allclose(scores.logprobs[0, 1:], logprobs[:, 0], atol=1e-4)
    whole = score(PARAMS, np.asarray([PROMPTS[0]]), CFG, prompt_width=6).logprobs[0, 6:]
    (found,) = score_many(PARAMS, [(PROMPTS[0][:6], PROMPTS[0][6:])], CFG)
    np.testing.assert_allclose(found.logprobs, whole, atol=1e-4)
    with pytest.raises(InputError, match=f"request 0 has 17 tokens. {REFUSED}"):
        score_many(PARAMS, [(PROMPTS[1][:6], PROMPTS[1][6:])], CFG)


def test_long_rows_of_several_texts_are_refused():
    with pytest.raises(InputError, match=f"rows of 17 tokens contain several texts. {REFUSED}"):
        forward(MODEL, PARAMS, jnp.asarray([PROMPTS[1]]), segment_ids=jnp.zeros((1, 17), jnp.int32))
