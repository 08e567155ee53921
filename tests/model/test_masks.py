"""Positions of new tokens and visibility, compared with plain loops over tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import KVCache
from jaxgen.core.model.cache import EMPTY
from jaxgen.core.model.masks import Visibility, allocate_slots, first_of_segment, hide_keys, place, row_order
from tests.support.models import model_config


def visible(query: int, key: int, window: int | None, first: int) -> bool:
    """Return whether one query sees one key."""
    return first <= key <= query and (window is None or query - key < window)


@st.composite
def visibilities(draw):
    """Draw two rows with three queries and five keys, with and without a window and segments."""
    orders = st.integers(-1, 7)
    queries = draw(st.lists(orders, min_size=6, max_size=6))
    keys = draw(st.lists(st.one_of(orders.filter(lambda n: n >= 0), st.just(int(EMPTY))), min_size=10, max_size=10))
    first = draw(st.none() | st.lists(st.integers(0, 5), min_size=6, max_size=6))
    window = draw(st.none() | st.integers(1, 5))
    shaped = [None if x is None else jnp.asarray(x, jnp.int32).reshape(2, -1) for x in (queries, keys, first)]
    return Visibility(shaped[0], (shaped[1],), shaped[2], window)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(visibilities())
def test_mask_follows_the_rule_and_span_covers_it(seen):
    queries, keys = np.asarray(seen.queries), np.asarray(seen.keys[0])
    first = np.zeros_like(queries) if seen.first is None else np.asarray(seen.first)
    wanted = [
        [[visible(queries[b, t], keys[b, s], seen.window, first[b, t]) for s in range(5)] for t in range(3)]
        for b in range(2)
    ]
    np.testing.assert_array_equal(seen.mask(0), wanted)
    slots = np.flatnonzero(np.any(wanted, axis=(0, 1)))
    begin, end = (int(x) for x in seen.span(0))
    if len(slots):
        assert begin <= slots[0]
        assert end > slots[-1]
    start = 2
    np.testing.assert_array_equal(seen.of_keys(0, start, 3).mask(0), np.asarray(wanted)[:, :, start:])
    np.testing.assert_array_equal(seen.of_row(jnp.int32(1)).mask(0)[0], np.asarray(wanted)[1])


def test_a_span_is_the_filled_part_or_the_window():
    keys = jnp.where(jnp.arange(100) < 30, jnp.arange(100), EMPTY)[None]
    step = Visibility(jnp.asarray([[29]]), (keys,))
    assert [int(x) for x in step.span(0)] == [0, 30]
    assert [int(x) for x in Visibility(step.queries, (keys,), window=8).span(0)] == [22, 30]
    begin, end = Visibility(jnp.asarray([[-1]]), (keys,)).span(0)
    assert end <= begin


def test_query_blocks_are_padded_with_the_last_query():
    queries, first = Visibility(jnp.arange(5)[None], (), jnp.arange(5)[None] - 2).query_blocks(3)
    assert queries.tolist() == [[[0, 1, 2]], [[3, 4, 4]]]
    assert first.tolist() == [[[-2, -1, 0]], [[1, 2, 2]]]


def test_padding_is_not_counted_in_the_order_and_is_not_a_key():
    mask = jnp.asarray([[False, True, True, False, True]])
    assert row_order(mask, jnp.asarray([3])).tolist() == [[2, 3, 4, 4, 5]]
    placement, _, _ = place(model_config(), jnp.zeros((1, 5, 32)), mask, None, None, None, None, None)
    assert placement.visible.keys[0].tolist() == [[EMPTY, 0, 1, EMPTY, 2]]


def test_hidden_keys_become_empty_and_later_keys_stay():
    order = jnp.asarray([[0, 1, 2, 3, EMPTY]], jnp.int32)
    assert hide_keys(jnp.asarray([[True, False]]), order).tolist() == [[0, EMPTY, 2, 3, EMPTY]]


def test_segments_begin_where_the_number_changes():
    order = jnp.arange(6)[None]
    assert first_of_segment(order, jnp.asarray([[1, 1, 2, 2, 1, 1]])).tolist() == [[0, 0, 2, 2, 4, 4]]


@pytest.mark.parametrize("position", [None, [5, 3]])
def test_new_tokens_use_the_next_slots_of_their_row_and_padding_uses_none(position):
    cache = KVCache.create(model_config(), 2, 8).replace(length=jnp.asarray([5, 3], jnp.int32))
    mask = jnp.asarray([[True, True], [False, True]])
    position = None if position is None else jnp.asarray(position)
    cache, order, slots, misplaced = allocate_slots(cache, position, mask)
    assert cache.length.tolist() == [7, 4]
    assert np.asarray(order)[np.asarray(mask)].tolist() == [5, 6, 3]
    assert slots[0].tolist() == [5, 6]
    assert slots[1, 1] == 3
    assert slots[1, 0] >= 8
    assert misplaced.tolist() == [False, False]
