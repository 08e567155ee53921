"""`do_sample` per prompt: in one batch, some rows sample and the others are greedy."""

import jax
import numpy as np
import pytest

from jaxgen import ConfigError, GenerationConfig, compute_transition_scores, generate, score
from tests.support.byte_model import IDS, MODEL, PARAMS

SAMPLES = np.array([True, False, False, True, False, True])
CFG = GenerationConfig(
    **{"model": MODEL, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": 1, "output_logprobs": "scores"},
    **{"temperature": 1.7, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3},
)
WARPERS = {"top_h": 0.8, "min_p": 0.05, "typical_p": 0.3, "epsilon_cutoff": 0.01, "eta_cutoff": 0.3}
KEY = jax.random.key(2)


def assert_rows_of(out, sampled, greedy) -> None:
    """Check that sampling rows equal those of the run `sampled`, and all other rows those of the run `greedy`."""
    for name in ("sequences", "lengths", "stop_reasons"):
        expected = np.where(SAMPLES.reshape(-1, *[1] * (np.ndim(getattr(out, name)) - 1)), *(
            np.asarray(getattr(run, name)) for run in (sampled, greedy)
        ))  # fmt: skip
        np.testing.assert_array_equal(getattr(out, name), expected, err_msg=name)
    expected = np.where(SAMPLES[:, None], sampled.logprobs, greedy.logprobs)
    np.testing.assert_allclose(out.logprobs, expected, atol=2e-5)
    assert not np.array_equal(sampled.sequences, greedy.sequences), "nothing is compared"


@pytest.mark.slow
@pytest.mark.parametrize("options", [WARPERS, {}, {"renormalize_logits": True}], ids=["all", "few", "renormalized"])
def test_rows_equal_those_of_all_sampled_or_all_greedy_batches(options):
    cfg = CFG.replace(**options)
    out = generate(PARAMS, IDS, KEY, cfg.replace(do_sample=SAMPLES))
    greedy = {name: getattr(GenerationConfig(), name) for name in WARPERS | {"temperature": 0, "top_k": 0, "top_p": 0}}
    assert_rows_of(
        out, generate(PARAMS, IDS, KEY, cfg.replace(do_sample=True)), generate(PARAMS, IDS, None, cfg.replace(**greedy))
    )


@pytest.mark.slow
def test_drafts_do_not_change_tokens():
    cfg = CFG.replace(prompt_lookup_num_tokens=3)
    plain, drafted = (generate(PARAMS, IDS, KEY, c.replace(do_sample=SAMPLES)) for c in (CFG, cfg))
    np.testing.assert_array_equal(plain.sequences, drafted.sequences)


@pytest.mark.slow
def test_new_values_compile_nothing():
    run = jax.jit(lambda cfg: generate(PARAMS, IDS, KEY, cfg).sequences)
    first = run(CFG.replace(do_sample=SAMPLES))
    second = run(CFG.replace(do_sample=~SAMPLES))
    assert run._cache_size() == 1
    assert not np.array_equal(first, second)


@pytest.fixture(scope="module")
def out():
    return generate(PARAMS, IDS, KEY, CFG.replace(do_sample=SAMPLES, output_scores=True))


def test_score_recomputes_the_log_probabilities(out):
    given = {"attention_mask": out.attention_mask, "prompt_width": out.prompt_width}
    again = score(PARAMS, out.sequences, CFG.replace(do_sample=SAMPLES), of="scores", **given)
    np.testing.assert_allclose(out.generated(again).logprobs, out.logprobs, atol=2e-5)


def test_recorded_scores_are_those_used_to_choose_tokens(out):
    expected = compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    live = np.arange(8)[None, :] < np.asarray(out.lengths)[:, None]
    np.testing.assert_allclose(np.where(live, expected, 0), out.logprobs, atol=2e-5)


def test_unsupported_options_are_refused():
    with pytest.raises(ConfigError, match="do_sample with one value per prompt works with num_beams=1"):
        CFG.replace(do_sample=[True, False], num_beams=2)
    with pytest.raises(ConfigError, match="num_return_sequences=2"):
        CFG.replace(do_sample=[True, False], num_return_sequences=2)
    for value in ([1, 0], [True, [False]]):
        with pytest.raises(TypeError, match="a list of one per prompt"):
            CFG.replace(do_sample=value)
    with pytest.raises(ValueError, match="do_sample has 2 values for 6 prompts"):
        generate(PARAMS, IDS, KEY, CFG.replace(do_sample=[True, False]))
    with pytest.raises(ConfigError, match="do_sample has one value per prompt"):
        CFG.replace(do_sample=[True, False]).to_hf()
