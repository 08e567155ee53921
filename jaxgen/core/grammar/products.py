"""Intersections, differences and counts of automata, as expressions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxgen.core.grammar.byte_automaton import (
    BYTES,
    STATES,
    ByteAutomaton,
    Work,
    automaton_of,
    distinct,
    ranges,
    refuse_size,
    restricted,
    useful_part,
    useful_states,
)
from jaxgen.core.grammar.expression import NOTHING, Compiled, Expression, Repeat

MOST_COUNTED = 2**12  # states above which the upper limit of a count is reduced
MOST_PAIRS = 2**24  # maximum number of pairs of states of two automata


def difference(
    items: Iterable[Expression], without: Iterable[Expression], name: str, work: Work | None = None
) -> Expression:
    """Return the expression for the strings that match all of `items` and none of `without`.

    Raises:
        InputError: an automaton is too large; the message refers to the expressions by `name`.
    """
    work = work or Work()
    result = None
    for expression, wanted in [*((item, True) for item in items), *((item, False) for item in without)]:
        other = automaton_of(expression, name, work)
        if other is None:
            if wanted:
                return NOTHING
        elif result is None:
            result = other
        else:
            result = useful_part(_product(result, other, wanted, name, work)[0])
            if result is None:
                return NOTHING
    assert result is not None, "there must be a first item"
    return _frozen(result)


def counted(item: Expression, unit: Expression, low: int, high: int | None, name: str, work: Work) -> Expression:
    """Return the expression for the strings of `item` that consist of `low` to `high` strings of `unit`.

    No string of `unit` may begin with another one. If the automaton would have more than `MOST_COUNTED` states, `high`
    is reduced.
    """
    one, units = automaton_of(item, name, work), automaton_of(Repeat(unit), name, work)
    if one is None or units is None:
        return NOTHING
    product, second = _product(one, units, True, name, work)
    useful = useful_states(*product)
    if not useful[product.start]:
        return NOTHING
    second = second[useful]
    table, accepting, start = restricted(*product, useful)
    size = len(table)
    top = low if high is None else min(high, max(low, MOST_COUNTED // size))
    if size * (top + 1) > STATES:
        refuse_size(name)
    work.spend(size * (top + 1), name)
    whole = np.append(second == units.start, False)
    layers = [np.where(table < 0, -1, table + size * np.where(whole[table], min(layer + 1, top), layer))
              for layer in range(top + 1)]  # fmt: skip
    if high is not None:
        layers[top] = np.where(whole[table], -1, layers[top])
    accepts = np.tile(accepting, top + 1) & (np.arange(size * (top + 1)) >= size * low)
    result = useful_part(ByteAutomaton(np.concatenate(layers).astype(np.int32), accepts, int(start)))
    return NOTHING if result is None else _frozen(result)


def accepts(expression: Expression, text: bytes) -> bool:
    """Return True if a compiled expression matches a text."""
    assert isinstance(expression, Compiled)
    state = 0
    for byte in text:
        targets = [target for first, last, target in expression.moves[state] if first <= byte <= last]
        if not targets:
            return False
        [state] = targets
    return state in expression.accepting


def _product(
    one: ByteAutomaton, other: ByteAutomaton, wanted: bool, name: str, work: Work
) -> tuple[ByteAutomaton, np.ndarray]:
    """Return the automaton for the strings of `one` that `other` accepts, or rejects if `wanted` is False.

    The second result is the state of `other` in each state.
    """
    dead = len(other.table)  # a state of `other` without transitions, from which nothing is accepted
    joint = np.vstack([one.table, np.where(other.table < 0, dead, other.table), np.full((1, BYTES), dead)])
    columns, like = distinct(np.ascontiguousarray(joint.T))
    first, second = joint[: len(one.table), columns], joint[len(one.table) :, columns]
    if len(first) * (dead + 1) > MOST_PAIRS:
        refuse_size(name)
    number = np.full(len(first) * (dead + 1) + 1, -1, np.int32)  # the last entry stands for -1
    front = np.array([one.start * (dead + 1) + other.start])
    number[front], found, rows = 0, [front], []
    count = 1
    while front.size:
        work.spend(front.size * len(columns), name)
        a, b = first[front // (dead + 1)], second[front % (dead + 1)]
        pairs = np.where((a < 0) | ((b == dead) & wanted), -1, a * (dead + 1) + b)
        rows.append(pairs)
        new = np.unique(pairs[pairs >= 0])
        front = new[number[new] < 0]
        number[front] = np.arange(count, count + len(front))
        count += len(front)
        found.append(front)
        if count > STATES:
            refuse_size(name)
    states = np.concatenate(found)
    second_states = states % (dead + 1)
    right = np.append(other.accepting, False)[second_states] == wanted
    table = number[np.concatenate(rows)]
    return ByteAutomaton(table[:, like], one.accepting[states // (dead + 1)] & right, 0), second_states


def _frozen(automaton: ByteAutomaton) -> Expression:
    """Return the expression for an automaton's strings."""
    table, accepting, start = automaton
    order = np.concatenate([[start], np.delete(np.arange(len(table)), start)])  # the start becomes state 0
    number = np.append(np.argsort(order), -1)
    table = number[table[order]]
    moves: list[list[tuple[int, int, int]]] = [[] for _ in table]
    state, low, high = ranges(table)
    for row, first, last, target in zip(
        *(part.tolist() for part in (state, low, high, table[state, low])), strict=True
    ):
        moves[row].append((first, last, target))
    return Compiled(tuple(map(tuple, moves)), frozenset(np.flatnonzero(accepting[order]).tolist()))
