"""Progress through constraints, compared with plain Python lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen.core.config.constraints import ForcedWords
from jaxgen.core.decoding.constraints import ConstraintAutomaton
from tests.support.models import slow


def follow(words, tokens):
    """Return the pending words, the word in progress (or None), its matched tokens, and the number of words met."""
    pending, current, matched, met = list(words), None, [], 0
    for token in tokens:
        longer = [*matched, token]
        tried = pending if current is None else [current]
        found = next((word for word in tried if any(a[: len(longer)] == longer for a in word)), None)
        if found is None:
            pending += [] if current is None else [current]
            current, matched = None, []
            continue
        if current is None:
            pending.remove(found)
        current, matched = found, longer
        if matched in found:
            current, matched, met = None, [], met + 1
    return pending, current, matched, met


def bank_of(words, tokens):
    _, current, matched, met = follow(words, tokens)
    return met * longest(words) + (longest(words) - len(max(current, key=len)) + len(matched) if current else 0)


def longest(words):
    return max(len(phrase) for word in words for phrase in word)


def proposals_of(words, tokens):
    """Map each token that makes progress to its bank, which transformers computes from a list that all tokens share."""
    pending, current, matched, met = follow(words, tokens)
    if current is None:
        return {a[0]: bank_of(words, [*tokens, a[0]]) for word in pending for a in word}
    shared, after = list(matched), {}
    for token in dict.fromkeys(a[len(matched)] for a in current if a[: len(matched)] == matched):
        after[token] = "broken"
        if any(a[: len(shared) + 1] == [*shared, token] for a in current):
            shared.append(token)
            after[token] = "met" if shared in current else "continues"
    most = longest(words)
    progress = {"broken": 0, "met": most, "continues": most - len(max(current, key=len)) + len(shared)}
    return {token: met * most + progress[how] for token, how in after.items()}


def table_of(words):
    return ConstraintAutomaton(jnp.asarray(ForcedWords().leaf(ForcedWords().parse("words", words))))


def draw_words(rng):
    words = []
    for _ in range(rng.integers(1, 5)):
        word = []
        for _ in range(rng.integers(1, 5)):
            phrase = rng.integers(1, 4, rng.integers(1, 5)).tolist()
            if all(phrase[: len(old)] != old[: len(phrase)] for old in word):
                word.append(phrase)
        words.append(word)
    return words


@functools.partial(jax.jit, static_argnames="count")
def observe(table, ids, length, count):
    state = table.begin(ids, length)
    tokens = table.proposals(state)
    forked = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), state)
    pushed = table.push(forked, tokens.reshape(-1), tokens.reshape(-1) >= 0)
    banks = table.proposed_banks(state, table.banks(pushed).reshape(tokens.shape))
    return table.banks(state), state.all_met, state.met, tokens, banks


@pytest.mark.parametrize("seed", slow(0, 1, 2))
def test_progress_matches_the_reference_for_random_texts(seed):
    rng = np.random.default_rng(seed)
    broken = 0
    for _ in range(40):
        words = draw_words(rng)
        ids = np.pad(rng.integers(1, 5, (8, 12)).astype(np.int32), ((0, 0), (0, 4)), constant_values=2)
        length = rng.integers(0, 13, 8).astype(np.int32)
        table = table_of(words)
        count = table.ids.shape[0] * table.ids.shape[1]
        banks, complete, met, tokens, proposed = map(np.asarray, observe(table, ids, length, count))
        for row in range(8):
            text = ids[row, : length[row]].tolist()
            pending, current, _, expected = follow(words, text)
            assert (banks[row], met[row]) == (bank_of(words, text), expected)
            assert complete[row] == (not pending and current is None)
            pairs = {(int(t), int(b)) for t, b in zip(tokens[row].ravel(), proposed[row].ravel(), strict=True) if t > 0}
            wanted = proposals_of(words, text)
            # If several alternatives continue with the same token, transformers lists only the first.
            assert {token for token, _ in pairs} == wanted.keys()
            assert set(wanted.items()) <= pairs
            broken += len(wanted) > 1 and min(wanted.values()) < bank_of(words, text)
    assert broken > 5  # how often the shared list matters


def test_a_broken_phrase_goes_to_the_end_of_the_queue():
    table = table_of([[5, 6], [5, 7], [8]])
    state = jax.jit(ConstraintAutomaton.begin)(table, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    push = jax.jit(ConstraintAutomaton.push)
    for token, current in [(5, 0), (9, -1), (5, 1), (7, -1), (8, -1), (5, 0), (5, -1), (5, 0), (6, -1)]:
        state = push(table, state, jnp.asarray([token]), jnp.asarray([True]))
        assert state.current.tolist() == [current]
    assert state.all_met.tolist() == [True]
    assert state.met.tolist() == [3]


def test_rows_that_are_not_live_are_unchanged():
    table = table_of([[5, 6]])
    begin = jax.jit(ConstraintAutomaton.begin)(table, jnp.asarray([[5], [5]]), jnp.asarray([1, 1]))
    state = jax.jit(ConstraintAutomaton.push)(table, begin, jnp.asarray([6, 6]), jnp.asarray([True, False]))
    assert state.met.tolist() == [1, 0]
    assert state.current.tolist() == [-1, 0]
