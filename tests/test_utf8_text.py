"""Lines of files end only at newlines, and errors name bad lines."""

import json
import random

import pytest

from jaxgen import InputError
from jaxgen.json_file import parse_json
from jaxgen.utf8_text import text_lines

# Characters at which Python's splitlines would split, and a few that look like spaces.
INSIDE = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\u00a0\ufeff"


def test_lines_end_at_newlines_only():
    text = f"\ufeffone{INSIDE}\r\n\n  \r\nsecond\rpart\nlast"
    assert text_lines("x", text.encode()) == [(1, f"one{INSIDE}"), (4, "second\rpart"), (5, "last")]
    assert text_lines("x", b"") == []


@pytest.mark.parametrize("seed", range(20))
def test_written_lines_can_be_read(seed):
    rng = random.Random(seed)
    texts = ["".join(rng.choices('ab {}"\\' + INSIDE, k=rng.randint(0, 12))) for _ in range(9)]
    texts[0] = "first"  # a byte order mark at the start would be skipped
    end = rng.choice(["\n", "\r\n"])
    read = text_lines("x", end.join(texts).encode())
    assert [text for _, text in read] == [text for text in texts if text.strip()]
    lines = text_lines("x", end.join(json.dumps(text, ensure_ascii=False) for text in texts).encode())
    assert [parse_json(line) for _, line in lines] == texts


@pytest.mark.parametrize("data", [b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf"])
def test_invalid_bytes_are_named(data):
    with pytest.raises(InputError, match=r"^file, line 3: not UTF-8: .* at byte \d$"):
        text_lines("file", b"good\r\n\n" + data + b"\nafter")


def bad_lines():
    """Yield bad JSON: truncated texts, texts with a changed character, and texts on which parsers disagree or fail."""
    rng = random.Random(0)
    good = json.dumps({"messages": [{"role": "user", "content": 'a \\ " é'}], "n": [1.5e3, None, True]})
    yield from (good[: rng.randrange(1, len(good))] for _ in range(60))
    for _ in range(60):
        place = rng.randrange(len(good))
        changed = good[:place] + rng.choice('{}[]",:\\\x00\x1f') + good[place + 1 :]
        try:
            json.loads(changed)
        except ValueError:
            yield changed
    yield from (
        "NaN",
        "[Infinity]",
        '{"a": -Infinity}',
        '"\\ud83d"',
        '{"a": ["\\udc00x"]}',
        "1" * 5000,
        "[" * 100_000,
        "[" * 300 + "]" * 300,
        "-1e400",
        '{"a": 1, "b": 2, "a": 3}',
        "",
    )


@pytest.mark.parametrize("line", list(bad_lines()), ids=lambda line: line[:20].encode("unicode_escape").decode())
def test_bad_line_gives_one_message(line):
    with pytest.raises(InputError) as caught:
        parse_json(line)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
