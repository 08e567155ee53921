import itertools
import re
import unicodedata

import numpy as np
import pytest
import regress
from hypothesis import given, settings, strategies as st

from jaxgen.core.grammar.byte_automaton import ByteAutomaton, compile_expression
from jaxgen.core.grammar.expression import Characters
from jaxgen.core.grammar.regex import read_regex
from jaxgen.errors import InputError

TEXTS = ["".join(text) for size in range(5) for text in itertools.product("abé", repeat=size)]


def compile_regex(pattern: str) -> ByteAutomaton:
    return compile_expression(read_regex(pattern))


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
def test_whole_texts_match_as_in_python(pattern):
    """Python is the reference, because the tests' ECMAScript engine wrongly matches aaa with `(?:(?:a|a)?){2}`."""
    automaton = compile_regex(pattern)
    found = [text for text in TEXTS if accepts(automaton, text)]
    assert found == [text for text in TEXTS if re.fullmatch(pattern, text)]


CODES = [*range(0x3100), *range(0xFE00, 0x10000), 0x1D400, 0x1F600, 0x10FFFF]


@pytest.mark.parametrize(
    "name",
    [
        *[r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", r"\p{Nd}", r"\P{Lu}", r"\p{L}", "[^\\d_]"],
        *[r"(?i)\w", r"(?i)\W", "(?i)[^k]", "(?i)ß", "(?i)[^ẞ]", "(?i)[ᾈ]"],
    ],
)
def test_character_classes_follow_ecma(name):
    tree, ecma = read_regex(name), regress.Regex(name.removeprefix("(?i)"), "iu" if "(?i)" in name else "u")
    assert isinstance(tree, Characters)
    for code in CODES:
        if "p" in name.lower() and unicodedata.category(chr(code)) == "Cn":
            continue  # the Unicode versions may differ
        inside = any(first <= code <= last for first, last in tree.ranges)
        assert inside == (ecma.find(chr(code)) is not None), hex(code)


def test_case_insensitive_matching_follows_ecma():
    for code in [code for code in range(0x800) if chr(code).isalpha()]:
        tree, ecma = read_regex(f"(?i){chr(code)}"), regress.Regex(chr(code), "iu")
        assert isinstance(tree, Characters)
        either = [chr(other) for first, last in tree.ranges for other in range(first, last + 1)]
        assert all(ecma.find(other) is not None for other in either)
        others = {chr(code).lower(), chr(code).upper()}
        assert {other for other in others if len(other) == 1 and ecma.find(other)} <= {*either}


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("a|ab", ["a", "ab"], ["", "abb"]),
        (r"[0-9]+(\.[0-9]+)?", ["7", "70", "7.25"], [".5", "7."]),
        ("^a|b$", ["a", "b"], ["ab"]),
        ("", [""], ["a"]),
        (r"\^\$[$^]", ["^$$", "^$^"], ["$"]),
        (r"[\]^)(]|\)", ["]", "^", ")", "("], [""]),
        ("(?i)ab", ["ab", "AB"], ["b"]),
        ("\x00\x00", ["\x00\x00"], ["\x00", ""]),
        ("[é-ü👋]+", ["éüö", "👋"], ["e", "Ã"]),
        (".", ["\x85", "\x00", "👋"], ["\n", "\r", "\u2028", "\u2029", ""]),
        ("^a$|^b$|(^|x)c($|y)", ["a", "b", "c", "xcy"], ["ab", "$"]),
        ("(?<name>a)(?P<other>b)", ["ab"], ["a"]),
        ("(?i)straße|é|[a-c]{2}[^x]", ["STRAßE", "É", "aBy"], ["STRASSE", "abX"]),
        ("(?s).", ["\n"], [""]),
        (r"\p{Lu}\P{L}[\p{Nd}-]", ["Ä3-", "A 3"], ["aa3"]),
        (r"\x41\u0042\u{1F44B}\ud83d\udc4b\cA\0\/\-[\b]", ["AB👋👋\x01\0/-\b"], [""]),
        ("a}b]", ["a}b]"], ["a"]),
        ("(?=.*b)(?!.*c)[a-d]{2}", ["ab", "bd"], ["ad", "bc"]),
        ("(?:a(?=b)|c)[a-c]", ["ab", "ca"], ["aa"]),
        ("[ab]+(?<!ba)", ["ab", "b"], ["ba", "bba"]),
    ],
)
def test_pattern_matches_whole_texts(pattern, texts, others):
    automaton = compile_regex(pattern)
    assert [accepts(automaton, text) for text in texts + others] == [True] * len(texts) + [False] * len(others)


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("@", ["@", "a@b"], ["ab", ""]),
        ("^a|b$", ["a", "axx", "xb"], ["xa", "bx"]),
        ("^(a|b$|^c)", ["ax", "b", "cx"], ["bx", "xa"]),
        ("(^|-)x", ["xa", "a-xb"], ["ax"]),
        ("^$", [""], ["a"]),
        ("", ["", "a"], []),
        ("(?<!-)$", ["", "a"], ["a-"]),
        ("a(?!b)", ["a", "ac", "aba"], ["ab", "b"]),
        ("^(?:(?!x)[a-z])?1", ["1", "a1"], ["x1", "b"]),
    ],
)
def test_search_matches_anywhere(pattern, texts, others):
    automaton = compile_expression(read_regex(pattern, search=True))
    assert [accepts(automaton, text) for text in texts + others] == [True] * len(texts) + [False] * len(others)


