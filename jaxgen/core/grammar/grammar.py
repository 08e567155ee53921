"""Grammars that are composed of texts, regular expressions and JSON schemas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from jaxgen.core.grammar import expression
from jaxgen.core.grammar.expression import Characters, Expression, Repeat, Text, complement, union
from jaxgen.core.grammar.json_schema import read_schema
from jaxgen.core.grammar.regex import read_regex
from jaxgen.core.grammar.stopping import stoppable
from jaxgen.errors import check_whole, shown
from jaxgen.utf8_text import encoded


@dataclass(frozen=True, eq=False)
class Grammar:
    """A set of texts, from which `TokenAutomaton.from_expression` builds an automaton.

    The class methods create grammars, and these operations combine them. Wherever a grammar is expected, a str stands
    for itself.

    - `a + b`: a text of `a`, followed by a text of `b`.
    - `a | b`: a text of `a` or of `b`.
    - `a.repeat(low, high, separator)`: several texts of `a`, one after another.

        >>> from jaxgen import Grammar
        >>> number = Grammar.regex("0|[1-9][0-9]{0,3}")
        >>> pairs = "(" + number.repeat(2, 2, separator=", ") + ")"
        >>> answer = ("none" | pairs.repeat(1, 3, separator="; ")) + "."

    Attributes:
        expression: the grammar as a tree.
    """

    expression: Expression

    @classmethod
    def text(cls, text: str) -> Grammar:
        """Return the grammar of a single text."""
        return cls(Text(encoded("a text of a grammar", text)))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of the texts that a regular expression matches, as in `TokenAutomaton.from_regex`.

        Raises:
            InputError: the pattern is not valid or not supported.
            TypeError: `pattern` is not a str.
        """
        return cls(read_regex(pattern))

    @classmethod
    def json_schema(
        cls,
        schema: Any,
        *,
        whitespace_pattern: str | None = None,
        name: str = "the schema",
        unsupported: Literal["error", "warn"] = "error",
        left_out: list[str] | None = None,
        any_order: bool = True,
    ) -> Grammar:
        """Return the grammar of the JSON texts that are valid against a schema.

        Error messages name a part of the schema by its path from `name`. Without `any_order`, all members of an object
        are in the schema's order; otherwise, optional ones are in any order if the grammar does not become too large.
        The other arguments are as in `TokenAutomaton.from_json_schema`.

        Raises:
            InputError: the schema is not valid, or uses a keyword that cannot be enforced.
            TypeError: `schema` is not a dict, a str or a class with a schema.
        """
        tree = read_schema(
            schema, whitespace_pattern, name=name, unsupported=unsupported, left_out=left_out, any_order=any_order
        )
        return cls(tree)

    @classmethod
    def any_character(cls, *, but: str = "") -> Grammar:
        """Return the grammar of texts of one character, which is not in `but`."""
        return cls(Characters(complement(union((ord(character), ord(character)) for character in but))))

    @classmethod
    def sequence(cls, *parts: Grammar | str) -> Grammar:
        """Return the grammar of texts that consist of a text of each part; without parts, of the empty text."""
        return cls(expression.sequence(*map(_tree, parts)))

    @classmethod
    def choice(cls, parts: Iterable[Grammar | str]) -> Grammar:
        """Return the grammar of the texts of all parts."""
        return cls(expression.choice(map(_tree, parts)))

    def repeat(self, low: int = 0, high: int | None = None, separator: Grammar | str | None = None) -> Grammar:
        """Return the grammar of `low` to `high` texts (None for no limit), with a separator between them."""
        low = check_whole("low", low, 0)
        high = None if high is None else check_whole("high", high, low)
        return Grammar(Repeat(self.expression, low, high, None if separator is None else _tree(separator)))

    def __add__(self, other: Grammar | str) -> Grammar:
        return Grammar.sequence(self, other)

    def __radd__(self, other: str) -> Grammar:
        return Grammar.sequence(other, self)

    def __or__(self, other: Grammar | str) -> Grammar:
        return Grammar.choice((self, other))

    def __ror__(self, other: str) -> Grammar:
        return Grammar.choice((other, self))

    @property
    def size(self) -> int:
        """An upper bound on the number of states of the grammar, before states that are equivalent are merged."""
        return self.expression.size

    # While this context lasts, grammars and automata under construction in this thread call a function often. The
    # function may end the construction with an exception, for example after a time limit.
    stoppable = staticmethod(stoppable)


def _tree(part: Grammar | str) -> Expression:
    if isinstance(part, Grammar):
        return part.expression
    if not isinstance(part, str):
        raise TypeError(f"a part of a grammar must be a Grammar or a str, got {shown(part)}")
    return Grammar.text(part).expression
