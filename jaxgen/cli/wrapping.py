"""Word wrapping of text as it is generated."""

from __future__ import annotations

import re
from unicodedata import category, east_asian_width

_SPACES = " \t\u3000"
_FENCE = re.compile(r"\s*(`{3,}(?=[^`]*$)|~{3,})(.*)")
_EMOJI_STYLE = "\ufe0f"  # on some terminals, this selector makes the preceding character two columns wide
# Unicode categories of characters that cannot begin a line, such as ")", "。" and accents.
_NOT_FIRST = {"Pe", "Pf", "Po", "Lm", "Sk", "Mn", "Mc", "Me", "Cf"}
# Categories of characters that cannot end a line, such as "(" and the emoji joiner.
_NOT_LAST = {"Ps", "Pi", "Cf"}


class Wrapper:
    """Wraps text that arrives in pieces. Lines break at spaces, or next to wide characters, such as Chinese characters.

    A word is held back until it is complete or no longer fits on the line, so that text on the screen never moves.
    Spaces at the end of a line are dropped. The terminal breaks words that are longer than a line. Long lines of
    fenced code are also left to the terminal, because inserting a newline could corrupt the code.
    """

    def __init__(self):
        self._restart()

    def put(self, text: str, columns: int) -> str:
        """Add `text`, and return the wrapped text that is ready to print; the terminal has `columns` columns."""
        return "".join(self._put(char, columns) for char in text)

    def end(self) -> str:
        """Return the word that was held back, and reset the wrapper."""
        word = self._release()
        self._restart()
        return word

    @property
    def column(self) -> int:
        """The cursor's column after the text that was returned, starting from 0."""
        return self._column

    def _restart(self) -> None:
        self._fence = ""  # the opening fence of the code block around the current line
        self._begin_line()

    def _begin_line(self) -> None:
        self._line = ""  # the text of the current line
        self._column = 0  # the cursor's column
        self._spaces = self._word = ""  # text that is held back
        self._placed = True  # True if the current word is returned as it arrives

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
        """Return the held-back spaces and word, and advance the column past them."""
        if not self._word:
            return ""
        shown, self._spaces, self._word = self._spaces + self._word, "", ""
        self._column = _after(self._column, shown)
        return shown

    def _place(self, char: str, columns: int) -> str:
        """Return the character, and advance the column; the terminal itself begins a new line when a line is full."""
        column = _after(self._column, char)
        self._column = column if column <= columns else _after(0, char)
        return char

    def _hold(self, char: str, columns: int) -> str:
        """Add the character to the held-back word; once the word is too long for this line, begin a new line."""
        self._word += char
        if _after(self._column, self._spaces + self._word) <= columns:
            return ""
        self._column, self._spaces, self._placed = 0, "", True
        return "\n" + self._release()


def _fence_after(line: str, fence: str) -> str:
    """Return the fence that is open after `line`, or "" if none is open; `fence` is the fence open before the line.

    As in CommonMark, a code block ends at a line that contains only a fence of the same character. The closing fence
    must be at least as long as the opening fence.
    """
    found = _FENCE.fullmatch(line)
    if found is None:
        return fence
    if not fence:
        return found[1]
    return "" if found[1].startswith(fence) and not found[2].strip() else fence


def _after(column: int, text: str) -> int:
    """Return the cursor's column after printing `text`, starting at `column`."""
    for char in text:
        column += 8 - column % 8 if char == "\t" else _width(char)
    return column


def _width(char: str) -> int:
    """Return how many columns a character takes up; if terminals differ, return the larger number."""
    if category(char) in ("Mn", "Me", "Cf", "Cc"):
        return int(char == _EMOJI_STYLE)
    return 2 if _is_wide(char) else 1


def _is_wide(char: str) -> bool:
    return east_asian_width(char) in ("W", "F")


def _may_part(before: str, after: str) -> bool:
    """Return True if a line may break between two adjacent characters, even without a space."""
    if category(before) in _NOT_LAST or category(after) in _NOT_FIRST:
        return False
    return _is_wide(before) or _is_wide(after)
