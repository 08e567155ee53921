"""Built-in ways to quantize weights, and the names that select them in the argument `quantize`.

This module does not import jax, so the commands can list the names in their help without loading jax.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from jaxgen.errors import ConfigError

if TYPE_CHECKING:
    from jaxgen.core.model.int4 import Int4
    from jaxgen.core.model.weights import Quantized

KINDS = {"int8": "jaxgen.core.model.int8:Int8"}  # those with files of their own
_INT4 = {"int4": "jaxgen.core.model.int4:GROUPS_OF_32", "int4-128": "jaxgen.core.model.int4:GROUPS_OF_128"}
CHOICES = (*KINDS, *_INT4, "none")  # "none" converts packed weights to arrays


def all_built_in() -> list[type[Quantized]]:
    """Return the classes of all built-in kinds that have files of their own."""
    return [resolve_name(path) for path in KINDS.values()]


def kind_of(quantize: Any) -> type[Quantized] | Int4 | None:
    """Return what `quantize` names, or `quantize` itself if it is a class. For "none" and None, return None.

    Raises:
        ConfigError: `quantize` is neither None nor a valid name or class.
    """
    if isinstance(quantize, type) and hasattr(quantize, "from_matrix"):
        return quantize
    if quantize is not None and quantize not in CHOICES:
        names = ", ".join(map(repr, CHOICES))
        raise ConfigError(f"quantize must be {names}, None or a class with from_matrix, got {quantize!r}")
    names = KINDS | _INT4
    return resolve_name(names[quantize]) if quantize in names else None
