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

    def map_sequences(self: State, change: Callable[[jax.Array], jax.Array]) -> State:
        """Apply `change` to all arrays except those with one row per prompt."""
        own: Any = self  # a dataclass
        changed = {}
        for field in dataclasses.fields(own):
            if field.name in self.of_prompts:
                continue
            value = getattr(own, field.name)
            is_state = isinstance(value, RowState)
            changed[field.name] = value.map_sequences(change) if is_state else jax.tree.map(change, value)
        return dataclasses.replace(own, **changed)
