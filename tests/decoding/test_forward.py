"""The model's pass over rows: prompts read whole and in chunks, new tokens, hooks, and guidance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import GenerationConfig, InputError, KVCache, StepHook
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.forward import Forward, begin_hook, inputs_of, observe, run_model
from jaxgen.core.decoding.needs import Needs
from jaxgen.core.decoding.passes import run_prompts
from jaxgen.core.decoding.request import Tokens
from jaxgen.core.model.causal_lm import ModelOutput, forward
from tests.support.counting import CFG as COUNTING
from tests.support.models import model_config, random_params
from tests.support.prepared_calls import begun, prepared

MODEL = model_config(num_hidden_layers=1)
PARAMS = random_params(MODEL)
PROMPTS = [[5, 6, 7], [11], [20, 21, 22, 23, 24]]
LENGTHS = np.array([3, 1, 5])
CFG = GenerationConfig(model=MODEL, max_new_tokens=4, pad_token_id=0)


# --- Columns ------------------------------------------------------------------------------------------------------

INPUTS = Tokens(
    mask=jnp.asarray([[True, True, True], [True, False, False]]),
    ids=jnp.asarray([[5, 6, 7], [11, 0, 0]]),
    key_mask=jnp.ones((2, 9), bool),
    adapter=jnp.asarray([1, 0]),
)


def test_columns_with_one_start_for_all_rows():
    part = INPUTS.columns(jnp.int32(1), 2)
    assert part.ids.tolist() == [[6, 7], [0, 0]]
    assert part.length.tolist() == [2, 0]
    assert (part.key_mask.shape, part.adapter.tolist()) == ((2, 9), [1, 0])


def test_columns_with_a_start_per_row():
    part = INPUTS.columns(jnp.asarray([2, 0]), 2)
    assert part.mask.tolist() == [[True, False], [True, False]]
    assert part.ids[:, 0].tolist() == [7, 11]
    assert (part.key_mask.shape, part.adapter.tolist()) == ((2, 9), [1, 0])


def test_padded_columns_have_no_tokens():
    wide = INPUTS.padded(5)
    assert (wide.ids.shape, wide.length.tolist()) == ((2, 5), [3, 1])


# --- The model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def passes():
    """Return outputs for prompts read whole and in chunks, more tokens (last and all logits), and no cache."""
    given = prepared(PROMPTS, CFG, PARAMS)
    run = dataclasses.replace(given.run, needs=Needs(layer_states=True, final_states=True))
    more = Tokens(
        jnp.asarray([[30, 31], [40, 41], [50, 0]]), jnp.asarray([[True, True], [False, False], [True, False]])
    )

    @jax.jit
    def passes(run, request):
        tokens, rows = begun(dataclasses.replace(given, run=run, request=request))
        chunked = dataclasses.replace(run, cfg=run.cfg.replace(prefill_chunk_size=2))
        cache = KVCache.create(MODEL, 3, 8)
        whole, _ = run_prompts(run, rows, tokens, cache, cache_is_empty=True)
        parts, _ = run_prompts(chunked, rows, tokens, cache, cache_is_empty=True)
        last, _ = run_model(run, rows, more, whole.cache)
        every, _ = run_model(run, rows, more, whole.cache, all_logits=True)
        joined = more.after(tokens)
        plain = forward(MODEL, run.params, joined.ids, attention_mask=joined.mask, output_hidden_states=True)
        return whole, parts, last, every, plain

    return passes(run, given.request)


def of_rows(x, columns) -> np.ndarray:
    return np.asarray(x)[np.arange(3), columns]


@pytest.mark.parametrize("number", [0, 1], ids=["whole", "chunks"])
def test_prompts_have_the_logits_and_states_of_their_last_tokens(passes, number):
    read, plain = passes[number], passes[4]
    assert read.cache.length.tolist() == LENGTHS.tolist()
    np.testing.assert_allclose(read.logits[:, 0], of_rows(plain.logits, LENGTHS - 1), atol=1e-4)
    assert len(read.states) == MODEL.num_hidden_layers + 1
    for states, expected in zip(read.states, plain.hidden_states, strict=True):
        np.testing.assert_allclose(states[:, 0], of_rows(expected, LENGTHS - 1), atol=1e-4)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(read.hidden[row, :length], plain.hidden_states[-1][row, :length], atol=1e-4)


def test_new_tokens_follow_those_in_the_cache(passes):
    last, every, plain = passes[2:]
    assert last.cache.length.tolist() == every.cache.length.tolist() == [5, 1, 6]
    assert (last.logits.shape[1], every.logits.shape[1]) == (1, 2)
    np.testing.assert_allclose(every.logits[0], plain.logits[0, 3:5], atol=1e-4)
    np.testing.assert_allclose(every.logits[2, 0], plain.logits[2, 5], atol=1e-4)
    for row, column in ((0, 4), (2, 5)):
        np.testing.assert_allclose(last.logits[row, 0], plain.logits[row, column], atol=1e-4)
        np.testing.assert_allclose(last.states[-1][row, 0], plain.hidden_states[-1][row, column], atol=1e-4)


# --- Hooks and guidance -------------------------------------------------------------------------------------------


class Recorder(StepHook):
    """A hook that shifts positions, hides the first token, and adds its state to the logits."""

    def init(self, history):
        return jnp.zeros(history.length.shape)

    def before(self, state, history, inputs):
        visible = inputs.attention_mask.at[:, 0].set(False)
        moved = dataclasses.replace(inputs, position_ids=inputs.position_ids + 100, attention_mask=visible)
        return moved, state + history.length.astype(state.dtype)

    def after(self, state, history, output):
        return dataclasses.replace(output, logits=output.logits + state[:, None]), state + 1


def hooked(hook=None, **options):
    given = prepared(PROMPTS, COUNTING.replace(**options), extensions=Extensions(hook=hook or Recorder()))
    tokens, rows = begun(given)
    rows = rows.end(jnp.asarray([False, True, False]), jnp.int32(1))
    return given.run, tokens, begin_hook(given.run, rows)


def test_a_hook_changes_the_inputs():
    run, tokens, rows = hooked()
    cache = dataclasses.replace(KVCache.create(COUNTING.model, 3, 4), length=jnp.asarray([2, 0, 1]))
    inputs, after = inputs_of(run, rows, tokens, cache, following=6)
    np.testing.assert_array_equal(inputs.position_ids - 100, np.arange(5)[None] + [[2], [0], [1]])
    assert jnp.argmax(inputs.embeds, axis=-1)[2].tolist() == PROMPTS[2]
    assert inputs.key_mask.shape == (3, 4 + 6)
    assert not inputs.key_mask[:, 0].any()
    assert inputs.key_mask[:, 1:].all()
    assert after.hook[0].tolist() == [3, 0, 5]  # a row that has ended keeps its state


def test_without_a_hook_the_model_reads_ids_or_embeddings():
    given = prepared(PROMPTS)
    tokens, rows = begun(given)
    cache = KVCache.create(COUNTING.model, 3, 4)
    inputs, _ = inputs_of(given.run, rows, tokens, cache)
    assert inputs.ids is tokens.ids
    assert (inputs.embeds, inputs.position_ids, inputs.key_mask, inputs.adapter) == (None,) * 4
    embedded = dataclasses.replace(tokens, embeds=jnp.ones((3, 5, 64)))
    inputs, _ = inputs_of(given.run, rows, embedded, cache)
    assert inputs.embeds is embedded.embeds


def test_each_row_of_both_streams_has_its_adapter():
    given = prepared(PROMPTS, COUNTING.replace(guidance_scale=1.5))
    tokens, rows = begun(given)
    rows = dataclasses.replace(rows, values={**rows.values, "adapter": jnp.asarray([2, 0, 1])})
    inputs, _ = inputs_of(given.run, rows, tokens, KVCache.create(COUNTING.model, 6, 4))
    assert inputs.adapter.tolist() == [2, 0, 1, 2, 0, 1]


def read_of(logits, states=()) -> Forward:
    return Forward(logits, states, ModelOutput(logits), KVCache.create(COUNTING.model, 3, 4))


def test_observe_reads_the_given_column():
    given = prepared(PROMPTS)
    logits = jnp.arange(3 * 2 * 50, dtype=jnp.float32).reshape(3, 2, 50)
    live = jnp.ones(3, bool)
    own, scores, _ = observe(given.run, begun(given)[1], read_of(logits), 1, live)
    assert scores is own
    np.testing.assert_array_equal(own, logits[:, 1])
    own, scores, _ = observe(
        given.run, begun(given)[1], read_of(logits, (logits,)), 1, live, score=lambda x, states: states[0] - 2 * x
    )
    np.testing.assert_array_equal(own, logits[:, 1])
    np.testing.assert_array_equal(scores, -logits[:, 1])


def test_a_hook_changes_the_logits_before_they_are_scored():
    run, _, rows = hooked()
    rows = dataclasses.replace(rows, hook=(jnp.asarray([10.0, 20.0, 30.0]),))
    logits = jnp.zeros((3, 1, 50))
    own, scores, after = observe(run, rows, read_of(logits), 0, jnp.asarray([True, True, False]), lambda x, _: 2 * x)
    assert own[:, 7].tolist() == [10, 20, 30]
    assert scores[:, 7].tolist() == [20, 40, 60]
    assert after.hook[0].tolist() == [11, 21, 30]


def test_guidance_comes_after_the_hook_and_leaves_the_logits_of_the_prompts():
    run, _, rows = hooked(guidance_scale=[2.0, 1.0, 2.0])
    assert [part.shape for part in rows.hook] == [(3,), (3,)]
    rows = dataclasses.replace(rows, hook=(jnp.zeros(3), jnp.zeros(3)))
    logits = jax.random.normal(jax.random.key(0), (6, 1, 50))
    own, scores, _ = observe(run, rows, read_of(logits), 0, jnp.ones(3, bool))
    np.testing.assert_array_equal(own, logits[:3, 0])
    with_prompt, without = jnp.split(jax.nn.log_softmax(logits[:, 0]), 2)
    np.testing.assert_allclose(scores[::2], (without + 2 * (with_prompt - without))[::2], atol=1e-5)
    np.testing.assert_array_equal(scores[1], own[1])


@pytest.mark.parametrize("wrong", [jnp.zeros(2), jnp.int32(0)])
def test_the_first_state_of_a_hook_has_a_row_for_each(wrong):
    hook = Recorder()
    hook.init = lambda history: wrong
    with pytest.raises(InputError, match=r"first axis is the rows, \[3, \.\.\.\]"):
        hooked(hook)
