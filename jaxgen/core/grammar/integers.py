"""Regular expressions that match the integers in a range."""

from __future__ import annotations

from collections.abc import Iterator

from jaxgen.core.grammar.expression import Characters, Expression, Repeat, choice, sequence


def integer_range(low: int | None, high: int | None) -> Expression:
    """Return the expression for the integers from `low` to `high`, inclusive; None means no bound.

    Each integer has one spelling, without leading zeros; 0 has no sign. The range must not be empty.
    """
    parts: list[Expression | str] = []
    if low is None or low < 0:
        least = max(1, -high) if high is not None else 1
        parts.append(sequence("-", _positive(least, None if low is None else -low)))
    if (low is None or low <= 0) and (high is None or high >= 0):
        parts.append("0")
    if high is None or high > 0:
        parts.append(_positive(max(1, low or 1), high))
    return choice(parts)


def _positive(low: int, high: int | None) -> Expression:
    """Return the expression for the integers from `low` (at least 1) to `high`."""
    if high is not None:
        return choice(_blocks(low, high))
    length = len(str(low))
    return choice([*_blocks(low, 10**length - 1), sequence(_digits(1, 9), Repeat(_digits(0, 9), length))])


def _blocks(low: int, high: int) -> Iterator[Expression]:
    """Split a range into blocks. A block has fixed digits, then a digit from a range, then any digits."""
    while low <= high:
        free, unit = 0, 1
        while low % (10 * unit) == 0 and low + 10 * unit - 1 <= high:
            free, unit = free + 1, 10 * unit
        first = low // unit
        last = min(first // 10 * 10 + 9, (high + 1) // unit - 1)
        fixed = str(first // 10) if first >= 10 else ""
        yield sequence(fixed, _digits(first % 10, last % 10), Repeat(_digits(0, 9), free, free))
        low = (last + 1) * unit


def _digits(first: int, last: int) -> Expression:
    return Characters(((ord("0") + first, ord("0") + last),))
