"""A regular expression as a table over bytes, read back from outlines-core, which compiles it for single bytes.

A text must match as a whole. outlines-core instead searches for the match that it prefers: it ends `a|ab` after the a,
and `[0-9]+(\\.[0-9]+)?` after the first digits. The pattern is therefore compiled as `\\x00\\x00(?:pattern)\\z|`:

- The anchor `\\z` makes every match end with the text.
- The two NUL bytes come before every text, so that the empty text can match too.
- The empty alternative is preferred to a match that begins later. Without it, some patterns have exponentially many
  states, such as `x[^a]{1,40}b`.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from jaxgen.errors import InputError

BYTES = 256
END, START = 256, 257  # outlines-core's tokens after those of the bytes
# An escaped character, or a class in brackets. A class inside a class leaves a "]" in the rest, which is harmless.
_ESCAPE_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ANCHORS = ("^", "$", r"\A", r"\z")


class ByteAutomaton(NamedTuple):
    """Deterministic automaton in which every state can be reached and leads to an accepting one.

    `table int32[S, 256]` is the state after each byte, -1 for none; `accepting` is bool[S].
    """

    table: np.ndarray
    accepting: np.ndarray
    start: int


def compile_regex(pattern: str) -> ByteAutomaton:
    """Compile a pattern in the syntax of Rust's `regex` crate; it matches whole texts, in UTF-8.

    Raises:
        InputError: an invalid pattern, one with look-arounds or back-references, or one that matches no text.
    """
    body = unanchored(pattern)
    outlines = _outlines_core()
    vocabulary = outlines.Vocabulary(END, {b"\0\0": [START], **{bytes([byte]): [byte] for byte in range(BYTES)}})
    try:
        index = outlines.Index(rf"\x00\x00(?:{body})\z|", vocabulary)
    except ValueError as error:
        raise InputError(
            f"the pattern {_shown(pattern)} cannot be used: a part of it matches nothing, or it is not a regular "
            "expression of Rust's regex crate (no look-around, no back-reference, no Unicode \\b); "
            f"outlines-core says: {error}"
        ) from error
    transitions = index.get_transitions()
    number = {state: i for i, state in enumerate(transitions)}  # older releases omit states that lead nowhere
    table = np.full((len(number), BYTES), -1, np.int32)
    for state, row in transitions.items():
        targets = {byte: number[target] for byte, target in row.items() if byte < BYTES and target in number}
        table[number[state], list(targets)] = list(targets.values())
    accepting = np.isin(list(number), list(index.get_final_states()))
    start = number.get(transitions[index.get_initial_state()].get(START), -1)
    useful = useful_states(table, accepting, start)
    if not useful.any():
        raise InputError(f"the pattern {_shown(pattern)} matches no text, so nothing could be generated")
    table, accepting, start = restricted(table, accepting, start, useful)
    return _minimal(ByteAutomaton(table, accepting, start))


def unanchored(pattern: str) -> str:
    """Remove a `^` at the start and a `$` at the end, which do not change a whole match, and check the rest.

    The result can be put into a group.

    Raises:
        InputError: other anchors, or a parenthesis that would close the group.
        TypeError: `pattern` is not a str.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern must be a str, got {type(pattern).__name__}")
    body = pattern.removeprefix("^")
    plain = _ESCAPE_OR_CLASS.sub(lambda match: match[0] if match[0] in _ANCHORS else " ", body)
    if plain.endswith("$"):
        body, plain = body[:-1], plain[:-1]
    found = [anchor for anchor in _ANCHORS if anchor in plain]
    if found:
        raise InputError(
            f"the pattern {_shown(pattern)} has {found[0]} inside: leave it out, because a text is always matched from "
            r"start to end (the characters ^ and $ are written \^ and \$)"
        )
    depth = np.cumsum([(character == "(") - (character == ")") for character in plain])
    if depth.size and depth.min() < 0:
        raise InputError(f"the pattern {_shown(pattern)} closes a group that was not opened: escape it, \\)")
    return body


def useful_states(table: np.ndarray, accepting: np.ndarray, start: int) -> np.ndarray:
    """Return the states that can be reached from the start and that lead to an accepting one, bool[S]."""
    states = len(table)
    source, column = np.nonzero(table >= 0)
    source, target = np.divmod(np.unique(source * states + table[source, column]), states)
    return _closure(np.arange(states) == start, source, target) & _closure(accepting, target, source)


def restricted(
    table: np.ndarray, accepting: np.ndarray, start: int, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Remove all states except `kept bool[S]`, and the transitions into the others."""
    number = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1).astype(np.int32)  # -1 stays -1
    return number[table[kept]], accepting[kept], int(number[start])


def distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each distinct row's first occurrence, and for each row the number of its distinct row."""
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
    """Merge states that accept the same texts (Moore): split by acceptance, then by the states after the next byte.

    Classes of states are compared by sums of random numbers. If two sums are ever equal by chance, nothing is merged.
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
