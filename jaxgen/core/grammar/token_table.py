"""Construction of token automata on the host: follow the tokens' bytes, and store each state's transitions compactly.

Tokens with equal transitions from every state share a class. In most states, few classes are allowed. In the others,
such as those inside a JSON string, almost all classes are allowed, but they lead to few different states. The classes
are numbered so that those that lead to the same states are mostly adjacent. A state's transitions are then a few ranges
of classes. Next states are mostly stored relative to the state, so the states of a bounded repetition share their rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from jaxgen.core.grammar.byte_automaton import ByteAutomaton, distances, distinct, edges, ranges, restricted
from jaxgen.core.grammar.stopping import check_stop
from jaxgen.core.text.tokenizer import Tokenizer, check_tokenizer
from jaxgen.errors import InputError

LARGEST_TABLE = 2**27  # maximum number of states times classes during construction; this many take 256 MB
MOST_CLASSES = 2**16  # maximum number of classes, which are stored as uint16
MOST_WORK = 2**29  # maximum number of transitions followed during construction
LONGEST_PREFIXES = 30_000  # maximum total length of all distinct prefixes, in bytes
COMPLETE = 0  # the state after a prefix
NEVER = 2**30  # the distance of a state from which the text cannot be completed
FAR = 2**20  # added to the next state if it is counted from the automaton's first state
_BEFORE, _AFTER = 64, 2048  # next states in this window are stored relative to the state
_SAMPLE = 128  # the number of states whose transitions determine the order of the classes

_tokens: weakref.WeakKeyDictionary[Tokenizer, Tokens] = weakref.WeakKeyDictionary()


class Tokens(NamedTuple):
    """The bytes that tokens add to the text: token i consists of `buffer[offsets[i] :]`, `lengths[i]` bytes.

    Special tokens and ids without a token have length 0.
    """

    lengths: np.ndarray
    offsets: np.ndarray
    buffer: np.ndarray


class TokenTable(NamedTuple):
    """Automaton over tokens.

    A row of transitions consists of `count[s]` ranges, beginning at index `first[s]`. States may share a row.

    Attributes:
        classes: uint16[V], the class of each token.
        first, count: int32[S], the row of each state.
        accepting: bool[S], True if the text so far is complete.
        shortest: int32[S], the minimum number of tokens needed to complete the text.
        low, high: uint16[n], the first and the last class of each range.
        step: int32[n], the next state, minus the state itself; or the next state plus `FAR`.
        longer: int16[n], `shortest` of the next state, minus that of the state.
        spans: int32[S], the number of ranges of classes that are allowed in each state, whatever the next state.
        span_low, span_high: uint16[n], the first and the last class of these ranges, from index `first[s]`.
        start: the initial state, or an array of initial states.
    """

    classes: np.ndarray
    first: np.ndarray
    count: np.ndarray
    accepting: np.ndarray
    shortest: np.ndarray
    low: np.ndarray
    high: np.ndarray
    step: np.ndarray
    longer: np.ndarray
    spans: np.ndarray
    span_low: np.ndarray
    span_high: np.ndarray
    start: np.ndarray


def tokens_of(tokenizer: Tokenizer, vocab_size: int | None) -> Tokens:
    """Return the tokens' bytes. `vocab_size` is as in `TokenAutomaton.from_regex`."""
    check_tokenizer(tokenizer)
    every = _tokens.get(tokenizer)
    if every is None:
        table = [token or b"" for token in tokenizer.token_bytes()]
        lengths = np.array([len(token) for token in table])
        every = Tokens(lengths, np.cumsum(lengths) - lengths, np.frombuffer(b"".join(table), np.ubyte))
        _tokens[tokenizer] = every
    lengths, offsets, buffer = every
    if vocab_size is None:
        return every
    more = max(vocab_size - len(lengths), 0)
    return Tokens(np.pad(lengths[:vocab_size], (0, more)), np.pad(offsets[:vocab_size], (0, more)), buffer)


def token_table(automaton: ByteAutomaton, tokens: Tokens) -> TokenTable | None:
    """Return the automaton over tokens for an automaton over bytes; None if the tokens can form none of its texts."""
    table, accepting, start = _in_order(automaton)
    classes, transitions = _follow(table, tokens)
    useful, result = compact(classes, transitions, accepting, np.asarray(start))
    return result if useful[start] else None


