"""Anchors, look-aheads and look-behinds of patterns, expressed by intersections and differences of automata.

A pattern that contains them is first written as alternatives in which they are direct parts of a sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence as Items
from typing import NoReturn

from jaxgen.core.grammar.byte_automaton import Work
from jaxgen.core.grammar.expression import (
    EMPTY,
    Alternatives,
    Anchor,
    Expression,
    Look,
    Part,
    Repeat,
    Sequence,
    choice,
    complement,
    sequence,
)
from jaxgen.core.grammar.products import difference
from jaxgen.core.grammar.utf8 import Ranges
from jaxgen.errors import InputError

MOST = 200  # maximum number of alternatives to which the groups of a pattern may be expanded


class Anchored:
    """The resolution of the anchors and look-arounds of one pattern, which messages call `name`.

    `characters` returns the expression for one character in the given ranges. If `large` is True, `$` also matches
    before a newline at the end, as in Python.
    """

    def __init__(self, name: str, characters: Callable[[Ranges], Expression], work: Work, large: bool):
        self.name, self.characters, self.work, self.large = name, characters, work, large
        self.special: dict[int, bool] = {}
        self.expanded = 0

    def refuse(self, reason: str) -> NoReturn:
        """Raise an error about the pattern."""
        raise InputError(f"{self.name} {reason}")

    @functools.cached_property
    def anything(self) -> Expression:
        """Return the expression for any string."""
        return Repeat(self.characters(complement(())))

    def resolve(self, tree: Expression, search: bool) -> Expression:
        """Return the expression for the strings that match as a whole or, if `search`, contain a match."""
        if not self.is_special(tree) and not search:
            return tree
        return self.choice([tree], search, search, True)

    def is_special(self, tree: Expression) -> bool:
        """Return True if a tree contains an anchor or a look-around."""
        if id(tree) not in self.special:
            inner = isinstance(tree, Anchor | Look) or any(self.is_special(part) for part in tree.parts())
            self.special[id(tree)] = inner
        return self.special[id(tree)]

    def choice(self, items: Items[Expression], before: bool, after: bool, start: bool) -> Expression:
        """Return the alternatives for a sequence of items.

        `before` and `after` say whether other text may surround the match; `start`, whether the sequence begins where
        the text begins, or after text that belongs to no item.
        """
        for i, item in enumerate(items):
            if isinstance(item, Anchor | Look) or not self.is_special(item):
                continue
            head, tail = items[:i], items[i + 1 :]
            match item:
                case Sequence(inner):
                    return self.choice([*head, *inner, *tail], before, after, start)
                case Alternatives(inner):
                    options: list[Items[Expression]] = [[one] for one in inner]
                case Part(_, Repeat(inner, 0, 1)):
                    options = [[], [inner]]
                case _:
                    self.refuse_repeat(item)
            self.expanded += len(options)
            if self.expanded > MOST:
                self.refuse("has too many groups with anchors or look-arounds: simplify it")
            return choice([self.choice([*head, *option, *tail], before, after, start) for option in options])
        return self.flat(items, before, after, start)

    def refuse_repeat(self, item: Expression) -> NoReturn:
        """Raise an error about the anchor or look-around in a repetition."""
        while not isinstance(item, Anchor | Look):
            item = next(part for part in item.parts() if self.is_special(part))
        if isinstance(item, Anchor):
            self.refuse_inside(item.sign)
        self.refuse("has a look-around in a repetition, which is not supported")

    def refuse_inside(self, sign: str) -> NoReturn:
        """Raise an error about an anchor where text must come before or after it."""
        self.refuse(
            f"has {sign} inside: leave it out, or put it at the start or end of an alternative (the characters ^ and $ "
            "are written \\^ and \\$)"
        )

    def flat(self, items: Items[Expression], before: bool, after: bool, start: bool) -> Expression:
        """Return the expression for a sequence in which only direct items are anchors or look-arounds."""
        signs = [item.sign if isinstance(item, Anchor) else None for item in items]
        wide = [i for i, item in enumerate(items) if not isinstance(item, Anchor | Look)]
        first, last = (wide[0], wide[-1]) if wide else (len(items), -1)
        for i, sign in enumerate(signs):
            if (sign == "^" and (i > first or not start)) or (sign == "$" and i < last):
                self.refuse_inside(sign)
        newline = Repeat(self.characters(((0x0A, 0x0A),)), 0, 1) if self.large else EMPTY
        result: Expression = newline if "$" in signs and after else self.anything if after else EMPTY
        final: list[tuple[bool, Expression]] = []
        anchored = "^" in signs or not before
        for i, item in reversed([*enumerate(items)]):
            if isinstance(item, Look) and item.ahead:
                self.large ^= item.negated
                inner = self.choice([item.item], False, True, i < first and anchored and start)
                self.large ^= item.negated
                result = self.combined(result, [(item.negated, inner)])
            elif isinstance(item, Look):
                if i < last or ("$" not in signs and after):
                    self.refuse("has a look-behind that is not at the end: write the condition without it")
                final.append((item.negated, self.choice([item.item], True, False, True)))
            elif not isinstance(item, Anchor):
                result = sequence(item, result)
        return self.combined(result if anchored else sequence(self.anything, result), final)

    def combined(self, result: Expression, conditions: list[tuple[bool, Expression]]) -> Expression:
        """Return the strings of `result` that satisfy all conditions, or do not match if a condition is negated."""
        if not conditions:
            return result
        wanted = [result, *(inner for negated, inner in conditions if not negated)]
        return difference(wanted, [inner for negated, inner in conditions if negated], self.name, self.work)
