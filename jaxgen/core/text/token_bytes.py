"""The bytes that each token adds to the text, derived from the tokenizer's decoder."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

from jaxgen.errors import ConfigError

# GPT-2 represents a printable byte by the character with the same code, and other bytes by characters from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER = (byte for byte in range(256) if byte not in _PRINTABLE)
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHER)}

_MOST_IDS = 10_000_000

FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def token_bytes(backend: tokenizers.Tokenizer) -> list[bytes | None]:
    """Return the bytes that each id adds after other text; None for special tokens and ids without a token.

    Raises:
        ConfigError: the decoder does not simply concatenate the tokens' bytes.
    """
    to_bytes = _decoder(backend)
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=-1)
    if largest > _MOST_IDS:
        raise ConfigError(f"tokenizer.json has a token with the id {largest}; ids must be at most {_MOST_IDS}")
    table: list[bytes | None] = [None] * (largest + 1)
    for token, index in vocabulary.items():
        if index not in special:
            table[index] = to_bytes(token)
    return table


def _decoder(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return a function that applies the decoder's steps to a single token."""
    if backend.decoder is None:
        raise ConfigError("tokenizer.json has no decoder, so tokens are joined by spaces that belong to no token")
    replacements: list[tuple[str, str]] = []
    to_bytes, fused = str.encode, False
    for step in _steps(json.loads(backend.decoder.__getstate__())):
        kind, pattern = step["type"], step.get("pattern", {})
        still_text = to_bytes is str.encode and not fused
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused:
            pass  # this step only affects the ends of the whole text
        elif kind == "Replace" and "String" in pattern and still_text:
            replacements.append((pattern["String"], step["content"]))
        elif kind == "Metaspace" and still_text:
            replacements.append((step["replacement"], " "))
        elif kind in ("ByteLevel", "ByteFallback") and still_text:
            to_bytes = _byte_level if kind == "ByteLevel" else _byte_fallback
        else:
            raise ConfigError(
                f"the step {step} of tokenizer.json's decoder does not determine the text of a single token: the "
                "steps must be ByteLevel, ByteFallback, Metaspace, Replace of a string, Fuse, or Strip after Fuse"
            )

    def convert(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        return to_bytes(token)

    return convert


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _steps(step)


def _byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:  # an added token, which is written verbatim
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    match = FALLBACK.fullmatch(token)
    return bytes.fromhex(match[1]) if match else token.encode()
