"""Functions that recognize arrays among option values, and convert the values to hashable or JSON-compatible forms.

This module does not import jax. JAX arrays and tracers are recognized only if jax is already loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def is_tracer(value: Any) -> bool:
    """Return True if a value is traced by jax, so that only its dtype and shape are known."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def is_array(value: Any) -> bool:
    """Return True for a numpy or jax array."""
    jax = sys.modules.get("jax")
    return isinstance(value, np.ndarray) or (jax is not None and isinstance(value, jax.Array))


class FrozenDict(Mapping):
    """An immutable, hashable dict."""

    def __init__(self, items: Any):
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def frozen(value: Any) -> Any:
    """Make a value hashable: turn lists into tuples, dicts into FrozenDicts, and numpy numbers into Python numbers."""
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(frozen(item) for item in value)
    if isinstance(value, Mapping):
        return FrozenDict((key, frozen(item)) for key, item in value.items())
    return value


def thawed(value: Any) -> Any:
    """Convert a value to lists and dicts for JSON; a dict with tuple keys becomes the list `[[key, value], ...]`."""
    if isinstance(value, tuple):
        return [thawed(item) for item in value]
    if hasattr(value, "to_hf"):
        return value.to_hf()
    if isinstance(value, Mapping) and any(isinstance(key, tuple) for key in value):
        return [[thawed(key), thawed(item)] for key, item in value.items()]
    if isinstance(value, Mapping):
        return {key: thawed(item) for key, item in value.items()}
    return value
