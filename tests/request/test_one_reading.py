"""A prompt of a running loop is checked like a call with one row: the same values pass, and errors are the same."""

import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import ConfigError, GenerationConfig, InputError, TokenAutomaton
from jaxgen.core.decoding.extensions import Extensions
from jaxgen.core.request.lengths import Lengths, beyond
from jaxgen.core.request.prepare import CallInputs, prepare
from jaxgen.core.request.prompt import PromptReader
from jaxgen.core.request.prompt_options import PromptOptions
from tests.support.models import model_config
from tests.support.tokenizers import byte_level

MODEL = model_config(vocab_size=320)
CFG = GenerationConfig(model=MODEL, max_new_tokens=8, do_sample=True, top_k=0, eos_token_id=2, pad_token_id=0)
TOK = byte_level()
READER = PromptReader(PromptOptions(CFG, 16), TOK, "threefry2x32")
GRAMMARS = [TokenAutomaton.from_regex(text, TOK, vocab_size=320) for text in ("a+", "abcdef", "a{20}")]
OTHER = TokenAutomaton.from_regex("a", TOK, vocab_size=321)

number = st.sampled_from([1, -1, 0.5, 1.0, 2, 1e-40, 1e40, float("nan"), float("inf"), True, None, "a", [1, 2]])
ids = st.lists(st.integers(-1, 321), max_size=4)
options = st.dictionaries(
    st.sampled_from(["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens", "typical_p"]),
    number,
    max_size=2,
) | st.dictionaries(st.sampled_from(["suppress_tokens", "eos_token_id", "bad_words_ids"]), st.just([5, 400]) | ids)
budgets = st.sampled_from([1, 3, 8])
keys = st.sampled_from(["typed", "old", "several", "none", "number"])
KEYS = {"old": jax.random.PRNGKey(3), "typed": jax.random.key(3), "number": 3}
KEYS |= {"several": jax.random.split(KEYS["typed"], 2), "none": None}


def outcome(read):
    """Return what `read` returns, or the kind and the text of its error."""
    try:
        return read()
    except (ValueError, TypeError) as error:
        return type(error).__name__, re.sub(r"\b(ids|the prompt)\b(?= contains)", "the prompt", str(error))


def called(ids, key, budget, own, grammar):
    cfg = CFG.replace(max_new_tokens=budget, **own)
    inputs = CallInputs([ids], key, np.ones((1, len(ids)), bool))
    request = prepare({}, cfg, inputs, Extensions(allowed=grammar), eager=True).request
    [row], [mask], [budget] = request.ids, request.mask, request.budget
    return row[mask].tolist(), int(budget), jax.random.key_data(request.key).tolist()


def read(ids, key, budget, own, grammar):
    prompt = READER.read({"ids": ids, "key": key, "max_new_tokens": budget, "allowed": grammar, **own})
    return prompt.ids.tolist(), prompt.budget, np.asarray(prompt.key).tolist()


@pytest.mark.filterwarnings("ignore::jaxgen.JaxgenWarning")  # of lengths that cannot be reached, only in calls
@settings(max_examples=300, deadline=None)
@given(ids.filter(len), keys.filter(lambda key: key not in ("none", "several")), budgets)
def test_prompt_and_call_are_read_alike(ids, key, budget):
    one = outcome(lambda: called(ids, KEYS[key], budget, {}, None))
    assert one == outcome(lambda: read(ids, KEYS[key], budget, {}, None))


@pytest.mark.filterwarnings("ignore::jaxgen.JaxgenWarning")
@settings(max_examples=300, deadline=None)
@given(budgets, options)
def test_options_are_checked_alike(budget, own):
    """Except that a temperature of 0 means greedy search in a prompt."""
    one = outcome(lambda: called([5, 6], KEYS["typed"], budget, own, None))
    assert one == outcome(lambda: read([5, 6], KEYS["typed"], budget, own, None))


@pytest.mark.filterwarnings("ignore::jaxgen.JaxgenWarning")
@pytest.mark.parametrize("grammar", [*GRAMMARS, OTHER])
@pytest.mark.parametrize("budget", [1, 4, 8])
def test_grammars_are_checked_alike(grammar, budget):
    one = outcome(lambda: called([5], KEYS["typed"], budget, {}, grammar))
    assert one == outcome(lambda: read([5], KEYS["typed"], budget, {}, grammar))


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([], InputError, "the prompt has no tokens: pass at least one"),
        ([[5]], TypeError, r"the prompt must be a list of token ids, got \[\[5\]\]"),
        ([5, [6]], TypeError, "the prompt must be a list of token ids"),
        ([5, True], TypeError, r"the prompt must be a list of token ids, got \[5, True\]"),
        ([0.5], TypeError, "the prompt must be a list of token ids"),
        ([2**70], TypeError, "the prompt must be a list of token ids"),
        ([5] * 17, InputError, "the prompt has 17 tokens, but at most 16 are accepted: shorten the prompt"),
    ],
)
def test_bad_ids_are_refused(ids, error, words):
    with pytest.raises(error, match=words):
        READER.read({"ids": ids})


def test_one_token_is_counted_in_the_singular():
    with pytest.raises(InputError, match="the prompt has 1 token, so it fills the context of 1: shorten the prompt"):
        Lengths(context=1).budget(1, 1)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 40), st.none() | st.integers(0, 40), *[st.none() | st.integers(1, 30)] * 3)
def test_budget_respects_all_limits(length, asked, prompt, answer, context):
    limits = Lengths(prompt, answer, context)
    fits = prompt is None or length <= prompt
    fits = fits and (asked is None or answer is None or asked <= answer)
    fits = fits and (context is None or length + (1 if asked is None else asked) <= context)
    if asked is None and answer is None and context is None:
        return  # nothing says how many tokens there are
    if not fits:
        with pytest.raises((InputError, ConfigError)):
            limits.budget(length, asked)
        return
    space = [] if context is None else [context - length]
    assert limits.budget(length, asked) == min(asked if asked is not None else 99, answer or 99, *space)


def test_max_length_includes_the_prompt():
    assert beyond(5, 8) == 3
    with pytest.raises(InputError, match="the prompt has 8 tokens, and max_length=8 includes the prompt: raise it, or"):
        beyond(8, 8)
    limits = Lengths(context=20, total=8)
    assert (limits.budget(5, None), limits.budget(5, 7)) == (3, 7)
    with pytest.raises(InputError, match="max_length=8 includes the prompt"):
        limits.budget(8, None)
