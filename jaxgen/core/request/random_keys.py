"""Random keys from seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxgen.core.decoding.rng import folded, seed_key, seed_words

KEY_IMPL = "threefry2x32"


def seed_keys(seed: int, count: int = 1) -> list[jax.Array]:
    """Return `count` keys for a seed: the seed's key, and this key folded with 1, 2, ...

    Raises:
        InputError: the seed does not fit into 64 bits.
    """
    key = seed_key(seed, KEY_IMPL)
    return [key, *(jax.random.fold_in(key, number) for number in range(1, count))]


def own_keys(key: jax.Array, indices: Sequence[int], seeds: Sequence[int | None]) -> jax.Array:
    """Return the key of each prompt: that of its own seed, or else `fold_in(key, index)`."""
    numbers: Any = np.asarray(indices, np.uint32)
    data: Any = np.array(jax.random.key_data(folded(key, numbers)))
    for row, seed in enumerate(seeds):
        if seed is not None:
            data[row] = seed_words(seed)
    return jax.random.wrap_key_data(data, impl=KEY_IMPL)
