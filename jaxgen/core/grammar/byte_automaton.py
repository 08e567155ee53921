"""Compilation of expressions to byte-level automata of limited size.

Thompson's construction compiles an expression to a nondeterministic automaton over bytes. The subset construction makes
the automaton deterministic, and equivalent states are merged. Limits are checked during construction, so a small
expression with a huge automaton is rejected early. The error names the part that makes the automaton too large.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jaxgen.core.grammar.expression import (
    Alternatives,
    Characters,
    Compiled,
    Expression,
    Members,
    Part,
    Repeat,
    Sequence,
    Text,
)
from jaxgen.core.grammar.stopping import check_stop
from jaxgen.core.grammar.utf8 import spelled
from jaxgen.errors import InputError

BYTES = 256
# Limits for one automaton. If an automaton reaches all limits, building it takes about a second and 150 MB of memory.
STATES = 2**15
NFA_STATES = 2**16  # maximum number of states in the nondeterministic automaton
WORK = 2_000_000  # maximum number of states and transitions visited while building
HIGHEST = 400  # maximum depth of nested expressions
MANY = 16  # for a repetition with `high >= MANY`, error messages name the enclosing part, not a part of the repetition
MINIMIZE_WORK = 20_000_000  # maximum number of transitions compared; beyond this number, states are not merged


class TooLargeError(InputError):
    """An automaton, or what it is made from, is too large."""


class ByteAutomaton(NamedTuple):
    """Deterministic automaton in which every state is reachable and leads to an accepting state.

    `table int32[S, 256]` maps a state and a byte to the next state, or to -1 if there is none; `accepting` is bool[S].
    """

    table: np.ndarray
    accepting: np.ndarray
    start: int


class Work:
    """Number of states and transitions that may still be visited. Several constructions can share one limit."""

    def __init__(self, most: int = WORK):
        self.left = most

    def spend(self, number: int, name: str) -> None:
        """Count visited states and transitions of the part named `name`."""
        check_stop()
        self.left -= number
        if self.left < 0:
            refuse_size(name)


def compile_expression(expression: Expression, name: str = "the pattern") -> ByteAutomaton:
    """Compile an expression; error messages refer to it by `name`.

    Raises:
        InputError: the expression matches nothing, or its automaton is too large.
    """
    automaton = automaton_of(expression, name, Work())
    if automaton is None:
        raise InputError(f"{name} matches no text, so nothing could be generated")
    return automaton


def automaton_of(expression: Expression, name: str, work: Work) -> ByteAutomaton | None:
    """Return the minimal automaton, or None if the expression matches nothing."""
    if expression.height > HIGHEST:
        raise InputError(f"{name} is nested too deeply: simplify it")
    if expression.size > NFA_STATES:
        refuse_size(_largest(expression, name))
    return useful_part(ByteAutomaton(*_determinized(expression, name, work)))


def useful_part(automaton: ByteAutomaton) -> ByteAutomaton | None:
    """Remove useless states and merge equivalent states; return None if the automaton accepts nothing."""
    useful = useful_states(*automaton)
    return _minimized(ByteAutomaton(*restricted(*automaton, useful))) if useful[automaton.start] else None


def useful_states(table: np.ndarray, accepting: np.ndarray, start: Any) -> np.ndarray:
    """Return bool[S], True for states that are reachable from a start and lead to an accepting state."""
    source, target = edges(table)
    reachable = distances(np.isin(np.arange(len(table)), start), source, target) >= 0
    return reachable & (distances(accepting, target, source) >= 0)


def restricted(
    table: np.ndarray, accepting: np.ndarray, start: Any, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Remove the states where `kept bool[S]` is False, and the transitions into them."""
    number = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1).astype(np.int32)  # -1 maps to -1
    return number[table[kept]], accepting[kept], number[start]


def distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the distinct rows in order of appearance; return their first indices, and each row's number."""
    seen: dict[bytes, int] = {}
    like = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows], np.int32)
    return np.unique(like, return_index=True)[1], like


