r"""Parser for JavaScript's regular expressions (ECMA 262 with flag u), which JSON schemas also use.

Back-references are rejected because an automaton cannot represent them. Word boundaries are also rejected, as is syntax
that Python, Rust and JavaScript read differently, such as `[]a]` or `\Z`. The error names the feature. Two features are
borrowed from other languages: the group `(?P<name>...)`, and the flags `(?i)` and `(?s)` at the start.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
import unicodedata
from collections.abc import Callable
from typing import NoReturn

from jaxgen.core.grammar.anchors import Anchored
from jaxgen.core.grammar.byte_automaton import Work
from jaxgen.core.grammar.expression import (
    LAST,
    SURROGATES,
    Anchor,
    Characters,
    Expression,
    Look,
    Part,
    Repeat,
    Sequence,
    choice,
    common,
    complement,
    union,
)
from jaxgen.core.grammar.utf8 import Ranges
from jaxgen.errors import InputError, shown

LONGEST = 10_000  # maximum length of a pattern, in characters
DEEPEST = 32  # maximum nesting depth of groups
MOST_CATEGORIES = 100  # maximum number of Unicode categories in a pattern; each has up to a thousand character ranges

DIGIT = ((0x30, 0x39),)
WORD = union([*DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
NEWLINES = union([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
SPACE = union(
    [(0x09, 0x0D), (0x2000, 0x200A), (0x2028, 0x2029)]
    + [(code, code) for code in (0x20, 0xA0, 0x1680, 0x202F, 0x205F, 0x3000, 0xFEFF)]
)
PYTHON_SPACE = ((0x1C, 0x1F), (0x85, 0x85))  # what Python's \\s matches and JavaScript's does not
CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
CATEGORIES = frozenset(
    "C Cc Cf Cn Co L Ll Lm Lo Lt Lu M Mc Me Mn N Nd Nl No P Pc Pd Pe Pf Pi Po Ps S Sc Sk Sm So Z Zl Zp Zs".split()
)

_BOUNDS = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_FLAGS = re.compile(r"\(\?([is]+)\)")
_NAME = re.compile(r"\(\?P?<[A-Za-z_$][A-Za-z0-9_$]*>")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,8})\}")
_PROPERTY = re.compile(r"[pP]\{(?:General_Category=|gc=)?([A-Za-z_=]+)\}")
_LOOKS = {"(?=": (True, False), "(?!": (True, True), "(?<=": (False, False), "(?<!": (False, True)}


def read_regex(
    pattern: str,
    where: str = "the pattern",
    characters: Callable[[Ranges], Expression] = Characters,
    *,
    search: bool = False,
    large: bool = False,
    work: Work | None = None,
) -> Expression:
    r"""Parse a pattern for whole strings or, if `search` is True, for strings that contain a match.

    `where` names the pattern in messages; `characters` returns the expression for one character in the given ranges.
    If `search` is True, `\d`, `\w`, `\s` and their capital forms match only characters on which Python agrees with
    JavaScript, because validators of JSON schemas use either. If `large` is also True, the expression contains all
    strings in which one of them finds a match, so that the others certainly do not contain one.

    Raises:
        InputError: the pattern is not valid or not supported.
        TypeError: `pattern` is not a str.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern must be a str, got {type(pattern).__name__}")
    if len(pattern) > LONGEST:
        raise InputError(f"{where} has {len(pattern)} characters: at most {LONGEST} are supported")
    reader = _Reader(pattern, where, characters, search, large)
    tree = reader.choice(0)
    if reader.place < len(pattern):
        reader.refuse("closes a group that was not opened: escape it, \\)")
    return Anchored(f"{where} {shown(pattern)}", characters, work or Work(), large).resolve(tree, search)


