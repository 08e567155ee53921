"""Preparing a call: its sizes, the values of each prompt, and inputs that are refused. Nothing is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import ConfigError, InputError, JaxgenWarning, KVCache
from jaxgen.core.decoding.continuation import UNKNOWN, Continuation
from jaxgen.core.decoding.continuous.slots import Continuous
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.modes import MODES
from tests.support import small
from tests.support.automata import of_matrix
from tests.support.counting import CFG
from tests.support.models import counting_config
from tests.support.prepared_calls import prepared

MODEL = CFG.model
PROMPTS = [[3], [7, 8, 9, 20], [30, 31]]
WIDTH = 4


def cache_of(counts: list[int], slots: int = 40) -> Continuation:
    kv = dataclasses.replace(KVCache.create(MODEL, len(counts), slots), length=jnp.asarray(counts, jnp.int32))
    return Continuation(kv, jnp.zeros((len(counts), slots), jnp.int32), jnp.asarray(counts))


# --- Sizes --------------------------------------------------------------------------------------------------------


def test_an_eager_call_is_rounded_up():
    given = prepared(PROMPTS, eager=True)
    assert given.request.ids.shape == given.request.mask.shape == (3, 32)
    assert given.request.ids[:, -WIDTH:].tolist() == given.ids.tolist() == [[0, 0, 0, 3], [7, 8, 9, 20], [0, 0, 30, 31]]
    assert given.request.mask.sum(axis=1).tolist() == [1, 4, 2]
    assert given.request.mask[:, -WIDTH:].tolist() == given.mask.tolist()
    assert (given.run.capacity, given.new_tokens, given.width) == (128, 6, WIDTH)
    assert given.request.budget.tolist() == [6] * 3
    assert (given.run.prompts, given.run.cached_slots) == (3, 0)
    assert isinstance(given.request.ids, np.ndarray)


def test_records_reduce_rounding_of_the_capacity():
    assert prepared(PROMPTS, CFG.replace(output_scores=True), eager=True).run.capacity == 16


def test_sizes_are_exact_under_jit():
    given = prepared(PROMPTS)
    assert given.request.ids.shape == (3, WIDTH)
    assert given.run.capacity == given.new_tokens == 6


def test_embeddings_and_negative_prompts_are_padded():
    embeds = np.ones((3, WIDTH, MODEL.hidden_size), np.float32)
    cfg = CFG.replace(guidance_scale=1.5)
    given = prepared(PROMPTS, cfg, eager=True, inputs_embeds=embeds, negative_prompt_ids=np.full((3, 40), 5))
    assert given.request.embeds.shape == (3, 32, MODEL.hidden_size)
    assert given.request.embeds[:, :-WIDTH].sum() == 0
    assert given.request.negative_ids.shape == given.request.negative_mask.shape == (3, 64)
    assert given.request.negative_mask.sum(axis=1).tolist() == [40] * 3


def test_embeddings_alone_have_no_columns_in_the_result():
    embeds = np.ones((3, WIDTH, MODEL.hidden_size), np.float32)
    given = prepared(PROMPTS, eager=True, ids=None, inputs_embeds=embeds)
    assert (given.ids.shape, given.mask.shape, given.width) == ((3, 0), (3, 0), WIDTH)
    assert (given.request.ids[:, -WIDTH:] == UNKNOWN).all()


# --- Budgets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [True, False])
def test_a_budget_per_prompt(eager):
    given = prepared(PROMPTS, CFG.replace(max_new_tokens=[2, 9, 4]), eager=eager)
    assert given.request.budget.tolist() == [2, 9, 4]
    assert given.request.budget.dtype == np.int32
    assert given.new_tokens == 9


def test_max_length_counts_prompt_and_cache_without_padding():
    cfg = counting_config(max_length=21, pad_token_id=0)
    assert prepared(PROMPTS, cfg, eager=True).request.budget.tolist() == [20, 17, 19]
    assert prepared(PROMPTS, cfg, eager=True).new_tokens == 20
    after = prepared(PROMPTS, cfg, eager=True, cache=cache_of([10, 2, 5]))
    assert after.request.budget.tolist() == [10, 15, 14]
    shared = prepared(PROMPTS, cfg, eager=True, cache=cache_of([10]))
    assert shared.request.budget.tolist() == [10, 7, 9]
    pairs = prepared([*PROMPTS, [5]], cfg, eager=True, cache=cache_of([10, 2]))
    assert pairs.request.budget.tolist() == [10, 7, 17, 18]


def test_max_length_under_jit_subtracts_the_padded_width():
    cfg = counting_config(max_length=21, pad_token_id=0)
    given = prepared(PROMPTS, cfg)
    assert given.new_tokens == 21 - WIDTH
    assert given.request.budget.tolist() == [17] * 3
    with pytest.raises(InputError, match="the longest prompt has room for 44 tokens, and max_length=21"):
        prepared(PROMPTS, cfg, cache=cache_of([10, 2, 5]))


def test_a_traced_budget_is_bounded_by_max_length():
    def budgets(budget):
        given = prepared(PROMPTS, CFG.replace(max_new_tokens=budget, max_length=30))
        assert given.new_tokens == 30 - WIDTH
        return given.request.budget

    assert jax.eval_shape(budgets, jnp.int32(3)).shape == (3,)
    assert jax.eval_shape(budgets, jnp.zeros(3, jnp.int32)).shape == (3,)
    with pytest.raises(ConfigError, match="more than the 4 before the answer; it is 3"):
        jax.eval_shape(lambda budget: prepared(PROMPTS, CFG.replace(max_new_tokens=budget, max_length=3)), jnp.int32(3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": [1, 2]}, InputError, "max_new_tokens has 2 values for 3 prompts"),
        ({"max_new_tokens": None, "max_length": 4}, InputError, "has 4 tokens, and max_length=4 includes the prompt"),
        ({"repetition_penalty": [1.5, 1.6]}, InputError, "repetition_penalty has 2 values for 3 prompts"),
        ({"do_sample": True}, InputError, "key is None"),
    ],
)
def test_options_for_another_number_of_prompts_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        prepared(PROMPTS, CFG.replace(**options), eager=True)


def test_unset_length_draws_a_warning():
    with pytest.warns(JaxgenWarning, match="neither max_new_tokens nor max_length is set: .* end at 20 tokens"):
        assert prepared(PROMPTS, counting_config(pad_token_id=0), eager=True).request.budget.tolist() == [19, 16, 18]


# --- Caches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "eager", "slots"),
    [
        ([31, 2, 5], True, 32),  # cached and prompt tokens: 31 + 1, 2 + 4, 5 + 2
        ([31, 30, 5], True, 64),
        ([32], True, 32),  # shared by the prompts, which have slots of their own
        ([31, 2, 5], False, 40 + WIDTH),
        ([32], False, 40),
    ],
)
def test_number_of_slots_includes_cached_tokens(counts, eager, slots):
    assert prepared(PROMPTS, eager=eager, cache=cache_of(counts)).run.cached_slots == slots


@pytest.mark.parametrize(("eager", "slots"), [(True, 64), (False, 44)])
def test_number_of_slots_includes_the_negative_prompt(eager, slots):
    negative = np.ones((3, 44), np.int32)
    cfg = CFG.replace(guidance_scale=1.5)
    given = prepared(PROMPTS, cfg, eager=eager, cache=cache_of([3]), negative_prompt_ids=negative)
    assert given.run.cached_slots == slots


def test_tokens_of_a_model_cache_are_unknown():
    given = prepared(PROMPTS, eager=True, cache=cache_of([3, 2, 1]).kv)
    assert given.request.cache.tokens is None
    assert given.request.cache.count.tolist() == [3, 2, 1]
    with pytest.raises(TypeError, match="cache must be the cache of an earlier output"):
        prepared(PROMPTS, cache=3)


# --- Where the inputs end up --------------------------------------------------------------------------------------


def test_option_values_are_in_the_request_not_the_run():
    cfg = CFG.replace(do_sample=True, temperature=0.5, repetition_penalty=[1.1, 1.2, 1.3], eos_token_id=[5, 6])
    given = prepared(PROMPTS, cfg, eager=True, key=jax.random.key(0))
    options = given.request.options
    assert {"temperature", "repetition_penalty", "eos_token_id"} <= options.keys()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(options))
    assert options["repetition_penalty"].shape == (3,)
    assert given.run.cfg.on("temperature")
    other = prepared(PROMPTS, cfg.replace(temperature=0.7, eos_token_id=[8, 9]), eager=True, key=jax.random.key(0))
    same = [jax.tree.leaves(call.run.cfg) for call in (given, other)]
    jax.tree.map(np.testing.assert_array_equal, *same)
    assert jax.tree.structure(given.run.cfg) == jax.tree.structure(other.run.cfg)


def test_mode_and_its_needs_are_chosen():
    assert prepared(PROMPTS).mode is MODES["greedy_search"]
    given = prepared(PROMPTS, CFG.replace(num_beams=3))
    assert given.mode is MODES["beam_search"]
    assert given.run.needs == given.mode.needs(CFG.replace(num_beams=3))
    given = prepared(PROMPTS, CFG.replace(slots=2))
    assert isinstance(given.mode, Continuous)


def test_draft_has_its_own_run_and_reads_all_tokens():
    cfg = small.CFG.replace(assistant_early_exit=1)
    given = prepared(PROMPTS, cfg, small.PARAMS)
    assert given.mode is MODES["assisted_generation"]
    assert given.run.draft.model.num_hidden_layers == 1
    assert prepared(PROMPTS).run.draft is None
    with pytest.raises(InputError, match="a draft model reads the ids of all tokens"):
        prepared(PROMPTS, cfg, small.PARAMS, cache=KVCache.create(small.MODEL, 3, 8))
    with pytest.raises(InputError, match="a draft model reads the ids of all tokens"):
        prepared(PROMPTS, cfg, small.PARAMS, ids=None, inputs_embeds=np.ones((3, WIDTH, 32), np.float32))


def test_automata_begin_in_their_first_states():
    grammar = of_matrix(np.zeros(50, np.int64), np.zeros((2, 1), np.int32), np.ones(2, bool), 1)
    assert grammar.start == 1
    given = prepared(PROMPTS, CFG.replace(eos_token_id=5), extensions=Extensions(allowed=grammar))
    assert given.request.grammar is grammar.start
    assert given.request.stop_strings is None
    assert prepared(PROMPTS).request.grammar is None


def test_negative_prompt_requires_guidance():
    given = prepared(PROMPTS, CFG.replace(guidance_scale=1.5))
    assert given.request.negative_ids is None
    with pytest.raises(InputError, match="negative_prompt_ids need guidance_scale"):
        prepared(PROMPTS, negative_prompt_ids=[[1]])
