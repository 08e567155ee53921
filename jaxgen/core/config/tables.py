"""Kinds of options that consist of token ids (sets, sequences, biases), and their tables in a compiled program.

The numbers in a table are traced. Table sizes are static and are rounded up to powers of two; unused entries are -1.
Changing ids therefore does not cause recompilation, and adding ids usually does not either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxgen.buckets import power_of_two
from jaxgen.core.config.kinds import INT32_MAX, Kind
from jaxgen.core.config.values import FrozenDict, is_array, is_tracer
from jaxgen.errors import ConfigError, shown

_LEAST = 4  # the minimum number of entries in a table
_LARGEST_BIAS = int(np.finfo(np.float32).max)
_BIAS_FORMS = "a non-empty dict {(id, ...): bias} or a non-empty list [[[id, ...], bias]]"


def as_lists(value: Any) -> Any:
    """Convert nested lists, tuples and arrays to nested lists of Python numbers."""
    if is_array(value) or isinstance(value, np.generic):
        return np.asarray(value).tolist()
    if isinstance(value, list | tuple):
        return [as_lists(item) for item in value]
    return value


def depth(value: Any) -> int:
    """Return how deeply lists are nested; 0 if the value is not a list."""
    return 1 + max((depth(item) for item in value), default=0) if isinstance(value, list) else 0


def checked_id(name: str, token: Any, given: Any) -> int:
    """Check and return a token id; `given` is the whole value, for the error message."""
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"{name} must contain token ids (whole numbers), got {shown(given)}")
    if not 0 <= token <= INT32_MAX:
        raise ConfigError(f"{name} must contain token ids >= 0 that fit into 32 bits, got {shown(given)}")
    return token


def filled(row: Sequence[int], size: int) -> list[int]:
    """Pad the ids with -1 to `size` entries."""
    return [*row, *[-1] * (size - len(row))]


def traced_table(name: str, value: Any, *ranks: int) -> Any:
    """Return a tracer of ids after checking its dtype and its number of axes."""
    if not np.issubdtype(value.dtype, np.integer):
        raise TypeError(f"{name} must contain token ids (whole numbers), got {value.dtype}")
    if value.ndim not in ranks:
        raise ConfigError(f"{name} must have {' or '.join(map(str, ranks))} axes under jit, got {list(value.shape)}")
    return value


class _Table(Kind):
    """Token ids: Python numbers for all prompts, or an array with one table per prompt. A table has `rank` axes."""

    traced = per_prompt = True
    rank: int

    def ids(self, value: Any) -> Any:
        """Return the ids in a value's leaf; the value must not be None."""
        return self.leaf(value)

    def prompt_count(self, value: Any) -> int | None:
        if value is None:
            return None
        ids = self.ids(value)
        return ids.shape[0] if ids.ndim > self.rank else None

    def tokens(self, value: Any) -> list[int]:
        if value is None or is_tracer(self.ids(value)):
            return []
        ids = np.ravel(np.asarray(self.ids(value)))
        return ids[ids >= 0].tolist()


class TokenIds(_Table):
    """One id, a list of ids, or one list of ids per prompt. The leaf is int32[E] or int32[B, E]."""

    rank = ranks = 1
    type_name = "id or ids"

    def parse(self, name: str, value: Any) -> Any:
        """Return an int, a tuple of ints (None if empty), or int32[B, E]; in an array, -1 marks an unused entry."""
        if is_tracer(value):
            return traced_table(name, value, 0, 1, 2)
        padded = is_array(value)
        ids = as_lists(value)
        if depth(ids) > 2 or (depth(ids) == 2 and not all(isinstance(row, list) for row in ids)):
            raise ConfigError(f"{name} must be one id, a list of ids, or a list of ids per prompt, got {shown(value)}")

        def row(tokens: list) -> list[int]:
            return [checked_id(name, token, value) for token in tokens if not (padded and token == -1)]

        if not isinstance(ids, list):
            return checked_id(name, ids, value)
        if depth(ids) == 2:
            rows = [row(tokens) for tokens in ids]
            return np.asarray([filled(row, power_of_two(max(map(len, rows)), _LEAST)) for row in rows], np.int32)
        return tuple(row(ids)) or None

    def leaf(self, value: Any) -> Any:
        if isinstance(value, int):
            value = (value,)
        if isinstance(value, tuple):
            return np.asarray(filled(value, power_of_two(len(value), _LEAST)), np.int32)
        return value

    def off_leaf(self, entries: int, width: int) -> Any:
        return np.full(entries, -1, np.int32)


