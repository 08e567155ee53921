"""Integer ranges, checked against numeric comparisons and against the jsonschema library."""

import json

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from jaxgen.core.grammar.byte_automaton import compile_expression
from jaxgen.core.grammar.integers import integer_range
from jaxgen.core.grammar.keywords import BOUNDS, MOST_DIGITS
from jaxgen.errors import InputError
from tests.grammar.test_json_schema import compile_schema, texts
from tests.grammar.test_regex import accepts

NEAR = range(-130, 131)
LARGEST = 10**MOST_DIGITS - 1


@pytest.mark.parametrize("low", [None, *range(-30, 31, 4)])
def test_small_ranges_are_exact(low):
    for high in [None, *range(-25 if low is None else low, 31, 3)]:
        automaton = compile_expression(integer_range(low, high))
        inside = [value for value in NEAR if accepts(automaton, str(value))]
        assert inside == [v for v in NEAR if (low is None or low <= v) and (high is None or v <= high)]
        assert not any(accepts(automaton, text) for text in ("", "-", "-0", "00", "01", "-01", "+1", "1.0", "1e1"))


NUMBERS = st.integers(-LARGEST, LARGEST) | st.integers(-1000, 1000)
BOUND = NUMBERS | st.floats(-1e6, 1e6)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(BOUNDS), BOUND, min_size=1), st.lists(NUMBERS, max_size=20))
@example({"exclusiveMaximum": -LARGEST}, [])
def test_bounds_follow_json_schema(bounds, values):
    schema = {"type": "integer", **bounds}
    valid = jsonschema.Draft202012Validator(schema).is_valid
    values += [int(bound) + more for bound in bounds.values() for more in (-1, 0, 1)]
    values = [value for value in values if abs(value) <= LARGEST]  # longer numbers are never generated
    if not any(map(valid, [*values, 0])):
        with pytest.raises(InputError, match=r"no number satisfies both|matches no text"):
            compile_schema(schema)
        return
    automaton = compile_schema(schema)
    assert [accepts(automaton, str(value)) for value in values] == [valid(value) for value in values]
    assert all(valid(json.loads(text)) for text in texts(automaton, 5, np.random.default_rng(0)))


def test_largest_ranges_have_small_automata():
    for low, high in ((None, LARGEST - 1), (-LARGEST + 1, LARGEST - 1), (10 ** (MOST_DIGITS - 1) + 1, None)):
        assert len(compile_expression(integer_range(low, high)).table) < 4 * MOST_DIGITS
