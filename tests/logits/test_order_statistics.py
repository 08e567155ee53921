import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from jaxgen.core.logits import order_statistics as select
from jaxgen.core.logits.order_statistics import bisect

ROWS, SIZE = 3, 23
kth_largest, last_of, ordered_bits = (jax.jit(f) for f in (select.kth_largest, select.last_of, select.ordered_bits))
FLOATS = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf])


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.float32, (ROWS, SIZE), elements=FLOATS))
def test_ordered_bits_keep_the_order(x):
    bits = np.asarray(ordered_bits(jnp.asarray(x)))
    # XLA's CPU backend treats subnormal numbers as zero.
    x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
    np.testing.assert_array_equal(bits[:, :, None] < bits[:, None, :], x[:, :, None] < x[:, None, :])


@settings(max_examples=200, deadline=None)
@given(hnp.arrays(np.uint32, (ROWS, SIZE)), hnp.arrays(np.int32, ROWS, elements=st.integers(1, SIZE)))
def test_kth_largest(bits, k):
    found = np.asarray(kth_largest(jnp.asarray(bits), jnp.asarray(k)))
    np.testing.assert_array_equal(found, [np.sort(row)[::-1][n - 1] for row, n in zip(bits, k, strict=True)])


@settings(max_examples=100, deadline=None)
@given(hnp.arrays(bool, (ROWS, SIZE)), st.integers(1, SIZE))
def test_last_of_keeps_the_highest_indices(chosen, count):
    kept = np.asarray(last_of(jnp.asarray(chosen), jnp.full(ROWS, count)))
    for row, result in zip(chosen, kept, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(result), np.flatnonzero(row)[-count:])


def test_bisect_returns_zero_if_the_condition_never_holds():
    assert bisect(lambda value: value < 0, 2).tolist() == [0, 0]
    assert bisect(lambda value: value <= 5, 2, bits=3).tolist() == [5, 5]
