"""The benchmarks run on small inputs; what they measure is not tested."""

import jax
import pytest

from benchmarks import processors
from jaxgen.config.options import OPTIONS


@pytest.mark.slow
def test_every_processor_is_measured():
    calls = processors._calls(vocab=600, rows=2)
    assert {option.name for option in OPTIONS.values() if option.stage} <= set(calls)
    for name, (function, *arguments) in calls.items():
        result = jax.jit(function)(*arguments)
        assert result.shape in ((2, 600), (2,)), name
