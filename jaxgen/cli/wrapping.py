"""Wrapping of generated text at words, as it comes."""

from __future__ import annotations

import re
from unicodedata import category, east_asian_width

_SPACES = " \t\u3000"
_FENCE = re.compile(r"\s*(`{3,}(?=[^`]*$)|~{3,})(.*)")
_EMOJI_STYLE = "\ufe0f"  # some terminals make the character before it two columns wide
# Categories of characters that cannot begin a line, such as ")", "。" and accents, and of those that cannot end one,
# such as "(" and the joiner of emoji.
_NOT_FIRST = {"Pe", "Pf", "Po", "Lm", "Sk", "Mn", "Mc", "Me", "Cf"}
_NOT_LAST = {"Ps", "Pi", "Cf"}


class Wrapper:
    """Wrapper of a text that comes in pieces: lines end at spaces, or next to wide characters such as Chinese ones.

    A word is held back until it is complete, or until its line is known, so that text on the screen never moves. Spaces
    at the end of a line are left out. The terminal itself breaks words that are longer than a line, and the lines of
    code between fences, to which a newline would do harm.
    """

    def __init__(self):
        self._restart()

    def put(self, text: str, columns: int) -> str:
        """Append text; return what can be printed now on a terminal of so many columns."""
        return "".join(self._put(char, columns) for char in text)

    def end(self) -> str:
        """Return the word that was held back, and start again."""
        word = self._release()
        self._restart()
        return word

    def _restart(self) -> None:
        self._fence = ""  # that began the code of the current line
        self._begin_line()

    def _begin_line(self) -> None:
        self._line = ""  # of the text
        self._column = 0  # of the cursor
        self._spaces = self._word = ""  # held back
        self._placed = True  # the current word is returned as it comes

    def _put(self, char: str, columns: int) -> str:
        line, self._line = self._line, self._line + char
        if char == "\n":
            word = self._release()
            self._fence = _fence_after(line, self._fence)
            self._begin_line()
            return word + char
        if self._fence or not line.strip():
            return self._place(char, columns)
        word = ""
        if char in _SPACES or _may_part(line[-1], char):
            word, self._placed = self._release(), False
        if char in _SPACES:
            self._spaces += char
            return word
        return word + (self._place(char, columns) if self._placed else self._hold(char, columns))

    def _release(self) -> str:
        """Return the word that is held back, which fits into the line, and the spaces before it."""
        if not self._word:
            return ""
        shown, self._spaces, self._word = self._spaces + self._word, "", ""
        self._column = _after(self._column, shown)
        return shown

    def _place(self, char: str, columns: int) -> str:
        """Return the character; if the line is full, the terminal begins the next one."""
        column = _after(self._column, char)
        self._column = column if column <= columns else _after(0, char)
        return char

    def _hold(self, char: str, columns: int) -> str:
        """Hold the character back with its word; begin a new line with the word once it is too long for this one."""
        self._word += char
        if _after(self._column, self._spaces + self._word) <= columns:
            return ""
        self._column, self._spaces, self._placed = 0, "", True
        return "\n" + self._release()


def _fence_after(line: str, fence: str) -> str:
    """Return the fence whose code goes on after a line, given that of the line itself; the empty string for none.

    As in CommonMark, code ends at a line of nothing but the same character, at least as often as it began.
    """
    found = _FENCE.fullmatch(line)
    if found is None:
        return fence
    if not fence:
        return found[1]
    return "" if found[1].startswith(fence) and not found[2].strip() else fence


def _after(column: int, text: str) -> int:
    """Return the cursor's column after a text that begins in `column`."""
    for char in text:
        column += 8 - column % 8 if char == "\t" else _width(char)
    return column


def _width(char: str) -> int:
    """Return the number of columns of a character, the larger one where terminals differ."""
    if category(char) in ("Mn", "Me", "Cf", "Cc"):
        return int(char == _EMOJI_STYLE)
    return 2 if _is_wide(char) else 1


def _is_wide(char: str) -> bool:
    return east_asian_width(char) in ("W", "F")


def _may_part(before: str, after: str) -> bool:
    """Return True if a line may end between two characters without a space."""
    if category(before) in _NOT_LAST or category(after) in _NOT_FIRST:
        return False
    return _is_wide(before) or _is_wide(after)
