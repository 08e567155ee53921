"""Check and convert sequences of token ids that callers pass."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgen.errors import InputError, shown


def id_list(ids: Any) -> list[int]:
    """Check token ids, given as a sequence of any type or as a single id, and return them as a list."""
    try:
        array = np.atleast_1d(np.asarray(ids))
    except ValueError as error:
        raise InputError("expected one sequence of ids, got several: decode_batch decodes rows") from error
    if array.size == 0:
        return []
    if array.dtype.kind not in "iu":
        got = type(ids).__name__ if array.dtype == object else array.dtype
        raise TypeError(f"token ids must be integers, got {got}: decode_batch decodes an output of generate")
    if array.ndim > 1:
        raise InputError(f"expected one sequence of ids, got shape {array.shape}: decode_batch decodes rows")
    if array.min() < 0 or array.max() >= 2**32:
        wrong = array[(array < 0) | (array >= 2**32)][0]
        raise InputError(f"{wrong} is not a token id: ids are at least 0 and below 2**32")
    return array.tolist()


def rows_of(sequences: Any) -> list[Any]:
    """Return the rows of an array, or of a list of sequences, as a list."""
    if hasattr(sequences, "ndim"):
        sequences = list(np.atleast_1d(sequences))
    if not isinstance(sequences, Sequence) or any(np.ndim(row) != 1 for row in sequences):
        raise TypeError(
            f"decode_batch accepts an output of generate or rows of ids, got {shown(sequences)}: use decode for one row"
        )
    return list(sequences)


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


def without_prefix(row: list[int], prefix: list[int], number: int) -> list[int]:
    """Return the part of a row after the prefix. `number` is the row's number in error messages.

    Raises:
        InputError: the row does not begin with the prefix, or contains nothing after it.
    """
    pairs = enumerate(itertools.zip_longest(prefix, row[: len(prefix)]))
    different = next((place for place, (wanted, given) in pairs if wanted != given), None)
    if different is not None:
        raise InputError(
            f"conversation {number} does not begin with the {len(prefix)} tokens of after: token {different} differs. "
            "Begin with the same messages, tools and variables as in chat_prefix, or call chat without after"
        )
    if prefix and len(row) == len(prefix):
        raise InputError(f"conversation {number} has no tokens besides the {len(prefix)} of after: add a message")
    return row[len(prefix) :]
