"""Read untrusted tokenizer.json files. Damaged files can make the Rust library panic or use up all memory."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxgen.errors import ConfigError, JaxgenError
from jaxgen.json_file import json_object, read_file

LARGEST = 50_000_000  # maximum bytes in a file; the largest known file is 35 MB
_MOST_ADDED = 1000  # maximum number of tokens added to a text, such as BOS and EOS
_MOST_GROWTH = 1000  # factor by which a normalizer or decoder may lengthen the text
# The Rust library does not validate the table under the key `precompiled_charsmap`. In a JSON file, letters of the key
# may be written as escapes, such as `\u0070` for "p".
_CHARSMAP, _ESCAPE = b"precompiled_charsmap", re.compile(rb"\\u00[2-7]")


def read_backend(file: Path) -> tokenizers.Tokenizer | None:
    """Return the tokenizer in a tokenizer.json, or None if the file does not exist.

    Raises:
        ConfigError: the file is damaged.
    """
    data = read_file(file, LARGEST)
    if data is None:
        return None
    if _CHARSMAP in data or _ESCAPE.search(data):
        _check_charsmaps(file, json_object(str(file), data))
    with library_errors(str(file)):
        backend = tokenizers.Tokenizer.from_buffer(data)
        added = backend.num_special_tokens_to_add(is_pair=False)
    if added > _MOST_ADDED:
        raise ConfigError(f"{file}: its post-processor adds {added:,} tokens to each text, more than {_MOST_ADDED}")
    for part in (backend.normalizer, backend.decoder):
        if part is not None and _growth(json.loads(part.__getstate__())) > _MOST_GROWTH:
            raise ConfigError(f"{file}: its replacements make a text more than {_MOST_GROWTH} times as long")
    return backend


def probe(source: str, backend: tokenizers.Tokenizer) -> None:
    """Encode and decode a short text, to detect tokenizers that panic on every text.

    Raises:
        ConfigError: the Rust library fails to encode or decode the text; the message begins with `source`.
    """
    with library_errors(source):
        backend.decode(backend.encode("a text").ids)


@contextlib.contextmanager
def library_errors(source: str) -> Iterator[None]:
    """Convert the library's exceptions to errors with a message that begins with `source`.

    Raises:
        ConfigError: the library failed.
    """
    try:
        yield
    except JaxgenError:
        raise
    except BaseException as error:
        # The library raises plain Exception or ValueError. A Rust panic is a PanicException, which is not an Exception.
        if type(error) in (Exception, ValueError) or type(error).__name__ == "PanicException":
            raise ConfigError(f"{source}: the tokenizer fails: {error}") from error
        raise


def _check_charsmaps(file: Path, content: Any) -> None:
    """Reject a table that claims to be larger than it is, because the library would allocate the claimed size."""
    for node in _objects(content):
        charsmap = node.get("precompiled_charsmap")
        if charsmap is not None and not _fits(charsmap):
            raise ConfigError(f"{file}: precompiled_charsmap is damaged")


def _objects(content: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all JSON objects in a value."""
    level = [content]
    while level:
        yield from (node for node in level if isinstance(node, Mapping))
        children = (node.values() if isinstance(node, Mapping) else node for node in level)
        level = [child for group in children for child in group if isinstance(child, Mapping | list)]


def _fits(charsmap: Any) -> bool:
    try:
        table = base64.b64decode(charsmap, validate=True)
    except (TypeError, ValueError, binascii.Error):
        return False
    return len(table) >= 4 and 4 + int.from_bytes(table[:4], "little") <= len(table)


def _growth(part: Mapping[str, Any]) -> float:
    """Return an upper bound on the factor by which a normalizer or decoder lengthens the text."""
    if part.get("type") == "Sequence":
        return math.prod(map(_growth, part.get("normalizers") or part.get("decoders") or ()))
    if part.get("type") == "Replace":
        replaced = len(part["pattern"].get("String", "x"))  # a regular expression may match a single character
        return max(1, len(part["content"]) / replaced) if replaced else math.inf
    if part.get("type") == "Prepend":
        return max(1, len(part["prepend"]))
    return 1
