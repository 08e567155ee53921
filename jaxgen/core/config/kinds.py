"""Kinds of option values. A kind defines the neutral value, and how values are parsed, checked and passed to a program.

This module does not import jax, so that the command can parse its arguments quickly.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from jaxgen.core.config.values import frozen, is_array, is_tracer
from jaxgen.errors import ConfigError, shown

if TYPE_CHECKING:
    import jax

    Number = int | float | np.ndarray | jax.Array
else:
    Number = Any

INT32_MAX = int(np.iinfo(np.int32).max)
_COMPARE = {">": operator.gt, ">=": operator.ge, "<=": operator.le, "<": operator.lt}


class Kind:
    """A kind of option value.

    Attributes:
        traced: True if the value is an argument of the compiled program; otherwise, the value is part of the program.
        type_name: the type as the option reference shows it.
        neutral: the neutral value, at which the option is off; for a static kind, the default.
        per_prompt: True if one value per prompt is allowed.
        ranks: the number of axes of each array in the leaf, not counting an axis for the prompts.
        optional: True if the option accepts None, which stands for a default other than None.
        form: how a command reads the value: as a "flag", "choice", "whole" number, "number", "texts", "layers" or as
            "json".
        values: the allowed values of a "choice".
    """

    traced: bool = False
    type_name: str = ""
    neutral: Any = None
    per_prompt: bool = False
    ranks: Any = 0
    optional: bool = False
    form: str = "json"
    values: tuple[Any, ...] = ()

    def parse(self, name: str, value: Any) -> Any:
        """Return the normal form of a value, with Python numbers where possible; equal values have equal forms.

        If None stands for the default, `Option.parse` converts None to the default without calling this method.

        Raises:
            ConfigError: the value is not allowed.
            TypeError: the value has the wrong type.
        """
        raise NotImplementedError

    @property
    def allowed(self) -> str:
        """A description of the allowed values; empty if the type already describes them."""
        return ""

    def is_off(self, value: Any) -> bool:
        """Return True if a value in normal form is the neutral value."""
        return value is None

    def leaf(self, value: Any) -> Any:
        """Convert a value in normal form to the program's arrays, or to None if it is static. The option must be on."""
        return value

    def prompt_count(self, value: Any) -> int | None:
        """Return the number of prompts if each prompt has its own value, or None if one value serves all prompts."""
        return None

    def tokens(self, value: Any) -> list[int]:
        """Return all token ids in a value, or an empty list for a traced value, whose ids are unknown."""
        return []

    def per_prompt_value(self, values: Iterable[Any]) -> Any:
        """Combine `values`, one per prompt, into one option value."""
        return list(values)

    def off_leaf(self, entries: int, width: int) -> Any:
        """Return the leaf that turns the option off for one prompt in a program where the option is on.

        Tables have `entries` entries of `width` ids each.
        """
        raise NotImplementedError


# --- Static values ----------------------------------------------------------------------------------------------------


class Static(Kind):
    """A value that is part of the program, or that is used on the host."""

    def is_off(self, value: Any) -> bool:
        return not value


class Anything(Static):
    """A value that is not checked."""

    def parse(self, name: str, value: Any) -> Any:
        return frozen(value)


@dataclasses.dataclass(frozen=True)
class Flag(Static):
    """True or False."""

    neutral: bool | None = False
    optional: bool = False
    type_name = "bool"
    form = "flag"

    def parse(self, name: str, value: Any) -> bool:
        value = frozen(value)
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {shown(value)}")
        return value


