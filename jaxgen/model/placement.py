"""Places of new tokens: their positions, their slots in the cache, and the keys that they may see."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.errors import InputError
from jaxgen.model.cache import KVCache
from jaxgen.model.config import ModelConfig
from jaxgen.model.context import NO_CONTEXT, Context
from jaxgen.model.masks import Visibility, allocate_slots, first_of_segment, hide_keys, key_order, row_order
from jaxgen.model.rope import rope_angles
from jaxgen.shapes import repeat_rows


@flax.struct.dataclass
class Placement:
    """The new tokens' places, the same for all layers.

    Attributes:
        cos, sin: `[B, T, H]`, the rotation of their positions.
        slots: int32[B, T], their slots in the cache's last part; padding and overflow past its end. None without a
            cache.
        visible: the keys that they may see, without the layer's window.
        context: of the pass.
        output_attentions: return the attention weights, static.
    """

    cos: jax.Array
    sin: jax.Array
    slots: jax.Array | None
    visible: Visibility
    context: Context = NO_CONTEXT
    output_attentions: bool = flax.struct.field(pytree_node=False, default=False)


def place(
    cfg: ModelConfig,
    x: jax.Array,
    attention_mask: jax.Array | None,
    cache: KVCache | None,
    cache_position: jax.Array | int | None,
    position_ids: jax.Array | None,
    segment_ids: jax.Array | None,
    key_mask: jax.Array | None,
) -> tuple[Placement, KVCache | None, jax.Array | None]:
    """Place the new tokens, of embeddings `x [B, T, D]`, in their rows and in the cache; see `CausalLM.__call__`.

    Returns their places, the cache with its new lengths, and bool[B], True for the rows whose tokens do not fit;
    the last two None without a cache.
    """
    batch, steps, _ = x.shape
    mask = _mask(attention_mask, batch, steps)
    first = start = None
    if cache is None:
        start = 0
        if cache_position is not None:
            raise InputError("cache_position needs a cache: pass cache too, or leave cache_position out")
        order = row_order(mask, jnp.zeros(batch, jnp.int32))
        slots, overflow, orders = None, None, [key_order(order, mask)]
        if segment_ids is not None:
            first = first_of_segment(order, _per_token("segment_ids", segment_ids, batch, steps))
    else:
        if segment_ids is not None:
            raise InputError("segment_ids are for packed rows without a cache: leave one of them out")
        if isinstance(cache_position, int) and cache.owners is None:  # rows that share slots store them in turn
            start = max(cache_position - cache.offset, 0)
        cache, order, slots, overflow = allocate_slots(cache, cache_position, mask)
        orders = [repeat_rows(part.token_order(), batch) for part in cache.parts]
        cache.check_model(cfg)

    if position_ids is not None:
        positions = _per_token("position_ids", position_ids, batch, steps)
    else:
        positions = order if first is None else order - first
    cos, sin = rope_angles(cfg, jnp.maximum(positions, 0), mask, x.dtype)
    if key_mask is not None:
        if key_mask.ndim != 2 or key_mask.shape[0] != batch or key_mask.dtype != bool:
            raise InputError(f"key_mask must be bool[{batch}, n], got {key_mask.dtype}{list(key_mask.shape)}")
        orders = [hide_keys(key_mask, keys) for keys in orders]
    visible = Visibility(order, tuple(orders), first, start=start)
    return Placement(cos, sin, slots, visible), cache, overflow


def _mask(attention_mask: jax.Array | None, batch: int, steps: int) -> jax.Array:
    if attention_mask is None:
        return jnp.ones((batch, steps), bool)
    attention_mask = jnp.asarray(attention_mask)
    if attention_mask.shape != (batch, steps):
        raise InputError(
            f"attention_mask must have the new tokens' shape, {[batch, steps]}, got {list(attention_mask.shape)}; "
            "the mask must not cover cached tokens"
        )
    return attention_mask.astype(bool)


def _per_token(name: str, values: jax.Array, batch: int, steps: int) -> jax.Array:
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer) or values.shape not in ((batch, steps), (1, steps)):
        raise InputError(
            f"{name} must be integers of the ids' shape, {[batch, steps]}, got {values.dtype}{list(values.shape)}"
        )
    return jnp.broadcast_to(values.astype(jnp.int32), (batch, steps))
