"""Encode the texts of requests, and refuse those that cannot fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import shown
from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.scored import TokenTexts

_BYTES = 128  # assumed to be the length of the longest token if it is shorter, because some tokenizers drop characters


class Encoder:
    """Converts texts to ids. Texts that are far too long are refused before they are encoded.

    Args:
        tokenizer: the model's tokenizer.
        width: the maximum number of tokens in a prompt.

    Attributes:
        most_bytes: the maximum number of bytes in a text.
    """

    def __init__(self, tokenizer: Tokenizer, width: int):
        self.tokenizer, self._width = tokenizer, width
        texts = TokenTexts(tokenizer)
        longest = max(len(texts.bytes(token)) for token in range(tokenizer.backend.get_vocab_size()))
        self._longest = max(longest, _BYTES)
        self.most_bytes = width * self._longest

    def encode(self, text: str, field: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text, or raise an `ApiError` that names the field."""
        self.check([text], field)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check(self, texts: Iterable[str], field: str) -> None:
        """Raise an `ApiError` if texts are too long together."""
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > self.most_bytes:
            raise ApiError(
                400,
                f"{field} has {size:,} bytes of text, but at most {self.most_bytes:,} are accepted: {self._longest} "
                f"for each of the {self._width:,} tokens that a prompt may have",
                field,
            )


def texts_of(value: str | list[Any], field: str) -> list[str | list[int]]:
    """Return the texts in a field, which is a text, a list of ids, or a list of either."""
    if isinstance(value, str) or (value and all(type(item) is int for item in value)):  # bool is not an id
        return [value]
    for index, item in enumerate(value):
        if not isinstance(item, str) and not (isinstance(item, list) and all(type(token) is int for token in item)):
            raise ApiError(400, f"{field}[{index}] must be a text or a list of ids, got {shown(item)}", field)
    if not value:
        raise ApiError(400, f"{field} must have at least one text", field)
    return value
