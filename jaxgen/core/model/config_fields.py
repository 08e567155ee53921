"""Fields of config.json, each with its type, range and default, and the function that checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxgen.errors import shown

FULL, SLIDING = "full_attention", "sliding_attention"  # the types of layers: without and with a window
REQUIRED: Any = object()
_LARGEST_WHOLE = 2**31 - 1  # positions and ids are int32
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127  # numbers in this range are normal in float32


@dataclasses.dataclass(frozen=True)
class Field:
    """One key of a config.json.

    Attributes:
        wanted: the valid values, in words that complete "must be ...".
        fits: returns True if a value (never null) is valid.
        default: the value for a missing or null key; with `REQUIRED`, such a key is an error.
        read: converts a valid value, such as an int to a float.
    """

    wanted: str
    fits: Callable[[Any], bool]
    default: Any = REQUIRED
    read: Callable[[Any], Any] = lambda value: value


def whole(least: int, default: Any = REQUIRED, most: int = _LARGEST_WHOLE) -> Field:
    """Return a field for an integer from `least` to `most`."""
    limit = f"<= {most}" if most < _LARGEST_WHOLE else "< 2**31"
    wanted = f"a whole number >= {least} and {limit}"
    return Field(wanted, lambda value: type(value) is int and least <= value <= most, default)


def positive(default: Any = REQUIRED) -> Field:
    """Return a field for a number above 0 that float32 can store."""
    return Field(
        "a number > 0 that fits into float32", lambda value: _is_number(value, _SMALLEST, _LARGEST), default, float
    )


def fraction(default: float) -> Field:
    """Return a field for a number from 0 to 1."""
    return Field("a number from 0 to 1", lambda value: _is_number(value, 0, 1), default, float)


def flag(default: Any = REQUIRED) -> Field:
    """Return a field for a boolean."""
    return Field("true or false", lambda value: type(value) is bool, default)


def only(value: bool) -> Field:
    """Return an optional field with a single valid value."""
    return Field("true" if value else "false", lambda given: given is value, value)


def one_of(names: Iterable[str]) -> Field:
    """Return a field whose value must be one of `names`."""
    names = tuple(names)
    return Field(f"one of {', '.join(names)}", lambda value: value in names)


def list_of(names: tuple[str, ...]) -> Field:
    """Return an optional field whose value is a list of strings from `names`."""

    def fits(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(name in names for name in value)

    return Field(f"a list of {', '.join(names)}", fits, None)


def numbers() -> Field:
    """Return a field for a list of numbers above 0."""

    def fits(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(_is_number(number, _SMALLEST, _LARGEST) for number in value)

    return Field("a list of numbers > 0", fits, read=lambda value: tuple(map(float, value)))


def read_fields(fields: Mapping[str, Field], config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the valid values, with defaults filled in, and a list of the problems."""
    values: dict[str, Any] = {}
    problems = []
    missing = [name for name, field in fields.items() if field.default is REQUIRED and config.get(name) is None]
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    for name, field in fields.items():
        value = config.get(name)
        if value is None:
            values[name] = field.default
        elif field.fits(value):
            values[name] = field.read(value)
        else:
            problems.append(f"{name} must be {field.wanted}, got {shown(value)}")
    return values, problems


def _is_number(value: Any, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most  # Python compares ints and floats exactly
