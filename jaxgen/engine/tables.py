"""Tables for grammar and stop-string automata, shared by all prompts in flight."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from jaxgen.errors import InputError
from jaxgen.grammar.stop_strings import StopAutomaton, StopStrings
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.text.tokenizer import Tokenizer


@dataclasses.dataclass
class _Part:
    """An automaton in a table, its first state, and the number of prompts that use it."""

    automaton: Any
    first: int
    users: int = 0


class Table:
    """A table of automata that can be added and removed while prompts use it. States in use are never renumbered.

    Args:
        name: the option that the automata come from.
        states: the number of states that the table has space for.
        free: the automaton for prompts without an automaton of their own.
        join: the function that builds the table from a dict of automata, keyed by their first states in the table.

    Attributes:
        joint: the table of all current automata, on the device.
    """

    def __init__(self, name: str, states: int, free: Any, join: Callable[[dict[int, Any]], Any]):
        self._name, self._states, self._join_parts = name, states, join
        self._parts: dict[Hashable, _Part] = {None: _Part(free, 0, 1)}
        self._lock = threading.Lock()
        self.joint = self._join()

    def fits(self, automaton: Any) -> None:
        """Raise an error if an automaton would not fit even into an empty table."""
        if (needed := automaton.states + 1) > self._states:
            raise InputError(
                f"{self._name} needs {needed} states, but the engine's table has {self._states}: create the "
                "engine with more, or use fewer or shorter texts"
            )

    def enter(self, key: Hashable, automaton: Any) -> int | None:
        """Register a user of an automaton, and return the automaton's initial state in the table.

        If the automaton is not in the table yet, add it; if there is currently no space for it, return None.
        """
        with self._lock:
            part = self._parts.get(key)
            if part is None:
                first = self._space(automaton.states)
                if first is None:
                    return None
                part = self._parts[key] = _Part(automaton, first)
                try:
                    self.joint = self._join()
                except InputError:  # together, the automata have too many classes of tokens
                    del self._parts[key]
                    return None
            part.users += 1
            return part.first + int(part.automaton.start)

    def leave(self, key: Hashable) -> None:
        """Record that a prompt no longer uses an automaton. If no prompt uses the automaton, free its states."""
        with self._lock:
            part = self._parts[key]
            part.users -= 1
            if not part.users:
                del self._parts[key]

    def _space(self, states: int) -> int | None:
        """Return the start of the first gap of at least `states` unused states, or None if no gap is large enough."""
        first = 0
        for part in sorted(self._parts.values(), key=lambda part: part.first):
            if part.first - first >= states:
                return first
            first = part.first + part.automaton.states
        return first if self._states - first >= states else None

    def _join(self) -> Any:
        return self._join_parts({part.first: part.automaton for part in self._parts.values()})


def tables_of(
    vocab: int, grammars: tuple[int, int], tokenizer: Tokenizer | None, stop_states: int, stop_in_prompt: bool
) -> dict[str, Table]:
    """Return empty tables by name: one for grammars and, if there is a tokenizer, one for stop strings."""
    tables = {"allowed": grammar_table(vocab, grammars)}
    if tokenizer is not None:
        tables["stop_strings"] = stop_table(tokenizer, vocab, stop_states, stop_in_prompt)
    return tables


def grammar_table(vocab: int, capacity: tuple[int, int]) -> Table:
    """Return an empty table of token automata, with space for `capacity[0]` states and `capacity[1]` classes of tokens.

    Prompts without a grammar may generate any token, including special tokens.
    """
    every = np.zeros(vocab, np.int32), np.zeros((1, 1), np.int32), np.ones(1, bool), np.zeros(1, np.int32)
    free = TokenAutomaton(*every, start=np.int32(0))  # pyright: ignore[reportArgumentType]
    return Table("allowed", capacity[0], free, lambda parts: TokenAutomaton.join(parts, capacity))


def stop_table(tokenizer: Tokenizer, vocab: int, capacity: int, spans_prompt: bool = True) -> Table:
    """Return an empty table of stop-string automata, with space for `capacity` states."""

    def join(parts: dict[int, StopAutomaton]) -> StopStrings:
        joint = StopStrings.join(parts, tokenizer, vocab, capacity=capacity)
        return dataclasses.replace(joint, spans_prompt=spans_prompt)

    return Table("stop_strings", capacity, StopAutomaton.of((), tokenizer, vocab), join)
