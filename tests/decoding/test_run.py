"""The inputs of a run: the values that belong to each prompt, and the numbers of rows and columns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import StepHook
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.decoding.needs import Needs
from jaxgen.core.decoding.request import Request
from jaxgen.core.decoding.run import Run, is_expanded
from tests.support.counting import CFG
from tests.support.prepared_calls import MESH, prepared

PROMPTS = [[3], [7, 8, 9, 20], [30, 31]]


def run_of(extensions=None, mesh=None, prompts: int = 3, needs: Needs | None = None, **options) -> Run:
    run = prepared([[1]], CFG.replace(**options), extensions=extensions).run
    return dataclasses.replace(run, mesh=mesh, prompts=prompts, capacity=6, needs=needs or Needs(), cached_slots=0)


def request_of(**options) -> Request:
    given = prepared(PROMPTS, CFG.replace(do_sample=True, **options), key=jax.random.key(3))
    return dataclasses.replace(given.request, grammar=jnp.int32(4), stop_strings=jnp.arange(3) + 7)


def test_a_complete_request_has_an_entry_for_each_prompt():
    complete = request_of(temperature=0.5, eos_token_id=[5, 6]).complete()
    assert complete.options["temperature"].tolist() == [0.5] * 3
    assert complete.options["eos_token_id"].tolist() == [[5, 6, -1, -1]] * 3
    assert complete.grammar.tolist() == [4] * 3
    assert complete.stop_strings.tolist() == [7, 8, 9]
    expected = [jax.random.fold_in(jax.random.key(3), prompt) for prompt in range(3)]
    assert (complete.key == jnp.stack(expected)).all()


def test_keys_per_prompt_are_used_unchanged():
    keys = jax.random.split(jax.random.key(1), 3)
    completed = dataclasses.replace(request_of(), key=keys).complete().key
    assert (completed == keys).all()
    assert dataclasses.replace(request_of(), key=None).complete().key is None


def test_selected_prompts_keep_their_values():
    complete = request_of(temperature=[0.5, 0.6, 0.7], max_new_tokens=[1, 2, 3]).complete()
    shared = object()
    selected = dataclasses.replace(complete, cache=shared).select(jnp.asarray([2, 0]))
    assert selected.cache is shared
    assert selected.ids.tolist() == [[0, 0, 30, 31], [0, 0, 0, 3]]
    assert selected.mask.tolist() == [[False, False, True, True], [False, False, False, True]]
    assert selected.budget.tolist() == [3, 1]
    np.testing.assert_allclose(selected.options["temperature"], [0.7, 0.5])
    assert selected.stop_strings.tolist() == [9, 7]
    assert (selected.key == complete.key[jnp.asarray([2, 0])]).all()


@pytest.mark.parametrize(
    ("rows", "prompts", "expected"), [(2, 3, True), (3, 3, True), (1, 3, False), (2, 4, False), (4, 3, False)]
)
def test_cache_is_expanded_when_a_mesh_pads_the_prompts(rows, prompts, expected):
    assert is_expanded(rows, prompts, MESH) is expected
    assert not is_expanded(rows, prompts, None)


def test_changes_scores_depends_on_options_and_processors():
    assert not run_of(eos_token_id=5).changes_scores
    assert run_of(repetition_penalty=1.2).changes_scores
    assert run_of(Extensions(processors=(print,))).changes_scores
    assert not run_of(Extensions(criteria=(print,))).changes_scores


def test_reads_states_depends_on_hook_and_mode():
    assert not run_of().reads_states
    assert run_of(Extensions(hook=StepHook())).reads_states
    assert run_of(needs=Needs(layer_states=True)).reads_states
    assert not run_of(needs=Needs(final_states=True)).reads_states


def test_guidance_is_on_if_it_has_a_scale():
    assert run_of(guidance_scale=1.5).guided
    assert not run_of(guidance_scale=1.0).guided
    assert not run_of().guided


def test_sizes_and_pad_id():
    run = run_of(pad_token_id=9)
    assert (run.capacity, run.prompts, run.model) == (6, 3, CFG.model)
    assert (run.pad_id.dtype, int(run.pad_id)) == (jnp.int32, 9)


@pytest.mark.parametrize("mesh", [None, MESH])
def test_rows_added_for_a_mesh_copy_the_first_row_and_are_removed(mesh):
    run = run_of(mesh=mesh)
    assert (run.prompts, run.padded_prompts) == (3, 3 if mesh is None else 4)
    given = {"a": jnp.asarray([5, 6, 7]), "b": jnp.asarray([[1, 2], [3, 4], [5, 6]])}
    padded = jax.jit(run.pad)(given)
    assert padded["a"].tolist() == [5, 6, 7, 5][: run.padded_prompts]
    assert padded["b"].tolist() == [[1, 2], [3, 4], [5, 6], [1, 2]][: run.padded_prompts]
    jax.tree.map(np.testing.assert_array_equal, run.cut(padded), given)
    sequences = jnp.arange(2 * run.padded_prompts)  # two per prompt
    assert run.cut(sequences).tolist() == [*range(6)]
