"""Expressions for the numbers of a JSON schema: bounds, multiples and excluded values.

Numbers with bounds have no exponent. A validator reads them as floats, so where a bound is exclusive, they have so few
digits that a number on the right side of the bound is not rounded to the bound.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

from jaxgen.core.grammar import keywords
from jaxgen.core.grammar.byte_automaton import Work
from jaxgen.core.grammar.expression import NOTHING, Compiled, Expression, Text, choice, sequence
from jaxgen.core.grammar.integers import integer_range
from jaxgen.core.grammar.products import difference
from jaxgen.core.grammar.regex import read_regex
from jaxgen.json_file import types_of

LARGEST = 10**keywords.MOST_DIGITS - 1
MOST_DIVISOR = 5_000  # maximum divisor of integers, without factors of 10
MOST_MULTIPLES = 2_000  # maximum number of multiples of a number that is not whole
DIGITS = 15  # decimals with at most so many digits are different floats
INTEGER = "-?(?:0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{{1,2}})?"  # 1e400 is valid JSON, but most programs cannot read it


def numbers(schemas: list[dict[str, Any]], integer: bool, excluded: list[Any], name: str, work: Work) -> Expression:
    """Return the expression for the numbers that are valid against all schemas and are none of `excluded`."""
    low, high = keywords.limits(schemas)
    divisors = [schema["multipleOf"] for schema in schemas if "multipleOf" in schema]
    whole = [int(divisor) for divisor in divisors if divisor == int(divisor)]
    broken = [divisor for divisor in divisors if divisor != int(divisor)]
    unlike = [value for value in excluded if "number" in types_of(value)]
    fractional = any(keywords.BROKEN in schema for schema in schemas)
    if fractional and (integer or whole):
        return NOTHING
    if integer or whole:
        conditions = [_integers(low, high), *(_multiples(divisor) for divisor in whole if divisor > 1)]
        if broken and (NOTHING in conditions or not all(map(_divides_integers, broken))):
            conditions.append(_decimals(low, high, tuple(broken), True))
    elif broken:
        parts = [_decimals(low, high, tuple(broken), False)]
        conditions = [choice([*parts, _integers(low, high)]) if all(map(_divides_integers, broken)) else parts[0]]
    elif low is None and high is None and not unlike and not fractional:
        return read_regex(NUMBER)
    else:
        conditions = _bounded(low, high, bool(unlike or fractional))
    if fractional:
        conditions.append(read_regex(rf"{INTEGER}\.[0-9]*[1-9][0-9]*"))
    if NOTHING in conditions:
        return NOTHING
    if len(conditions) == 1 and not unlike:
        return conditions[0]
    return difference(conditions, [_spellings(value) for value in unlike], name, work)


Bound = tuple[Fraction, bool] | None


def _integers(low: Bound, high: Bound) -> Expression:
    """Return the expression for the integers between two bounds, which have at most `MOST_DIGITS` digits."""
    least = greatest = None
    if low is not None:
        least = max(-LARGEST, math.floor(low[0]) + 1 if low[1] else math.ceil(low[0]))
    if high is not None:
        greatest = min(LARGEST, math.ceil(high[0]) - 1 if high[1] else math.floor(high[0]))
    if (least or 0) > LARGEST or (greatest or 0) < -LARGEST:
        return NOTHING
    if least is not None and greatest is not None and least > greatest:
        return NOTHING
    return integer_range(least, greatest)


@functools.lru_cache(1000)
def _multiples(divisor: int) -> Expression:
    """Return the expression for the multiples of an integer; the states are remainders."""
    zeros = 0
    while divisor % 10 == 0:
        divisor, zeros = divisor // 10, zeros + 1
    if divisor > MOST_DIVISOR or zeros > keywords.MOST_DIGITS:
        keywords.refuse("the schema", f": multipleOf {divisor * 10**zeros} is not supported: use an enum")
    # States: 0 is the start, 1 follows a minus sign, and 2 + r is the remainder r.
    first = tuple((48 + digit, 48 + digit, 2 + digit % divisor) for digit in range(1, 10))
    moves = [((45, 45, 1), *first), first]
    for rest in range(divisor):
        moves.append(tuple((48 + digit, 48 + digit, 2 + (10 * rest + digit) % divisor) for digit in range(10)))
    nonzero = difference([Compiled(tuple(moves), frozenset([2]))], [], "multipleOf")
    return choice(["0", sequence(nonzero, "0" * zeros)])


def _divides_integers(divisor: float) -> bool:
    """Return True if all integers are multiples of a fraction, also when they are divided in floating point."""
    exact = Fraction(repr(divisor))
    error = abs(Fraction(divisor) / exact - 1)
    return exact.numerator == 1 and error <= Fraction(1, 2**54)


@functools.lru_cache(100)
def _decimals(low: Bound, high: Bound, divisors: tuple[float, ...], integer: bool) -> Expression:
    """Return the expression for the first multiples of fractions between two bounds."""
    step = Fraction(math.lcm(*(Fraction(repr(divisor)).numerator for divisor in divisors)),
                    math.gcd(*(Fraction(repr(divisor)).denominator for divisor in divisors)))  # fmt: skip
    if low is not None:
        first, sign = math.floor(low[0] / step) + 1 if low[1] else math.ceil(low[0] / step), 1
    elif high is not None:
        first, sign = math.ceil(high[0] / step) - 1 if high[1] else math.floor(high[0] / step), -1
    else:
        first, sign = 0, 1
    count = MOST_MULTIPLES
    if low is not None and high is not None:
        last = math.ceil(high[0] / step) - 1 if high[1] else math.floor(high[0] / step)
        count = max(0, min(count, last - first + 1))
    places = next((n for n in range(DIGITS) if (step * 10**n).denominator == 1), None)
    if places is None:
        return NOTHING
    scaled = int(step * 10**places)
    found = [_point((first + sign * i) * scaled, places) for i in range(count)]
    options = choice(
        text
        for text in found
        if len(text) <= DIGITS
        and ("." not in text or not integer)
        and all((float(text) / divisor).is_integer() for divisor in divisors)
    )
    return difference([options], [], "multipleOf")


def _point(scaled: int, places: int) -> str:
    """Return the shortest decimal for a number that is divided by 10**places."""
    digits = str(abs(scaled)).rjust(places + 1, "0")
    whole, fraction = digits[: len(digits) - places], digits[len(digits) - places :].rstrip("0")
    return ("-" if scaled < 0 else "") + whole + ("." + fraction if fraction else "")


def _decimal(number: Fraction) -> str | None:
    """Return the shortest decimal for a fraction, or None if it has too many digits."""
    scaled = number * 10**DIGITS
    return _point(int(scaled), DIGITS) if scaled.denominator == 1 and abs(number) < 10**DIGITS else None


def _bounded(low: Bound, high: Bound, exact: bool) -> list[Expression]:
    """Return expressions whose intersection is the decimals between two bounds.

    If `exact` is True, all decimals are different floats.
    """
    conditions: list[Expression] = []
    if low is not None:
        conditions.append(_side(low, False))
    if high is not None:
        conditions.append(_side(high, True))
    limited = [bound for bound in (low, high) if bound is not None and bound[1]]
    if exact:
        conditions.append(read_regex(r"-?(?:0|[1-9][0-9]{0,7})(?:\.[0-9]{1,7})?"))
    elif limited:
        places = DIGITS - max(len(str(int(abs(bound[0])))) for bound in limited)
        fraction = rf"(?:\.[0-9]{{1,{places}}})?" if places > 0 else ""
        conditions.append(read_regex(INTEGER + fraction))
    return conditions


def _side(bound: tuple[Fraction, bool], below: bool) -> Expression:
    """Return the expression for the decimals at most, or at least, as large as a bound, or strictly so."""
    limit, exclusive = bound
    positive = read_regex(_POSITIVE)
    if limit == 0:
        zero = [] if exclusive else [read_regex(r"0(?:\.0+)?")]
        other = _above(limit, True)
        return choice([*zero, sequence("-", other) if below else other])
    if below == (limit > 0):  # zero is on this side of the limit
        inner = _below(abs(limit), exclusive)
        return choice([inner, sequence("-", positive)] if below else [sequence("-", inner), positive])
    inner = NOTHING if abs(limit) >= LARGEST else _above(abs(limit), exclusive)
    return sequence("-", inner) if below else inner


def _parts(limit: Fraction) -> tuple[int, str]:
    """Return the integer part and the digits after the point; a limit is a decimal of limited size."""
    whole = int(limit)
    digits, rest = "", limit - whole
    while rest and len(digits) < 400:
        rest *= 10
        digits += str(int(rest))
        rest -= int(rest)
    return whole, digits


_ANY = "[0-9]*"
_POSITIVE = r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"


def _above(limit: Fraction, exclusive: bool) -> Expression:
    """Return the expression for the decimals >= 0 that are at least a limit >= 0, or above it."""
    whole, digits = _parts(limit)
    larger = sequence(integer_range(whole + 1, None), read_regex(r"(?:\.[0-9]+)?"))
    tails = [f"{digits[:i]}[{int(digit) + 1}-9]{_ANY}" for i, digit in enumerate(digits) if digit != "9"]
    tails.append(f"{digits}0*[1-9]{_ANY}" if exclusive else f"{digits}{_ANY if digits else '[0-9]+'}")
    fraction = rf"\.(?:{'|'.join(tails)})"
    if not digits and not exclusive:
        fraction = f"(?:{fraction})?"
    return choice([larger, sequence(str(whole), read_regex(fraction))])


@functools.lru_cache(1000)
def _below(limit: Fraction, exclusive: bool) -> Expression:
    """Return the expression for the decimals >= 0 that are at most a limit > 0, or below it."""
    if limit > LARGEST:
        limit, exclusive = Fraction(LARGEST + 1), True
    return difference([read_regex(_POSITIVE)], [_above(limit, not exclusive)], "the schema")


def _spellings(value: int | float) -> Expression:
    """Return the expression for all decimals that stand for a number."""
    text = _decimal(keywords.exact(value))
    if text is None:
        return Text(repr(value).encode())
    sign = "-?" if value == 0 else ""
    zeros = "0*" if "." in text else r"(?:\.0+)?"
    return read_regex(sign + text.replace(".", r"\.") + zeros)
