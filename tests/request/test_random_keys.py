import jax
import numpy as np
import pytest

from jaxgen import InputError
from jaxgen.core.request.random_keys import own_keys, seed_keys


def data(*keys):
    return [np.asarray(jax.random.key_data(key)).tolist() for key in keys]


def test_first_key_is_the_seeds_and_others_are_folded_in():
    key = jax.random.key(7, impl="threefry2x32")
    assert data(*seed_keys(7, 3)) == data(key, jax.random.fold_in(key, 1), jax.random.fold_in(key, 2))
    with pytest.raises(InputError, match="seed must be from"):
        seed_keys(2**64)


def test_prompts_have_the_keys_of_their_seeds_or_indices():
    (key,) = seed_keys(7)
    keys = own_keys(key, [4, 2**32 - 1, 0], [None, None, 9])
    assert data(*keys) == data(jax.random.fold_in(key, 4), jax.random.fold_in(key, 2**32 - 1), jax.random.key(9))
