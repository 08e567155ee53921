"""Options that hold token ids: sets, sequences and biases, and how they become tables of a compiled program.

A table's numbers are traced; its sizes are static, rounded up to powers of two and filled up with -1, which stands for
no token. So other ids are the same program, and mostly more ids too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.core import FrozenDict
from jax.core import Tracer

from jaxgen.errors import ConfigError

_LEAST = 4  # entries of a table


def _rounded(size: int, least: int = _LEAST) -> int:
    return max(least, 1 << (size - 1).bit_length())


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array)


def _list(value: Any) -> Any:
    """Nested lists of Python numbers for whatever holds them."""
    if isinstance(value, np.ndarray | jax.Array | np.generic):
        return np.asarray(value).tolist()
    if isinstance(value, list | tuple):
        return [_list(item) for item in value]
    return value


def _depth(value: Any) -> int:
    return 1 + max((_depth(item) for item in value), default=0) if isinstance(value, list) else 0


def _token(name: str, token: Any, given: Any) -> int:
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"{name} must hold token ids, whole numbers, got {given!r}")
    if not 0 <= token <= np.iinfo(np.int32).max:
        raise ConfigError(f"{name} must hold token ids >= 0 that fit into 32 bits, got {given!r}")
    return token


def _filled(rows: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    return [[*row, *[-1] * (size - len(row))] for row in rows]


def _traced_table(name: str, value: Tracer, *ranks: int) -> Tracer:
    if not np.issubdtype(value.dtype, np.integer):
        raise TypeError(f"{name} must hold token ids, whole numbers, got {value.dtype}")
    if value.ndim not in ranks:
        raise ConfigError(f"{name} must have {' or '.join(map(str, ranks))} axes under jit, got {list(value.shape)}")
    return value


@dataclasses.dataclass(frozen=True)
class IdSet:
    """One id, a list of ids, or a list of such lists, one per prompt. Leaf: int32[E] or int32[B, E]."""

    off: Any = None

    def is_off(self, value: Any) -> bool:
        """Whether there is no id in it."""
        return value is None

    def normal(self, name: str, value: Any) -> Any:
        """Return None, an int, a tuple of ints, or int32[B, E]; in an array -1 stands for none."""
        if value is None:
            return None
        if isinstance(value, Tracer):
            return _traced_table(name, value, 0, 1, 2)
        holes = _is_array(value)
        ids = _list(value)
        if _depth(ids) > 2 or (_depth(ids) == 2 and not all(isinstance(row, list) for row in ids)):
            raise ConfigError(f"{name} must be one id, a list of ids, or a list of ids per prompt, got {value!r}")

        def row(tokens: list) -> list[int]:
            return [_token(name, token, value) for token in tokens if not (holes and token == -1)]

        if not isinstance(ids, list):
            return _token(name, ids, value)
        if _depth(ids) == 2:
            rows = [row(tokens) for tokens in ids]
            return np.asarray(_filled(rows, _rounded(max(map(len, rows)))), np.int32)
        return tuple(row(ids)) or None

    def leaf(self, value: Any) -> Any:
        """Return the table, or None where the option is off."""
        if isinstance(value, int):
            value = (value,)
        if isinstance(value, tuple):
            return np.asarray(_filled([value], _rounded(len(value)))[0], np.int32)
        return value

    def prompts(self, value: Any) -> int | None:
        """For how many prompts it has a value each; None where one holds for all."""
        return value.shape[0] if _is_array(value) and value.ndim == 2 else None

    def tokens(self, value: Any) -> list[int]:
        """Every id of a concrete value."""
        return [] if value is None else [int(token) for token in np.ravel(np.asarray(value)) if token >= 0]


@dataclasses.dataclass(frozen=True)
class Sequences:
    """A list of sequences of ids, or a list of such lists, one per prompt. Leaf: int32[S, W] or int32[B, S, W]."""

    width: int | None = None  # of each sequence, where it is fixed
    off: Any = None

    def is_off(self, value: Any) -> bool:
        """Whether there is no sequence in it."""
        return value is None

    def normal(self, name: str, value: Any) -> Any:
        """Return None, a tuple of tuples of ints or, per prompt, a tuple of those."""
        if value is None:
            return None
        if isinstance(value, Tracer):
            return _traced_table(name, value, 2, 3)
        holes = _is_array(value)
        rows = _list(value)
        if not isinstance(rows, list) or not rows or _depth(rows) not in (2, 3):
            raise ConfigError(f"{name} must be a list of lists of ids that is not empty, got {value!r}")
        if _depth(rows) == 3:
            return tuple(self._one(name, row, value, holes) for row in rows)
        return self._one(name, rows, value, holes)

    def _one(self, name: str, rows: Any, given: Any, holes: bool) -> tuple[tuple[int, ...], ...]:
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise ConfigError(f"{name} must be a list of lists of ids, got {given!r}")
        kept = [[token for token in row if not (holes and token == -1)] for row in rows]
        kept = [row for row in kept if row or not holes]
        for row in kept:
            if not row or (self.width is not None and len(row) != self.width):
                wanted = "at least one id" if self.width is None else f"{self.width} numbers"
                raise ConfigError(f"{name} must hold lists of {wanted}, got {given!r}")
        return tuple(tuple(_token(name, token, given) for token in row) for row in kept)

    def leaf(self, value: Any) -> Any:
        """Return the table, or None where the option is off."""
        if not isinstance(value, tuple):
            return value
        several = self.prompts(value) is not None
        tables = value if several else (value,)
        width = _rounded(max((len(row) for table in tables for row in table), default=1), 2)
        size = _rounded(max(len(table) for table in tables))
        filled = [_filled([*table, *[()] * (size - len(table))], width) for table in tables]
        return np.asarray(filled if several else filled[0], np.int32)

    def prompts(self, value: Any) -> int | None:
        """For how many prompts it has a value each; None where one holds for all."""
        if isinstance(value, tuple):
            return (
                len(value)
                if any(isinstance(item, tuple) and (not item or isinstance(item[0], tuple)) for item in value)
                else None
            )
        return value.shape[0] if _is_array(value) and value.ndim == 3 else None

    def tokens(self, value: Any) -> list[int]:
        """Every id of a concrete value."""
        return [] if value is None else [int(token) for token in np.ravel(self.leaf(value)) if token >= 0]


class Biases:
    """A bias per sequence of ids: `{(1, 2): 0.5}`, `[[[1, 2], 0.5]]`, or a list of such dicts, one per prompt.

    Leaf: `(int32[S, W], float32[S])`, both with a leading B where there is one per prompt.
    """

    off: Any = None
    sequences = Sequences()

    def is_off(self, value: Any) -> bool:
        """Whether there is no bias in it."""
        return value is None

    def normal(self, name: str, value: Any) -> Any:
        """Return None, a FrozenDict of floats by tuples of ints or, per prompt, a tuple of those."""
        if value is None or (isinstance(value, tuple) and len(value) == 2 and all(map(_is_array, value))):
            return value  # as a leaf
        if not isinstance(value, Mapping | list | tuple) or not value:
            raise ConfigError(f"{name} must be a dict that is not empty, {{(id, ...): bias}}, got {value!r}")
        if isinstance(value, Mapping):
            return self._one(name, value.items(), value)
        if all(isinstance(item, Mapping) for item in value):
            return tuple(self._one(name, item.items(), value) for item in value)
        if not all(isinstance(item, list | tuple) and len(item) == 2 for item in value):
            raise ConfigError(f"{name} must be a dict {{(id, ...): bias}} or a list [[[id, ...], bias]], got {value!r}")
        return self._one(name, value, value)

    def _one(self, name: str, items: Any, given: Any) -> FrozenDict:
        table = {}
        for ids, bias in items:
            ids = _list(ids)
            if not isinstance(ids, list) or not ids:
                raise ConfigError(f"{name} must have tuples of ids as keys, with at least one id, got {given!r}")
            if isinstance(bias, bool) or not isinstance(bias, int | float | np.number) or np.isnan(bias):
                raise TypeError(f"{name} must have numbers as biases, got {given!r}")
            table[tuple(_token(name, token, given) for token in ids)] = float(bias)
        return FrozenDict(table)

    def leaf(self, value: Any) -> Any:
        """Return the tables, or None where the option is off."""
        if value is None or (isinstance(value, tuple) and all(map(_is_array, value))):
            return value
        several = isinstance(value, tuple)
        dicts = value if several else (value,)
        ids = tuple(tuple(table) for table in dicts)
        sequences = self.sequences.leaf(ids if several else ids[0])
        biases = [[*table.values(), *[0.0] * (sequences.shape[-2] - len(table))] for table in dicts]
        return sequences, np.asarray(biases if several else biases[0], np.float32)

    def prompts(self, value: Any) -> int | None:
        """For how many prompts it has a value each; None where one holds for all."""
        if isinstance(value, tuple) and not any(map(_is_array, value)):
            return len(value)
        return self.sequences.prompts(value[0]) if isinstance(value, tuple) else None

    def tokens(self, value: Any) -> list[int]:
        """Every id of a concrete value."""
        return [] if value is None else self.sequences.tokens(self.leaf(value)[0])


TABLES: dict[str, Any] = {
    "eos_token_id": IdSet(),
    "forced_eos_token_id": IdSet(),
    "suppress_tokens": IdSet(),
    "begin_suppress_tokens": IdSet(),
    "bad_words_ids": Sequences(),
    "forced_decoder_ids": Sequences(width=2),
    "sequence_bias": Biases(),
}


def eos_list(eos_token_id: Any) -> list[int]:
    """Return the eos ids of a concrete config as a list, empty where there is none."""
    return TABLES["eos_token_id"].tokens(eos_token_id)
