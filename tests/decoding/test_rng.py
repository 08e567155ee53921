"""Seeds: all 64 bits count, as in jax with x64."""

import jax
import pytest

from jaxgen import InputError
from jaxgen.core.decoding.rng import seed_key, seed_words
from tests.support.compilations import compilations


def data(key: jax.Array) -> list[int]:
    return jax.random.key_data(key).tolist()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32 + 5, 2**63 - 1, -1, -(2**32) - 7, -(2**63)])
@pytest.mark.parametrize("x64", [False, True])
def test_seed_gives_the_key_of_jax(seed, impl, x64):
    with jax.enable_x64(x64):
        assert seed_key(seed, impl).dtype == jax.random.key(0, impl=impl).dtype
        if x64 or 0 <= seed < 2**32:
            assert data(seed_key(seed, impl)) == data(jax.random.key(seed, impl=impl))
    with jax.enable_x64(True):
        assert data(seed_key(seed, impl)) == data(jax.random.key(seed, impl=impl))


def test_every_seed_of_64_bits_has_its_own_key():
    seeds = [0, 5, 2**32 + 5, 2**63, 2**64 - 2, -3]
    assert len({tuple(seed_words(seed)) for seed in seeds}) == len(seeds)
    assert seed_words(-1).tolist() == seed_words(2**64 - 1).tolist()
    with compilations() as compiled:
        seed_key(2**40)
    assert compiled == [0]


@pytest.mark.parametrize(
    ("seed", "error"), [(2**64, InputError), (-(2**63) - 1, InputError), (1.0, TypeError), (True, TypeError)]
)
def test_bad_seeds_are_refused(seed, error):
    with pytest.raises(error, match=r"seed must be (a whole number|from -9223372036854775808 to 18446744073709551615)"):
        seed_key(seed)
