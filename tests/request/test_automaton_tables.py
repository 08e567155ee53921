"""Adding automata to tables and removing them again: states do not move, and space is reused."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxgen import InputError, TokenAutomaton
from jaxgen.core.grammar.stop_strings import StopAutomaton
from jaxgen.core.grammar.token_automaton import Capacity
from jaxgen.core.request.running.automaton_tables import GrammarTable, StopTable, grammar_capacity
from jaxgen.core.request.running.engine_sizes import EngineSizes
from tests.support.compilations import compilations
from tests.support.tokenizers import byte_level

TOK = byte_level()
VOCAB = 320
push = jax.jit(lambda table, state, tokens: table.push(state, tokens, None))


def grammar(pattern: str) -> TokenAutomaton:
    return TokenAutomaton.from_regex(pattern, TOK, vocab_size=VOCAB)


def accepts(table: TokenAutomaton, state: int, text: str) -> bool:
    for token in TOK.encode(text):
        state = int(push(table, np.asarray([state]), np.asarray([token]))[0])
    return state >= 0 and bool(table.accepting[state])


def table_of(states: int, transitions: int = 1024, classes: int = 64, automata: int = 8) -> GrammarTable:
    return GrammarTable(VOCAB, Capacity(states, transitions, classes, automata))


def test_automata_join_and_leave_while_others_stay():
    table = table_of(40)
    patterns = {name: grammar(name) for name in ("[a-c]{1,8}", "(yes|no)", "[0-9]{2,4}")}
    states = {name: table.enter(name, automaton) for name, automaton in patterns.items()}
    assert table.enter("(yes|no)", None) == states["(yes|no)"]
    table.leave("(yes|no)")
    assert accepts(table.joint, states["(yes|no)"], "yes")
    table.leave("(yes|no)")
    states["z{1,18}"] = table.enter("z{1,18}", grammar("z{1,18}"))
    for name, yes, no in (("[a-c]{1,8}", "abc", "abd"), ("[0-9]{2,4}", "12", "1"), ("z{1,18}", "zz", "z" * 19)):
        assert accepts(table.joint, states[name], yes)
        assert not accepts(table.joint, states[name], no)
    assert accepts(table.joint, 0, "anything at all")


def test_an_automaton_stays_until_its_space_is_needed(monkeypatch):
    table, written = table_of(20), []
    write = table.write
    monkeypatch.setattr(table, "write", lambda first, automaton: (written.append(first), write(first, automaton)))
    one, two, three = grammar("[a-c]{1,8}"), grammar("[d-f]{1,8}"), grammar("g{1,9}")
    first = table.enter("one", one)
    table.leave("one")
    assert table.enter("two", two) is not None
    assert table.enter("one", one) == first
    assert len(written) == 2
    table.leave("two")
    assert table.enter("three", three) is not None  # in the space of two
    assert table.enter("two", two) is None
    assert len(written) == 3
    assert accepts(table.joint, first, "abc")
    table.leave("one")
    table.leave("three")
    assert table.enter("two", two) is not None


def test_grammars_wait_for_a_full_table_without_any_work(monkeypatch):
    table = table_of(22)
    monkeypatch.setattr(table, "write", lambda *_: written.append(1))
    large, other, third, written = grammar("[a-c]{1,8}"), grammar("[d-f]{1,8}"), grammar("[g-i]{1,8}"), []
    for automaton in (large, other, third):
        table.fits(automaton)
    assert table.enter("large", large) is not None
    assert table.enter("other", other) is not None  # two that are accepted fit together
    for _ in range(100):
        assert table.enter("third", third) is None
    assert len(written) == 2
    table.leave("large")
    assert table.enter("third", third) is not None


def test_a_grammar_without_transitions_takes_no_space_of_others():
    table = table_of(40)
    states = {text: table.enter(text, grammar(text)) for text in ("", "yes", "no")}
    assert accepts(table.joint, 0, "anything at all")
    for name, state in states.items():
        assert [text for text in states if accepts(table.joint, state, text)] == [name]


def test_stacked_automaton_may_enter():
    """A stack has one initial state per prompt, so that of one automaton has shape [1]."""
    table, letters, digits = table_of(40), grammar("[a-c]{1,8}"), grammar("[0-9]{2,4}")
    both, start = TokenAutomaton.stack([letters], capacity=Capacity(64, 64, 64, 2)).add(digits)
    for name, automaton in (("one", TokenAutomaton.stack([letters])), ("two", dataclasses.replace(both, start=start))):
        table.fits(automaton)
        state = table.enter(name, automaton)
        assert state is not None
        assert accepts(table.joint, state, "ab") == (name == "one")
        assert accepts(table.joint, state, "12") == (name == "two")
    with pytest.raises(InputError, match=r"needs 2 automata \(grammars: twice as many\), .* at most 1"):
        table_of(40, automata=2).fits(both)


@pytest.mark.parametrize(
    ("sizes", "pattern", "message"),
    [
        ({"states": 24}, "a{12}", "the grammar needs 13 states (grammar_states: twice as many), .* at most 12"),
        (
            {"transitions": 24},
            "abcdefghijklmnop",
            "the grammar needs 16 transitions (grammar_transitions: .* at most 12",
        ),
        (
            {"classes": 3},
            "ax|by|c",
            "the grammar needs 6 classes of tokens (grammar_classes), but the engine allows at most 3",
        ),
    ],
)
def test_oversized_grammar_is_refused(sizes, pattern, message):
    table = table_of(**{"states": 64, **sizes})
    with pytest.raises(InputError, match=message.replace("(", r"\(").replace(")", r"\)")):
        table.fits(grammar(pattern))


def test_adding_a_grammar_sends_only_its_own_part():
    """A grammar is written in pieces of a fixed size, so that nothing is compiled."""
    table = table_of(4000, 20_000, 1024, 8)
    table.enter("few", grammar("(yes|no)"))
    with compilations() as count:
        states = {text: table.enter(text, grammar(text)) for text in ("[^x]{300}", "[0-9]{2,4}")}
    assert count[0] == 0
    assert accepts(table.joint, states["[^x]{300}"], "y" * 300)
    assert not accepts(table.joint, states["[^x]{300}"], "y" * 299)
    assert accepts(table.joint, states["[0-9]{2,4}"], "123")


def test_two_grammars_with_many_classes_fit_together():
    """A list of words has many classes of tokens and few states. Two such grammars fit together."""
    words = [chr(97 + i) + chr(97 + j) for i in range(12) for j in range(26)]
    table = GrammarTable(VOCAB, grammar_capacity(EngineSizes()))
    first, second = (grammar("|".join(words[half::2])) for half in (0, 1))
    for automaton in (first, second):
        table.fits(automaton)
        state = table.enter(id(automaton), automaton)
        assert state is not None
        assert accepts(table.joint, state, "ab") == (automaton is second)


@pytest.mark.slow
def test_stop_strings_join_and_leave():
    table = StopTable(TOK, VOCAB, 10)

    def found(state: int, text: str) -> bool:
        state, hit = np.asarray([state]), False
        for token in TOK.encode(text):
            state, ends = table.joint.push(state, np.asarray([token]))
            hit |= bool(ends[0])
        return hit

    first, second = (StopAutomaton.of(strings, TOK, VOCAB) for strings in (["end", "no"], ["x"]))
    one, two = table.enter("one", first), table.enter("two", second)
    assert (one, two) == (1, 7)
    assert found(one, "the end")
    assert not found(two, "the end")
    assert found(two, "axb")
    assert not found(0, "the end of x, no")
    table.leave("one")
    assert table.enter("three", StopAutomaton.of(["aa"], TOK, VOCAB)) == 1
    assert found(two, "axb")
    assert found(1, "baa")
