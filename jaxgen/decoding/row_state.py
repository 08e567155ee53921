"""Trees of arrays with one row per sequence or, in some fields, one row per prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax

State = TypeVar("State", bound="RowState")


class RowState:
    """Base class of pytree dataclasses whose arrays have one row per sequence on the first axis.

    Attributes:
        of_prompts: the names of fields whose arrays have one row per prompt, shared by all sequences of the prompt.
    """

    of_prompts: ClassVar[tuple[str, ...]] = ()

    def map_rows(self: State, of_sequences: Callable, *others: Any, of_prompts: Callable = lambda x, *_: x) -> State:
        """Map the arrays of sequences with `of_sequences`, and those of prompts with `of_prompts` (default: no change).

        Both functions also receive the matching arrays of `others`, which have the same structure as `self`.
        """
        return _map((self, *others), of_sequences, of_prompts)


def _map(trees: tuple, of_sequences: Callable, of_prompts: Callable) -> Any:
    if not isinstance(trees[0], RowState):
        return jax.tree.map(of_sequences, *trees)
    first: Any = trees[0]  # a dataclass
    changed = {
        field.name: _map(
            tuple(getattr(tree, field.name) for tree in trees),
            of_prompts if field.name in first.of_prompts else of_sequences,
            of_prompts,
        )
        for field in dataclasses.fields(first)
    }
    return dataclasses.replace(first, **changed)
