"""The values of options: what each may be, when it is off, and how it is given to a compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxgen.errors import ConfigError

# A number, one number per prompt, or the same as an array.
Number = int | float | np.ndarray | jax.Array

_EOS_BUCKET = 4  # eos tables have a multiple of this many entries, the rest -1: more ids, the same program


@dataclasses.dataclass(frozen=True)
class Knob:
    """A traced option: its dtype, the value that means "off", other spellings of that, and what is allowed."""

    dtype: type
    off: Any
    also_off: tuple[Any, ...] = ()
    allowed: str = ""
    holds: Callable[[np.ndarray], Any] = lambda value: True
    per_prompt: bool = True

    def is_off(self, value: Any) -> bool:
        """Whether the value leaves everything as it is."""
        if value is None:
            return True
        return isinstance(value, int | float) and (value == self.off or value in self.also_off)


def _positive(value: np.ndarray) -> Any:
    return value > 0


def _not_negative(value: np.ndarray) -> Any:
    return value >= 0


def _fraction(value: np.ndarray) -> Any:
    return (value >= 0) & (value <= 1)


_POSITIVE: dict[str, Any] = {"allowed": "> 0", "holds": _positive}
_NOT_NEGATIVE: dict[str, Any] = {"allowed": ">= 0", "holds": _not_negative}
_FRACTION: dict[str, Any] = {"allowed": "between 0 and 1", "holds": _fraction}

KNOBS: dict[str, Knob] = {
    "temperature": Knob(float, 1.0, allowed="> 0 (for greedy decoding set do_sample=False)", holds=_positive),
    "top_k": Knob(int, 0, **_NOT_NEGATIVE),
    "top_p": Knob(float, 1.0, **_FRACTION),
    "min_p": Knob(float, None, (0.0,), **_FRACTION),
    "typical_p": Knob(float, 1.0, allowed="> 0 and <= 1", holds=lambda value: (value > 0) & (value <= 1)),
    "epsilon_cutoff": Knob(float, 0.0, allowed=">= 0 and < 1", holds=lambda value: (value >= 0) & (value < 1)),
    "eta_cutoff": Knob(float, 0.0, allowed=">= 0 and < 1", holds=lambda value: (value >= 0) & (value < 1)),
    "repetition_penalty": Knob(float, 1.0, **_POSITIVE),
    "encoder_repetition_penalty": Knob(float, 1.0, **_POSITIVE),
    "length_penalty": Knob(float, 1.0),
    "diversity_penalty": Knob(float, 0.0),
    "guidance_scale": Knob(float, None, (1.0,)),
    "penalty_alpha": Knob(float, None, (0.0,), **_NOT_NEGATIVE),
    "max_new_tokens": Knob(int, None, **_POSITIVE),
    "min_new_tokens": Knob(int, None, **_NOT_NEGATIVE),
    "min_length": Knob(int, 0, **_NOT_NEGATIVE),
    "pad_token_id": Knob(int, None, per_prompt=False, **_NOT_NEGATIVE),
}


def eos_list(eos_token_id: Any) -> list[int]:
    """Return the eos ids of a concrete config as a list, empty where there is none."""
    if eos_token_id is None:
        return []
    return [int(token) for token in np.atleast_1d(np.asarray(eos_token_id)) if token >= 0]


def normal_number(name: str, value: Any, knob: Knob) -> Any:
    """Normalise a traced option: a Python number, an array `[B]` of the right dtype, or what means off."""
    if isinstance(value, Tracer):
        return _traced_number(name, value, knob)
    if isinstance(value, bool | str | bytes | complex | Mapping):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if knob.is_off(value):
        return knob.off
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise TypeError(f"{name} must be a number, or one per prompt, got {value!r}") from error
    whole = np.issubdtype(array.dtype, np.integer)
    if not whole and (knob.dtype is int or not (array.dtype.kind == "f" or jnp.issubdtype(array.dtype, jnp.floating))):
        kind = "a whole number" if knob.dtype is int else "a number"
        raise TypeError(f"{name} must be {kind}, got {value!r}")
    if array.ndim > 1 or (array.ndim == 1 and not knob.per_prompt):
        shape = "one number" + (" or one per prompt, [B]" if knob.per_prompt else "")
        raise ConfigError(f"{name} must be {shape}, got shape {list(array.shape)}")
    if whole and knob.dtype is int and np.any(np.abs(array) > np.iinfo(np.int32).max):
        raise ConfigError(f"{name} must fit into 32 bits, got {value!r}")
    array = array.astype(np.float32 if knob.dtype is float else np.int32)
    if not np.all(knob.holds(array)) or (knob.dtype is float and not np.all(np.isfinite(array))):
        raise ConfigError(f"{name} must be {knob.allowed or 'finite'}, got {value!r}")
    if array.ndim == 1:
        return array
    number = value.item() if hasattr(value, "item") else value
    return knob.off if knob.is_off(number) else knob.dtype(number)


def _traced_number(name: str, value: Tracer, knob: Knob) -> Any:
    """Give a traced value the dtype that it has as an argument; its value cannot be checked."""
    whole = jnp.issubdtype(value.dtype, jnp.integer)
    if not whole and (knob.dtype is int or not jnp.issubdtype(value.dtype, jnp.floating)):
        raise TypeError(f"{name} must be {'a whole number' if knob.dtype is int else 'a number'}, got {value.dtype}")
    if value.ndim > 1 or (value.ndim == 1 and not knob.per_prompt):
        raise ConfigError(f"{name} must be one number or one per prompt, [B], got shape {list(value.shape)}")
    return jnp.asarray(value, jnp.float32 if knob.dtype is float else jnp.int32)


def number_leaf(value: Any, knob: Knob) -> Any:
    """Return the leaf of a traced option: None where it is off, else a number or array of its dtype."""
    if knob.is_off(value):
        return None
    if isinstance(value, int | float):
        return np.float32(value) if knob.dtype is float else np.int32(value)
    return value


def normal_eos(value: Any) -> Any:
    """Normalise eos ids: None, one int, or a tuple of them. In an array, -1 stands for none."""
    if value is None or isinstance(value, Tracer):
        return value
    if isinstance(value, jax.Array):
        value = np.asarray(value)
    if np.ndim(value) > 1:
        raise ConfigError(f"eos_token_id must be one id or a list of them, got {value!r}")
    ids = [value] if np.ndim(value) == 0 else list(value)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(f"eos_token_id must be a whole number or a list of them, got {value!r}")
        if token > np.iinfo(np.int32).max or (token < 0 and not isinstance(value, np.ndarray)):
            raise ConfigError(f"eos_token_id must be >= 0 and fit into 32 bits, got {value!r}")
    ids = [int(token) for token in ids if token >= 0]
    if np.ndim(value) == 0:
        return ids[0]
    return tuple(ids) or None


def eos_table(value: Any) -> Any:
    """int32[E] with E rounded up and -1 for no id, so that another number of ids is the same program."""
    if not isinstance(value, int | tuple):
        return value
    ids = [value] if isinstance(value, int) else list(value)
    size = -(-len(ids) // _EOS_BUCKET) * _EOS_BUCKET
    return np.asarray(ids + [-1] * (size - len(ids)), np.int32)


def frozen(value: Any) -> Any:
    """Make a static option hashable: tuples for lists, a FrozenDict for a dict."""
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(frozen(item) for item in value)
    if isinstance(value, Mapping):
        return flax.core.FrozenDict({key: frozen(item) for key, item in value.items()})
    return value


def thawed(value: Any) -> Any:
    """Undo `frozen`: lists and dicts, as JSON has them."""
    if isinstance(value, tuple):
        return [thawed(item) for item in value]
    if isinstance(value, Mapping):
        return {key: thawed(item) for key, item in value.items()}
    return value