class _Reader:
    """Reader for a pattern, with its current position."""

    def __init__(
        self,
        pattern: str,
        where: str,
        characters: Callable[[Ranges], Expression],
        cautious: bool,
        large: bool,
    ):
        self.pattern, self.where, self.characters, self.cautious = pattern, where, characters, cautious
        self.large = large  # True where a larger class leads to fewer matches: in negated classes and look-arounds
        flags = _FLAGS.match(pattern)
        self.flags = flags[1] if flags else ""
        self.place = flags.end() if flags else 0
        self.categories = 0

    def refuse(self, reason: str) -> NoReturn:
        raise InputError(f"{self.where} {shown(self.pattern)} {reason}, at character {self.place + 1}")

    def next(self, text: str) -> bool:
        """Skip `text` and return True if `text` comes next; otherwise, return False."""
        found = self.pattern.startswith(text, self.place)
        self.place += len(text) * found
        return found

    def match(self, syntax: re.Pattern[str]) -> re.Match[str] | None:
        found = syntax.match(self.pattern, self.place)
        self.place = found.end() if found else self.place
        return found

    def choice(self, depth: int) -> Expression:
        if depth > DEEPEST:
            self.refuse(f"has groups nested more than {DEEPEST} levels deep")
        items = [self.sequence(depth)]
        while self.next("|"):
            items.append(self.sequence(depth))
        return choice(items)

    def sequence(self, depth: int) -> Expression:
        items = []
        while self.place < len(self.pattern) and self.pattern[self.place] not in "|)":
            items.append(self.term(depth))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def term(self, depth: int) -> Expression:
        start = self.place
        item = self.atom(depth)
        if self.place == len(self.pattern) or self.pattern[self.place] not in "*+?{":
            return item
        if isinstance(item, Anchor | Look):
            self.refuse(f"repeats {item.sign if isinstance(item, Anchor) else 'a look-ahead or look-behind'}")
        low, high = self.bounds()
        self.next("?")  # a lazy repetition matches the same strings
        if self.place < len(self.pattern) and self.pattern[self.place] in "*+?{":
            self.refuse("repeats a repetition: put it into a group, (?:...)")
        source = self.pattern[start : self.place]
        part = f"{shown(source)} in " if source != self.pattern else ""
        return Part(f"{part}{self.where} {shown(self.pattern)}", Repeat(item, low, high))

    def bounds(self) -> tuple[int, int | None]:
        for sign, bounds in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self.next(sign):
                return bounds
        found = self.match(_BOUNDS)
        if found is None:
            self.refuse("has a brace that does not begin a repetition: write {2}, {2,} or {2,3}, or escape it, \\{")
        digits = max(len(found[1]), len(found[3] or ""))
        if digits > 9:
            self.refuse(f"has a bound with {digits} digits, which is too large for an automaton")
        low = int(found[1])
        high = low if found[2] is None else int(found[3]) if found[3] else None
        if high is not None and high < low:
            self.refuse(f"has bounds in the wrong order, {found[0]}")
        return low, high

    def atom(self, depth: int) -> Expression:
        sign = self.pattern[self.place]
        if sign == "(":
            return self.group(depth)
        if sign in "*+?{":
            self.refuse(f"has nothing that {sign} could repeat: escape it, \\{sign}")
        if sign == "\\":
            found = self.escape()
            return self.of(found if isinstance(found, tuple) else ((found, found),))
        self.place += 1
        if sign == "[":
            return self.of(self.brackets())
        if sign in "^$":
            return Anchor(sign)
        if sign == ".":
            newlines = ((0x0A, 0x0A),) if self.cautious and self.large else NEWLINES
            return self.of(((0, LAST),) if "s" in self.flags else complement(newlines))
        return self.of(((ord(sign), ord(sign)),))

    def of(self, ranges: Ranges) -> Expression:
        ranges = union(ranges)
        if not ranges:
            self.refuse("has a part that matches no character")
        return self.characters(self.cased(ranges))

    def cased(self, ranges: Ranges) -> Ranges:
        """Return the characters and, if the flag i is set, all characters that differ from them only in case."""
        if "i" not in self.flags:
            return ranges
        ends = [last for _, last in ranges] + [LAST + 1]
        starts = [first for first, _ in ranges] + [LAST + 1]
        others = [other for code, other in _cases() if starts[bisect.bisect_left(ends, code)] <= code]
        return union([*ranges, *((other, other) for other in others)])

    def group(self, depth: int) -> Expression:
        look = next((look for opening, look in _LOOKS.items() if self.next(opening)), None)
        if look is None and not self.next("(?:") and not self.match(_NAME):
            if self.pattern.startswith("(?", self.place):
                kind = self.pattern[self.place : self.place + 3]
                self.refuse(
                    f"has a kind of group that is not supported, {kind}: write (?:...); (?i) and (?s) may stand at the "
                    "start"
                )
            self.place += 1
        negated = look is not None and look[1]
        self.large ^= negated
        inner = self.choice(depth + 1)
        self.large ^= negated
        if not self.next(")"):
            self.refuse("has a group that is not closed")
        return inner if look is None else Look(inner, *look)

    def brackets(self) -> Ranges:
        """Read a class after its opening bracket."""
        negated = self.next("^")
        self.large ^= negated
        if self.pattern.startswith("]", self.place):
            self.refuse("has a class that begins with ]: escape it, \\] (any character is [\\s\\S])")
        parts: list[tuple[int, int]] = []
        while not self.next("]"):
            first = self.member()
            if self.pattern.startswith("-", self.place) and not self.pattern.startswith("-]", self.place):
                self.place += 1
                last = self.member()
                if isinstance(first, tuple) or isinstance(last, tuple):
                    self.refuse("has a class of characters as the end of a range: escape the hyphen, \\-")
                if last < first:
                    self.refuse(f"has a range in the wrong order, {shown(chr(first))} to {shown(chr(last))}")
                parts.append((first, last))
            else:
                parts += first if isinstance(first, tuple) else [(first, first)]
        self.large ^= negated
        return complement(self.cased(union(parts))) if negated else union(parts)

    def member(self) -> int | Ranges:
        """Read a character, or an escaped class, inside brackets."""
        if self.place >= len(self.pattern):
            self.refuse("has a class that is not closed")
        for operator in ("&&", "--", "||", "~~", "[:", "[=", "[."):
            if self.pattern.startswith(operator, self.place):
                self.refuse(
                    f"has {operator} in a class, which other languages read differently: escape it, \\{operator[0]}"
                )
        if self.pattern[self.place] == "\\":
            return self.escape(inside=True)
        self.place += 1
        return ord(self.pattern[self.place - 1])

    def escape(self, inside: bool = False) -> int | Ranges:
        """Read an escape: a character, or the characters of a class."""
        self.place += 1
        sign = self.pattern[self.place : self.place + 1]
        if sign.lower() in CLASSES:
            self.place += 1
            if sign in CLASSES:
                return self.named(sign, self.large)
            return complement(self.cased(self.named(sign.lower(), not self.large)))
        if sign in ("x", "u"):
            return self.code_point()
        if sign in ("p", "P"):
            return self.category(sign == "P")
        octal = sign == "0" and self.pattern[self.place + 1 : self.place + 2].isdecimal()
        if sign in CONTROLS and not octal:
            self.place += 1
            return CONTROLS[sign]
        if inside and sign == "b":
            self.place += 1
            return 8
        if sign == "c" and re.match("[A-Za-z]", self.pattern[self.place + 1 : self.place + 2]):
            self.place += 2
            return ord(self.pattern[self.place - 1]) % 32
        if sign.isascii() and not sign.isalnum() and sign.isprintable() and sign:
            self.place += 1
            return ord(sign)
        if sign.isdecimal() or sign == "k":
            self.refuse(f"has \\{sign}: back-references and octal numbers are not supported")
        if sign in ("b", "B"):
            self.refuse(f"has a word boundary, \\{sign}, which is not supported")
        if sign in ("A", "z", "Z"):
            self.refuse(f"has \\{sign}: leave it out, a text is always matched from start to end")
        self.refuse(f"has the escape {shown(chr(92) + sign)}, which is not known" if sign else "ends in a backslash")

    def named(self, sign: str, large: bool) -> Ranges:
        r"""Return the characters of `\d`, `\w` or `\s`: JavaScript's or, if `cautious`, possible or certain ones."""
        if not self.cautious:
            return CLASSES[sign]
        if large:
            return {"d": _category("Nd"), "w": union([*WORD, (0x80, LAST)]), "s": union([*SPACE, *PYTHON_SPACE])}[sign]
        return common(SPACE, complement(((0xFEFF, 0xFEFF),))) if sign == "s" else CLASSES[sign]

    def code_point(self) -> int:
        r"""Read `xHH`, `uHHHH` or `u{H...}`; a surrogate pair is read as one character."""
        found = self.match(_HEX)
        if found is None:
            self.refuse(r"has an incomplete code: write \x41, \u0041 or \u{41}")
        code = int(found[1] or found[2] or found[3], 16)
        if 0xD800 <= code < 0xDC00 and self.pattern.startswith("\\u", self.place):
            self.place += 1
            second = self.match(_HEX)
            low = int(second[2] or "0", 16) if second else 0
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + ((code - 0xD800) << 10) + low - 0xDC00
        if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
            self.refuse(f"has the code {code:x}, which is not a character")
        return code

    def category(self, negated: bool) -> Ranges:
        r"""Read `p{...}`; return the characters of a Unicode general category, or all other characters if `negated`."""
        found = self.match(_PROPERTY)
        if found is None or found[1] not in CATEGORIES:
            self.refuse(
                r"has a Unicode property that is not supported; general categories are, such as \p{L} and \p{Lu}"
            )
        self.categories += 1
        if self.categories > MOST_CATEGORIES:
            self.refuse(f"has more than {MOST_CATEGORIES} Unicode categories: simplify it")
        return complement(_category(found[1])) if negated else _category(found[1])


@functools.cache
def _category(name: str) -> Ranges:
    return union((code, code) for code in range(LAST + 1) if unicodedata.category(chr(code)).startswith(name))


@functools.cache
def _cases() -> list[tuple[int, int]]:
    """Return the pairs of characters that differ only in case, that is, have the same case folding."""
    alike: dict[str, list[int]] = {}
    for code in range(0x1E944):  # characters from U+1E944 on have no uppercase or lowercase variants
        alike.setdefault(chr(code).casefold(), []).append(code)
    return [pair for codes in alike.values() for pair in itertools.permutations(codes, 2)]
