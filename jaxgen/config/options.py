"""The values of traced options: what each may be, when it is off, and how it is given to a compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxgen.config.tables import TABLES, Option
from jaxgen.errors import ConfigError
from jaxgen.logits.watermark import WatermarkingConfig

# A number, one number per prompt, or the same as an array.
Number = int | float | np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Knob(Option):
    """A number: its dtype, the value that means "off", other spellings of that, and what is allowed."""

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

    def normal(self, name: str, value: Any) -> Any:
        """Return a Python number, an array `[B]` of the right dtype, or what means off."""
        return _normal_number(name, value, self)

    def leaf(self, value: Any) -> Any:
        """Return None where the option is off, else a number or array of its dtype."""
        if self.is_off(value):
            return None
        if isinstance(value, int | float):
            return np.float32(value) if self.dtype is float else np.int32(value)
        return value

    def prompts(self, value: Any) -> int | None:
        """For how many prompts it has a value each; None where one holds for all."""
        return value.shape[0] if np.ndim(value) == 1 else None


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
    "top_h": Knob(float, None, allowed="> 0 and <= 1", holds=lambda value: (value > 0) & (value <= 1)),
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
    "forced_bos_token_id": Knob(int, None, **_NOT_NEGATIVE),
    "pad_token_id": Knob(int, None, per_prompt=False, **_NOT_NEGATIVE),
}


def _normal_number(name: str, value: Any, knob: Knob) -> Any:
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
    with np.errstate(over="ignore"):  # what becomes infinite is refused
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


@dataclasses.dataclass(frozen=True)
class Decay(Option):
    """`(start, factor)`, each a number or one per prompt. Leaf: `(int32, float32)`."""

    start: Knob = Knob(int, None, **_NOT_NEGATIVE)
    factor: Knob = Knob(float, None, **_POSITIVE)

    def normal(self, name: str, value: Any) -> Any:
        """Return None or the pair."""
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != 2 or any(part is None for part in value):
            raise ConfigError(f"{name} must be a pair, (start, factor), got {value!r}")
        pair = self.start.normal(f"{name}'s start", value[0]), self.factor.normal(f"{name}'s factor", value[1])
        if all(np.ndim(part) for part in pair) and len(pair[0]) != len(pair[1]):
            raise ConfigError(f"{name} must have as many starts as factors, got {len(pair[0])} and {len(pair[1])}")
        return pair

    def leaf(self, value: Any) -> Any:
        """Return the pair with its dtypes, or None."""
        return None if value is None else (self.start.leaf(value[0]), self.factor.leaf(value[1]))

    def prompts(self, value: Any) -> int | None:
        """For how many prompts it has a value each; None where one holds for all."""
        return None if value is None else self.start.prompts(value[0]) or self.factor.prompts(value[1])


class Watermark(Option):
    """A `WatermarkingConfig` or the dict of one; it is its own leaf."""

    def normal(self, name: str, value: Any) -> Any:
        """Return None or a WatermarkingConfig."""
        if isinstance(value, Mapping):
            return WatermarkingConfig.from_hf(value)
        if value is not None and not isinstance(value, WatermarkingConfig):
            raise TypeError(f"{name} must be a WatermarkingConfig or a dict, got {type(value).__name__}")
        return value


# Every option whose value is an argument of the compiled program.
TRACED: dict[str, Option] = {
    **KNOBS,
    **TABLES,
    "exponential_decay_length_penalty": Decay(),
    "watermarking_config": Watermark(),
}


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
    """Return lists and dicts, as JSON has them; a dict by tuples becomes the list `[[key, value], ...]`."""
    if isinstance(value, tuple):
        return [thawed(item) for item in value]
    if isinstance(value, WatermarkingConfig):
        return value.to_hf()
    if isinstance(value, Mapping) and any(isinstance(key, tuple) for key in value):
        return [[thawed(key), thawed(item)] for key, item in value.items()]
    if isinstance(value, Mapping):
        return {key: thawed(item) for key, item in value.items()}
    return value
