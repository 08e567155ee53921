"""The cache, compared with NumPy: dtypes, writes, streams, and the selection and insertion of rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgen import InputError, KVCache
from jaxgen.core.model.cache import KeysValues
from jaxgen.core.model.cache_storage import as_numbers, as_stored
from tests.support.models import model_config, slow

CFG = model_config()


def filled(rows: int, slots: int, copies: int = 0, own: int = 3, seed: int = 0, dtype: str = "float32") -> KVCache:
    """Return a cache of random numbers. If `copies` is not 0, return a fork of such a cache."""
    cache = KVCache.create(CFG, rows, slots, dtype)
    if copies:
        cache = dataclasses.replace(filled(rows, slots, seed=seed + 1, dtype=dtype)).fork(copies, own)
    rng = np.random.default_rng(seed)

    def draw(x):
        return as_stored(jnp.asarray(rng.normal(size=x.shape)), cache.dtype, cache.cache_dtype is not None)

    layers = tuple([KeysValues(draw(layer.keys), draw(layer.values), layer.dtype) for layer in cache.layers])
    length = jnp.asarray(rng.integers(1, cache.slots + 1, cache.rows), jnp.int32)
    return dataclasses.replace(cache, layers=layers, length=length)


def arrays(cache: KVCache) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(dataclasses.replace(cache, prefix=None))]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cache_has_the_models_dtype(dtype):
    cache = KVCache.create(model_config(torch_dtype=dtype), 2, 5)
    assert cache.dtype == dtype
    assert cache.keys[0].nbytes == 2 * 2 * 5 * 8 * jnp.dtype(dtype).itemsize
    numbers = filled(2, 5, copies=2, dtype=dtype)
    for part in (cache, numbers, numbers.flatten(8), numbers.reorder(jnp.asarray([1])), numbers.crop(2)):
        assert {x.dtype.name for index in range(2) for x in part.layer(index)} == {dtype}
    assert KVCache.create(model_config(torch_dtype="bfloat16"), 1, 1, "float32").dtype == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32", "float16")])
def test_values_are_read_as_written(dtype):
    cache = KVCache.create(CFG, 2, 5, dtype)
    new = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 3, 8)), dtype)
    slots = jnp.asarray([[0, 1, 2], [4, 9, 1]])  # each row has its own slots; 9 is out of range
    layer = jax.jit(KeysValues.push)(cache.layers[0], new, 2 * new, slots)
    wanted = np.zeros((2, 2, 5, 8), np.float32)
    wanted[0, :, :3] = new[0].astype(jnp.float32)
    wanted[1][:, [4, 1]] = new[1].astype(jnp.float32)[:, [0, 2]]
    keys, values = dataclasses.replace(cache, layers=(layer, *cache.layers[1:])).layer(0)
    np.testing.assert_array_equal(keys.astype(jnp.float32), wanted)
    np.testing.assert_array_equal(values.astype(jnp.float32), 2 * wanted)


@pytest.mark.slow
def test_8_bit_values_are_within_half_a_step():
    rng = np.random.default_rng(0)
    new = jnp.asarray(rng.normal(size=(2, 2, 3, 8)), jnp.float32).at[0, 1, 2].set(0)
    stored = as_stored(new, "float32", int8=True)
    cache = KVCache.create(CFG, 2, 5, "int8")
    assert (cache.dtype, cache.cache_dtype) == ("float32", "int8")
    assert (stored.values.dtype, stored.shape) == (jnp.int8, new.shape)
    layer = jax.jit(KeysValues.push)(cache.layers[0], new, new, jnp.asarray([[0, 1, 2], [4, 9, 1]]))
    read, _ = dataclasses.replace(cache, layers=(layer, *cache.layers[1:])).layer(0)
    half = jnp.max(jnp.abs(new), axis=-1, keepdims=True) / 127 / 2
    assert np.all(np.abs(read[0, :, :3] - new[0]) <= half[0] * 1.0001)
    assert np.all(np.abs(read[1, :, jnp.asarray([4, 1])] - new[1, :, jnp.asarray([0, 2])]) <= 0.02)
    assert not read[0, 1, 2].any()
    assert bool(
        jnp.isnan(as_numbers(as_stored(new.at[0, 0, 0, 0].set(jnp.nan), "float32", True), "float32")[0, 0, 0, 0])
    )
    assert sum(x.nbytes for x in jax.tree.leaves(cache.keys[0])) == 2 * 2 * 5 * (8 + 4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_select_reorders_the_rows_over_one_prefix_in_a_loop(dtype):
    cache = filled(2, 4, copies=3, dtype=dtype)
    orders = jnp.asarray([[2, 0, 0, 5, 3, 4], [1, 1, 2, 3, 3, 5]])
    select = jax.jit(lambda cache, orders: jax.lax.fori_loop(0, 2, lambda i, c: c.select(orders[i]), cache))
    chosen = select(cache, orders)
    assert jax.tree.structure(chosen) == jax.tree.structure(cache)
    twice = np.asarray(orders[0])[np.asarray(orders[1])]
    for got, x in zip(arrays(chosen), arrays(cache), strict=True):
        np.testing.assert_array_equal(got, x[twice])
    for got, x in zip(arrays(chosen.prefix), arrays(cache.prefix), strict=True):
        np.testing.assert_array_equal(got, x)
    for got, wanted in zip(
        arrays(chosen.flatten(8)), arrays(cache.reorder(jnp.asarray(twice)).flatten(8)), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_insert_replaces_rows_and_leaves_out_numbers_out_of_range(dtype):
    cache, source = filled(4, 5, seed=1, dtype=dtype), filled(3, 5, seed=7, dtype=dtype)
    rows = jnp.asarray([2, 9, 0])
    insert = jax.jit(lambda cache, source: jax.lax.fori_loop(0, 2, lambda _, c: c.insert(source, rows), cache))
    result = insert(cache, source)
    assert jax.tree.structure(result) == jax.tree.structure(cache)
    for x, old, given in zip(arrays(result), arrays(cache), arrays(source), strict=True):
        wanted = old.copy()
        wanted[[2, 0]] = given[[0, 2]]
        np.testing.assert_array_equal(x, wanted)
    untouched = cache.insert(source, jnp.asarray([-1, 4, 100]))
    for x, old in zip(jax.tree.leaves(untouched), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(x, old)


@pytest.mark.parametrize("rows", [1, 3])
def test_insert_preserves_a_shared_prefix(rows):
    cache, source = filled(1, 4, copies=rows), filled(1, 4, copies=1, seed=5)
    result = cache.insert(source, jnp.asarray([rows - 1]))
    for got, old in zip(arrays(result.prefix), arrays(cache.prefix), strict=True):
        np.testing.assert_array_equal(got, old)
    for got, old, new in zip(arrays(result), arrays(cache), arrays(source), strict=True):
        np.testing.assert_array_equal(got, np.concatenate([old[: rows - 1], new]))


@pytest.mark.parametrize(
    "source",
    [
        filled(2, 6),
        filled(2, 5, dtype="bfloat16"),
        filled(2, 5, dtype="int8"),
        filled(2, 5, copies=1),
        KVCache.create(model_config(head_dim=4), 2, 5),
    ],
    ids=["slots", "dtype", "8 bits", "parts", "model"],
)
def test_insert_refuses_a_cache_with_other_parts(source):
    with pytest.raises(InputError, match="must have the parts"):
        filled(4, 5).insert(source, jnp.asarray([0, 1]))


def test_insert_refuses_a_prefix_that_belongs_to_prompts():
    with pytest.raises(InputError, match="the prefix has several rows, got 2"):
        filled(2, 5, copies=1).insert(filled(1, 5, copies=1), jnp.asarray([0]))


def test_row_numbers_count_the_rows_of_one_stream():
    """Two streams of three rows: the operations act on the same row of both streams."""
    cache = dataclasses.replace(filled(6, 5), streams=2)
    source = dataclasses.replace(filled(4, 5, seed=7), streams=2)
    selected, inserted = cache.select(jnp.asarray([2, 0, 0])), cache.insert(source, jnp.asarray([1, -1]))
    shorter = cache.drop_last(jnp.asarray([1, 0, 1]))
    assert shorter.length.tolist() == (cache.length - jnp.asarray([1, 0, 1, 1, 0, 1])).tolist()
    for got, x in zip(arrays(selected), arrays(cache), strict=True):
        np.testing.assert_array_equal(got, x[[2, 0, 0, 5, 3, 3]])
    for got, x, new in zip(arrays(inserted), arrays(cache), arrays(source), strict=True):
        np.testing.assert_array_equal(got, np.stack([x[0], new[0], x[2], x[3], new[2], x[5]]))
    assert cache.empty_rows(2, 4).rows == 4
    for part in (selected, inserted, shorter, cache.empty_rows(2, 4), cache.grow(3), cache.flatten(5)):
        assert part.streams == 2


@pytest.mark.parametrize("shared", [False, True])
def test_first_stream_of_a_fork(shared):
    """Rows 0 to 3 of eight: two copies of prefix rows 0 and 1."""
    fork = dataclasses.replace(filled(4, 3), streams=2).fork(2, 5, shared)
    chosen = fork.select(jnp.asarray([1, 1, 3, 2])).first_stream()
    assert (chosen.rows, chosen.streams, chosen.prefix.rows, chosen.prefix.streams) == (4, 1, 2, 1)
    for got, x in zip(arrays(chosen.prefix), arrays(fork.prefix), strict=True):
        np.testing.assert_array_equal(got, x[:2])
    assert chosen.keys[0].shape == ((2, 2, 10, 8) if shared else (4, 2, 5, 8))


def test_a_state_that_merges_tokens_cannot_be_cropped(monkeypatch):
    cache = filled(2, 5)
    monkeypatch.setattr(KeysValues, "can_crop", False)
    for crop in (lambda: cache.crop(1), lambda: cache.drop_last(jnp.asarray([1, 0]))):
        with pytest.raises(InputError, match="this model's cache cannot remove tokens"):
            crop()
