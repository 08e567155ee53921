"""Token automata from and to matrices of transitions, for tests that follow them on the host."""

from typing import Any

import numpy as np

from jaxgen import TokenAutomaton
from jaxgen.core.grammar.token_table import FAR, compact


def matrix(automaton: TokenAutomaton) -> tuple[np.ndarray, np.ndarray]:
    """Return the class of each token, int[V], and the next state for each state and class, int[S, C].

    -1 means that a class is not allowed. The table must consist of one automaton.
    """
    names = ("first", "count", "low", "high", "step")
    first, count, low, high, step = (np.asarray(getattr(automaton, name)) for name in names)
    needs = automaton.needs
    assert needs.automata == 1
    transitions = np.full((needs.states, needs.classes), -1)
    for state in range(needs.states):
        for at in range(first[state], first[state] + count[state]):
            following = step[at] - FAR if step[at] >= FAR // 2 else state + step[at]
            assert (transitions[state, low[at] : high[at] + 1] == -1).all()
            transitions[state, low[at] : high[at] + 1] = following
    return np.asarray(automaton.classes)[0], transitions


def of_matrix(classes: np.ndarray, transitions: np.ndarray, accepting: np.ndarray, start: Any) -> TokenAutomaton:
    """Return the automaton for the result of `matrix`. All states must be reachable and lead to an accepting state."""
    useful, table = compact(classes, transitions.astype(np.int16), accepting, np.asarray(start))
    assert useful.all()
    return TokenAutomaton.of_table(table, np.zeros(len(accepting), bool))
