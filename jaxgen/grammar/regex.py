"""A regular expression as a table over bytes. outlines-core compiles it; what it makes of single bytes is read back.

Every text is matched whole. outlines-core searches, and prefers: it ends `a|ab` behind the a, and does not pass
through a shorter match, as that of `[0-9]+(\\.[0-9]+)?` behind the first digits. So the pattern gets an end of text
behind it. Two bytes in front let it match the empty text as well, and an empty alternative, which is preferred to a
later start of the search, keeps the states few: for the search `x[^a]{1,40}b` has more than can be counted.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from jaxgen.errors import InputError

BYTES = 256
END, START = 256, 257  # tokens of outlines-core's besides the bytes
# What a backslash escapes, and a class in brackets. A class in a class leaves a "]" behind, which hurts nobody.
_ESCAPE_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ANCHORS = ("^", "$", r"\A", r"\z")


class ByteAutomaton(NamedTuple):
    """A deterministic automaton in which every state can be reached and leads to an accepting one.

    `table int32[S, 256]` holds the state behind each byte, -1 for none; `accepting` is bool[S].
    """

    table: np.ndarray
    accepting: np.ndarray
    start: int


def compile_regex(pattern: str) -> ByteAutomaton:
    """Compile a pattern in the syntax of Rust's `regex` crate; it matches whole texts, in UTF-8.

    Raises InputError for a pattern that is not one, or has look-arounds or back-references, or matches no text.
    """
    body = unanchored(pattern)
    outlines = _outlines_core()
    vocabulary = outlines.Vocabulary(END, {b"\0\0": [START], **{bytes([byte]): [byte] for byte in range(BYTES)}})
    try:
        index = outlines.Index(rf"\x00\x00(?:{body})\z|", vocabulary)
    except ValueError as error:
        raise InputError(
            f"the pattern {_shown(pattern)} cannot be used: a part of it matches nothing, or it is no regular "
            "expression of Rust's regex crate (no look-around, no back-reference, no Unicode \\b); "
            f"outlines-core says: {error}"
        ) from error
    transitions = index.get_transitions()
    number = {state: i for i, state in enumerate(transitions)}  # older releases leave states out that lead nowhere
    table = np.full((len(number), BYTES), -1, np.int32)
    for state, row in transitions.items():
        targets = {byte: number[target] for byte, target in row.items() if byte < BYTES and target in number}
        table[number[state], list(targets)] = list(targets.values())
    accepting = np.isin(list(number), list(index.get_final_states()))
    start = number.get(transitions[index.get_initial_state()].get(START), -1)
    useful = useful_states(table, accepting, start)
    if not useful.any():
        raise InputError(f"the pattern {_shown(pattern)} matches no text; nothing could be generated")
    table, accepting, start = restricted(table, accepting, start, useful)
    return _minimal(ByteAutomaton(table, accepting, start))


def unanchored(pattern: str) -> str:
    """Drop a `^` at the start and a `$` at the end, which say nothing of a whole match, and check the rest.

    So it can stand in a group. Raises InputError for other anchors and for a parenthesis that would close the group.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern is a str, got {type(pattern).__name__}")
    body = pattern.removeprefix("^")
    plain = _ESCAPE_OR_CLASS.sub(lambda match: match[0] if match[0] in _ANCHORS else " ", body)
    if plain.endswith("$"):
        body, plain = body[:-1], plain[:-1]
    found = [anchor for anchor in _ANCHORS if anchor in plain]
    if found:
        raise InputError(
            f"the pattern {_shown(pattern)} has {found[0]} inside; leave it out, a text always matches from its start "
            r"to its end (the characters ^ and $ are written \^ and \$)"
        )
    depth = np.cumsum([(character == "(") - (character == ")") for character in plain])
    if depth.size and depth.min() < 0:
        raise InputError(f"the pattern {_shown(pattern)} closes a group that it has not opened; write \\) for the sign")
    return body


def useful_states(table: np.ndarray, accepting: np.ndarray, start: int) -> np.ndarray:
    """Mark the states that are reached from the start and from which an accepting one is reached, bool[S]."""
    states = len(table)
    source, column = np.nonzero(table >= 0)
    source, target = np.divmod(np.unique(source * states + table[source, column]), states)
    return _closure(np.arange(states) == start, source, target) & _closure(accepting, target, source)


def restricted(
    table: np.ndarray, accepting: np.ndarray, start: int, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Drop all states but `kept bool[S]`, and the transitions into them."""
    number = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1).astype(np.int32)  # -1 stays -1
    return number[table[kept]], accepting[kept], int(number[start])


def distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each distinct row's first occurrence, and for each row the number of its like."""
    seen: dict[bytes, int] = {}
    like = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows], np.int32)
    return np.unique(like, return_index=True)[1], like


def _closure(reached: np.ndarray, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    while True:
        grown = reached.copy()
        grown[target[reached[source]]] = True
        if np.array_equal(grown, reached):
            return grown
        reached = grown


def _minimal(automaton: ByteAutomaton) -> ByteAutomaton:
    """Merge the states that accept the same texts (Moore): split by acceptance, then by what the next byte leads to.

    A state is told apart by a sum of random numbers; should two sums ever be equal by chance, nothing is merged.
    """
    table, accepting, start = automaton
    columns, _ = distinct(np.ascontiguousarray(table.T))
    narrow = table[:, columns]
    random = np.random.default_rng(0)
    weights = random.integers(2**63, size=len(columns), dtype=np.uint64) | np.uint64(1)
    sums, parts = accepting.astype(np.uint64), 0
    while True:
        first, part = np.unique(sums, return_index=True, return_inverse=True)[1:]
        if len(first) == parts:
            break
        parts = len(first)
        name = random.integers(2**63, size=parts + 1, dtype=np.uint64)  # the last is that of -1
        sums = name[part] + (name[np.append(part, -1)[narrow]] * weights).sum(axis=1)
    number = np.append(part, -1).astype(np.int32)  # -1 stays -1
    merged = ByteAutomaton(number[table[first]], accepting[first], int(part[start]))
    exact = np.array_equal(merged.table[part], number[table]) and np.array_equal(merged.accepting[part], accepting)
    return merged if exact else automaton


def _outlines_core() -> Any:
    try:
        import outlines_core
    except ImportError as error:
        raise InputError("constrained text needs outlines-core: pip install 'jaxgen[constrain]'") from error
    return outlines_core


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 200 else f"{pattern[:200]}...")
