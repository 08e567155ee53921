"""UTF-8 encoding of ranges of characters."""

from __future__ import annotations

import functools

Ranges = tuple[tuple[int, int], ...]  # ranges of code points, including both ends; sorted, disjoint, without surrogates


@functools.lru_cache(1000)
def spelled(ranges: Ranges) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return an automaton that matches the UTF-8 bytes of a character in `ranges`.

    The result contains the transitions of each state, as tuples (first byte, last byte, target). State 0 is the start.
    The index after the last state stands for the end of a character.
    """
    rest: dict[tuple[tuple[tuple[int, int], ...], ...], int] = {}
    states: list[list[tuple[int, int, int]]] = []

    def state(spellings: tuple[tuple[tuple[int, int], ...], ...]) -> int:
        if spellings == ((),):
            return -1
        if spellings not in rest:
            rest[spellings] = len(states)
            states.append([])
            after: dict[tuple[int, int], list] = {}
            for spelling in spellings:
                after.setdefault(spelling[0], []).append(spelling[1:])
            moves = [(first, last, state(tuple(rests))) for (first, last), rests in after.items()]
            states[rest[spellings]] = moves
        return rest[spellings]

    state(tuple(spelling for first, last in ranges for spelling in _split(first, last)))
    return tuple(tuple((a, b, len(states) if to < 0 else to) for a, b, to in moves) for moves in states)


def _split(first: int, last: int) -> list[tuple[tuple[int, int], ...]]:
    """Split a range of characters into sequences of byte ranges, with one range for each byte."""
    for limit in (0x7F, 0x7FF, 0xFFFF):
        if first <= limit < last:
            return [*_split(first, limit), *_split(limit + 1, last)]
    if last <= 0x7F:
        return [((first, last),)]
    for bits in (6, 12, 18):
        mask = (1 << bits) - 1
        if first & ~mask != last & ~mask:
            if first & mask:
                return [*_split(first, first | mask), *_split((first | mask) + 1, last)]
            if last & mask != mask:
                return [*_split(first, (last & ~mask) - 1), *_split(last & ~mask, last)]
    return [tuple(zip(chr(first).encode(), chr(last).encode(), strict=True))]
