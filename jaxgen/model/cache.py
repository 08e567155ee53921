"""The preallocated key-value cache.

A row's tokens lie in its slots in their order and without gaps, whatever the padding was: slot i holds the row's
i-th token. So a row attends to the same slots alone, in any batch and in any bucket, the filled part of a cache is
its beginning, and to crop one is to lower `length`.

A cache may stand on another one, its `prefix`, of fewer rows and read only: rows b*c to b*c + c - 1 share prefix
row b. Return sequences and beams share their prompt's keys and values in this way, requests their system prompt's;
only what the rows do not share is copied when rows are reordered. Slots are numbered through, the prefix's first.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxgen.errors import InputError
from jaxgen.model.config import ModelConfig
from jaxgen.shapes import repeat_rows

# The order of a slot that holds nothing: after every token.
EMPTY = jnp.iinfo(jnp.int32).max


@flax.struct.dataclass
class KVCache:
    """Keys and values of the tokens so far, one `[B, K, S, H]` pair per layer.

    Attributes:
        keys: one array per layer, `[B, K, S, H]`, rotated by RoPE.
        values: likewise.
        length: int32[B], how many slots of this part each row fills, from slot 0 on.
        prefix: the cache that this one stands on, or None.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array
    prefix: KVCache | None = None

    @classmethod
    def create(cls, cfg: ModelConfig, rows: int, slots: int, dtype=None) -> KVCache:
        """Return an empty cache of `slots` slots for each of `rows` rows.

        `dtype` is by default the model's, on CPU float32: there XLA converts a 16-bit cache to float32 and back,
        all of it, for each token that is written. The values are the same, rounded to the model's dtype.
        """
        if rows < 1 or slots < 1:
            raise InputError(f"a cache needs at least one row and one slot, got rows={rows}, slots={slots}")
        shape = (rows, cfg.num_key_value_heads, slots, cfg.head_dim)
        dtype = dtype or ("float32" if jax.default_backend() == "cpu" else cfg.dtype)
        layers = range(cfg.num_hidden_layers)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
            values=tuple(jnp.zeros(shape, dtype) for _ in layers),
            length=jnp.zeros(rows, jnp.int32),
        )

    def fork(self, copies: int, slots: int) -> KVCache:
        """Return an empty cache of `slots` slots for `copies` rows per row, that stands on this one."""
        if copies < 1 or slots < 1:
            raise InputError(f"a fork needs at least one copy and one slot, got copies={copies}, slots={slots}")
        shape = (self.rows * copies, *self.keys[0].shape[1:2], slots, self.keys[0].shape[-1])
        return KVCache(
            keys=tuple(jnp.zeros(shape, key.dtype) for key in self.keys),
            values=tuple(jnp.zeros(shape, value.dtype) for value in self.values),
            length=jnp.zeros(shape[0], jnp.int32),
            prefix=self,
        )

    @property
    def rows(self) -> int:
        """How many rows, B."""
        return self.keys[0].shape[0]

    @property
    def slots(self) -> int:
        """How many slots this part has, S."""
        return self.keys[0].shape[2]

    @property
    def offset(self) -> int:
        """The number of this part's first slot: how many slots the prefix has."""
        return 0 if self.prefix is None else self.prefix.offset + self.prefix.slots

    @property
    def parts(self) -> list[KVCache]:
        """This cache and those it stands on, in the order of the tokens."""
        return [*(self.prefix.parts if self.prefix is not None else []), self]

    @property
    def prefix_length(self) -> jax.Array:
        """int32[B], how many tokens each row has in the prefix."""
        if self.prefix is None:
            return jnp.zeros(self.rows, jnp.int32)
        return repeat_rows(self.prefix.total_length, self.rows)

    @property
    def total_length(self) -> jax.Array:
        """int32[B], how many tokens each row has, the prefix's included."""
        return self.prefix_length + self.length

    def flatten(self, slots: int) -> KVCache:
        """Return a copy in one part of `slots` slots, which must be enough for `total_length`."""
        first, *rest = self.parts
        merged = KVCache(
            keys=tuple(_resize(repeat_rows(key, self.rows), slots) for key in first.keys),
            values=tuple(_resize(repeat_rows(value, self.rows), slots) for value in first.values),
            length=self.total_length,
        )
        for part in rest:
            merged = _append(merged, part)
        return merged

    def check_model(self, cfg: ModelConfig) -> None:
        """Raise where this is the cache of another model."""
        layers, (_, heads, _, size) = len(self.keys), self.keys[0].shape
        if (layers, heads, size) != (cfg.num_hidden_layers, cfg.num_key_value_heads, cfg.head_dim):
            raise InputError(
                f"the cache is of another model: it has {layers} layers, {heads} heads and head size {size}; this one "
                f"{cfg.num_hidden_layers}, {cfg.num_key_value_heads} and {cfg.head_dim}"
            )

    def crop(self, length: jax.Array | int) -> KVCache:
        """Return a copy in one part with at most the first `length` tokens of each row, int32[] or int32[B].

        A negative length removes that many tokens from the end, as in transformers.
        """
        return _crop(self, self.check_length(length))

    def check_length(self, length: jax.Array | int) -> jax.Array:
        """Return a length to crop to as an array; raise unless it is one integer or one per row."""
        length = jnp.asarray(length)
        if not jnp.issubdtype(length.dtype, jnp.integer) or length.shape not in ((), (self.rows,)):
            raise InputError(f"length must be one integer or one per row, [{self.rows}], got {length!r}")
        return length

    def reorder(self, rows: jax.Array) -> KVCache:
        """Return a copy in one part with other rows: row i is row `rows[i]`, int32[n]; some may come several times."""
        rows = jnp.asarray(rows)
        if not jnp.issubdtype(rows.dtype, jnp.integer) or rows.ndim != 1 or not len(rows):
            raise InputError(f"rows must be integers of shape [n], at least one, got {rows.dtype}{list(rows.shape)}")
        if not isinstance(rows, Tracer) and (int(rows.min()) < 0 or int(rows.max()) >= self.rows):
            raise InputError(f"rows must be from 0 to {self.rows - 1}, got {rows.tolist()}")
        return _reorder(self, rows)

    def expand(self, copies: int) -> KVCache:
        """Return a copy in one part with each row `copies` times, as `repeat_interleave`.

        `generate` does not need it: a cache of fewer rows is shared by as many prompts as there are to each, and read
        from one place.
        """
        if not isinstance(copies, int) or copies < 1:
            raise InputError(f"copies must be a whole number of at least 1, got {copies!r}")
        return _reorder(self, jnp.repeat(jnp.arange(self.rows), copies))

    def take_rows(self, rows: int) -> KVCache:
        """Return the first rows of a cache whose second half is of no interest, or all of it where there are so many.

        That is how classifier-free guidance leaves it; a prefix is cut in proportion.
        """
        if self.rows == rows:
            return self
        keep = jax.tree.map(lambda x: x[:rows], dataclasses.replace(self, prefix=None))
        prefix = None if self.prefix is None else self.prefix.take_rows(self.prefix.rows * rows // self.rows)
        return dataclasses.replace(keep, prefix=prefix)

    def pad_rows(self, rows: int) -> KVCache:
        """Return this cache, of one part, with empty rows behind its own."""
        return jax.tree.map(lambda x: jnp.pad(x, ((0, rows - x.shape[0]), *[(0, 0)] * (x.ndim - 1))), self)

    def drop_last(self, count: jax.Array) -> KVCache:
        """Forget the last `count int32[B]` tokens of each row, all of them in this part. Later tokens replace them."""
        return dataclasses.replace(self, length=self.length - count)

    def token_order(self) -> jax.Array:
        """int32[B, S]: which of its row's tokens, counted from 0, a slot of this part holds; `EMPTY` for none."""
        slot = jnp.arange(self.slots, dtype=jnp.int32)[None, :]
        return jnp.where(slot < self.length[:, None], self.prefix_length[:, None] + slot, EMPTY)


@jax.jit
def _crop(cache: KVCache, length: jax.Array) -> KVCache:
    flat = cache.flatten(cache.offset + cache.slots)
    length = jnp.clip(jnp.where(length < 0, flat.length + length, length), 0)
    return dataclasses.replace(flat, length=jnp.minimum(flat.length, length))


@jax.jit
def _reorder(cache: KVCache, rows: jax.Array) -> KVCache:
    merged = cache.flatten(cache.offset + cache.slots)
    return jax.tree.map(lambda x: x[rows], merged)


def _resize(x: jax.Array, slots: int, axis: int = 2) -> jax.Array:
    """Cut `x` along its slots, or fill it up with zeros."""
    x = jax.lax.slice_in_dim(x, 0, min(slots, x.shape[axis]), axis=axis)
    widths = [(0, slots - x.shape[axis]) if index == axis else (0, 0) for index in range(x.ndim)]
    return jnp.pad(x, widths)


def _append(merged: KVCache, part: KVCache) -> KVCache:
    """Put what `part` holds behind what it stands on."""
    rows, slots = merged.rows, merged.slots
    column = jnp.arange(part.slots, dtype=jnp.int32)[None, :]
    start = repeat_rows(part.prefix_length, rows)[:, None]

    def places(count: jax.Array) -> jax.Array:
        return jnp.where(column < repeat_rows(count, rows)[:, None], start + column, slots + column)

    filled = places(part.length)
    return dataclasses.replace(
        merged,
        keys=tuple(write(a, repeat_rows(b, rows), filled) for a, b in zip(merged.keys, part.keys, strict=True)),
        values=tuple(write(a, repeat_rows(b, rows), filled) for a, b in zip(merged.values, part.values, strict=True)),
    )


def write(buffer: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Return `buffer [B, K, S, H]` with `new [B, K, T, H]` at `slots int32[B, T]`; slots past the end are dropped.

    A scatter, which XLA does in place in a loop whether the rows write to one slot or each to its own.
    """
    rows = jnp.arange(buffer.shape[0])[:, None, None]
    heads = jnp.arange(buffer.shape[1])[None, :, None]
    new = new.astype(buffer.dtype)
    return buffer.at[rows, heads, slots[:, None, :]].set(new, mode="drop", unique_indices=True)
