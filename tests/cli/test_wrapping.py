"""Word wrapping in a terminal."""

import contextlib
import os
import pty
import select
import termios
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jaxgen.cli.printing import Printer
from jaxgen.cli.timing import Stats
from jaxgen.cli.wrapping import Wrapper
from tests.support.tokenizers import byte_level

LINK = "https://example.com/" + "x" * 10


def wrapped(*pieces: str, columns: int = 20) -> list[str]:
    """Return the wrapped text, split at newlines."""
    wrapper = Wrapper()
    return ("".join(wrapper.put(piece, columns) for piece in pieces) + wrapper.end()).split("\n")


@given(st.lists(st.from_regex(r"\A[a-z]{1,10}( |  |\n)\Z"), max_size=40), st.integers(10, 30), st.integers(1, 9))
def test_words_split_in_any_way_are_wrapped_like_textwrap(words, columns, size):
    text = "".join(words)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    lines = [textwrap.wrap(line, columns) or [""] for line in text.split("\n")]
    assert wrapped(*pieces, columns=columns) == [row for line in lines for row in line]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("A fox  named   Ivy, who was afraid ", ["A fox  named   Ivy,", "who was afraid"]),
        ("  indented text that is long", ["  indented text that", "is long"]),
        ("a\tb\tc d", ["a\tb\tc d"]),
        ("a\tb\tc def", ["a\tb\tc", "def"]),
        (f"Look at {LINK} first", ["Look at", f"{LINK} first"]),
        ("```py\nx = a_call(of, many, words)\n```\nand then more text", ["```py", "x = a_call(of, many, words)", "```",
                                                                         "and then more text"]),
        ("```\nTitle\n~~~~~\nx = a_call(of, many, words)\n````\nand then more text",
         ["```", "Title", "~~~~~", "x = a_call(of, many, words)", "````", "and then more text"]),
        ("~~~~ a\n~~~ b\n~~~\nx = a_call(of, words)\n~~~~",
         ["~~~~ a", "~~~ b", "~~~", "x = a_call(of, words)", "~~~~"]),
        ("```x``` is inline\nand then more text", ["```x``` is inline", "and then more text"]),
        ("\n\n", ["", "", ""]),
        ("这是一个很长的句子没有空格", ["这是一个很长的句子没", "有空格"]),
        ("这是一个很长的句子没有，空格", ["这是一个很长的句子没", "有，空格"]),
        ("这是一个很长的句子了。空格", ["这是一个很长的句子", "了。空格"]),
        ("这是一个很长的句子（空格）", ["这是一个很长的句子", "（空格）"]),
        ("这是 jaxgen，用 JAX 写的", ["这是 jaxgen，用 JAX", "写的"]),
        ("👍🏽👨\u200d👩\u200d👧" * 3, ["👍🏽👨\u200d👩\u200d👧" * 2, "👍🏽👨\u200d👩\u200d👧"]),
        ("e\u0301" * 10 + " " + "e\u0301" * 9, ["e\u0301" * 10 + " " + "e\u0301" * 9]),
        ("a fox\xa0named Ivy, afraid", ["a fox\xa0named Ivy,", "afraid"]),
    ],
)  # fmt: skip
def test_rows(text, rows):
    assert wrapped(text) == rows
    assert wrapped(*text) == rows


def test_a_word_is_returned_when_its_place_is_known():
    wrapper = Wrapper()
    pieces = {
        "On": "On",
        "ce": "ce",
        " up": "",
        "on": "",
        " a": " upon",
        " ti": " a\nti",
        "me": "me",
        ".\nBut": ".\nBut",
    }
    assert {piece: wrapper.put(piece, 12) for piece in pieces} == pieces
    assert wrapper.put(" no", 12) == ""
    assert wrapper.end() == " no"
    assert wrapper.put("Once", 12) == "Once"


@contextlib.contextmanager
def on_a_terminal():
    """Replace stdout with a terminal of 20 columns; yield it and a function that checks the text shown."""
    own, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 20))

    def expect(text: str) -> None:
        shown = ""
        while len(shown) < len(text) and select.select([own], [], [], 10)[0]:
            shown += os.read(own, 65536).decode().replace("\r\n", "\n")
        assert shown == text

    with open(theirs, "w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
        yield theirs, expect
    os.close(own)


def stream(text: str, **more) -> Printer:
    """Print an answer as if it were being generated, but do not end it."""
    session: Any = SimpleNamespace(tokenizer=byte_level(), generate_kwargs=more, stats=Stats())
    printer = Printer(session)
    printer.put([0])  # the prompt
    printer.put(session.tokenizer.encode(text))
    return printer


def test_an_answer_on_a_terminal_is_wrapped():
    with on_a_terminal() as (_, expect):
        printer = stream("She was not afraid of the dark.")
        expect("She was not afraid\nof the")
        printer.end()
        expect(" dark.\n")
    assert printer.text == "She was not afraid of the dark."


def test_lines_are_as_wide_as_the_terminal_is_now():
    with on_a_terminal() as (terminal, expect):
        printer = stream("She was not afraid\n")
        termios.tcsetwinsize(terminal, (24, 10))
        printer.on_finalized_text("of the dark.", stream_end=True)
        expect("She was not afraid\nof the\ndark.\n")
        termios.tcsetwinsize(terminal, (0, 0))
        printer.on_finalized_text("She was not afraid of the dark.", stream_end=True)
        expect("She was not afraid of the dark.\n")


def test_an_answer_in_a_grammar_is_not_wrapped():
    with on_a_terminal() as (_, expect):
        stream('{"text": "She was not afraid of the dark."}', prefix_allowed_tokens_fn=None).end()
        expect('{"text": "She was not afraid of the dark."}\n')


def test_an_answer_in_a_file_is_not_wrapped(capsys):
    stream("She was not afraid of  the dark. ").end()
    assert capsys.readouterr().out == "She was not afraid of  the dark. \n"
