"""State of rows: the sequences of a prompt share the values of their prompt."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import GenerationConfig, InputError
from jaxgen.core.decoding.continuous.lanes import Lanes
from jaxgen.core.decoding.extensions import Extensions, functions
from jaxgen.core.decoding.loop import prefill
from jaxgen.core.decoding.recording import Recording
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.stop_reasons import StopReason
from tests.support.counting import CFG as COUNTING
from tests.support.models import model_config, random_params
from tests.support.prepared_calls import MESH, begun, prepared

MODEL = model_config(num_hidden_layers=1)
PARAMS = random_params(MODEL)
PROMPTS = np.random.default_rng(0).integers(3, MODEL.vocab_size, (4, 5), np.int32)
KEYS = jax.random.split(jax.random.key(0), 4)


def rows_of(prompts: list[int]) -> Rows:
    """Return two sequences of each of these prompts."""
    cfg = GenerationConfig(
        **{"model": MODEL, "do_sample": True, "num_return_sequences": 2, "max_new_tokens": 4, "pad_token_id": 0},
        **{"temperature": [0.5 + prompt for prompt in prompts], "output_hidden_states": True, "eos_token_id": 1},
    )
    number = np.array(prompts)
    given = prepared(PROMPTS[number].tolist(), cfg, PARAMS, eager=True, key=KEYS[number])
    return _two_of_each(given.run, given.request)


_two_of_each = jax.jit(lambda run, request: prefill(run, request)[0].fork(2))
_insert = jax.jit(Rows.insert)


def assert_equal(rows: Rows, expected: Rows) -> None:
    assert rows.cache_ids is not None
    assert rows.recording.hidden_states is not None
    assert rows.keys is not None
    wanted, structure = jax.tree.flatten(expected)
    assert jax.tree.structure(rows) == structure
    for got, leaf in zip(jax.tree.leaves(rows), wanted, strict=True):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            got, leaf = jax.random.key_data(got), jax.random.key_data(leaf)
        # Products may differ in their last bits if the number of rows differs.
        np.testing.assert_allclose(np.asarray(got).astype(np.float32), np.asarray(leaf).astype(np.float32), atol=1e-5)


def key_data(rows: Rows) -> np.ndarray:
    assert rows.keys is not None
    return np.asarray(jax.random.key_data(rows.keys))


def test_insert_replaces_a_prompt_with_all_its_sequences():
    replaced = _insert(rows_of([0, 1, 2]), rows_of([3, 0]), np.array([2, 3, 4, 5]))
    assert_equal(replaced, rows_of([0, 3, 0]))


def test_insert_ignores_row_numbers_out_of_range():
    replaced = _insert(rows_of([0, 1, 2]), rows_of([3, 1]), np.array([6, 6, 4, 5]))
    assert_equal(replaced, rows_of([0, 1, 1]))


def test_sequences_share_their_prompts_values():
    rows = rows_of([0, 1])
    selected = rows.select(jnp.asarray([1, 0, 3, 3]))
    assert rows.cache_ids is not None
    assert selected.cache_ids is rows.cache_ids
    np.testing.assert_array_equal(key_data(selected), key_data(rows)[[1, 0, 3, 3]])


# --- Small cases by hand ------------------------------------------------------------------------------------------


def begun_rows(prompts, cfg=COUNTING, **inputs):
    given = prepared(prompts, cfg, **inputs)
    return given.run, begun(given)[1]


_push = jax.jit(Rows.push)


def push(run, rows: Rows, tokens: list[int], live=None, failed=None, criteria=(), scores=None) -> Rows:
    if criteria:
        criteria = functions("stopping_criteria", criteria)
        run = dataclasses.replace(run, extensions=Extensions(criteria=criteria))
    live = np.array([True] * rows.count if live is None else live)
    failed = np.array(failed or [0] * rows.count, np.int32)
    scores = np.zeros((rows.count, 50), np.float32) if scores is None else scores
    return _push(rows, run, np.array(tokens, np.int32), failed, live, scores, scores - 1)


def test_rows_begin_with_their_prompts():
    given = prepared([[3], [7, 8, 9], [30, 31], [5]], COUNTING.replace(max_new_tokens=[1, 9, 2, 4]))
    request = dataclasses.replace(given.request, budget=np.array([1, 9, 0, 4], np.int32))
    request.ids[3, -1] = 50
    run = dataclasses.replace(given.run, capacity=6)
    _, rows = begun(dataclasses.replace(given, run=run, request=request))
    assert rows.history.ids.shape == (4, 3 + 6)
    assert rows.history.length.tolist() == [1, 3, 2, 1]
    assert rows.history.budget.tolist() == [1, 6, 0, 4]
    assert rows.reasons.tolist() == [StopReason.NONE, StopReason.NONE, StopReason.LENGTH, StopReason.BAD_ID]
    assert rows.live.tolist() == [True, True, False, False]


def test_push_appends_a_token_and_sets_the_first_stop_reason():
    cfg = COUNTING.replace(max_new_tokens=[1, 2, 1, 3, 3], eos_token_id=[[5], [5], [5], [6], [5]])
    run, rows = begun_rows([[1], [2], [3], [4], [2, 3]], cfg)
    pushed = push(run, rows, [9, 9, 5, 5, 5], live=[True, True, True, True, False])
    assert pushed.history.last(1)[:, 0].tolist() == [9, 9, 5, 5, 3]
    assert pushed.history.step.tolist() == [1, 1, 1, 1, 0]
    assert pushed.reasons.tolist() == [StopReason.LENGTH, StopReason.NONE, StopReason.EOS, StopReason.NONE, 0]
    again = push(run, pushed, [7] * 5)
    assert again.history.step.tolist() == [1, 2, 1, 2, 1]
    assert again.reasons.tolist() == [StopReason.LENGTH, StopReason.LENGTH, StopReason.EOS, 0, 0]


def test_row_without_a_possible_token_ends_without_one():
    run, rows = begun_rows([[1], [2]], COUNTING.replace(output_scores=True))
    rows = dataclasses.replace(rows, recording=Recording(scores=jnp.zeros((2, 6, 50))))
    pushed = push(run, rows, [7, 7], failed=[StopReason.NO_TOKEN, 0])
    assert pushed.history.step.tolist() == [0, 1]
    assert pushed.reasons.tolist() == [StopReason.NO_TOKEN, StopReason.NONE]
    assert pushed.recording.scores[:, 0, 0].tolist() == [-1, -1]  # the failed step's scores are recorded
    assert pushed.recording.scores[:, 1, 0].tolist() == [0, 0]


def test_a_criterion_sees_the_new_token():
    run, rows = begun_rows([[1], [2]])
    pushed = push(run, rows, [7, 8], criteria=[lambda history, scores: history.last(1)[:, 0] == 8])
    assert pushed.reasons.tolist() == [StopReason.NONE, StopReason.CRITERION]
    with pytest.raises(InputError, match=r"must return bool\[2\], one per row, got int32\(2,\)"):
        push(run, rows, [7, 8], criteria=[lambda history, scores: history.length])


@flax.struct.dataclass
class Twice:
    """A replacement for stop strings that ends a row at its second 9. The state is the number of 9s."""

    def begin(self, start, ids, length):
        return start

    def push(self, state, tokens):
        state = state + (tokens == 9).astype(jnp.int32)
        return state, state == 2


def test_push_advances_stop_strings():
    run, rows = begun_rows([[1], [2], [3]])
    run = dataclasses.replace(run, extensions=Extensions(stop_strings=Twice()))
    history = dataclasses.replace(rows.history, grammar=np.zeros(3, np.int32))
    rows = dataclasses.replace(rows, history=history, stop_strings=np.array([0, 1, 1], np.int32))
    pushed = push(run, rows, [9, 9, 9], live=[True, True, False])
    assert pushed.stop_strings.tolist() == [1, 2, 1]
    assert pushed.reasons.tolist() == [StopReason.NONE, StopReason.STOP_STRING, StopReason.NONE]
    # State 0 means no stop strings. With lanes, the search is skipped when all live rows have state 0.
    mixed = dataclasses.replace(rows, lanes=Lanes(np.zeros(3, bool), None, ()))
    assert push(run, mixed, [9, 9, 8], live=[True, False, True]).stop_strings.tolist() == [1, 1, 1]
    assert push(run, mixed, [9, 9, 9], live=[True, False, False]).stop_strings.tolist() == [0, 1, 1]


@pytest.mark.parametrize("source", ["scores", "logits"])
def test_push_records_log_probabilities(source):
    run, rows = begun_rows([[1], [2]], COUNTING.replace(output_logprobs=source, top_logprobs=2))
    scores = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)
    pushed = push(run, rows, [7, 8], live=[True, False], scores=scores)
    used = scores[0] - (source == "scores")
    expected = np.asarray(used - np.log(np.exp(used).sum()))
    logprobs = jax.tree.map(np.asarray, pushed.logprobs)
    np.testing.assert_allclose(logprobs.logprobs[:, 0], [expected[7], 0], atol=1e-5)
    assert logprobs.top_tokens[0, 0].tolist() == np.argsort(-expected)[:2].tolist()
    assert not logprobs.logprobs[:, 1:].any()
    unlogged = dataclasses.replace(rows, lanes=Lanes(np.zeros(2, bool), np.array([False, True]), ()))
    assert not np.asarray(push(run, unlogged, [7, 8], live=[True, False]).logprobs.logprobs).any()


@pytest.mark.slow
def test_all_tokens_include_cached_and_generated_ones():
    run, rows = begun_rows([[1], [7, 8, 9]])
    assert rows.all_tokens(6)[:, :3].tolist() == [[1, 0, 0], [7, 8, 9]]
    forked = rows.fork(2)
    forked = push(run, push(run, forked, [20, 21, 22, 23]), [30, 31, 32, 33], live=[True, False, True, True])
    tokens, count = forked.all_tokens(6).tolist(), forked.history.total_length.tolist()
    known = [row[:length] for row, length in zip(tokens, count, strict=True)]
    assert known == [[1, 20, 30], [1, 21], [7, 8, 9, 22, 32], [7, 8, 9, 23, 33]]
    assert dataclasses.replace(rows, cache_ids=None).all_tokens(6) is None


def test_sequence_key_does_not_depend_on_the_number_of_sequences():
    cfg = COUNTING.replace(do_sample=True)
    _, rows = begun_rows([[1], [2]], cfg, key=jax.random.key(0))
    forked = key_data(rows.fork(3))
    for number in range(3):
        alone = key_data(rows.sequence(jnp.full(2, number)))
        np.testing.assert_array_equal(alone, forked[number::3])


def test_rows_added_for_a_mesh_have_ended():
    run, rows = begun_rows([[1], [2], [3]])
    padded = rows.pad(dataclasses.replace(run, mesh=MESH))
    assert padded.live.tolist() == [True, True, True, False]
    assert padded.reasons.tolist() == [0, 0, 0, StopReason.LENGTH]
    assert padded.history.ids[:, 0].tolist() == [1, 2, 3, 1]
