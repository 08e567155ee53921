"""Lines of text files: prompts, or JSON objects with requests or training data."""

from __future__ import annotations

import codecs
import json
from typing import Any, NoReturn

from jaxgen.errors import InputError


def text_lines(source: str, data: bytes) -> list[tuple[int, str]]:
    """Return the lines that are not empty, with their numbers, counted from 1.

    A line ends at `\\n` or `\\r\\n` and nowhere else: other separators, such as U+2028, are part of the text. A
    byte-order mark at the beginning is skipped.

    Raises:
        InputError: a line that is not UTF-8; the message begins with `source` and its number.
    """
    lines = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{source}, line {number}: not UTF-8: {error.reason} at byte {error.start + 1}") from error
        if text.strip():
            lines.append((number, text))
    return lines


def json_line(text: str) -> Any:
    """Return the value of a line of JSON.

    Raises:
        InputError: it is not valid JSON, is nested too deeply, or a string has half of a surrogate pair.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error.msg} at character {error.pos + 1}") from error
    except UnicodeEncodeError as error:
        raise InputError("a string has half of a surrogate pair, such as \\ud83d: write the whole character") from error
    except RecursionError as error:
        raise InputError("the JSON is nested too deeply") from error
    except ValueError as error:  # a number with thousands of digits
        raise InputError(f"not valid JSON: {error}") from error
    return value


def _refuse(constant: str) -> NoReturn:
    raise InputError(f"not valid JSON: {constant} is not a number")
