"""Log how a program that is about to be compiled differs from existing programs.

    logging.basicConfig()
    logging.getLogger("jaxgen").setLevel(logging.INFO)

For example, if a call to `generate` turns on `top_p` and has a different number of prompts, the log then shows:

    INFO:jaxgen:compiling generate: ids int32[8,32], was int32[4,32]; option top_p is on, was off; and 2 more
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax

LOG = logging.getLogger("jaxgen")
_SHOWN = 4  # maximum number of differences in a message
_WIDTH = 40  # maximum number of characters in a value
# Messages omit the names in `_INNER`. Differences in `_FOLLOWING` come last, because they can result from other
# differences.
_INNER = {"run", "request", "cfg", "enabled", "options", "extensions"}
_FOLLOWING = {"params", "state"}


def log_compilation(key: tuple, others: Sequence[tuple], freed: Sequence[tuple]) -> None:
    """Log that a program is being compiled, why none of the `others` fits, and which programs were freed to make room.

    Args:
        key: the key of the new program. It consists of the `Program`, the structure of its arguments, its static
            arguments, whether it is for a CPU, and the form of each leaf.
        others: the keys of the programs that already existed.
        freed: the keys of the freed programs.
    """
    for program, *_ in freed:
        LOG.info("freed a program of %s, the least recently used of %d", program.name, len(others))
    new = _arguments(key)
    # The most recently used program comes first: among programs with equally few differences, `min` selects the first.
    found = [_differences(new, _arguments(other)) for other in reversed(others) if other[0] is key[0]]
    texts = min(found, key=len, default=[])
    shown = "; ".join([*texts[:_SHOWN], *([f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else [])])
    if found and not texts:
        shown = "arguments of a different structure"
    LOG.info("compiling %s%s", key[0].name, f": {shown}" if shown else "")


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """Form of a leaf: its shape, its dtype (or Python type), and whether its type is weak."""

    form: tuple

    def __str__(self) -> str:
        shape, kind, weak = self.form
        return f"{'weak ' * weak}{getattr(kind, '__name__', kind)}[{','.join(map(str, shape))}]"


def _arguments(key: tuple) -> dict[str, Any]:
    """Return the arguments of a program by name, each as a tree with a `_Leaf` for each array."""
    program, structure, static, on_cpu, forms = key
    args, traced = jax.tree.unflatten(structure, [_Leaf(form) for form in forms])
    named = dict(zip(inspect.signature(program).parameters, args, strict=False))
    return named | traced | dict(static) | {"on_cpu": on_cpu}


def _differences(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """Describe each difference. An option that occurs in several places is described only once."""
    found = sorted(_compare((), new, old), key=lambda difference: _rank(difference[0]))
    texts: dict[str, str] = {}
    for path, one, other in found:
        name = ".".join(part for part in path if part not in _INNER)
        texts.setdefault(name, _text(path, name, one, other))
    return list(texts.values())


def _compare(path: tuple[str, ...], new: Any, old: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Yield the path and both values of each part that differs."""
    if new is old or (type(new) is type(old) and new == old):
        return
    parts, others = _parts(new), _parts(old)
    if type(new) is not type(old) or parts is None or others is None:
        yield path, new, old
        return
    for name in {**parts, **others}:
        yield from _compare((*path, str(name)), parts.get(name), others.get(name))


def _parts(value: Any) -> dict | None:
    """Return the parts of a tree by name, or None if a value has no parts or its parts should not be compared."""
    if isinstance(value, dict):
        return value
    if isinstance(value, frozenset):
        return dict.fromkeys(sorted(value, key=str), True)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    compares = dataclasses.is_dataclass(value) and type(value).__eq__ is not object.__eq__
    if not compares or isinstance(value, type | _Leaf):
        return None
    return {name: part for name, part in vars(value).items() if not name.startswith("_")}


def _rank(path: tuple[str, ...]) -> int:
    """Return a sort key for a difference. Prompts come first, then settings, then parameters and state."""
    return 2 if _FOLLOWING.intersection(path) else int(path[0] != "request")


def _text(path: tuple[str, ...], name: str, new: Any, old: Any) -> str:
    if {"enabled", "options"}.intersection(path) and (new is None or old is None):
        return f"option {name} is {'off, was on' if new is None else 'on, was off'}"
    one, other = _short(new), _short(old)
    if one != other:
        return f"{name} {one}, was {other}"
    return f"{name} is a different {one}"


def _short(value: Any) -> str:
    if isinstance(value, str | _Leaf):
        text = str(value)
    elif callable(value) or _parts(value) or type(value).__repr__ is object.__repr__:
        text = getattr(value, "__qualname__", type(value).__name__)
    else:
        text = repr(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."
