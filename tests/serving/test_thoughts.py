import pytest
from hypothesis import given, settings, strategies as st

from jaxgen import Grammar
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.serving.thoughts import PAIRS, ThoughtParser, before, is_open, tags_of
from tests.support.automata import matrix
from tests.support.dialects import KINDS
from tests.support.tokenizers import byte_level

THINK, BRACKETS = PAIRS


def parse(pieces, opened=False, tags=THINK):
    parser = ThoughtParser(tags, opened)
    results = [*(parser.put(piece) for piece in pieces), parser.end()]
    return "".join(thought for thought, _ in results), "".join(content for _, content in results)


@pytest.mark.parametrize(("kind", "tags"), [("QWEN3", THINK), ("R1", THINK), ("HERMES", None), ("LLAMA", None)])
def test_the_template_shows_whether_the_model_thinks(kind, tags):
    assert tags_of(KINDS[kind]) == tags


def test_tags_are_found_by_their_closing_tag():
    assert [tags_of(pair.closing) for pair in PAIRS] == list(PAIRS)
    assert tags_of(None) is None


CASES = [
    ("", False, "", ""),
    ("A wren. ", False, "", "A wren. "),
    ("  A wren.", False, "", "  A wren."),
    ("<think>\nA bird?\n</think>\n\nA wren.\n", False, "A bird?", "A wren.\n"),
    ("\n <think>A bird?</think>A wren.", False, "A bird?", "A wren."),
    ("<think>\n\n</think>\n\nA wren.", False, "", "A wren."),
    ("<think>A bird? ", False, "A bird?", ""),
    ("<think>A bird? </thi", False, "A bird? </thi", ""),
    ("<thi", False, "", "<thi"),
    (" <thing>", False, "", " <thing>"),
    ("A <think>b</think> c", False, "", "A <think>b</think> c"),
    ("A bird?\n</think>\n\nA wren.", True, "A bird?", "A wren."),
    ("\nA  <b>\n\nbird?", True, "A  <b>\n\nbird?", ""),
    ("a</think>b</think>c", True, "a", "b</think>c"),
    ("<think>a</think>b", True, "<think>a", "b"),
    ("</think>b", True, "", "b"),
]


@pytest.mark.parametrize(("text", "opened", "thought", "content"), CASES)
def test_thoughts_and_content_are_split(text, opened, thought, content):
    assert parse([text], opened) == parse(text, opened) == (thought, content)
    for cut in range(1, len(text)):
        assert parse([text[:cut], text[cut:]], opened) == (thought, content)


def test_other_tags():
    assert parse("[THINK]A bird?[/THINK] A wren.", tags=BRACKETS) == ("A bird?", "A wren.")


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "a", "<", "</th", "b c"]), max_size=10),
    st.booleans(),
    st.data(),
)
def test_parsing_does_not_depend_on_the_pieces(parts, opened, data):
    text = "".join(parts)
    whole = parse([text], opened)
    assert parse(text, opened) == parse(parts, opened) == whole
    assert parse([*data.draw(st.lists(st.just(""), max_size=2)), text], opened) == whole
    assert sum(map(len, whole)) <= len(text)


def test_thoughts_come_as_they_are_generated():
    parser = ThoughtParser(THINK, False)
    assert [
        parser.put(piece) for piece in ("<think>", "\nA ", "bird? ", "</th", "ing ", "</think>", "\n", "A wren")
    ] == [
        ("", ""),
        ("A", ""),
        (" bird?", ""),
        ("", ""),
        (" </thing", ""),
        ("", ""),
        ("", ""),
        ("", "A wren"),
    ]
    assert not parser.is_open


@pytest.mark.parametrize(
    ("prompt", "own", "expected"),
    [
        ("Hi<assistant>", "", False),
        ("Hi<assistant><think>\n", "", True),
        ("Hi<assistant><think>\n\n</think>\n\n", "", False),
        ("<think>Hi<assistant>", "", False),
        ("Hi<assistant><think>Hm", "<think>Hm", True),
        ("Hi<assistant><think>Hm</think>A", "<think>Hm</think>A", False),
    ],
)
def test_the_prompt_may_open_the_thought(prompt, own, expected):
    assert is_open(prompt, THINK, own) is expected


def accepts(prompt, opened, text):
    """Return True if a text is complete for the grammar "yes" after the thought, and None if it is not allowed."""
    tok = byte_level()
    made = TokenAutomaton.from_expression((before(THINK, prompt, opened) or Grammar.text("")) + "yes", tok)
    (classes, table), state = matrix(made), int(made.start)
    for token in tok.encode(text, add_special_tokens=False):
        state = table[state, classes[token]]
        if state < 0:
            return None
    return bool(made.accepting[state])


@pytest.mark.parametrize(
    ("prompt", "opened", "text", "expected"),
    [
        ("<think>\n", True, "Hm</think>yes", True),
        ("<think>\n", True, "a < b </thin </think>\n\nyes", True),
        ("<think>\n", True, "yes", False),
        ("<think>\n", True, "Hm</think>no", None),
        ("<think></think>\n", False, "yes", True),
        ("<think></think>\n", False, "<think>", None),
        ("Hi", False, "yes", True),
        ("Hi", False, "<think>Hm</think>\nyes", True),
        ("Hi", False, "Hm", None),
    ],
)
def test_a_grammar_begins_after_the_thought(prompt, opened, text, expected):
    assert accepts(prompt, opened, text) is expected
