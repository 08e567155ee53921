"""Conversations that continue known tokens: those of `chat_prefix`, or of an output's cache."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from jaxgen.core.text.ids import id_list
from jaxgen.errors import InputError


class _Tokenizer(Protocol):
    truncation_side: str

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Any, skip_special_tokens: bool, clean_up_tokenization_spaces: bool | None) -> str: ...


def prefixes_of(after: Any, conversations: int) -> list[list[int]]:
    """Return the ids that each conversation begins with, from one list of ids or from a `Continuation`.

    Raises:
        InputError: the continuation has no ids, or its number of rows differs from that of the conversations.
    """
    if not hasattr(after, "tokens"):
        return [id_list(after)] * conversations
    if after.tokens is None:
        raise InputError("after: the ids of this cache's tokens are unknown: pass the ids themselves")
    rows = [row[:count] for row, count in zip(np.asarray(after.tokens), np.asarray(after.count), strict=True)]
    if len(rows) not in (1, conversations):
        raise InputError(f"after has {len(rows)} rows, but there are {conversations} conversations: pass one for each")
    return [id_list(row) for row in rows] * (conversations // len(rows))


def encode_after(tokenizer: _Tokenizer, text: str, prefix: list[int], number: int, max_length: int | None) -> list[int]:
    """Encode a conversation, and return the ids after the prefix, at most `max_length` with the prefix.

    `number` is the conversation's number in error messages.

    Raises:
        InputError: the conversation does not begin with the prefix, or `max_length` leaves nothing after it.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if ids[: len(prefix)] != prefix:  # an answer may have been generated with other tokens than `encode` returns
        known = _text(tokenizer, prefix)
        if text.startswith(known) and (rest := _continued(tokenizer, text[len(known) :], prefix, ids)) is not None:
            ids = [*prefix, *rest]
    count, row = len(prefix), ids[len(prefix) :]
    if ids[:count] != prefix:
        raise InputError(
            f"conversation {number} does not begin with the {count} tokens of after: begin with the same messages, "
            "tools and variables as in chat_prefix, or call chat without after"
        )
    if prefix and not row:
        raise InputError(f"conversation {number} has no tokens after the {count} of after: add a message")
    if max_length is None:
        return row
    left = max_length - count
    if left < 1:
        raise InputError(f"max_length must be greater than the {count} tokens of after, got {max_length}")
    return row[:left] if tokenizer.truncation_side == "right" else row[-left:]


def _continued(tokenizer: _Tokenizer, rest: str, prefix: list[int], ids: list[int]) -> list[int] | None:
    """Encode the rest of a text after a prefix; None if the tokenizer encodes it differently there.

    `ids` are those of the whole text. SentencePiece tokenizers add a space to the beginning of any text, which must not
    come between the prefix and the rest. Then, the rest is encoded after a newline, which is removed again.
    """
    whole = _text(tokenizer, ids)
    for before in ("", "\n"):
        first = tokenizer.encode(before, add_special_tokens=False)
        row = tokenizer.encode(before + rest, add_special_tokens=False)
        if row[: len(first)] == first and _text(tokenizer, [*prefix, *row[len(first) :]]) == whole:
            return row[len(first) :]
    return None


def _text(tokenizer: _Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
