"""Regular expressions as trees. The same object may occur in several places in a tree.

Expressions are compared by identity. `size` is an upper bound on the number of states that an expression adds to the
nondeterministic automaton; `height` is the depth of nesting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxgen.core.grammar.stopping import check_stop
from jaxgen.core.grammar.utf8 import Ranges, spelled

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


class Expression:
    """A set of strings."""

    size: int
    height: int

    def __post_init__(self):
        check_stop()
        # Size and height are computed bottom-up, because computing them on demand would recurse deeply in a deep tree.
        object.__setattr__(self, "size", self._count())
        object.__setattr__(self, "height", 1 + max((part.height for part in self.parts()), default=0))

    def parts(self) -> list[Expression]:
        """Return the direct subexpressions, without separators."""
        match self:
            case Sequence(items) | Alternatives(items):
                return list(items)
            case Members(items, _, further):
                return [item for item, _ in items] + ([] if further is None else [further])
            case Part(_, item) | Repeat(item) | Look(item):
                return [item]
        return []

    def _count(self) -> int:
        return sum(part.size for part in self.parts())


@dataclass(frozen=True, eq=False)
class Characters(Expression):
    """One character from a set."""

    ranges: Ranges

    def _count(self) -> int:
        return len(spelled(self.ranges))


@dataclass(frozen=True, eq=False)
class Text(Expression):
    """A literal string, in UTF-8."""

    text: bytes

    def _count(self) -> int:
        return len(self.text)


@dataclass(frozen=True, eq=False)
class Compiled(Expression):
    """The strings of a deterministic automaton over bytes, which begins in state 0.

    `moves` contains the transitions of each state, as tuples (first byte, last byte, target).
    """

    moves: tuple[tuple[tuple[int, int, int], ...], ...]
    accepting: frozenset[int]

    def _count(self) -> int:
        return 1 + len(self.moves)


@dataclass(frozen=True, eq=False)
class Sequence(Expression):
    """One expression after another."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Alternatives(Expression):
    """Any of the expressions."""

    items: tuple[Expression, ...]

    def _count(self) -> int:
        return 1 + super()._count()


@dataclass(frozen=True, eq=False)
class Repeat(Expression):
    """An expression repeated `low` to `high` times, or at least `low` times if `high` is None."""

    item: Expression
    low: int = 0
    high: int | None = None
    separator: Expression | None = None

    def _count(self) -> int:
        copies = max(self.low, 1) if self.high is None else self.high
        return 2 + copies * (1 + self.item.size + (0 if self.separator is None else self.separator.size))


@dataclass(frozen=True, eq=False)
class Members(Expression):
    """Expressions, some of them optional, with separators between the expressions that are present.

    They are in the given order or, if `free` is True, only the others are: optional ones are in any order and place.
    After them, `further` may occur any number of times. In all, `low` to `high` expressions must be present.
    """

    items: tuple[tuple[Expression, bool], ...]
    separator: Expression
    further: Expression | None = None
    low: int = 0
    high: int | None = None
    free: bool = False

    def counts(self) -> tuple[int, bool]:
        """Return the largest number of members that is counted, and True if that number also stands for more."""
        return (max(self.low, 1), True) if self.high is None else (self.high, False)

    def _count(self) -> int:
        top = self.counts()[0]
        needed = [item.size for item, needed in self.items if needed]
        optional = [item.size for item, needed in self.items if not needed]
        if self.free:
            sets = 2 ** len(optional)
            hubs = sets * (len(needed) + 1)
            size = hubs * (2 + self.separator.size) + sets * sum(needed) + hubs * sum(optional) // 2
        else:
            size = top * sum(part + self.separator.size + 2 for part in [*needed, *optional])
        further = 0 if self.further is None else top * (self.further.size + self.separator.size + 2)
        return 2 + top + size + further


@dataclass(frozen=True, eq=False)
class Anchor(Expression):
    """An anchor in a pattern, `^` or `$`, which is removed before compilation."""

    sign: str


@dataclass(frozen=True, eq=False)
class Look(Expression):
    """A look-ahead or look-behind in a pattern, which is resolved before compilation."""

    item: Expression
    ahead: bool
    negated: bool


@dataclass(frozen=True, eq=False)
class Part(Expression):
    """An expression with a name for error messages."""

    name: str
    item: Expression


EMPTY = Sequence(())
NOTHING = Alternatives(())


def sequence(*items: Expression | str) -> Expression:
    """Return a sequence of expressions; a str matches itself literally."""
    return Sequence(tuple(Text(item.encode()) if isinstance(item, str) else item for item in items))


def choice(items: Iterable[Expression | str]) -> Expression:
    """Return an alternation of expressions, without those that are NOTHING; a str matches itself literally."""
    options = tuple(Text(item.encode()) if isinstance(item, str) else item for item in items if item is not NOTHING)
    return options[0] if len(options) == 1 else Alternatives(options) if options else NOTHING


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the characters in any of the ranges, except surrogates, which are not characters."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    low, high = SURROGATES
    below = [(first, min(last, low - 1)) for first, last in merged if first < low]
    return (*below, *((max(first, high + 1), last) for first, last in merged if last > high))


def complement(ranges: Ranges) -> Ranges:
    """Return all characters that are not in the ranges."""
    ends = [-1, *(end for first, last in ranges for end in (first - 1, last)), LAST]
    starts = [end + 1 for end in ends[::2]]
    return union((first, last) for first, last in zip(starts, ends[1::2], strict=True) if first <= last)


def common(first: Ranges, second: Ranges) -> Ranges:
    """Return the characters that are in both sets."""
    return complement(union([*complement(first), *complement(second)]))
