"""When a row is finished."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def is_eos(tokens: jax.Array, eos: jax.Array | None) -> jax.Array:
    """bool[rows]: is the row's token one of `eos int32[E]`? Entries of −1 match nothing."""
    if eos is None:
        return jnp.zeros(tokens.shape, bool)
    return jnp.any(tokens[:, None] == jnp.atleast_1d(eos)[None, :], axis=-1)
