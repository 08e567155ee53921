"""Command-line parsing that raises `InputError` instead of exiting the process."""

from __future__ import annotations

import argparse
import difflib
import functools
import ipaddress
import math
import re
import stat
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxgen.core.model.config import DTYPES
from jaxgen.core.model.quantization import CHOICES
from jaxgen.errors import InputError, one_line
from jaxgen.json_file import kind_of, parse_json
from jaxgen.remote import is_url

# Exit statuses of the commands.
FAILED, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


class Help(argparse.HelpFormatter):
    """A formatter that never breaks a line within the name of an option."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises errors, rejects abbreviations, and suggests the closest option for a typo.

    `reason` returns a hint for the error message about an unknown option, or an empty string if there is no hint.
    """

    def __init__(self, reason: Callable[[str], str] = lambda flag: "", **options):
        super().__init__(allow_abbrev=False, formatter_class=Help, **options)
        self.reason = reason

    def error(self, message: str) -> NoReturn:
        """Raise an `InputError` instead of exiting the process."""
        raise InputError(f"{message}; see {self.prog} --help")

    def read(self, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
        """Return the options and the remaining words, or raise an error for an unknown option."""
        words = sys.argv[1:] if arguments is None else arguments
        known = self.flags()
        for word in words[: words.index("--")] if "--" in words else words:
            if f"-{word.partition('=')[0]}" in known and word.startswith("-"):
                raise InputError(f"unknown option {word}: did you mean -{word}?")  # rather than -t "emperature"
        options, rest = self.parse_known_args(words)
        for word in rest:
            if word.startswith("-") and word not in ("-", *known):  # any known option in `rest` comes after "--"
                flag = word.partition("=")[0]
                reason = self.reason(flag)
                hint = f": {reason}" if reason else suggestion(flag, known, f"; see {self.prog} --help")
                raise InputError(f"unknown option {word}{hint}")
        return options, rest

    def flags(self) -> list[str]:
        """Return the names of all options: "-h", "--help", ..."""
        return [name for action in self._actions for name in action.option_strings]


def add_weights(add: Callable[..., Any], dtype: str, quantize: str | None = None) -> None:
    """Add the option --dtype and, if it has a help text, --quantize, by calling `add_argument`."""
    add("--dtype", choices=DTYPES, help=dtype)
    if quantize is not None:
        add("--quantize", choices=CHOICES, help=quantize)


def suggestion(word: str, known: Sequence[str], otherwise: str = "") -> str:
    """Suggest the first known word that starts with `word`, or else the most similar one."""
    longer = [name for name in known if name.startswith(word) and len(word) > 2]
    # Compare words without their leading hyphens or slash, which would make short words too similar.
    bare = {name.lstrip("-/"): name for name in known}
    near = longer or [bare[name] for name in difflib.get_close_matches(word.lstrip("-/"), bare, n=1, cutoff=0.7)]
    return f": did you mean {near[0]}?" if near else otherwise


def whole(text: str, least: int = 1 - 2**31, bits: int = 31) -> int:
    """Parse an integer in the range `least` to 2**bits - 1."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if abs(value) >= 2**bits:
        raise argparse.ArgumentTypeError(f"{text} is out of range: it must be below 2**{bits}")
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
    return value


count, natural = functools.partial(whole, least=1), functools.partial(whole, least=0)


def mesh(text: str) -> tuple[int, int]:
    """Parse the sizes of a mesh, such as 1x8."""
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} must be DATAxMODEL, such as 1x8")
    return int(sizes[0]), int(sizes[1])


def unicode(text: str) -> str:
    """Decode the surrogates in `text` as UTF-8. Surrogates represent bytes that the locale could not decode."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid Unicode") from error


def path(text: str) -> Path:
    """Parse a path. The file need not exist."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a file name")
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text!r} is a URL, which is not offered here: copy it to a file first")
    return Path(text)


def target(text: str) -> Path | str:
    """Parse the path or the URL of a file to write."""
    return text if is_url(text) else path(text)


def named_path(text: str) -> tuple[str, Path]:
    """Parse NAME=DIR into a name and a path."""
    name, _, rest = text.partition("=")
    if not name or not rest:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=DIR")
    return name, path(rest)


def origin(text: str) -> str:
    """Parse the origin of a page, such as http://localhost:3000, or "*" for all origins."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[a-z0-9.\[\]:-]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} must be SCHEME://HOST or SCHEME://HOST:PORT in lower case, or *")
    return text


def host_name(text: str) -> str:
    """Parse a name or an address of a host without its port, such as example.org or ::1, or "*" for all."""
    try:
        is_name = text == "*" or re.fullmatch(r"[\w.-]+", text, re.ASCII) or ipaddress.ip_address(text)
    except ValueError:
        is_name = False
    if not is_name:
        raise argparse.ArgumentTypeError(f"{text!r} must be a name such as example.org, without scheme and port, or *")
    return text


def source(text: str) -> str:
    """Parse a file name or a URL, or "-" for stdin."""
    return text if is_url(text) else str(path(text))


def file(text: str) -> Path:
    """Parse the path of an existing file."""
    try:
        mode = path(text).stat().st_mode
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{one_line(text, 200)}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise argparse.ArgumentTypeError(f"{text} is not a regular file but {kind_of(Path(text))}")
    return Path(text)


def device(text: str) -> tuple[str, int | None]:
    """Parse a platform and an optional device index, such as gpu:1."""
    if not (match := re.fullmatch(r"(cpu|gpu|cuda|rocm|tpu)(?::(\d{1,6}))?", text, re.ASCII)):
        raise argparse.ArgumentTypeError(f"{text!r} must be cpu, gpu or tpu, optionally with a number, such as gpu:1")
    return match[1], None if match[2] is None else int(match[2])


def shard(text: str) -> tuple[int, int]:
    """Parse r/R into the index of a shard and the number of shards."""
    if not (match := re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be r/R, such as 0/8 for the first of 8 shards, with at most 999,999 shards"
        )
    number, count = int(match[1]), int(match[2])
    if count == 0:
        raise argparse.ArgumentTypeError(f"{text}: there must be at least one shard, 0/1")
    if number >= count:
        raise argparse.ArgumentTypeError(f"{text}: the first of {count} shards is 0, and the last is {count - 1}")
    return number, count


def one_of(values: Mapping[str, Any], text: str) -> Any:
    """Return the value in `values` whose name is `text`."""
    if text not in values:
        raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(values)}")
    return values[text]


def layers(text: str) -> str | list[int]:
    """Parse "low", "high" or a comma-separated list of layers."""
    if text in ("low", "high"):
        return text
    try:
        return [whole(layer) for layer in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither low, high nor layers such as 2,4") from None


def json_value(text: str) -> Any:
    """Parse a JSON value, such as a number, a list or an object."""
    try:
        return parse_json(text)
    except InputError as error:
        shown = textwrap.shorten(text, 40, placeholder=" ...")
        raise argparse.ArgumentTypeError(f"{shown!r}: {error}; write a value such as 5 or [1, 2]") from error


def seed(text: str) -> int | None:
    """Parse a seed; see `seed_words`. Return None for "random"."""
    return None if text == "random" else whole(text, least=-(2**63), bits=64)


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and finite")
    return value


def share(text: str) -> float:
    """Parse a number that is at least 0 and below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
