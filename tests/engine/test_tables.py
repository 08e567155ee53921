"""Adding automata to tables and removing them again: states do not move, and space is reused."""

import numpy as np
import pytest

from jaxgen import InputError, TokenAutomaton
from jaxgen.engine.tables import grammar_table, stop_table
from jaxgen.grammar.stop_strings import StopAutomaton
from tests.support.tokenizers import byte_level

TOK = byte_level()
VOCAB = 320


def grammar(pattern: str) -> TokenAutomaton:
    return TokenAutomaton.from_regex(pattern, TOK, vocab_size=VOCAB)


def accepts(table: TokenAutomaton, state: int, text: str) -> bool:
    for token in TOK.encode(text):
        state = int(table.push(np.asarray([state]), np.asarray([token]), None)[0])
    return state >= 0 and bool(table.accepting[state])


def test_automata_join_and_leave_while_others_stay():
    table = grammar_table(VOCAB, (40, 64))
    patterns = {name: grammar(name) for name in ("[a-c]{1,8}", "(yes|no)", "[0-9]{2,4}")}
    states = {name: table.enter(name, automaton) for name, automaton in patterns.items()}
    assert table.enter("(yes|no)", None) == states["(yes|no)"]
    table.leave("(yes|no)")
    assert accepts(table.joint, states["(yes|no)"], "yes")
    table.leave("(yes|no)")
    states["z{1,2}"] = table.enter("z{1,2}", grammar("z{1,2}"))
    for name, yes, no in (("[a-c]{1,8}", "abc", "abd"), ("[0-9]{2,4}", "12", "1"), ("z{1,2}", "zz", "zzz")):
        assert accepts(table.joint, states[name], yes)
        assert not accepts(table.joint, states[name], no)
    assert accepts(table.joint, 0, "anything at all")
    assert states["z{1,2}"] < states["[0-9]{2,4}"], "the free states are not used"


def test_grammars_wait_for_a_full_table_and_are_refused_by_a_small_one():
    table = grammar_table(VOCAB, (12, 64))
    large, other = grammar("[a-c]{1,8}"), grammar("[d-f]{1,8}")
    table.fits(large)
    assert table.enter("large", large) is not None
    assert table.enter("other", other) is None
    table.leave("large")
    assert table.enter("other", other) is not None
    with pytest.raises(InputError, match=r"allowed needs 14 states, but the engine's table has 12"):
        table.fits(grammar("a{12}"))


def test_too_many_classes_of_tokens_make_wait():
    table = grammar_table(VOCAB, (64, 4))
    assert table.enter("a", grammar("[a-c]+")) is not None
    assert table.enter("b", grammar("d(e|f)g")) is None
    table.leave("a")
    table = table.joint
    assert table.transitions.shape == (64, 4)


@pytest.mark.slow
def test_stop_strings_join_and_leave():
    table = stop_table(TOK, VOCAB, 20)

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
