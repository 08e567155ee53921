"""jaxgen's errors, and the category of all its warnings."""

import reprlib
import sys
import warnings
from typing import Any

LONGEST = 2000  # maximum number of characters in a message
LONGEST_VALUE = 100


class JaxgenError(ValueError):
    """Base class of all errors caused by an invalid value; a wrong type raises `TypeError`. The message is one line."""

    def __init__(self, text: object = ""):
        super().__init__(one_line(str(text)))


class ConfigError(JaxgenError):
    """An invalid or unsupported model config or generation config."""


class InputError(JaxgenError):
    """An invalid array or text passed to `generate`, the model or the tokenizer."""


class GenerationError(JaxgenError):
    """A run that could not continue because all tokens were banned or the scores were NaN.

    Attributes:
        output: the `GenerateOutput` of all rows. Failed rows end early, and their stop reasons say why.
    """

    def __init__(self, text: object = "", output: Any = None):
        super().__init__(text)
        self.output = output


class JaxgenWarning(UserWarning):
    """The category of every warning that jaxgen emits."""


def warn(message: str) -> None:
    """Emit a `JaxgenWarning` that points to the innermost caller outside the packages `jaxgen` and `convert`."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("jaxgen", "convert"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, JaxgenWarning, stacklevel=level)


def one_line(text: str, longest: int = LONGEST) -> str:
    """Return `text` as one line of printable characters, truncated to `longest` characters.

    >>> one_line("a\\nb\\x00")
    'a b\\\\x00'
    """
    cut = text[: longest + 1]
    if not cut.isprintable():
        line = " ".join(part.strip() for part in cut.splitlines())
        cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return cut if len(cut) <= longest else f"{cut[: longest - 4]} ..."


class _Shortened(reprlib.Repr):
    """Cheap `repr` that shows only the beginning of a large value."""

    def __init__(self):
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 20
        self.maxstring = self.maxother = 80

    def repr_int(self, value: int, _: int) -> str:
        return repr(value) if abs(value) < 10**40 else f"a number of {value.bit_length()} bits"


_SHORTENED = _Shortened()


def shown(value: object) -> str:
    """Return `repr(value)` on one line, shortened if it is long."""
    return one_line(_SHORTENED.repr(value), LONGEST_VALUE)


def bare(name: str) -> str:
    """Return a name as shown in messages: without quotation marks, unless it is empty."""
    return shown(name)[1:-1] or "''"


def check_whole(
    name: str, value: Any, least: int = 1, most: int | None = None, error: type[JaxgenError] = InputError
) -> int:
    """Return `value` as an int. Raise TypeError if it is not a whole number, or `error` if it is out of range."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {shown(value)}")
    if value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise error(f"{name} must be {limits}, got {value}")
    return int(value)
