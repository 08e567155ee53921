import time

import jax
import jax.numpy as jnp
import pytest

from jaxgen.cli.timing import Stats


def compile_something() -> None:
    jax.jit(lambda x: jnp.sin(x) * time.perf_counter())(1.0)  # a new constant, so it is not in jax's cache


def test_timing_of_a_streamed_answer():
    stats = Stats()
    stats.streamed([(10.0, 0.0), (15.0, 4.0), (17.0, 4.0), (20.0, 6.0)])
    assert (stats.first, stats.rest, stats.tokens) == ([5.0], 3.0, 2)


@pytest.mark.parametrize("count", [0, 1])
def test_timing_of_an_answer_without_tokens(count):
    stats = Stats()
    stats.streamed([stats.now()] * count)
    assert (stats.first, stats.rest, stats.tokens) == ([], 0.0, 0)


def test_compilation_is_not_counted_as_generation():
    stats = Stats()
    begin = stats.now()
    compile_something()
    end = stats.now()
    assert end[1] > 0
    stats.streamed([begin, begin, end])
    assert stats.rest == pytest.approx(end[0] - begin[0] - end[1])
    with stats.generating():
        compile_something()
    assert stats.compile > end[1]
    assert stats.rest < stats.now()[0] - begin[0] - stats.compile + 1e-6
