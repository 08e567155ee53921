"""Fields of config.json: the type, range and default of each, and the check that all of them share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

REQUIRED: Any = object()


@dataclasses.dataclass(frozen=True)
class Field:
    """One key of a config.json.

    Attributes:
        wanted: the valid values in words that complete "must be ...".
        fits: tells whether a value (never null) is valid.
        default: the value if the key is missing or null; with `REQUIRED` that is an error.
    """

    wanted: str
    fits: Callable[[Any], bool]
    default: Any = REQUIRED


def whole(least: int, default: Any = REQUIRED) -> Field:
    """Whole number that is at least `least`."""
    return Field(f"a whole number >= {least}", lambda value: type(value) is int and value >= least, default)


def positive(default: Any = REQUIRED) -> Field:
    """Finite number above 0."""
    return Field("a number > 0", lambda value: _is_number(value) and value > 0, default)


def fraction(default: Any = REQUIRED) -> Field:
    """Number from 0 to 1."""
    return Field("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1, default)


def flag(default: Any = REQUIRED) -> Field:
    """JSON's true or false."""
    return Field("true or false", lambda value: type(value) is bool, default)


def one_of(names: Iterable[str], default: Any = REQUIRED) -> Field:
    """One of these strings."""
    names = tuple(names)
    return Field(f"one of {', '.join(names)}", lambda value: value in names, default)


def list_of(names: Iterable[str], default: Any = REQUIRED) -> Field:
    """List of some of these strings."""
    names = tuple(names)

    def fits(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(name in names for name in value)

    return Field(f"a list of {', '.join(names)}", fits, default)


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
            values[name] = value
        else:
            problems.append(f"{name} must be {field.wanted}, got {value!r}")
    return values, problems


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
