"""Check and convert sequences of token ids that callers pass."""

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
