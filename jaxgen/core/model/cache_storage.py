"""The state that a cache stores for a layer: the contract of all kinds, and the formats of keys and values.

Keys and values are stored as floats, as the bits of 16-bit floats, or as 8-bit integers with scales.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Protocol, Self

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.workarounds import stored_dtype

SCALED = jnp.dtype(jnp.int8)  # the dtype that selects 8-bit storage with scales
_LARGEST = 127  # -128 is not used, so that negation is exact


class LayerState(Protocol):
    """State of one layer in one part of a cache: what the layer stores of the tokens that it has read.

    A kind of state is a pytree. The first axis of each array is the rows, which is all that `KVCache.insert` needs. The
    layer adds tokens with `push`, whose arguments depend on the kind. A row's tokens arrive in order, and padding must
    not change the state. `KVCache.flatten` joins parts, and supports only `KeysValues`.

    Attributes:
        can_crop: True if lowering `KVCache.length` removes a row's last tokens, which `crop`, `drop_last` and the modes
            with `Mode.crops` need. False for a state that merges all tokens, such as the state of a recurrence.
    """

    can_crop: ClassVar[bool]

    @classmethod
    def create(cls, cfg: ModelConfig, rows: int, slots: int, dtype: jnp.dtype) -> Self:
        """Return the state before the first token."""
        ...

    def empty(self, rows: int, slots: int) -> Self:
        """Return the state before the first token, in the format of this state."""
        ...

    def fork(self, rows: int, slots: int, writers: int) -> Self:
        """Return the state of `rows` rows in a new part that extends this one. Groups of `writers` rows share slots."""
        ...

    def resize(self, slots: int) -> Self:
        """Return a copy with space for `slots` tokens."""
        ...

    def select(self, rows: jax.Array, groups: int, shared: bool) -> Self:
        """Return the state after `KVCache.select`. If `shared`, `KVCache.owners` says which slots a row reads.

        `rows` and `groups` are as in `shapes.take`.
        """
        ...


@flax.struct.dataclass
class ScaledSlots:
    """8-bit keys or values, which represent `values * scales[..., None]`.

    Attributes:
        values: int8 `[n, K, S, H]`, from -127 to 127; in attention, floats with the same values.
        scales: float32 `[n, K, S]`, one for each head and slot.
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, `[n, K, S, H]`."""
        return self.values.shape


Slots = jax.Array | ScaledSlots


def empty_slots(shape: tuple[int, ...], dtype: str, int8: bool) -> Slots:
    """Return zeros `[n, K, S, H]`: 8-bit if `int8` is True, otherwise in the format that a cache of `dtype` uses."""
    if int8:
        return ScaledSlots(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    return jnp.zeros(shape, stored_dtype(dtype))


def as_stored(x: jax.Array, dtype: str, int8: bool = False) -> Slots:
    """Convert floats `[n, K, T, H]` to the format in which a cache of `dtype` stores them."""
    x = x.astype(dtype)
    if not int8:
        return x if stored_dtype(dtype) == x.dtype else lax.bitcast_convert_type(x, stored_dtype(dtype))
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / _LARGEST
    values = jnp.round(x / jnp.where(scales == 0, 1, scales)[..., None])
    return ScaledSlots(values.astype(jnp.int8), scales)


def as_numbers(x: Slots, dtype: str) -> jax.Array:
    """Convert the stored contents of a cache of `dtype` back to floats."""
    if isinstance(x, ScaledSlots):
        return (x.values.astype(jnp.float32) * x.scales[..., None]).astype(dtype)
    return x if x.dtype == jnp.dtype(dtype) else lax.bitcast_convert_type(x, dtype)


def write(buffer: Any, new: Any, slots: jax.Array) -> Any:
    """Write arrays `new [B*c, K, T, H]` to `slots int32[B*c, T]` of `buffer [B, K, S, H]`; skip slots past the end.

    Both are arrays or trees of arrays. Rows b*c to b*c + c - 1 write to row b of the buffer. Each row and head is
    written by a separate scatter operation. XLA can therefore write in place inside a loop, even if rows write to
    different slots. On a mesh, each device writes only the rows and heads that it stores.
    """
    return jax.tree.map(functools.partial(_write, slots), buffer, new)


def _write(slots: jax.Array, buffer: jax.Array, new: jax.Array) -> jax.Array:
    def write_head(buffer: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
        return buffer.at[slots].set(new, mode="drop", unique_indices=True)

    if new.shape[0] != buffer.shape[0]:
        rows, (heads, _, *size) = buffer.shape[0], new.shape[1:]
        new = new.reshape(rows, -1, *new.shape[1:]).swapaxes(1, 2).reshape(rows, heads, -1, *size)
        slots = slots.reshape(rows, -1)
    slots = jnp.broadcast_to(slots[:, None, :], new.shape[:3])
    return jax.vmap(jax.vmap(write_head))(buffer, new, slots)
