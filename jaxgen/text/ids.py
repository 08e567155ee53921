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


def without_prefix(rows: list[list[int]], prefix: list[int]) -> list[list[int]]:
    """Return the part of each row after the prefix.

    Raises:
        InputError: a row does not begin with the prefix, or contains nothing after it.
    """
    for i, row in enumerate(rows):
        pairs = enumerate(itertools.zip_longest(prefix, row[: len(prefix)]))
        different = next((place for place, (wanted, given) in pairs if wanted != given), None)
        if different is not None:
            raise InputError(
                f"conversation {i} does not begin with the {len(prefix)} tokens of after: token {different} differs. "
                "Begin with the same messages, tools and variables as in chat_prefix, or call chat without after"
            )
        if prefix and len(row) == len(prefix):
            raise InputError(f"conversation {i} has no tokens besides the {len(prefix)} of after: add a message")
    return [row[len(prefix) :] for row in rows]