def test_automaton_is_minimal():
    assert len(compile_regex("(ab)*").table) == 2
    assert len(compile_regex("abc|xbc|(?:y|z)c").table) == 4
    automaton = compile_regex("(é|ö)*a{3}")
    assert set(automaton.table.ravel()) == set(range(-1, len(automaton.table)))
    assert (np.any(automaton.table >= 0, axis=1) | automaton.accepting).all()


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a^b", r"has \^ inside"),
        ("b(c|^a)", r"has \^ inside"),
        ("(a$|b)c?", r"has \$ inside"),
        ("(^a)*", r"has \^ inside"),
        ("^*", r"repeats \^"),
        (r"\Aa", r"has \\A: leave it out"),
        ("a)|(b", "not opened"),
        ("a(", "not closed"),
        ("[", "class that is not closed"),
        ("[b-a]", "wrong order, 'b' to 'a'"),
        (r"[\d-a]", "escape the hyphen"),
        ("[]a]", "begins with ]"),
        ("[^]a]", "begins with ]"),
        ("[a&&b]", "has && in a class"),
        ("[[:alpha:]]", r"has \[: in a class"),
        (r"[^\s\S]", "matches no character"),
        ("(?=a)b", "matches no text"),
        ("((?!ab).)*", "a look-around in a repetition"),
        ("(?=a)*", "repeats a look-ahead"),
        ("(?<!a)b", "a look-behind that is not at the end"),
        ("(?>a)", r"a kind of group that is not supported, \(\?>: write"),
        ("(?(1)a)", r"not supported, \(\?\("),
        ("(?#x)", r"not supported, \(\?#"),
        ("a(?i)", "kind of group that is not supported"),
        (r"(a)\1", r"\\1: back-references"),
        (r"(?<x>a)\k<x>", r"\\k: back-references"),
        (r"a\b", "word boundary"),
        (r"\q", "escape .* not known"),
        ("\\", "ends in a backslash"),
        (r"\x4", "incomplete code"),
        (r"\ud83d", "not a character"),
        ("\ud800", "matches no character"),
        (r"\p{Script=Greek}", "Unicode property"),
        ("*a", r"nothing that \* could repeat"),
        ("a**", "repeats a repetition"),
        ("a*+", "repeats a repetition"),
        ("a{,3}", "brace that does not begin a repetition"),
        ('{"a"}', r"nothing that \{ could repeat"),
        ("a{3,2}", "wrong order"),
        ("a{9999999999}", "10 digits"),
        ("(" * 40 + ")" * 40, "groups nested more than 32 levels"),
        ("a" * 10_001, "10001 characters"),
    ],
)
def test_bad_patterns_are_refused(pattern, words):
    with pytest.raises(InputError, match=words) as caught:
        compile_regex(pattern)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_patterns_must_be_text():
    with pytest.raises(TypeError, match="bytes"):
        compile_regex(b"a")  # type: ignore[arg-type]