def edges(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct transitions of a table, as an array of source states and an array of target states."""
    state, low, _ = ranges(table)
    pairs = np.unique(state * len(table) + table[state, low])
    return pairs // len(table), pairs % len(table)


def ranges(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the state, the first and the last column of each range of columns with the same next state."""
    begins = np.ones(table.shape, bool)
    begins[:, 1:] = table[:, 1:] != table[:, :-1]
    at = np.flatnonzero(begins)
    state, low = np.divmod(at, table.shape[1])
    high = np.append(at[1:], table.size) - 1 - state * table.shape[1]
    exists = table[state, low] >= 0
    return state[exists], low[exists], high[exists]


def distances(begin: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return each state's distance from the nearest state in `begin bool[S]`, as int32[S]; -1 if there is no path."""
    order = np.argsort(source, kind="stable")
    follower = target[order]
    first = np.searchsorted(source[order], np.arange(len(begin) + 1))
    distance = np.where(begin, 0, -1).astype(np.int32)
    front, steps = np.flatnonzero(begin), 0
    while front.size:
        check_stop()
        steps += 1
        counts = first[front + 1] - first[front]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        found = follower[np.repeat(first[front], counts) + offsets]
        front = np.unique(found[distance[found] < 0])
        distance[front] = steps
    return distance


def _largest(expression: Expression, name: str) -> str:
    """Follow the largest subexpressions down to a size of `NFA_STATES // 2`; return the innermost `Part`'s name."""
    while parts := expression.parts():
        name = expression.name if isinstance(expression, Part) else name
        expression = max(parts, key=lambda part: part.size)
        if expression.size < NFA_STATES // 2:
            break
    return name


def refuse_size(name: str) -> NoReturn:
    """Raise an error about the part that makes an automaton too large."""
    raise TooLargeError(
        f"{name} is too large: an automaton may have {STATES} states; lower its limits, or split or simplify it"
    )


class _Nfa:
    """Nondeterministic automaton with moves on bytes, and jumps (epsilon transitions).

    `parts` contains the name of the part that each state belongs to.
    """

    def __init__(self, name: str):
        self.jumps: list[list[int]] = []
        self.moves: list[list[tuple[int, int, int]]] = []  # first byte, last byte, target
        self.parts: list[str] = []
        self.name = name
        self.repeated = False  # True inside a large repetition, whose inner parts are not named in error messages

    def state(self) -> int:
        self.jumps.append([])
        self.moves.append([])
        self.parts.append(self.name)
        return len(self.jumps) - 1

    def jump(self, start: int) -> int:
        """Add a jump from `start` to a new state, and return that state."""
        self.jumps[start].append(self.state())
        return self.jumps[start][-1]

    def add(self, expression: Expression, start: int) -> int:
        """Add states for an expression, beginning at `start`; return the last state. No move leads back to `start`."""
        check_stop()
        match expression:
            case Text(text):
                for byte in text:
                    self.moves[start].append((byte, byte, self.state()))
                    start = len(self.moves) - 1
                return start
            case Characters(ranges):
                spellings = spelled(ranges)
                new = [start, *(self.state() for _ in spellings[1:]), self.state()]
                for state, moves in zip(new, spellings, strict=False):
                    self.moves[state] += [(first, last, new[target]) for first, last, target in moves]
                return new[-1]
            case Sequence(items):
                for item in items:
                    start = self.add(item, start)
                return start
            case Alternatives(items):
                end = self.state()
                for item in items:
                    self.jumps[self.add(item, start)].append(end)
                return end
            case Compiled(moves, accepting):
                new = [self.jump(start), *(self.state() for _ in moves[1:]), self.state()]
                for state, targets in zip(new, moves, strict=False):
                    self.moves[state] += [(first, last, new[target]) for first, last, target in targets]
                for state in accepting:
                    self.jumps[new[state]].append(new[-1])
                return new[-1]
            case Repeat():
                return self.repeat(expression, start)
            case Members():
                return self.members(expression, start)
            case Part(name, item):
                outer, self.name = self.name, self.name if self.repeated else name
                start = self.add(item, start)
                self.name = outer
                return start
        raise AssertionError(expression)

    def repeat(self, expression: Repeat, start: int) -> int:
        """Add copies of the item; copies after the first `low` are optional. If `high` is None, the last can repeat."""
        item, low, high, separator = expression.item, expression.low, expression.high, expression.separator
        copies = max(low, 1) if high is None else high
        end = self.state()
        outer, self.repeated = self.repeated, self.repeated or (high or 0) >= MANY
        for number in range(copies):
            if number >= low:
                self.jumps[start].append(end)
            if number and separator is not None:
                start = self.add(separator, start)
            if high is None and number == copies - 1:
                start = self.jump(start)
                again, start = start, self.add(item, start)
                self.jumps[start if separator is None else self.add(separator, start)].append(again)
            else:
                start = self.add(item, start)
        self.jumps[start].append(end)
        self.repeated = outer
        return end

    def members(self, expression: Members, start: int) -> int:
        """Add members. `levels[n]` is the state after n members, of which the last may also stand for more."""
        _, more = expression.counts()
        levels = self._in_any_order(expression, start) if expression.free else self._in_order(expression, start)
        if expression.further is not None:
            levels = [level if level is None else self.jump(level) for level in levels]
            for count, begin in self._beginnings(levels, more, expression.separator).items():
                level = levels[count]
                level = levels[count] = self.state() if level is None else level
                self.jumps[self.add(expression.further, begin)].append(level)
        end = self.state()
        for level in levels[expression.low :]:
            if level is not None:
                self.jumps[level].append(end)
        return end

    def _in_order(self, expression: Members, start: int) -> list[int | None]:
        """Add members in the given order; return the state after each number of them."""
        top, more = expression.counts()
        levels: list[int | None] = [start, *(self.state() for _ in range(top))]
        for item, needed in expression.items:
            following: list[int | None] = [None if needed else level for level in levels]
            for count, begin in self._beginnings(levels, more, expression.separator).items():
                end = self.jump(self.add(item, begin))
                if not needed and (level := levels[count]) is not None:
                    self.jumps[level].append(end)
                following[count] = end
            levels = following
        return levels

    def _in_any_order(self, expression: Members, start: int) -> list[int | None]:
        """Add members, of which the optional ones are in any order; return the state after each number of them.

        A state stands for the number of required members and the set of optional ones that there are.
        """
        top, more = expression.counts()
        needed = [item for item, needed in expression.items if needed]
        optional = [item for item, needed in expression.items if not needed]
        levels: list[int | None] = [None if needed else start, *(self.state() for _ in range(top))]
        hubs = {(0, 0): start}
        for done, used in itertools.product(range(len(needed) + 1), range(2 ** len(optional))):
            count = done + used.bit_count()
            hub, level = hubs.get((done, used)), levels[min(count, top)]
            if hub is None:
                continue  # there would be more members than allowed
            if done == len(needed) and level is not None and level != hub:
                self.jumps[hub].append(level)
            if count == top and not more:
                continue
            options = [((done, used | 1 << i), item) for i, item in enumerate(optional) if not used >> i & 1]
            options += [((done + 1, used), item) for item in needed[done : done + 1]]
            begin = hub if count == 0 else self.add(expression.separator, hub)
            for following, item in options:
                hubs[following] = hubs[following] if following in hubs else self.state()
                self.jumps[self.add(item, begin)].append(hubs[following])
        return levels

    def _beginnings(self, levels: list[int | None], more: bool, separator: Expression) -> dict[int, int]:
        """Return the state in which the next member begins, for each number of members that there are then."""
        begins: dict[int, int] = {}
        for count, level in enumerate(levels):
            following = min(count + 1, len(levels) - 1) if more else count + 1
            if level is None or following == len(levels):
                continue
            begin = begins.setdefault(following, self.state())
            self.jumps[level if count == 0 else self.add(separator, level)].append(begin)
        return begins


def _determinized(expression: Expression, name: str, work: Work) -> tuple[np.ndarray, np.ndarray, int]:
    """Construct the deterministic automaton (subset construction); return its table, accepting states and start."""
    nfa = _Nfa(name)
    start = nfa.state()
    final = nfa.add(expression, start)
    cuts = sorted({0, BYTES, *(cut for moves in nfa.moves for first, last, _ in moves for cut in (first, last + 1))})
    kind = {cut: number for number, cut in enumerate(cuts)}
    moves = [[(kind[first], kind[last + 1], target) for first, last, target in row] for row in nfa.moves]

    sets: list[tuple[int, ...]] = []
    number: dict[tuple[int, ...], int] = {}
    closures: dict[tuple[int, ...], int] = {}
    spent = 0

    def closure(begin: tuple[int, ...]) -> int:
        """Follow jumps from `begin` to the states that read bytes or accept; return the index of this set in `sets`."""
        nonlocal spent
        if begin not in closures:
            seen, rest = set(begin), list(begin)
            while rest:
                new = [target for target in nfa.jumps[rest.pop()] if target not in seen]
                seen.update(new)
                rest += new
            spent += len(seen)
            states = tuple(sorted(one for one in seen if moves[one] or one == final))
            closures[begin] = number.setdefault(states, len(sets))
            if len(number) > len(sets):
                sets.append(states)
        return closures[begin]

    rows = []
    closure((start,))
    for states in sets:
        check_stop()
        row = [-1] * (len(cuts) - 1)
        pieces = [move for state in states for move in moves[state]]
        spent += len(pieces)
        if len(pieces) == 1:
            [(low, high, target)] = pieces
            row[low:high] = [closure((target,))] * (high - low)
        else:
            for low, high, targets in _segments(pieces):
                spent += len(targets)
                row[low:high] = [closure(targets)] * (high - low)
        rows.append(row)
        if len(sets) > STATES or spent > work.left:
            often = collections.Counter(nfa.parts[state] for states in sets[-1000:] for state in states)
            refuse_size(often.most_common(1)[0][0])
    work.left -= spent
    table = np.array(rows, np.int32)
    accepting = np.array([final in states for states in sets])
    return np.repeat(table, np.diff(cuts), axis=1), accepting, 0


def _segments(pieces: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Split ranges (first, end, target) where one of them begins or ends; yield segments with the targets of each."""
    changes: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for low, high, target in pieces:
        changes[low].append((target, 1))
        changes[high].append((target, -1))
    active: dict[int, int] = {}
    ends = sorted(changes)
    for low, high in itertools.pairwise(ends):
        for target, change in changes[low]:
            active[target] = active.get(target, 0) + change
            if not active[target]:
                del active[target]
        if active:
            yield low, high, tuple(sorted(active))


def _minimized(automaton: ByteAutomaton) -> ByteAutomaton:
    """Merge states that accept the same strings (Moore's algorithm).

    States are split into classes by acceptance, and then repeatedly by the classes of their next states. Random hashes
    are used to compare these classes. If two hashes collide, or if merging takes too long, nothing is merged.
    """
    table, accepting, start = automaton
    columns, _ = distinct(np.ascontiguousarray(table.T))
    narrow = table[:, columns]
    random = np.random.default_rng(0)
    weights = random.integers(2**63, size=len(columns), dtype=np.uint64) | np.uint64(1)
    sums, parts, first, part = accepting.astype(np.uint64), 0, np.zeros(0, np.int64), np.zeros(0, np.int64)
    for _ in range(max(MINIMIZE_WORK // narrow.size, 1)):
        check_stop()
        first, part = np.unique(sums, return_index=True, return_inverse=True)[1:]
        if len(first) == parts:
            break
        parts = len(first)
        name = random.integers(2**63, size=parts + 1, dtype=np.uint64)  # the last entry stands for -1 (no next state)
        sums = name[part] + (name[np.append(part, -1)[narrow]] * weights).sum(axis=1)
    else:
        return automaton
    number = np.append(part, -1).astype(np.int32)  # -1 maps to -1
    merged = ByteAutomaton(number[table[first]], accepting[first], int(part[start]))
    exact = np.array_equal(merged.table[part], number[table]) and np.array_equal(merged.accepting[part], accepting)
    return merged if exact else automaton
