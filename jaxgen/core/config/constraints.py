"""Constraints for constrained beam search, and subclasses of `Kind` for the options that contain constraints.

A constraint is met once the row contains one of its alternatives, which are sequences of token ids. An option's
constraints form a table, int32[C, A, W], whose axes are constraints, alternatives and ids. The table's sizes are
rounded up, and unused entries are -1, so changing the ids does not cause recompilation. This module does not import
jax.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgen.buckets import power_of_two
from jaxgen.core.config.kinds import Kind
from jaxgen.core.config.tables import as_lists, checked_id, depth, filled, traced_table
from jaxgen.core.config.values import is_array, is_tracer
from jaxgen.errors import ConfigError

Phrase = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PhrasalConstraint:
    """A phrase that the text must contain, as in transformers' `PhrasalConstraint`.

    >>> PhrasalConstraint([5, 6, 7])
    PhrasalConstraint(token_ids=(5, 6, 7))

    Attributes:
        token_ids: the ids of the phrase, in order.

    Raises:
        ConfigError: there are no ids, or an id is negative.
        TypeError: `token_ids` contains something other than ids.
    """

    token_ids: Sequence[int]

    def __post_init__(self):
        object.__setattr__(self, "token_ids", _phrase("token_ids", self.token_ids, self.token_ids))

    @property
    def alternatives(self) -> tuple[Phrase, ...]:
        """A tuple with the phrase as its only element."""
        return (tuple(self.token_ids),)


@dataclasses.dataclass(frozen=True)
class DisjunctiveConstraint:
    """Alternative phrases: the text must contain at least one of them, as in transformers' `DisjunctiveConstraint`.

    >>> DisjunctiveConstraint([[5, 6], [7]])
    DisjunctiveConstraint(nested_token_ids=((5, 6), (7,)))

    Attributes:
        nested_token_ids: the ids of each phrase. No phrase may be the beginning of another.

    Raises:
        ConfigError: there are no phrases, a phrase is empty, one phrase begins with another, or an id is negative.
        TypeError: `nested_token_ids` contains something other than lists of ids.
    """

    nested_token_ids: Sequence[Sequence[int]]

    def __post_init__(self):
        given = self.nested_token_ids
        phrases = as_lists(given)
        if not isinstance(phrases, list) or not phrases:
            raise ConfigError(f"nested_token_ids must be a non-empty list of lists of ids, got {given!r}")
        alternatives = tuple(_phrase("nested_token_ids", phrase, given) for phrase in phrases)
        ordered = sorted(alternatives)  # a phrase sorts right before longer ones that begin with it
        for shorter, longer in itertools.pairwise(ordered):
            if longer[: len(shorter)] == shorter:
                raise ConfigError(
                    f"nested_token_ids has {list(shorter)}, which is a prefix of {list(longer)}: remove one of them"
                )
        object.__setattr__(self, "nested_token_ids", alternatives)

    @property
    def alternatives(self) -> tuple[Phrase, ...]:
        """The phrases."""
        return tuple(map(tuple, self.nested_token_ids))


Constraint = PhrasalConstraint | DisjunctiveConstraint


class ConstraintKind(Kind):
    """Base class for kinds of constraints. All prompts share the constraints. `leaf` returns int32[C, A, W]."""

    traced = True
    ranks = 3

    def leaf(self, value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        return _table([_constraint(word).alternatives for word in value])

    def tokens(self, value: Any) -> list[int]:
        return [token for phrase in self.phrases(value) for token in phrase]

    def phrases(self, value: Any) -> list[Phrase]:
        """Return the alternatives of all constraints, or an empty list for a traced value."""
        if value is None or is_tracer(value):
            return []
        # In a config that jax has unflattened, the constraints are an array.
        words = _untable("constraints", value) if is_array(value) else value
        return [phrase for word in words for phrase in _constraint(word).alternatives]


class ForcedWords(ConstraintKind):
    """A list of phrases, or of lists of alternative phrases."""

    type_name = "lists of ids, or lists of such lists"

    def parse(self, name: str, value: Any) -> Any:
        """Return a tuple in which each item is a phrase or a tuple of alternative phrases.

        `value` may be an array `[C, A, W]`, padded with -1.
        """
        if is_tracer(value):
            return traced_table(name, value, 3)
        words = _untable(name, value) if is_array(value) else as_lists(value)
        if not isinstance(words, list) or not words or not all(isinstance(word, list) and word for word in words):
            raise ConfigError(
                f"{name} must be a non-empty list of phrases [id, ...], or of lists of alternative phrases "
                f"[[id, ...], ...], got {value!r}; text is encoded with the tokenizer first"
            )
        try:
            return tuple(_ids(_constraint(word)) for word in words)
        except (ConfigError, TypeError) as error:
            raise type(error)(f"{name}: {error}") from None


class Constraints(ConstraintKind):
    """A list of `PhrasalConstraint` and `DisjunctiveConstraint`."""

    type_name = "list of constraints"

    def parse(self, name: str, value: Any) -> Any:
        """Return a tuple of constraints. `value` may be an array `[C, A, W]`, padded with -1."""
        if is_tracer(value):
            return traced_table(name, value, 3)
        if is_array(value):
            return tuple(map(_constraint, _untable(name, value)))
        kinds = "jaxgen.PhrasalConstraint and jaxgen.DisjunctiveConstraint"
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name} must be a list of {kinds}, got {type(value).__name__}")
        if not value:
            raise ConfigError(f"{name} must not be empty: leave it out for no constraints")
        for constraint in value:
            if not isinstance(constraint, Constraint):
                other = f"{type(constraint).__module__}.{type(constraint).__qualname__}"
                raise TypeError(f"{name} must contain only {kinds}, which can be compiled, got {other}")
        return tuple(value)


def as_forced_words(constraints: Sequence[Constraint]) -> list:
    """Convert constraints to the format of `force_words_ids`."""
    return [as_lists(_ids(constraint)) for constraint in constraints]


def _ids(constraint: Constraint) -> Any:
    return constraint.token_ids if isinstance(constraint, PhrasalConstraint) else constraint.nested_token_ids


def _phrase(name: str, phrase: Any, given: Any) -> Phrase:
    ids = as_lists(phrase)
    if not isinstance(ids, list):
        raise TypeError(f"{name} must be made of lists of ids, got {given!r}")
    if not ids:
        raise ConfigError(f"{name} must have at least one id in each list, got {given!r}")
    return tuple(checked_id(name, token, given) for token in ids)


def _constraint(word: Any) -> Constraint:
    """Return the constraint for a phrase or a list of alternative phrases; return an existing constraint unchanged."""
    if isinstance(word, Constraint):
        return word
    return PhrasalConstraint(word) if depth(as_lists(word)) < 2 else DisjunctiveConstraint(word)


def _table(constraints: Sequence[Sequence[Phrase]]) -> np.ndarray:
    """Return the alternatives of each constraint, as int32[C, A, W]."""
    width = power_of_two(max(len(phrase) for phrases in constraints for phrase in phrases), 4)
    most = power_of_two(max(map(len, constraints)), 1)
    count = power_of_two(len(constraints), 4)
    rows = [[*phrases, *[()] * (most - len(phrases))] for phrases in [*constraints, *[()] * (count - len(constraints))]]
    return np.asarray([[filled(phrase, width) for phrase in phrases] for phrases in rows], np.int32)


def _untable(name: str, table: Any) -> list:
    """Return each constraint in a table: a phrase, or a list of phrases if the constraint has several alternatives."""
    if np.ndim(table) != 3:
        raise ConfigError(
            f"{name} as an array must have 3 axes, [constraints, alternatives, ids], got shape {list(np.shape(table))}"
        )
    words = [[[token for token in phrase if token != -1] for phrase in phrases] for phrases in as_lists(table)]
    words = [[phrase for phrase in phrases if phrase] for phrases in words]
    return [phrases[0] if len(phrases) == 1 else phrases for phrases in words if phrases]
