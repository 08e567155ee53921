"""Prompts with more tokens than one pass reads: groups of rows, and rows in pieces."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

from jaxgen import GenerationConfig, KVCache, generate, prefill, shard_params
from jaxgen.core.decoding import passes
from jaxgen.core.decoding.needs import Needs
from jaxgen.core.decoding.passes import TOKENS_PER_PASS, pass_shape, run_prompts
from jaxgen.core.decoding.request import Tokens
from jaxgen.core.model.context import Context
from tests.support.models import all_generated, model_config, random_params
from tests.support.prepared_calls import begun, prepared
from tests.test_meshes import mesh_of_shape

MODEL = model_config(num_hidden_layers=1, max_position_embeddings=16384)
PARAMS = random_params(MODEL)
CFG = GenerationConfig(model=MODEL, max_new_tokens=4, pad_token_id=0)
# 45 rows of 128 columns are 5,760 tokens: two passes, with 23 rows in each, one of them in both.
ROWS, WIDTH = 45, 128


def prompts(rows: int = ROWS, width: int = WIDTH, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return left-padded prompts of different lengths and their mask."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, width + 1, size=(rows, 1))
    lengths[0] = width
    return rng.integers(1, 97, size=(rows, width), dtype=np.int32), np.arange(width) >= width - lengths


# --- The shape of a pass ------------------------------------------------------------------------------------------


def shape_for(rows: int, width: int, model=MODEL, **options) -> tuple[int | None, int]:
    cfg = dataclasses.replace(CFG.replace(**options), model=model)
    run = prepared([[1]], cfg, PARAMS, eager=True).run
    tokens = Tokens(jnp.zeros((rows, width), jnp.int32), jnp.ones((rows, width), bool))
    return pass_shape(run, tokens, KVCache.create(MODEL, rows, 1))


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [
        (8, 512, (None, 512)),
        (9, 512, (5, 512)),
        (64, 2048, (2, 2048)),
        (61, 2048, (2, 2048)),
        (67, 64, (34, 64)),
        (1, 4096, (None, 4096)),
        (1, 16384, (None, 4096)),
        (3, 6144, (1, 3072)),
    ],
)
def test_a_pass_has_at_most_4096_tokens(rows, width, expected):
    assert shape_for(rows, width) == expected
    assert (expected[0] or rows) * expected[1] <= TOKENS_PER_PASS


def test_a_given_piece_size_is_kept():
    assert shape_for(16, 8192, prefill_chunk_size=1024) == (4, 1024)
    assert shape_for(2, 8192, prefill_chunk_size=8192) == (1, 8192)


@pytest.mark.parametrize("output", ["output_hidden_states", "output_attentions"])
def test_rows_whose_columns_are_all_returned_stay_whole(output):
    assert shape_for(2, 8192, return_dict_in_generate=True, **{output: True}) == (1, 8192)


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"model_type": "phi3", "rope_scaling": LONGROPE, "original_max_position_embeddings": 64},
    ],
    ids=["dynamic", "longrope"],
)
def test_rows_whose_rope_depends_on_their_length_stay_whole(changes):
    model = model_config(num_hidden_layers=1, max_position_embeddings=128, **changes)
    assert shape_for(2, 8192, model) == (1, 8192)


# --- What a pass computes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "most"), [(5, 16), (5, 40), (4, 3)], ids=["overlap", "halves", "pieces"])
def test_groups_and_pieces_compute_what_one_pass_does(monkeypatch, rows, most):
    given = prepared([[1] * 8] * rows, CFG, PARAMS)
    needs = Needs(layer_states=True, final_states=True)
    run = dataclasses.replace(given.run, needs=needs, context=Context(divided=False))
    ids, mask = prompts(rows, 8)

    def read(limit: int):
        monkeypatch.setattr(passes, "TOKENS_PER_PASS", limit)

        @jax.jit
        def all_passes(run, request):
            _, state = begun(dataclasses.replace(given, run=run, request=request))
            cache = KVCache.create(MODEL, rows, 8)
            return run_prompts(run, state, Tokens.align(ids, mask), cache, cache_is_empty=True)[0]

        return all_passes(run, given.request)

    whole, parts = read(4096), read(most)
    lengths = mask.sum(axis=1)
    np.testing.assert_array_equal(parts.cache.length, lengths)
    for x, y in zip((whole.logits, *whole.states), (parts.logits, *parts.states), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    for row, length in enumerate(lengths):
        for x, y in zip(whole.cache.layer(0), parts.cache.layer(0), strict=True):
            np.testing.assert_allclose(x[row, :, :length], y[row, :, :length], atol=2e-5)
            assert not np.any(y[row, :, length:])
        np.testing.assert_allclose(whole.hidden[row, :length], parts.hidden[row, :length], atol=2e-5)


# --- Calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 2, "num_return_sequences": 2},
        {"penalty_alpha": 0.6, "top_k": 3},
        {"guidance_scale": 1.5},
        {"prompt_lookup_num_tokens": 3},
        {"cache_dtype": "int8"},
        {"output_hidden_states": True, "return_dict_in_generate": True},
    ],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_a_large_batch_is_answered_like_its_parts(options):
    cfg = CFG.replace(**options)
    ids, mask = prompts()
    out = generate(PARAMS, ids, None, cfg, attention_mask=mask)
    first = generate(PARAMS, ids[:20], None, cfg, attention_mask=mask[:20])
    rest = generate(PARAMS, ids[20:], None, cfg, attention_mask=mask[20:])
    assert all_generated(out) == all_generated(first) + all_generated(rest)
    if out.hidden_states is not None:
        states = (x.hidden_states.prefill for x in (out, first, rest))
        for x, y, z in zip(*states, strict=True):
            np.testing.assert_allclose(x, np.concatenate([y, z]), atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "cached", "expected"),
    [(45, 1, 23), (45, 45, 23), (45, 9, 15), (45, 3, 15), (64, 2, 32), (64, 32, 32), (61, 1, 31)],
)
def test_a_group_has_whole_rows_of_a_shared_prefix(rows, cached, expected):
    run = prepared([[1]], CFG, PARAMS, eager=True).run
    tokens = Tokens(jnp.zeros((rows, WIDTH), jnp.int32), jnp.ones((rows, WIDTH), bool))
    assert pass_shape(run, tokens, KVCache.create(MODEL, cached, 1).fork(rows // cached, WIDTH)) == (expected, WIDTH)


@pytest.mark.parametrize("cached", [1, 3, 9, ROWS])
def test_a_large_batch_continues_a_cache(cached):
    ids, mask = prompts()
    before, before_mask = prompts(cached, 16, seed=1)
    cache = prefill(PARAMS, before, CFG, attention_mask=before_mask)
    out = generate(PARAMS, ids, None, CFG, attention_mask=mask, cache=cache)
    repeated, repeated_mask = (np.repeat(x, ROWS // cached, axis=0) for x in (before, before_mask))
    joined, joined_mask = (np.concatenate(x, axis=1) for x in ((repeated, ids), (repeated_mask, mask)))
    half = slice(0, 20)
    whole = generate(PARAMS, joined[half], None, CFG, attention_mask=joined_mask[half])
    assert all_generated(out)[half] == all_generated(whole)


def test_each_device_reads_its_rows_in_groups():
    params = shard_params(PARAMS, MODEL, mesh_of_shape((2, 1)))
    ids, mask = prompts(2 * ROWS)
    out = generate(params, ids, None, CFG, attention_mask=mask)
    assert all_generated(out) == all_generated(generate(PARAMS, ids, None, CFG, attention_mask=mask))


def test_a_large_batch_inside_shard_map():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    ids, mask = prompts()

    def sequences(params, ids, mask):
        return generate(params, ids, None, CFG, attention_mask=mask).sequences

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 1)
        mapped = jax.shard_map(sequences, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P("data"))
        found = jax.jit(mapped)(PARAMS, ids, mask)
    np.testing.assert_array_equal(found, generate(PARAMS, ids, None, CFG, attention_mask=mask).sequences)


def test_a_long_prompt_is_answered_like_one_pass_over_it():
    ids, _ = prompts(1, 6000)
    out = generate(PARAMS, ids, None, CFG)
    whole = generate(PARAMS, ids, None, CFG.replace(prefill_chunk_size=6144))
    assert all_generated(out) == all_generated(whole)


def test_a_large_batch_draws_the_same_tokens_as_its_parts():
    cfg = CFG.replace(do_sample=True, temperature=0.8)
    ids, mask = prompts()
    keys = jax.random.split(jax.random.key(3), ROWS)
    out = generate(PARAMS, ids, keys, cfg, attention_mask=mask)
    first = generate(PARAMS, ids[:20], keys[:20], cfg, attention_mask=mask[:20])
    assert all_generated(out)[:20] == all_generated(first)