@dataclasses.dataclass(frozen=True)
class StaticInteger(Static):
    """An integer from `least` to 2**31 - 1."""

    neutral: int | None = None
    least: int = 0
    optional: bool = False
    type_name = "int"
    form = "whole"

    @property
    def allowed(self) -> str:
        return f">= {self.least}"

    def parse(self, name: str, value: Any) -> int:
        value = frozen(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be a whole number, got {shown(value)}")
        if not self.least <= value <= INT32_MAX:
            raise ConfigError(f"{name} must be {self.allowed} and fit into 32 bits, got {shown(value)}")
        return value


class Seconds(Kind):
    """A number of seconds. 0 is a valid limit, so only None means off."""

    type_name = "float"
    form = "number"

    @property
    def allowed(self) -> str:
        return ">= 0"

    def parse(self, name: str, value: Any) -> float:
        value = frozen(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number of seconds, got {shown(value)}")
        if not 0 <= value <= sys.float_info.max:
            raise ConfigError(f"{name} must be >= 0 seconds and finite, got {shown(value)}: leave it out for no limit")
        return value


class OneOf(Static):
    """One of several values, the first of which is the default."""

    form = "choice"

    def __init__(self, *values: Any):
        self.values, self.neutral = values, values[0]
        self.type_name = " or ".join(dict.fromkeys(type(value).__name__ for value in values if value is not None))

    @property
    def allowed(self) -> str:
        *most, last = map(repr, self.values)
        return f"{', '.join(most)} or {last}"

    def parse(self, name: str, value: Any) -> Any:
        value = frozen(value)
        if not any(type(value) is type(known) and value == known for known in self.values):
            raise ConfigError(f"{name} must be {self.allowed}, got {shown(value)}")
        return value


class Layers(Static):
    """The string "low" or "high", or a list of layers, from which duplicates are removed."""

    type_name = "'low', 'high' or list"
    form = "layers"

    def parse(self, name: str, value: Any) -> str | tuple[int, ...]:
        value = frozen(value.tolist() if is_array(value) and not is_tracer(value) else value)
        if value in ("low", "high"):
            return value
        if not isinstance(value, tuple) or not all(type(layer) is int for layer in value):
            raise TypeError(f"{name} must be 'low', 'high' or a list of layers, got {shown(value)}")
        if not value or min(value) < 0:
            raise ConfigError(f"{name} must have at least one layer and no negative numbers, got {list(value)}")
        return tuple(dict.fromkeys(value))


class Text(Static):
    """A string or a list of strings for all prompts, or a list with one entry per prompt.

    Each entry is a list of strings or None.
    """

    type_name = "str or list"
    form = "texts"
    per_prompt = True

    def parse(self, name: str, value: Any) -> Any:
        value = frozen(value)
        several = self.prompt_count(value) is not None
        for strings in self.sets(value):
            if several and strings is None:
                continue
            if not isinstance(strings, tuple) or not all(isinstance(string, str) for string in strings):
                form = "a string, a list of strings, or a list with an entry per prompt, each a list of strings or None"
                raise TypeError(f"{name} must be {form}, got {shown(value)}")
            if not strings or "" in strings:
                remedy = "use None for a prompt without any" if several else "leave it out for no stop strings"
                raise ConfigError(f"{name} must not be empty, got {shown(value)}: {remedy}")
        return value

    def prompt_count(self, value: Any) -> int | None:
        return len(value) if isinstance(value, tuple) and not all(isinstance(x, str) for x in value) else None

    def sets(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple with one entry per prompt (strings or None), or with a single entry for all prompts."""
        if self.prompt_count(value) is not None:
            return value
        return ((value,) if isinstance(value, str) else value,)


# --- Traced values ----------------------------------------------------------------------------------------------------


class Flags(Flag):
    """One static bool for all prompts, or one traced bool per prompt. The leaf is None or bool[B]."""

    traced = per_prompt = True

    def is_off(self, value: Any) -> bool:
        return value is False

    def parse(self, name: str, value: Any) -> Any:
        if isinstance(value, bool | np.bool_):
            return bool(value)
        try:
            array: Any = value if is_tracer(value) else np.asarray(value)
        except ValueError:  # the value is nested unevenly, or too deeply
            array = np.asarray(None)
        if array.dtype != bool or array.ndim != 1:
            raise TypeError(f"{name} must be True or False, or a list of one per prompt, got {shown(value)}")
        return array

    def leaf(self, value: Any) -> Any:
        return None if isinstance(value, bool) else value

    def prompt_count(self, value: Any) -> int | None:
        return None if isinstance(value, bool) else value.shape[0]

    def per_prompt_value(self, values: Iterable[Any]) -> list[bool]:
        return np.ravel(list(values)).tolist()

    def off_leaf(self, entries: int, width: int) -> Any:
        return np.bool_(False)


@dataclasses.dataclass(frozen=True)
class Real(Kind):
    """A finite number, or one per prompt. The leaf is a scalar or `[B]`.

    Attributes:
        also_off: a second value that means off.
        above, least, most, below: bounds; `above` and `below` are exclusive.
        hint: advice for a value outside the bounds.
    """

    neutral: Any = None
    _: dataclasses.KW_ONLY
    also_off: Any = None
    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None
    hint: str = ""
    per_prompt: bool = True
    optional: bool = False
    traced = True
    type_name = "float"
    form = "number"
    array_dtype: ClassVar[type] = np.float32

    def is_off(self, value: Any) -> bool:
        return value is None or (isinstance(value, int | float) and value in (self.neutral, self.also_off))

    def parse(self, name: str, value: Any) -> Any:
        """Return a Python number, an array `[B]` of the right dtype, or the neutral value."""
        if isinstance(value, bool | str | bytes | complex | Mapping):
            raise TypeError(f"{name} must be a number, got {shown(value)}")
        if self.is_off(value):
            return self.neutral
        try:
            array: Any = value if is_tracer(value) else np.asarray(value)
        except ValueError as error:
            raise TypeError(f"{name} must be a number, or one per prompt, got {shown(value)}") from error
        must_be_whole = self.array_dtype is not np.float32
        whole = isinstance(value, int) or np.issubdtype(array.dtype, np.integer)
        real = "float" in array.dtype.name  # includes bfloat16, which numpy does not classify as a floating-point type
        if not whole and (must_be_whole or not real):
            kind = "a whole number" if must_be_whole else "a number"
            raise TypeError(f"{name} must be {kind}, got {shown(value)}")
        if array.ndim > self.per_prompt:
            shape = "one number" + (" or one per prompt, [B]" if self.per_prompt else "")
            raise ConfigError(f"{name} must be {shape}, got shape {list(array.shape)}")
        if is_tracer(value):
            return array.astype(self.array_dtype)
        if must_be_whole and np.any((array > (limits := np.iinfo(self.array_dtype)).max) | (array < limits.min)):
            raise ConfigError(f"{name} must fit into 32 bits, got {shown(value)}")
        given, array = array, _converted(array, self.array_dtype)
        compared = (_COMPARE[sign](array, bound) for sign, bound in self._bounds.items())
        if not all(map(np.all, (np.isfinite(array), *compared))):
            hint, rounded = self.hint and f" ({self.hint})", _rounded(given, array)
            raise ConfigError(f"{name} must be {self.allowed}{hint}, got {shown(value)}{rounded}")
        if array.ndim:
            return array
        number = (int if must_be_whole else float)(value)
        return self.neutral if self.is_off(number) else number

    def leaf(self, value: Any) -> Any:
        return self.array_dtype(value) if isinstance(value, int | float) else value

    def prompt_count(self, value: Any) -> int | None:
        return np.shape(value)[0] if np.ndim(value) else None

    def off_leaf(self, entries: int, width: int) -> Any:
        off = self.also_off if self.neutral is None else self.neutral
        if off is None:
            off = np.inf if self.least is None else self.least
        return self.array_dtype(off)

    @property
    def allowed(self) -> str:
        if (self.least, self.most) == (0, 1):
            return "between 0 and 1"
        signs = [f"{sign} {bound}" for sign, bound in self._bounds.items()]
        limited = self.array_dtype is not np.float32 or self.most is not None or self.below is not None
        return " and ".join(signs if limited else [*signs, "finite"])

    @property
    def _bounds(self) -> dict[str, float]:
        bounds = {">": self.above, ">=": self.least, "<=": self.most, "<": self.below}
        return {sign: bound for sign, bound in bounds.items() if bound is not None}


def _converted(given: np.ndarray, dtype: type) -> np.ndarray:
    """Convert numbers to the program's dtype. Numbers that are too large become infinite."""
    with np.errstate(over="ignore"):
        try:
            return given.astype(dtype)
        except OverflowError:  # a Python number that is too large even for a float64
            return np.asarray(np.inf)


def _rounded(given: np.ndarray, array: np.ndarray) -> str:
    """Return an addition to an error text if a number in `given` became 0 or infinite in the program's dtype."""
    with np.errstate(invalid="ignore"):
        if np.any((array == 0) & (given != 0)):
            return ", which is 0 in float32"
        return ", which is too large for float32" if np.any(np.isinf(array) & (abs(given) < np.inf)) else ""


class Integer(Real):
    """An integer, or one per prompt."""

    type_name = "int"
    form = "whole"
    array_dtype = np.int32


class Unsigned(Integer):
    """An integer from 0 to 2**32 - 1, or one per prompt."""

    array_dtype = np.uint32


class TokenId(Integer):
    """A token id, or one per prompt; None means off."""

    def __init__(self, **fields: Any):
        super().__init__(least=0, **fields)

    def tokens(self, value: Any) -> list[int]:
        return [] if value is None or is_tracer(value) else np.ravel(value).tolist()

    def off_leaf(self, entries: int, width: int) -> Any:
        return np.int32(-1)


class DecayPair(Kind):
    """A pair `(start, factor)`. Each part is one number, or one per prompt. The leaf is `(int32, float32)`."""

    traced = per_prompt = True
    ranks = (0, 0)
    type_name = "(int, float)"
    _start, _factor = Integer(least=0), Real(above=0)

    def parse(self, name: str, value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != 2 or any(part is None for part in value):
            raise ConfigError(f"{name} must be a pair, (start, factor), got {shown(value)}")
        pair = self._start.parse(f"{name}'s start", value[0]), self._factor.parse(f"{name}'s factor", value[1])
        if all(np.ndim(part) for part in pair) and len(pair[0]) != len(pair[1]):
            raise ConfigError(f"{name} must have as many starts as factors, got {len(pair[0])} and {len(pair[1])}")
        return pair

    def leaf(self, value: Any) -> Any:
        return self._start.leaf(value[0]), self._factor.leaf(value[1])

    def prompt_count(self, value: Any) -> int | None:
        return None if value is None else self._start.prompt_count(value[0]) or self._factor.prompt_count(value[1])

    def per_prompt_value(self, values: Iterable[Any]) -> Any:
        return tuple(map(list, zip(*values, strict=True)))

    def off_leaf(self, entries: int, width: int) -> Any:
        return np.int32(INT32_MAX), np.float32(1)
