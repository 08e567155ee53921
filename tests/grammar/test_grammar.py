"""Grammars that users compose: `jaxgen.Grammar`."""

import re

import pytest

from jaxgen import Grammar, InputError
from jaxgen.core.grammar.byte_automaton import compile_expression
from tests.grammar.test_regex import accepts

NUMBER = Grammar.regex("0|[1-9][0-9]?")
GRAMMARS = {
    "a text": (Grammar.text("a.b"), "a\\.b"),
    "the empty text": (Grammar.sequence(), ""),
    "a text before a grammar": ("x" + NUMBER, "x([0-9]|[1-9][0-9])"),
    "a text after a grammar": (NUMBER + "x", "([0-9]|[1-9][0-9])x"),
    "a choice": ("x" | NUMBER | "0", "x|[0-9]|[1-9][0-9]"),
    "a choice of many": (Grammar.choice(["", "x", NUMBER]), "x?|[0-9]|[1-9][0-9]"),
    "repetitions": (Grammar.text("x").repeat(), "x*"),
    "limits and separators": (
        ("x" + NUMBER).repeat(1, 2, separator=","),
        "x[0-9]{1,2}(,x[0-9]{1,2})?",
    ),
    "any character": (Grammar.any_character(), "(?s:.)"),
    "any character but two": (Grammar.any_character(but="ax"), "[^ax]"),
    "a schema between texts": ("<" + Grammar.json_schema({"type": "boolean"}) + ">", "<(true|false)>"),
}
TEXTS = ["", "a", "b", "é", "\n", "x", "xx", "xxx", "0", "12", "123", "x0", "0x", "x1,x22", "x1,x2,x3", "a.b", "<true>"]


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammar_accepts_only_its_texts(name):
    grammar, pattern = GRAMMARS[name]
    automaton = compile_expression(grammar.expression, "the grammar")
    for text in TEXTS:
        assert accepts(automaton, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: NUMBER + 1, TypeError, "a part of a grammar must be a Grammar or a str, got 1"),
        (lambda: Grammar.choice(["a", None]), TypeError, "must be a Grammar or a str, got None"),
        (lambda: Grammar.text("\ud800"), InputError, "a text of a grammar is not valid Unicode"),
        (lambda: NUMBER.repeat(-1), InputError, "low must be at least 0, got -1"),
        (lambda: NUMBER.repeat(3, 2), InputError, "high must be at least 3, got 2"),
        (lambda: NUMBER.repeat(0, 1.5), TypeError, "high must be a whole number, got 1.5"),
        (lambda: Grammar.json_schema({"type": "x"}, name="args"), InputError, "args: type must be"),
    ],
)
def test_invalid_parts_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_construction_can_be_stopped():
    class Late(Exception):
        pass

    def check():
        raise Late

    with pytest.raises(Late), Grammar.stoppable(check):
        Grammar.regex("a")
    Grammar.regex("a")
