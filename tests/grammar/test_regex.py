import itertools
import re
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxgen.errors import InputError
from jaxgen.grammar.regex import compile_regex

TEXTS = ["".join(text) for size in range(5) for text in itertools.product("abé", repeat=size)]


def accepts(automaton, text: str) -> bool:
    state = automaton.start
    for byte in text.encode():
        state = automaton.table[state, byte]
        if state < 0:
            return False
    return bool(automaton.accepting[state])


def patterns():
    atoms = st.sampled_from(["a", "b", "é", ".", "[^a]", "[ab]", "", r"\S"])
    repeats = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{0,3}?"])

    def larger(inner):
        group = inner.map("(?:{})".format)
        return st.one_of(
            st.lists(group, min_size=2, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map("|".join),
            st.tuples(group, repeats).map("".join),
        )

    return st.recursive(atoms, larger, max_leaves=8)


@settings(max_examples=150, deadline=None)
@given(patterns())
def test_it_matches_whole_texts_as_python_does(pattern):
    automaton = compile_regex(pattern)
    found = [text for text in TEXTS if accepts(automaton, text)]
    assert found == [text for text in TEXTS if re.fullmatch(pattern, text)]


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("a|ab", ["a", "ab"], ["", "abb"]),
        (r"[0-9]+(\.[0-9]+)?", ["7", "70", "7.25"], [".5", "7."]),
        ("^a|b$", ["a", "b"], ["ab"]),
        ("", [""], ["a"]),
        (r"\^\$[$^]", ["^$$", "^$^"], ["$"]),
        (r"[]^)(]|\)", ["]", "^", ")", "("], [""]),
        ("(?i)ab", ["ab", "AB"], ["b"]),
        ("\x00\x00", ["\x00\x00"], ["\x00", ""]),
        ("[é-ü👋]+", ["éüö", "👋"], ["e", "Ã"]),
        (".", ["\r", "\x00", "👋"], ["\n", ""]),
        (r"(?:a(?-u:\b) ?)*", ["a", "a a", ""], ["aa"]),
    ],
)
def test_what_it_matches(pattern, texts, others):
    automaton = compile_regex(pattern)
    assert [accepts(automaton, text) for text in texts + others] == [True] * len(texts) + [False] * len(others)


def test_no_state_is_superfluous():
    assert len(compile_regex("(ab)*").table) == 2
    assert len(compile_regex("abc|xbc|(?:y|z)c").table) == 4
    automaton = compile_regex("(é|ö)*a{3}")
    assert set(automaton.table.ravel()) == set(range(-1, len(automaton.table)))
    assert (np.any(automaton.table >= 0, axis=1) | automaton.accepting).all()


@pytest.mark.parametrize("pattern", [r"(yes|no), because [^.\n]{1,80}\.", "x[^a]{1,40}b", '"[^x]{0,200}"'])
def test_bounded_repetitions_are_compiled_at_once(pattern):
    start = time.perf_counter()
    assert len(compile_regex(pattern).table) < 2500
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a^b", r"has \^ inside"),
        ("b|^a", r"has \^ inside"),
        ("(a$|b)c?", r"has \$ inside"),
        (r"\Aa", r"has \\A inside"),
        ("a)|(b", "not opened"),
        ("[", "not a regular expression"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "back-reference"),
        (r"a\b", "word bound"),
        ("[a&&b]", "matches no"),
        ("\ud800", "surrogates"),
        ("a(", "not a regular expression"),
    ],
)
def test_bad_patterns(pattern, words):
    with pytest.raises(InputError, match=words):
        compile_regex(pattern)


def test_other_types():
    with pytest.raises(TypeError, match="bytes"):
        compile_regex(b"a")  # type: ignore[arg-type]


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(InputError, match=r"pip install 'jaxgen\[constrain\]'"):
        compile_regex("a")
