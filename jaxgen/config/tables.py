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
from jaxgen.shapes import power_of_two

_LEAST = 4  # entries of a table


class Option:
    """An option whose value is an argument of the compiled program."""

    off: Any = None  # the value that leaves everything as it is

    def is_off(self, value: Any) -> bool:
        """Whether the value leaves everything as it is."""
        return value is None

    def normal(self, name: str, value: Any) -> Any:
        """Return the one form that equal values have, of Python numbers where there is one value for all prompts.

        Raises:
            ConfigError: a value that is not allowed.
            TypeError: a value of the wrong type.
        """
        raise NotImplementedError

    def leaf(self, value: Any) -> Any:
        """Return the arrays for a value in its normal form, or None where the option is off."""
        return value

    def prompts(self, value: Any) -> int | None:
        """For how many prompts it has a value each; None where one holds for all."""
        return None


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


def _filled(row: Sequence[int], size: int) -> list[int]:
    return [*row, *[-1] * (size - len(row))]


def _traced_table(name: str, value: Tracer, *ranks: int) -> Tracer:
    if not np.issubdtype(value.dtype, np.integer):
        raise TypeError(f"{name} must hold token ids, whole numbers, got {value.dtype}")
    if value.ndim not in ranks:
        raise ConfigError(f"{name} must have {' or '.join(map(str, ranks))} axes under jit, got {list(value.shape)}")
    return value


class _Table(Option):
    """Token ids: Python numbers for all prompts, or an array with one more axis than `rank`, one value per prompt."""

    rank: int

    def ids(self, value: Any) -> Any:
        """The ids of the leaf of a value, which is not None."""
        return self.leaf(value)

    def prompts(self, value: Any) -> int | None:
        """For how many prompts it has a value each; None where one holds for all."""
        if value is None:
            return None
        ids = self.ids(value)
        return ids.shape[0] if ids.ndim > self.rank else None

    def tokens(self, value: Any) -> list[int]:
        """Every id of a concrete value."""
        return [] if value is None else [int(token) for token in np.ravel(np.asarray(self.ids(value))) if token >= 0]


class IdSet(_Table):
    """One id, a list of ids, or a list of such lists, one per prompt. Leaf: int32[E] or int32[B, E]."""

    rank = 1

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
            return np.asarray([_filled(row, power_of_two(max(map(len, rows)), _LEAST)) for row in rows], np.int32)
        return tuple(row(ids)) or None

    def leaf(self, value: Any) -> Any:
        """Return the table, or None where the option is off."""
        if isinstance(value, int):
            value = (value,)
        return (
            np.asarray(_filled(value, power_of_two(len(value), _LEAST)), np.int32)
            if isinstance(value, tuple)
            else value
        )


@dataclasses.dataclass(frozen=True)
class Sequences(_Table):
    """A list of sequences of ids, or a list of such lists, one per prompt. Leaf: int32[S, W] or int32[B, S, W]."""

    width: int | None = None  # of each sequence, where it is fixed
    rank = 2

    def normal(self, name: str, value: Any) -> Any:
        """Return None, a tuple of tuples of ints, or int32[B, S, W]; in an array -1 stands for none."""
        if value is None:
            return None
        if isinstance(value, Tracer):
            return _traced_table(name, value, 2, 3)
        holes = _is_array(value)
        rows = _list(value)
        if not isinstance(rows, list) or not rows or _depth(rows) not in (2, 3):
            raise ConfigError(f"{name} must be a list of lists of ids that is not empty, got {value!r}")
        if _depth(rows) == 3:
            return _stacked([self._one(name, row, value, holes) for row in rows])
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
        return _stacked([value])[0] if isinstance(value, tuple) else value


def _stacked(tables: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """int32[B, S, W]: the tables filled up to one size."""
    width = power_of_two(max((len(row) for table in tables for row in table), default=1), 2)
    size = power_of_two(max(map(len, tables)), _LEAST)
    return np.asarray(
        [[_filled(row, width) for row in [*table, *[()] * (size - len(table))]] for table in tables], np.int32
    )


class Biases(_Table):
    """A bias per sequence of ids: `{(1, 2): 0.5}`, `[[[1, 2], 0.5]]`, or a list of such dicts, one per prompt.

    Leaf: `(int32[S, W], float32[S])`, both with a leading B where there is one per prompt.
    """

    rank = 2

    def ids(self, value: Any) -> Any:
        """The ids of the leaf of a value, which is not None."""
        return self.leaf(value)[0]

    def normal(self, name: str, value: Any) -> Any:
        """Return None, a FrozenDict of floats by tuples of ints or, per prompt, the leaf."""
        if value is None:
            return None
        if isinstance(value, tuple) and len(value) == 2 and all(map(_is_array, value)):
            return value if any(isinstance(part, Tracer) for part in value) else _from_leaf(*map(np.asarray, value))
        if not isinstance(value, Mapping | list | tuple) or not value:
            raise ConfigError(f"{name} must be a dict that is not empty, {{(id, ...): bias}}, got {value!r}")
        if isinstance(value, Mapping):
            return self._one(name, value.items(), value)
        if all(isinstance(item, Mapping) for item in value):
            return _biases([self._one(name, item.items(), value) for item in value])
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
        return jax.tree.map(lambda table: table[0], _biases([value])) if isinstance(value, FrozenDict) else value


def _biases(dicts: Sequence[Mapping]) -> tuple[np.ndarray, np.ndarray]:
    """int32[B, S, W] and float32[B, S]: the sequences and their biases."""
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


TABLES: dict[str, _Table] = {
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
