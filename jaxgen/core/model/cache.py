"""The preallocated cache: each layer's state of the tokens that the model has read, which is their keys and values.

A row's tokens are stored in order and without gaps, regardless of padding: slot i contains the row's i-th token. A row
therefore attends to the same slots whether it runs alone or in a batch, regardless of the bucket. The filled slots of
a row always come first, so lowering `length` is enough to drop the row's last tokens.

A cache can extend another cache, its `prefix`, which is read-only. If the cache has c times as many rows as the prefix,
rows b*c to b*c + c - 1 share prefix row b. A prefix lets sequences and beams share the keys and values of their prompt,
and lets requests share those of a system prompt. Slot numbers start in the prefix and continue in the cache that
extends it.

The rows of a prompt can also share the slots that they write to (`fork(..., shared=True)`), as beams do. `select` then
does not move keys or values.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxgen.buckets import cache_slots
from jaxgen.core.model.cache_storage import (
    SCALED,
    LayerState,
    ScaledSlots,
    Slots,
    as_numbers,
    as_stored,
    empty_slots,
    write,
)
from jaxgen.core.model.config import ModelConfig
from jaxgen.errors import InputError
from jaxgen.shapes import put, repeat_rows, resize_axis, short_repr, take

# The index that marks an empty slot. It is larger than any token's index.
EMPTY = jnp.iinfo(jnp.int32).max


@flax.struct.dataclass
class KeysValues(LayerState):
    """Keys and values of one layer, in one part of the cache or of the new tokens alone.

    Attributes:
        keys: `[n, K, S, H]`, rotated by RoPE: a float array of `dtype`, an int16 array with the bits of 16-bit floats,
            or `ScaledSlots`. n divides B, and batch row b reads row b // (B/n). One product covers all batch rows that
            read the same row. If rows share slots, S counts the slots of all writers, and token i of writer j is at
            index `i * writers + j`.
        values: stored like the keys, but not rotated.
        dtype: the dtype of keys and values when read as floats; static.
    """

    keys: Slots
    values: Slots
    dtype: str = flax.struct.field(pytree_node=False)
    can_crop = True

    __repr__ = short_repr

    @classmethod
    def create(cls, cfg: ModelConfig, rows: int, slots: int, dtype: jnp.dtype) -> KeysValues:
        """Return empty slots of this dtype. With `SCALED`, they are read as floats of the model's dtype."""
        scaled, shape = dtype == SCALED, (rows, cfg.num_key_value_heads, slots, cfg.head_dim)
        name = cfg.dtype if scaled else dtype.name
        return cls(empty_slots(shape, name, scaled), empty_slots(shape, name, scaled), name)

    @property
    def slots(self) -> int:
        """The number of slots, S."""
        return self.keys.shape[2]

    def push(self, k: jax.Array, v: jax.Array, slots: jax.Array) -> KeysValues:
        """Store the keys and values `[B, K, T, H]` of new tokens in `slots int32[B, T]`; skip slots past the end."""
        scaled = isinstance(self.keys, ScaledSlots)
        keys, values = [as_stored(x, self.dtype, scaled) for x in (k, v)]
        return write(self, KeysValues(keys, values, self.dtype), slots)

    def empty(self, rows: int, slots: int) -> KeysValues:
        """Return empty slots."""
        return self.fork(rows, slots, 1)

    def fork(self, rows: int, slots: int, writers: int) -> KeysValues:
        """Return empty slots, because the prefix stays readable."""

        def zeros(x: jax.Array) -> jax.Array:
            return jnp.zeros((rows // writers, x.shape[1], slots * writers, *x.shape[3:]), x.dtype)

        return jax.tree.map(zeros, self)

    def resize(self, slots: int) -> KeysValues:
        """Drop the last slots, or add empty ones."""
        return jax.tree.map(functools.partial(resize_axis, axis=2, size=slots), self)

    def select(self, rows: jax.Array, groups: int, shared: bool) -> KeysValues:
        """Move the rows, unless they share slots."""
        return self if shared else jax.tree.map(lambda x: take(x, rows, groups), self)


def layer_kinds(cfg: ModelConfig) -> tuple[type[KeysValues], ...]:
    """Return the kind of state that each layer of a model has."""
    return (KeysValues,) * cfg.num_hidden_layers


@flax.struct.dataclass
class KVCache:
    """Keys and values of the tokens so far, one `KeysValues` per layer.

    16-bit keys and values are stored bit for bit as int16. XLA's CPU compiler would convert a cache of 16-bit
    floats to float32 and back at every step of a loop. `layer` returns keys and values as floats.

    A cache is a chain of parts: its prefix, if any, and then its own slots. In this example, rows 0 and 1 share a row
    of the prefix and two slots per token (`writers` is 2), of which row r writes slot r. Both rows continue token d,
    which row 0 wrote, so `owners` is 0 for this token in both rows. Token e is no longer read by any row.

                prefix   own slots   owners   tokens
        row 0   a b c    d|e  f|g     0 0     a b c d f
        row 1   (same)   (same)       0 1     a b c d g

    Attributes:
        layers: the keys and values of each layer, `[B/writers, K, S*writers, H]`.
        length: int32[B], the number of slots that each row has filled in this part, counted from its first slot.
        prefix: the cache that this one extends, or None.
        owners: int32[B, S], the writer of each token, from 0 to `writers - 1`; None if each row has its own slots.
        writers: the number of rows that share slots, static.
        streams: with guidance 2, otherwise 1; static. B counts the rows of all streams, one stream after the other.
            Row numbers and arguments with one entry per row count only the rows of one stream.
    """

    layers: tuple[KeysValues, ...]
    length: jax.Array
    prefix: KVCache | None = None
    owners: jax.Array | None = None
    writers: int = flax.struct.field(pytree_node=False, default=1)
    streams: int = flax.struct.field(pytree_node=False, default=1)

    __repr__ = short_repr

    @classmethod
    def create(cls, cfg: ModelConfig, rows: int, slots: int, dtype=None) -> KVCache:
        """Return an empty cache with `slots` slots for each of `rows` rows, by default in the model's dtype.

        With the dtype `SCALED`, keys and values are stored in 8 bits with a float32 scale for each head and slot.
        Reading keys or values returns floats of the model's dtype.
        """
        if rows < 1 or slots < 1:
            raise InputError(f"a cache needs at least one row and one slot, got rows={rows}, slots={slots}")
        dtype = jnp.dtype(dtype or cfg.dtype)
        layers = [kind.create(cfg, rows, slots, dtype) for kind in layer_kinds(cfg)]
        return cls(tuple(layers), jnp.zeros(rows, jnp.int32))

    def fork(self, copies: int, slots: int, shared: bool = False) -> KVCache:
        """Return an empty cache with this cache as its prefix, `slots` slots per row, and `copies` rows per prefix row.

        With `shared`, the copies of a row share their slots, so `select` moves no data.
        """
        if copies < 1 or slots < 1:
            raise InputError(f"a fork needs at least one copy and one slot, got copies={copies}, slots={slots}")
        rows, writers = self.rows * copies, copies if shared else 1
        layers = tuple([layer.fork(rows, slots, writers) for layer in self.layers])
        owners = jnp.zeros((rows, slots), jnp.int32) if shared else None
        return KVCache(layers, jnp.zeros(rows, jnp.int32), self, owners, writers, self.streams)

    def empty_rows(self, rows: int, slots: int) -> KVCache:
        """Return an empty cache of `rows` rows and `slots` slots, with this cache's storage format and prefix."""
        rows *= self.streams
        layers = tuple([layer.empty(rows, slots) for layer in self.layers])
        return KVCache(layers, jnp.zeros(rows, jnp.int32), self.prefix, streams=self.streams)

    def grow(self, slots: int) -> KVCache:
        """Return a copy with at least `slots` more slots. Rows must not share slots."""
        layers = tuple([layer.resize(cache_slots(self.slots + slots)) for layer in self.layers])
        return dataclasses.replace(self, layers=layers)

    def layer(self, index: int) -> tuple[jax.Array, jax.Array]:
        """Return the keys and values of a layer in this part as floats, each `dtype[B, K, S, H]`."""
        return as_numbers(self.keys[index], self.dtype), as_numbers(self.values[index], self.dtype)

    @property
    def keys(self) -> tuple[Slots, ...]:
        """The keys of each layer."""
        return tuple([layer.keys for layer in self.layers])

    @property
    def values(self) -> tuple[Slots, ...]:
        """The values of each layer."""
        return tuple([layer.values for layer in self.layers])

    @property
    def dtype(self) -> str:
        """The dtype of keys and values when read as floats."""
        return self.layers[0].dtype

    @property
    def cache_dtype(self) -> str | None:
        """The value that `cfg.cache_dtype` must have to continue from this cache: `SCALED.name` (8 bits) or None."""
        return SCALED.name if isinstance(self.layers[0].keys, ScaledSlots) else None

    @property
    def rows(self) -> int:
        """The number of rows in all streams, B."""
        return self.length.shape[0]

    @property
    def slots(self) -> int:
        """The number of slots that a row can fill in this part, S."""
        return self.layers[0].slots // self.writers

    @property
    def offset(self) -> int:
        """The index of this part's first slot, which equals the number of slots in the prefix."""
        return 0 if self.prefix is None else self.prefix.offset + self.prefix.slots

    @property
    def parts(self) -> list[KVCache]:
        """The prefixes, earliest tokens first, followed by this cache."""
        return [*(self.prefix.parts if self.prefix is not None else []), self]

    @property
    def prefix_length(self) -> jax.Array:
        """The number of tokens that each row has in the prefix, int32[B]."""
        if self.prefix is None:
            return jnp.zeros(self.rows, jnp.int32)
        return repeat_rows(self.prefix.total_length, self.rows)

    @property
    def total_length(self) -> jax.Array:
        """The number of tokens in each row and its prefix, int32[B]."""
        return self.prefix_length + self.length

    def flatten(self, slots: int) -> KVCache:
        """Return a copy as a single part of `slots` slots, which must be enough for `total_length`."""
        first, *rest = self.parts
        repeated = jax.tree.map(lambda x: repeat_rows(x, self.rows), first.separate().layers)
        layers = tuple([layer.resize(slots) for layer in repeated])
        merged = KVCache(layers, self.total_length, streams=self.streams)
        for part in rest:
            merged = _append(merged, part)
        return merged

    def check_model(self, cfg: ModelConfig) -> None:
        """Raise an error if the cache was created for a different model."""
        layers, (_, heads, _, size) = len(self.layers), self.layers[0].keys.shape
        if (layers, heads, size) != (cfg.num_hidden_layers, cfg.num_key_value_heads, cfg.head_dim):
            raise InputError(
                f"the cache belongs to another model: it has {layers} layers, {heads} heads and head size {size}; this "
                f"model has {cfg.num_hidden_layers}, {cfg.num_key_value_heads} and {cfg.head_dim}"
            )

    def crop(self, length: jax.Array | int) -> KVCache:
        """Return a copy that consists of a single part and contains only the first `length` tokens of each row.

        `length` is int32[] or int32[B]. A negative length removes that many tokens from the end, as in transformers.
        """
        self._check_can_crop()
        return _crop(self, self.check_length(length))

    def _check_can_crop(self) -> None:
        if not all(layer.can_crop for layer in self.layers):
            raise InputError("this model's cache cannot remove tokens: read the shorter text into a new cache")

    def check_length(self, length: jax.Array | int) -> jax.Array:
        """Return `crop`'s argument as an array; raise an error if it is neither one integer nor one per row."""
        length = jnp.asarray(length)
        if not jnp.issubdtype(length.dtype, jnp.integer) or length.shape not in ((), (self.rows,)):
            raise InputError(f"length must be one integer or one per row, [{self.rows}], got {length!r}")
        return length

    def reorder(self, rows: jax.Array) -> KVCache:
        """Return a copy as a single part in which row i is the old row `rows[i]`; `rows int32[n]` may repeat rows."""
        return _reorder(self, self.row_indices(row_numbers(rows, self.rows // self.streams)))

    def select(self, rows: jax.Array) -> KVCache:
        """Return a cache in which row i is the old row `rows[i]`, for `rows int32[n]`; the prefix stays the same.

        Row i and row `rows[i]` must share a prefix row, as the beams of a prompt do; this is not checked. The cache's
        structure does not change either, so a compiled loop can carry the cache. To mix prompts, use `reorder`. If rows
        share slots, no keys or values are copied, and `rows` may be shorter than a stream. A shorter `rows` must select
        the same number of rows from each prompt.
        """
        rows, groups = self.row_indices(rows), 1 if self.prefix is None else self.prefix.rows
        layers = tuple([layer.select(rows, groups, self.owners is not None) for layer in self.layers])
        length, owners = jax.tree.map(lambda x: take(x, rows, groups), (self.length, self.owners))
        return dataclasses.replace(self, layers=layers, length=length, owners=owners)

    def row_indices(self, rows: jax.Array) -> jax.Array:
        """Convert the row numbers `rows int32[n]` to indices of the rows in all streams, int32[streams * n]."""
        if self.streams == 1:
            return rows
        first = jnp.arange(self.streams, dtype=jnp.int32)[:, None] * (self.rows // self.streams)
        return (first + rows[None, :]).reshape(-1)

    def in_all_streams(self, tree: Any) -> Any:
        """Repeat arrays `[rows, ...]` once per stream, and return `[B, ...]`."""
        return tree if self.streams == 1 else jax.tree.map(lambda x: jnp.concatenate([x] * self.streams), tree)

    def first_stream(self) -> KVCache:
        """Return only the rows of the first stream, and only the rows of the prefix that belong to them."""
        if self.streams == 1:
            return self
        part = jax.tree.map(lambda x: x[: x.shape[0] // self.streams], dataclasses.replace(self, prefix=None))
        prefix = None if self.prefix is None else self.prefix.first_stream()
        return dataclasses.replace(part, prefix=prefix, streams=1)

    def insert(self, source: KVCache, rows: jax.Array) -> KVCache:
        """Return a copy of this cache in which the n rows of `source` replace the rows at the indices `rows int32[n]`.

        Only the inserted rows are copied, even in a compiled loop. Row indices out of range are ignored; all other
        indices must be distinct. A prefix must have a single row and must also be the prefix of `source`.

        Raises:
            InputError: the shapes or dtypes of `source` do not match, the prefix has several rows, or rows share slots.
        """
        if self.owners is not None:
            raise InputError("rows that share slots cannot be replaced: use a cache whose rows have their own slots")
        if self.prefix is not None and self.prefix.rows > 1:
            raise InputError(
                f"rows cannot be replaced if the prefix has several rows, got {self.prefix.rows}: use a cache without "
                "a prefix, such as `reorder` returns"
            )
        sizes, given = ([_form(part) for part in cache.parts] for cache in (self, source))
        if sizes != given:
            raise InputError(f"source must have the parts ([K, S, H], dtype) = {sizes}, got {given}")
        # Each dropped row gets its own index, because the scatter's indices are declared unique.
        dropped = self.rows + jnp.arange(source.rows, dtype=jnp.int32)
        is_row = self.in_all_streams((rows >= 0) & (rows < self.rows // self.streams))
        rows = jnp.where(is_row, self.row_indices(rows), dropped)
        part, new = (dataclasses.replace(cache, prefix=None) for cache in (self, source))
        part = jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop", unique_indices=True), part, new)
        return dataclasses.replace(part, prefix=self.prefix)

    def expand(self, copies: int) -> KVCache:
        """Return a copy as a single part with each row repeated `copies` times, like torch's `repeat_interleave`.

        `generate` does not need this, because it accepts a cache with one row for several prompts.
        """
        return _reorder(self, repeated_rows(self.rows, copies))

    def drop_last(self, count: jax.Array) -> KVCache:
        """Drop the last `count int32[n]` tokens of each row, which must be in this part. New tokens overwrite them."""
        self._check_can_crop()
        return dataclasses.replace(self, length=self.length - self.in_all_streams(count))

    def token_order(self) -> jax.Array:
        """Return the token indices of all slots, int32[B, S*writers]; `EMPTY` if a row has no token in the slot."""
        slot = jnp.arange(self.slots, dtype=jnp.int32)[None, :]
        order = jnp.where(slot < self.length[:, None], self.prefix_length[:, None] + slot, EMPTY)
        if self.owners is None:
            return order
        own = self.owners[..., None] == jnp.arange(self.writers, dtype=jnp.int32)[None, None, :]
        return jnp.where(own, order[..., None], EMPTY).reshape(self.rows, -1)

    def write_slots(self, slots: jax.Array) -> tuple[KVCache, jax.Array]:
        """Prepare a part whose rows share slots for writing to `slots int32[B, T]`. The write skips slots past the end.

        Returns:
            The cache with updated `owners`, and the slots' indices in the arrays of `KeysValues`, as int32[B, T].
        """
        assert self.owners is not None
        rows = jnp.arange(self.rows, dtype=jnp.int32)[:, None]
        writer = rows % self.writers
        owners = put(self.owners, slots, jnp.broadcast_to(writer, slots.shape))
        return dataclasses.replace(self, owners=owners), slots * self.writers + writer

    def by_token(self, weights: jax.Array) -> jax.Array:
        """Convert attention weights per slot `[..., offset + S*writers]` to weights per token `[..., offset + S]`."""
        if self.owners is None:
            return weights
        own = weights[..., self.offset :].reshape(*weights.shape[:-1], self.slots, self.writers)
        return jnp.concatenate([weights[..., : self.offset], own.sum(axis=-1)], axis=-1)

    def separate(self) -> KVCache:
        """Return this part without its prefix, with separate slots for each row."""
        own = dataclasses.replace(self, prefix=None)
        if self.owners is None:
            return own
        row = jnp.arange(self.rows)[:, None] // (self.rows // self.layers[0].keys.shape[0])
        index = jnp.arange(self.slots, dtype=jnp.int32)[None, :] * self.writers + self.owners
        layers = jax.tree.map(lambda x: x[row, :, index].swapaxes(1, 2), self.layers)
        return dataclasses.replace(own, layers=layers, owners=None, writers=1)


def _form(part: KVCache) -> tuple[tuple[int, ...], str]:
    return part.layers[0].keys.shape[1:], part.cache_dtype or part.dtype


def row_numbers(rows: jax.Array, count: int) -> jax.Array:
    """Return `reorder`'s argument as an array; raise an error if an entry is not a row index below `count`."""
    rows = jnp.asarray(rows)
    if not jnp.issubdtype(rows.dtype, jnp.integer) or rows.ndim != 1 or not len(rows):
        raise InputError(f"rows must be integers of shape [n], at least one, got {rows.dtype}{list(rows.shape)}")
    if not isinstance(rows, Tracer) and (int(rows.min()) < 0 or int(rows.max()) >= count):
        raise InputError(f"rows must be from 0 to {count - 1}, got {rows.tolist()}")
    return rows


def repeated_rows(rows: int, copies: int) -> jax.Array:
    """Return `reorder`'s argument that repeats each row; raise an error if `copies` is not a positive integer."""
    if not isinstance(copies, int) or copies < 1:
        raise InputError(f"copies must be a whole number of at least 1, got {copies!r}")
    return jnp.repeat(jnp.arange(rows), copies)


@functools.partial(jax.jit, inline=True)
def _crop(cache: KVCache, length: jax.Array) -> KVCache:
    flat = cache.flatten(cache.offset + cache.slots)
    length = jnp.clip(jnp.where(length < 0, flat.length + length, length), 0)
    return dataclasses.replace(flat, length=jnp.minimum(flat.length, length))


@functools.partial(jax.jit, inline=True)
def _reorder(cache: KVCache, rows: jax.Array) -> KVCache:
    merged = cache.flatten(cache.offset + cache.slots)
    return jax.tree.map(lambda x: x[rows], merged)


def _append(merged: KVCache, part: KVCache) -> KVCache:
    """Write the tokens of `part` to `merged`, after the tokens of the part's prefix."""
    rows, slots = merged.rows, merged.slots
    column = jnp.arange(part.slots, dtype=jnp.int32)[None, :]
    start = repeat_rows(part.prefix_length, rows)[:, None]
    part = part.separate()
    filled = jnp.where(column < repeat_rows(part.length, rows)[:, None], start + column, slots + column)
    new = jax.tree.map(lambda x: repeat_rows(x, rows), part.layers)
    return dataclasses.replace(merged, layers=write(merged.layers, new, filled))
