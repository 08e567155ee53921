"""The interface of a format in which models write tool calls, and the parser that finds calls in generated text."""

from __future__ import annotations

import abc
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxgen.core.grammar.grammar import Grammar
from jaxgen.errors import InputError
from jaxgen.serving.formats.reading import SPACE, Broken, Call, Parts, Reading, Unknown, after_space, literal

Functions = Mapping[str, dict[str, Any] | None]  # the schemas of the parameters, by function name
_MOST_FREE = 2**13  # maximum size of the grammars of all arguments in which optional ones are in any order


class Format(abc.ABC):
    """A format of tool calls.

    Attributes:
        openings: the texts with which a call may begin. All have the same first character.
        closing: a tag after a call. It is dropped if it follows, but the call does not depend on it.
        bare: characters with which a call may also begin if only calls come before it.
        marks: tags that may be special tokens of the tokenizer. They are part of the text that the parser reads.
        is_single: True if the model writes only one call in an answer.
        before, between, after: the text of a call: before the name, between the name and the arguments, and after them.
        separator: the text between two calls.
        shows: the texts that a chat template has if the model uses this format.
    """

    openings: ClassVar[tuple[str, ...]]
    closing: ClassVar[str] = ""
    bare: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]] = ()
    is_single: ClassVar[bool] = False
    before: ClassVar[str] = ""
    between: ClassVar[str | Grammar] = ""
    after: ClassVar[str] = ""
    separator: ClassVar[str] = ""
    shows: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def read(self, functions: Functions) -> Reading[Parts]:
        """Read the calls after one opening, which is read too; a call of another function is `Unknown`."""

    def grammar(self, functions: Functions, limit: int | None, left_out: list[str] | None = None) -> Grammar:
        """Return the grammar of one to `limit` calls (None for no limit), or of one call if `is_single` is True.

        What cannot be enforced is left out and added to the list `left_out`, if there is one.

        Raises:
            InputError: a schema is not supported.
        """
        calls = Grammar.choice(
            Grammar.sequence(name, self.between, grammar) for name, grammar in arguments(functions, left_out).items()
        )
        return (self.before + calls + self.after).repeat(1, 1 if self.is_single else limit, self.separator)

    def write(self, calls: Sequence[Call]) -> str:
        """Return the text of calls, as the model writes them."""
        texts = (f"{self.before}{call.name}{self.between}{call.arguments}{self.after}" for call in calls)
        return self.separator.join(texts)

    def call_id(self) -> str:
        """Return a new id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def past_id(self, identifier: str) -> str:
        """Return the id under which the chat template gets a past call, or the result of this call."""
        return identifier


def arguments(functions: Functions, left_out: list[str] | None = None) -> dict[str, Grammar]:
    """Return the grammar of each function's arguments as JSON; a function without a schema has no arguments.

    Optional arguments are in any order if the grammars of all functions together are not too large. `left_out` is as in
    `schema_of`.
    """
    for any_order in (True, False):
        missing: list[str] | None = None if left_out is None else []
        found = {name: _arguments(name, schema, missing, any_order) for name, schema in functions.items()}
        if sum(grammar.size for grammar in found.values()) <= _MOST_FREE:
            break
    if left_out is not None:
        left_out += missing or []
    return found


def _arguments(name: str, schema: dict[str, Any] | None, left_out: list[str] | None, any_order: bool) -> Grammar:
    if schema is None:
        return Grammar.text("{}")
    try:
        return schema_of({"type": "object", **schema}, f"{name}.parameters", left_out, any_order)
    except InputError as error:
        raise InputError(f"the tool {name}: {error}") from error


def schema_of(schema: Any, name: str, left_out: list[str] | None, any_order: bool = True) -> Grammar:
    """Read a schema; what cannot be enforced is an error, or added to the list `left_out` if there is one."""
    unsupported = "error" if left_out is None else "warn"
    return Grammar.json_schema(schema, name=name, unsupported=unsupported, left_out=left_out, any_order=any_order)


def free_text(*ends: str) -> Grammar:
    """Return the grammar of any text that contains none of `ends`; it may end with a part of one of them.

    All `ends` begin with the same character, which occurs only once in each.
    """
    first, begun = ends[0][0], dict.fromkeys(end[:length] for end in ends for length in range(1, len(end)))
    following = {text: "".join(end[len(text)] for end in ends if end.startswith(text)) for text in begun}
    apart = [text + Grammar.any_character(but=first + following[text]) for text in begun]
    beginnings = Grammar.choice(begun).repeat()
    return Grammar.choice([Grammar.any_character(but=first), beginnings + Grammar.choice(apart)]).repeat() + beginnings


class CallParser:
    r"""Parser for generated text that arrives in pieces. The result does not depend on how the text is split.

    A call and its tags are treated as content if the call is not complete and valid, or if its function is not in
    `functions`. Calls after the first `most_calls` are dropped.

    Whitespace before a call is dropped. If the text contains calls, whitespace at its end is also dropped.

        >>> from jaxgen.serving.formats.hermes import Hermes
        >>> parser = CallParser(Hermes(), {"f": None}, None)
        >>> parser.put('Yes.\n<tool_call>\n{"name": "f", "arguments": {"x"')
        ('Yes.', [])
        >>> parser.put(": 1}}\n</tool_call>")
        ('', [Call(name='f', arguments='{"x": 1}', id=None)])
        >>> parser.end()
        ('', [])
    """

    def __init__(self, form: Format, functions: Functions, most_calls: int | None):
        self._form, self._functions, self._most, self._found = form, functions, most_calls, 0
        self._space: list[str] = []  # whitespace that is dropped if a call follows
        self._held: list[str] = []  # the characters that the reader has received
        self._reader: Reading[Parts] | None = None
        self._is_closing = False  # True while the reader reads the tag after a call
        self._only_calls = True  # False if there has been other text

    def put(self, text: str) -> tuple[str, list[Call]]:
        """Read more text; return the content and calls that can no longer change."""
        content: list[str] = []
        calls: list[Call] = []
        for char in text:
            self._put(char, content, calls)
        return "".join(content), calls

    def end(self) -> tuple[str, list[Call]]:
        """Return the content and calls that were held back; a call that lacks only the closing tag is accepted."""
        content: list[str] = []
        calls: list[Call] = []
        if self._reader is not None:
            self._receive("", content, calls)
        if not self._found:
            content += self._space
        return "".join(content), calls

    def _put(self, char: str, content: list[str], calls: list[Call]) -> None:
        if self._reader is not None:
            self._receive(char, content, calls)
        elif char in SPACE:
            self._space.append(char)
        elif char == self._form.openings[0][0] or (self._only_calls and char in self._form.bare):
            self._reader = self._form.read(self._functions)
            next(self._reader)
            self._receive(char, content, calls)
        else:
            content += [*self._space, char]
            self._space, self._only_calls = [], False

    def _receive(self, char: str, content: list[str], calls: list[Call]) -> None:
        """Pass a character to the reader; take its calls, or treat what it has received as content."""
        assert self._reader is not None
        self._held.append(char)
        try:
            self._reader.send(char)
            return
        except StopIteration as end:
            self._take(end.value, content, calls)
            return
        except Broken as error:
            self._only_calls = self._only_calls and isinstance(error, Unknown)
        text = "".join(self._held)
        again = self._beginning(text) if char else ""
        text = text.removesuffix(again)
        content += [*self._space, text.rstrip("".join(SPACE))]
        self._space = list(text[len(content[-1]) :])
        self._held, self._reader, self._is_closing = [], None, False
        for next_char in again:
            self._put(next_char, content, calls)

    def _take(self, parts: Parts, content: list[str], calls: list[Call]) -> None:
        """Take what the reader has read; if calls have a closing tag, read it next."""
        found = [part for part in parts if isinstance(part, Call)]
        if texts := [part for part in parts if isinstance(part, str)]:
            content += [*self._space, *texts]
        left = None if self._most is None else max(self._most - self._found, 0)
        calls += found[:left]
        self._found += len(found)
        self._space, self._held, self._reader = [], [], None
        self._is_closing = bool(self._form.closing) and not self._is_closing
        if self._is_closing:
            self._reader = _closing(self._form.closing)
            next(self._reader)

    def _beginning(self, text: str) -> str:
        """Return the longest end of `text` with which a call may begin; not all of it, unless it follows a call."""
        openings = self._form.openings
        lengths = range(min(max(map(len, openings)), len(text) - (not self._is_closing)), 0, -1)
        return next((text[-n:] for n in lengths if any(opening.startswith(text[-n:]) for opening in openings)), "")


def _closing(tag: str) -> Reading[Parts]:
    """Read whitespace and a tag, which the end of the text may cut off."""
    yield from literal(tag, (yield from after_space()), may_end=True)
    return []
