"""The order of processors and warpers, and the functions that their records name."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.core.config.generation_options import OPTIONS, of_stage
from jaxgen.core.config.option import AFTER_GRAMMAR, BEFORE_GRAMMAR, GUIDANCE, RENORMALIZE, WARP
from jaxgen.core.logits.pipeline import build_transform
from jaxgen.core.logits.processors import PROCESSORS
from jaxgen.core.logits.row_options import RowOptions
from jaxgen.core.logits.warpers import WARPERS
from tests.support.rows import config_of, history_of

# The classes of transformers 4.41.1, in the order of its two lists. HammingDiversity is only used by beam groups. In
# transformers, PrefixConstrained comes after BEFORE_GRAMMAR, and the caller's processors before LogitNormalization.
ORDER_441 = {
    GUIDANCE: ["UnbatchedClassifierFreeGuidanceLogitsProcessor"],
    BEFORE_GRAMMAR: [
        "SequenceBiasLogitsProcessor",
        "HammingDiversityLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
    ],
    AFTER_GRAMMAR: [
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "ForceTokensLogitsProcessor",
        "WatermarkLogitsProcessor",
    ],
    RENORMALIZE: ["LogitNormalization"],
    WARP: [
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
    ],
}


def test_order_follows_transformers():
    for stage, classes in ORDER_441.items():
        assert [option.hf for option in of_stage(stage) if option.since == ""] == classes
    assert {option.stage for option in OPTIONS.values()} == {"", *ORDER_441}


def test_order_of_processors_that_are_newer_or_jaxgens_own():
    before = [option.name for option in of_stage(BEFORE_GRAMMAR)]
    place = before.index("repetition_penalty")
    assert before[place + 1 : place + 3] == ["frequency_penalty", "presence_penalty"]
    assert [option.name for option in of_stage(WARP)][:3] == ["temperature", "top_h", "top_k"]


def test_every_processor_function_has_the_options_name():
    stages = (BEFORE_GRAMMAR, AFTER_GRAMMAR, RENORMALIZE)
    assert list(PROCESSORS) == [option.name for stage in stages for option in of_stage(stage)]
    assert list(WARPERS) == [option.name for option in of_stage(WARP)]
    for name, function in (PROCESSORS | WARPERS).items():
        assert function.__name__ == name
        assert list(inspect.signature(function).parameters) == ["history", "scores", "options"]


def test_top_k_and_top_p_share_one_search_and_one_condition():
    def counts(**options) -> tuple[int, int]:
        cfg = jax.tree.map(jnp.asarray, config_of(1000, do_sample=True, **options))
        transform = build_transform(RowOptions.of(cfg, 1))
        history = history_of(np.zeros((1, 1), np.int32), np.ones(1, np.int32), vocab=1000)
        program = str(jax.make_jaxpr(functools.partial(transform, history))(jnp.zeros((1, 1000))))
        return program.count(" top_k["), program.count(" cond[")

    assert {counts(top_k=5, top_p=1.0), counts(top_k=0, top_p=0.5), counts(top_k=5, top_p=0.5)} == {(1, 1)}


def test_stages_run_in_order():
    """A bias raises a token, the grammar bans it, another token is forced, and the caller's processor runs last."""
    scores = jnp.zeros((1, 4))
    history = history_of(np.zeros((1, 1), np.int32), np.ones(1, np.int32), vocab=4)
    cfg = config_of(4, sequence_bias={(1,): 5.0}, forced_bos_token_id=2, renormalize_logits=True)
    cfg = jax.tree.map(jnp.asarray, cfg)
    given = []

    def custom(history, scores):
        given.append(scores)
        return scores + jnp.asarray([[0.0, 1.0, 0.0, 1.0]])

    options = RowOptions.of(cfg, 1)
    transform = build_transform(options, [custom], lambda history: jnp.asarray([[True, False, True, True]]))
    assert transform(history, scores).tolist() == [[-np.inf, -np.inf, 0.0, -np.inf]]
    assert given[0].tolist() == [[-np.inf, -np.inf, 0.0, -np.inf]]
    free = build_transform(dataclasses.replace(options, cfg=cfg.replace(forced_bos_token_id=None)), [custom])
    free(history, scores)
    assert given[1].tolist() == [[0.0, 5.0, 0.0, 0.0]]


WARPING = {
    "top_k": {"top_k": 2, "temperature": 2.0},
    "top_k and top_p": {"top_k": 6, "top_p": 0.5},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.5},
    "typical_p": {"typical_p": 0.3},
    "epsilon_cutoff": {"epsilon_cutoff": 0.3},
    "eta_cutoff": {"eta_cutoff": 0.5},
    "top_h": {"top_h": 0.3},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WARPING)
def test_warpers_keep_the_given_token(name):
    """The given token's score is only divided by the temperature, unless it is banned. Others are removed as usual."""
    scores = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    scores[[0, 1], [0, 1]] = 4.0  # these are never removed
    history = history_of(np.zeros((8, 1), np.int32), np.ones(8, np.int32), vocab=8)
    given = np.arange(8)
    banned = given == 7

    def transformed(*given, **options):
        cfg = config_of(8, do_sample=True, suppress_tokens=[7], **WARPING[name], **options)
        cfg = jax.tree.map(jnp.asarray, cfg)
        return np.asarray(jax.jit(build_transform(RowOptions.of(cfg, 8)))(history, scores, *given))

    expected = transformed().copy()
    removed = np.isneginf(np.diag(expected))
    assert not removed[:2].any()
    assert removed[2:7].any()
    tempered = np.diag(scores) / np.float32(WARPING[name].get("temperature", 1))
    expected[given, given] = np.where(banned, -np.inf, tempered)
    np.testing.assert_array_equal(transformed(given), expected)
    renormalized = transformed(given, renormalize_logits=True)
    np.testing.assert_allclose(renormalized, jax.nn.log_softmax(expected, axis=-1), rtol=1e-5)