def prefix_table(prefixes: Sequence[bytes], tokens: Tokens) -> TokenTable:
    """Return the automaton for texts that begin with a prefix, with the initial state of each prefix."""
    table, start = _prefix_bytes(prefixes)
    accepting = np.arange(len(table)) == COMPLETE
    classes, transitions = _follow(table, tokens, ~accepting)
    transitions[COMPLETE] = COMPLETE
    useful, result = compact(classes, transitions, accepting, start)
    for text, possible in zip(prefixes, useful[start], strict=True):
        if not possible:
            raise InputError(f"the prefix {text!r} cannot be written with the tokenizer's tokens: change it")
    return result


def _in_order(automaton: ByteAutomaton) -> ByteAutomaton:
    """Renumber the states in order of their distance from the start, so that parts with equal structure look alike."""
    table, accepting, start = automaton
    following = table[:, distinct(np.ascontiguousarray(table.T))[0]].tolist()
    order, seen = [start], {start, -1}
    for state in order:
        for target in following[state]:
            if target not in seen:
                seen.add(target)
                order.append(target)
    number = np.full(len(table) + 1, -1, np.int32)  # -1 maps to -1
    number[order] = np.arange(len(order))
    return ByteAutomaton(number[table[order]], accepting[order], 0)


def _prefix_bytes(prefixes: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the automaton for texts that begin with a prefix: its table int32[S, 256], and each prefix's first state.

    A prefix has one state per byte; its last byte leads to `COMPLETE`.
    """
    begin, states = {b"": COMPLETE}, COMPLETE + 1
    for prefix in prefixes:
        if prefix not in begin:
            begin[prefix], states = states, states + len(prefix)
    if states > LONGEST_PREFIXES:
        raise InputError(f"the prefixes have {states - 1:,} bytes, more than {LONGEST_PREFIXES:,}: shorten them")
    table = np.full((states, 256), -1, np.int32)
    table[COMPLETE] = COMPLETE
    for prefix, first in begin.items():
        for state, byte in enumerate(prefix, start=first):
            table[state, byte] = state + 1 if state + 1 < first + len(prefix) else COMPLETE
    return table, np.array([begin[prefix] for prefix in prefixes], np.int32)


def _follow(table: np.ndarray, tokens: Tokens, followed: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Follow the bytes of every token from all states at once.

    Return the class of each token, int[V], and the transitions, int16[S, classes].

    States where `followed bool[S]` is False get no outgoing transitions; None means True for all states.

    Every token defines a function from states to states: the composition of the functions of its bytes. Many tokens
    share a function, so each function is stored once, and tokens refer to it by its index. At each byte position,
    tokens with the same function and the same next byte share one composition.
    """
    lengths, offsets, buffer = tokens
    table = table.astype(np.int16)  # an automaton has at most 32,768 states
    bytes_of_kind, kind = distinct(np.ascontiguousarray(table.T))
    step = np.append(table.T[bytes_of_kind], np.full((len(bytes_of_kind), 1), -1, np.int16), axis=1)  # -1 maps to -1

    nowhere, unmoved = np.full(len(table), -1, np.int16), np.arange(len(table), dtype=np.int16)
    if followed is not None:
        unmoved = np.where(followed, unmoved, -1).astype(np.int16)
    number = {nowhere.tobytes(): 0}
    number.setdefault(unmoved.tobytes(), 1)
    functions = [np.frombuffer(function, np.int16) for function in number]
    work = 0
    current = (lengths > 0) * number[unmoved.tobytes()]  # a token without text is never allowed
    going = np.flatnonzero(current)
    for position in range(lengths.max(initial=0)):
        going = going[(lengths[going] > position) & (current[going] > 0)]
        pairs = current[going] * len(step) + kind[buffer[offsets[going] + position]]
        pairs, which = np.unique(pairs, return_inverse=True)
        work += len(pairs) * len(table)
        if work > MOST_WORK:
            _refuse_size(len(table))
        composed = np.empty(len(pairs), np.int64)
        for i, (before, byte) in enumerate(zip(*np.divmod(pairs, len(step)), strict=True)):
            check_stop()
            function = step[byte][functions[before]].tobytes()
            composed[i] = number.setdefault(function, len(functions))
            if composed[i] == len(functions):
                functions.append(np.frombuffer(function, np.int16))
                if len(functions) * len(table) > LARGEST_TABLE:
                    _refuse_size(len(table))
        current[going] = composed[which]
    used, classes = np.unique(current, return_inverse=True)
    if len(used) > MOST_CLASSES:
        _refuse_size(len(table))
    return classes, np.stack([functions[i] for i in used], axis=1)


def compact(
    classes: np.ndarray, transitions: np.ndarray, accepting: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, TokenTable]:
    """Remove useless states, and store the transitions, int16[S, classes], as ranges.

    Return bool[S], True for states that are reachable from a start and lead to an accepting state; and the automaton.
    """
    order = _class_order(transitions)
    columns, like = distinct(np.ascontiguousarray(transitions.T[order]))
    place = np.empty(len(order), np.int64)
    place[order] = like
    classes, transitions = place[classes], transitions[:, order[columns]]
    source, target = edges(transitions)
    shortest = distances(accepting, target, source)
    useful = (shortest >= 0) & (distances(np.isin(np.arange(len(accepting)), start), source, target) >= 0)
    if not useful.all():
        transitions, accepting, start = restricted(transitions, accepting, start, useful)
        shortest = shortest[useful]
    state, low, high = ranges(transitions)
    following = transitions[state, low].astype(np.int32)
    step = following - state
    step = np.where((step >= -_BEFORE) & (step < _AFTER), step, following + FAR)
    rows = np.stack([low, high, step, shortest[following] - shortest[state]], axis=1).astype(np.int32)
    first, count, rows = _shared(rows, np.searchsorted(state, np.arange(len(accepting) + 1)))
    low, high, step, longer = rows.T
    of_range = (
        low.astype(np.uint16),
        high.astype(np.uint16),
        step,
        longer.astype(np.int16),
        *_spans(low, high, first, count),
    )
    start = np.asarray(start, np.int32)
    return useful, TokenTable(classes.astype(np.uint16), first, count, accepting, shortest, *of_range, start)


def _class_order(transitions: np.ndarray) -> np.ndarray:
    """Return the classes, sorted by their transitions from a sample of states, those with most transitions first."""
    count = (transitions >= 0).sum(axis=1)
    states = np.argsort(-count, kind="stable")[: max((count > 16).sum(), 1)]
    sample = states[np.unique(np.linspace(0, len(states) - 1, _SAMPLE).astype(int))]
    return np.lexsort(transitions[sample[::-1]])


def _shared(rows: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Store equal rows once. The row of state s is `rows[bounds[s] : bounds[s + 1]]`.

    Return each row's first index and its number of ranges, as int32[S], and the ranges of all distinct rows.
    """
    seen: dict[bytes, int] = {}
    count = np.diff(bounds).astype(np.int32)
    first, kept, total = np.empty(len(count), np.int32), [], 0
    for state, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        row = rows[begin:end]
        first[state] = seen.setdefault(row.tobytes(), total)
        if first[state] == total and len(row):
            kept.append(row)
            total += len(row)
    return first, count, np.concatenate([*kept, rows[:0]])


def _spans(
    low: np.ndarray, high: np.ndarray, first: np.ndarray, count: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join adjacent ranges of each row; return `spans`, `span_low` and `span_high`."""
    starts = np.unique(first[count > 0])
    is_first = np.isin(np.arange(len(low)), starts)
    begins = is_first | (low != np.append(-1, high[:-1] + 1)[: len(low)])
    ends = np.append(begins[1:], True)[: len(low)]
    row, number = np.cumsum(is_first) - 1, np.cumsum(begins) - 1
    place = (starts - number[starts])[row] + number
    span_low, span_high = np.zeros(len(low), np.uint16), np.zeros(len(low), np.uint16)
    span_low[place[begins]], span_high[place[ends]] = low[begins], high[ends]
    of_row = np.bincount(row[begins], minlength=len(starts))
    spans = np.zeros(len(first), np.int32)
    spans[count > 0] = of_row[np.searchsorted(starts, first[count > 0])]
    return spans, span_low, span_high


def _refuse_size(states: int) -> NoReturn:
    raise InputError(
        f"the automaton has {states} states, with too many kinds of tokens: at most {LARGEST_TABLE} transitions and "
        f"{MOST_CLASSES} kinds are supported; lower the limits of long texts and arrays, shorten long prefixes, or "
        "split the grammar"
    )
