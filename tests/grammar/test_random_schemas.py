"""Text of the bundled model under random schemas, one per prompt, validated with the jsonschema library."""

import re

import jax
import numpy as np
import pytest

from convert import load_hf
from jaxgen import StopReason, TokenAutomaton, Tokenizer, demo, generate
from jaxgen.errors import InputError
from tests.grammar.test_json_schema import compile_schema, texts
from tests.support.schemas import RandomSchemas, problem

ROWS, BUDGET = 50, 256
# A random schema may be rejected because nothing is valid, or as too large, or because of what cannot be enforced.
EXPECTED = re.compile(
    "matches no text|nothing satisfies both|no number satisfies both|is too large|of its recursion|"
    "too many combinations|cannot be negated|has a not with|has contains beside|has minProperties|more than 64"
)


@pytest.fixture(scope="module")
def storyteller():
    return *load_hf(demo.PATH, dtype="float32"), Tokenizer.from_pretrained(demo.PATH)


def supported(source: RandomSchemas, tokenizer: Tokenizer):
    """Yield schemas and their automata. Rejected schemas are left out."""
    while True:
        schema = source.root()
        try:
            yield schema, TokenAutomaton.from_json_schema(schema, tokenizer)
        except InputError as error:
            if not EXPECTED.search(str(error)):
                raise


def check(storyteller, batches: int, seed: int) -> set[StopReason]:
    """Generate text for `ROWS` schemas per batch, at a high temperature in every other batch."""
    params, cfg, tokenizer = storyteller
    pairs, reasons = supported(RandomSchemas(seed), tokenizer), set()
    ids = np.repeat(tokenizer.chat([[{"role": "user", "content": "Tell me a story about an owl"}]]).ids, ROWS, axis=0)
    cfg = cfg.replace(max_new_tokens=BUDGET, do_sample=True, top_p=1.0)
    for number in range(batches):
        schemas, automata = zip(*(next(pairs) for _ in range(ROWS)), strict=True)
        key = jax.random.key(number)
        hot = cfg.replace(temperature=[0.7, 3.0][number % 2])
        out = generate(params, ids, key, hot, prefix_allowed_tokens_fn=TokenAutomaton.stack(automata))
        for schema, text in zip(schemas, tokenizer.decode_batch(out), strict=True):
            assert problem(schema, text) is None
        reasons |= set(map(StopReason, out.stop_reasons.tolist()))
    return reasons


@pytest.mark.slow
def test_fifty_random_schemas(storyteller):
    assert check(storyteller, batches=1, seed=1) <= {StopReason.EOS, StopReason.COMPLETE}


@pytest.mark.slow
def test_three_hundred_random_schemas(storyteller):
    assert check(storyteller, batches=6, seed=0) == {StopReason.EOS, StopReason.COMPLETE}


def check_texts(count: int, seed: int) -> None:
    source, rng, checked = RandomSchemas(seed), np.random.default_rng(seed), 0
    while checked < count:
        schema = source.root()
        try:
            automaton = compile_schema(schema)
        except InputError as error:
            if not EXPECTED.search(str(error)):
                raise
            continue
        for text in texts(automaton, 4, rng):
            assert problem(schema, text) is None
        checked += 1


def test_random_texts():
    check_texts(40, seed=0)


@pytest.mark.slow
def test_more_random_texts():
    check_texts(1000, seed=1)
