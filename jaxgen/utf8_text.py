"""Decode and encode UTF-8 text, and split it into lines."""

from __future__ import annotations

import codecs

from jaxgen.errors import InputError


def decoded(source: str, data: bytes) -> str:
    """Decode UTF-8 text.

    Raises:
        InputError: the data is not UTF-8; the message begins with `source`.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not UTF-8: {error.reason} at byte {error.start + 1}") from error


def encoded(source: str, text: str) -> bytes:
    """Encode text as UTF-8.

    Raises:
        InputError: the text contains an unpaired surrogate; the message begins with `source`.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{source} is not valid Unicode: {error}") from error


def text_lines(source: str, data: bytes) -> list[tuple[int, str]]:
    """Return the lines that are not blank, each with its line number, starting from 1.

    Lines end only at `\\n` or `\\r\\n`; other separators, such as U+2028, are part of the text. A byte-order mark at
    the beginning is skipped.

    Raises:
        InputError: a line is not UTF-8; the message begins with `source` and the line number.
    """
    lines = enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1)
    texts = [(number, decoded(f"{source}, line {number}", line.removesuffix(b"\r"))) for number, line in lines]
    return [(number, text) for number, text in texts if text.strip()]