class TokenSequences(_Table):
    """A list of sequences of ids, or one such list per prompt. The leaf is int32[S, W] or int32[B, S, W]."""

    width: int | None = None  # the fixed width of each sequence, if any
    rank = ranks = 2
    type_name = "lists of ids"

    def parse(self, name: str, value: Any) -> Any:
        """Return a tuple of tuples of ints, or int32[B, S, W]; in an array, -1 marks an unused entry."""
        if is_tracer(value):
            return traced_table(name, value, 2, 3)
        padded = is_array(value)
        rows = as_lists(value)
        if not isinstance(rows, list) or not rows or depth(rows) not in (2, 3):
            raise ConfigError(f"{name} must be a non-empty list of lists of ids, got {shown(value)}")
        if depth(rows) == 3:
            return _stacked([self._one(name, row, value, padded) for row in rows])
        return self._one(name, rows, value, padded)

    def _one(self, name: str, rows: Any, given: Any, padded: bool) -> tuple[tuple[int, ...], ...]:
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise ConfigError(f"{name} must be a list of lists of ids, got {shown(given)}")
        if padded:
            rows = [[token for token in row if token != -1] for row in rows]
            rows = [row for row in rows if row]
        for row in rows:
            if not row or (self.width is not None and len(row) != self.width):
                size = "at least one id" if self.width is None else f"{self.width} numbers"
                raise ConfigError(f"{name} must contain lists of {size}, got {shown(given)}")
        return tuple(tuple(checked_id(name, token, given) for token in row) for row in rows)

    def leaf(self, value: Any) -> Any:
        return _stacked([value])[0] if isinstance(value, tuple) else value

    def off_leaf(self, entries: int, width: int) -> Any:
        return np.full((entries, self.width or width), -1, np.int32)


class PlacedTokens(TokenSequences):
    """A list of pairs `[position, id]`, or one such list per prompt. The leaf is int32[S, 2] or int32[B, S, 2]."""

    width = 2
    type_name = "lists of [position, id]"

    def tokens(self, value: Any) -> list[int]:
        return super().tokens(value)[1::2]  # the ids, without the positions


def _stacked(tables: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """Return the tables, padded to the same size, as int32[B, S, W]."""
    width = power_of_two(max((len(row) for table in tables for row in table), default=1), 2)
    size = power_of_two(max(map(len, tables)), _LEAST)
    return np.asarray(
        [[filled(row, width) for row in [*table, *[()] * (size - len(table))]] for table in tables], np.int32
    )


class SequenceBias(_Table):
    """A bias for each sequence of ids: `{(1, 2): 0.5}`, `[[[1, 2], 0.5]]`, or a list with one such dict per prompt.

    The leaf is `(int32[S, W], float32[S])`, both with a leading axis B if there is one dict per prompt.
    """

    rank, ranks = 2, (2, 1)
    type_name = "dict"

    def ids(self, value: Any) -> Any:
        return self.leaf(value)[0]

    def parse(self, name: str, value: Any) -> Any:
        """Return a FrozenDict `{(id, ...): bias}`; for a traced value or one dict per prompt, a pair of arrays."""
        if isinstance(value, tuple) and len(value) == 2 and all(map(is_array, value)):
            return value if any(map(is_tracer, value)) else _from_leaf(*map(np.asarray, value))
        if not isinstance(value, Mapping | list | tuple) or not value:
            raise ConfigError(f"{name} must be {_BIAS_FORMS}, got {shown(value)}")
        if isinstance(value, Mapping):
            return self._one(name, value.items(), value)
        if all(isinstance(item, Mapping) for item in value):
            return _biases([self._one(name, item.items(), value) for item in value])
        if not all(isinstance(item, list | tuple) and len(item) == 2 for item in value):
            raise ConfigError(f"{name} must be {_BIAS_FORMS}, got {shown(value)}")
        return self._one(name, value, value)

    def _one(self, name: str, items: Any, given: Any) -> FrozenDict:
        table = {}
        for ids, bias in items:
            ids = as_lists(ids)
            if not isinstance(ids, list) or not ids:
                raise ConfigError(f"{name} must have a list or tuple of ids for each bias, got {shown(given)}")
            if isinstance(bias, bool) or not isinstance(bias, int | float | np.number) or bias != bias:
                raise TypeError(f"{name} must have numbers as biases, got {shown(given)}")
            if _LARGEST_BIAS < abs(bias) < np.inf:
                raise ConfigError(f"{name} must have biases that fit into float32, got {shown(given)}")
            table[tuple(checked_id(name, token, given) for token in ids)] = float(bias)
        return FrozenDict(table)

    def leaf(self, value: Any) -> Any:
        if not isinstance(value, FrozenDict):
            return value
        sequences, biases = _biases([value])
        return sequences[0], biases[0]

    def off_leaf(self, entries: int, width: int) -> Any:
        return np.full((entries, width), -1, np.int32), np.zeros(entries, np.float32)


def _biases(dicts: Sequence[Mapping]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequences, int32[B, S, W], and their biases, float32[B, S]."""
    sequences = _stacked([tuple(table) for table in dicts])
    biases = [[*table.values(), *[0.0] * (sequences.shape[1] - len(table))] for table in dicts]
    return sequences, np.asarray(biases, np.float32)


def _from_leaf(sequences: np.ndarray, biases: np.ndarray) -> Any:
    """Return the normal form of a leaf."""
    if sequences.ndim == 3:
        return sequences, biases
    rows = (
        (tuple(int(token) for token in row if token >= 0), bias) for row, bias in zip(sequences, biases, strict=True)
    )
    return FrozenDict({row: float(bias) for row, bias in rows if row})


def eos_list(eos_token_id: Any) -> list[int]:
    """Return the ids in a concrete `eos_token_id` as a list, which is empty if there are none."""
    return TokenIds().tokens(eos_token_id)
