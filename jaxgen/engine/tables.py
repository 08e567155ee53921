"""Tables of the automata of grammars and stop strings, shared by all prompts in flight."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np

from jaxgen.errors import InputError
from jaxgen.grammar.stop_strings import StopAutomaton, StopStrings
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.text.tokenizer import Tokenizer


class Kind(Protocol):
    """A kind of automaton, with operations to join several of them in one table."""

    name: str

    def states(self, automaton: Any) -> int:
        """Return the number of states."""
        ...

    def start(self, automaton: Any) -> int:
        """Return the initial state, counting the automaton's states from 0."""
        ...

    def free(self) -> Any:
        """Return the automaton for prompts without one."""
        ...

    def join(self, parts: dict[int, Any]) -> Any:
        """Return a table of automata. Each key is the first state of its automaton in the table."""
        ...


@dataclasses.dataclass(frozen=True)
class Grammars:
    """Token automata, in a table with space for `capacity` states and classes of tokens."""

    vocab_size: int
    capacity: tuple[int, int]
    name = "allowed"

    def states(self, automaton: TokenAutomaton) -> int:
        """Return the number of states."""
        return automaton.states

    def start(self, automaton: TokenAutomaton) -> int:
        """Return the first state."""
        return int(automaton.start)

    def free(self) -> TokenAutomaton:
        """Return the automaton that allows every token, including special tokens."""
        every = np.zeros(self.vocab_size, np.int32), np.zeros((1, 1), np.int32), np.ones(1, bool), np.zeros(1, np.int32)
        return TokenAutomaton(*every, start=np.int32(0))  # pyright: ignore[reportArgumentType]

    def join(self, parts: dict[int, TokenAutomaton]) -> TokenAutomaton:
        """Return the joint automaton."""
        return TokenAutomaton.join(parts, self.capacity)


@dataclasses.dataclass(frozen=True)
class Stops:
    """Automata of stop strings, in a table with space for `capacity` states."""

    tokenizer: Tokenizer
    vocab_size: int
    capacity: int
    spans_prompt: bool = True
    name = "stop_strings"

    def states(self, automaton: StopAutomaton) -> int:
        """Return the number of states."""
        return len(automaton.found)

    def start(self, automaton: StopAutomaton) -> int:
        """Return the first state."""
        return 0

    def free(self) -> StopAutomaton:
        """Return the automaton that finds nothing."""
        return StopAutomaton.of((), self.tokenizer, self.vocab_size)

    def join(self, parts: dict[int, StopAutomaton]) -> StopStrings:
        """Return the joint tables."""
        joint = StopStrings.join(parts, self.tokenizer, self.vocab_size, capacity=self.capacity)
        return dataclasses.replace(joint, spans_prompt=self.spans_prompt)


@dataclasses.dataclass
class _Part:
    """An automaton in a table, its first state, and the number of prompts that use it."""

    automaton: Any
    first: int
    users: int = 0


class Table:
    """A table that automata join and leave while prompts are using it. States in use are never renumbered.

    Attributes:
        joint: the table on the device.
    """

    def __init__(self, kind: Kind, states: int):
        self._kind, self._states = kind, states
        self._parts: dict[Hashable, _Part] = {None: _Part(kind.free(), 0, 1)}
        self._lock = threading.Lock()
        self.joint = self._join()

    def fits(self, automaton: Any) -> None:
        """Raise an error if an automaton would not fit even into an empty table."""
        if (needed := self._kind.states(automaton) + 1) > self._states:
            raise InputError(
                f"{self._kind.name} needs {needed} states, but the engine's table has {self._states}: create the "
                "engine with more, or use fewer or shorter texts"
            )

    def enter(self, key: Hashable, automaton: Any) -> int | None:
        """Add a user of an automaton, which joins the table if it is not there yet, and return its initial state.

        Return None if the table currently has no space for the automaton.
        """
        with self._lock:
            part = self._parts.get(key)
            if part is None:
                first = self._space(self._kind.states(automaton))
                if first is None:
                    return None
                part = self._parts[key] = _Part(automaton, first)
                try:
                    self.joint = self._join()
                except InputError:  # together, the automata have too many classes of tokens
                    del self._parts[key]
                    return None
            part.users += 1
            return part.first + self._kind.start(part.automaton)

    def leave(self, key: Hashable) -> None:
        """Remove a user of an automaton. The states of an automaton without users become free."""
        with self._lock:
            part = self._parts[key]
            part.users -= 1
            if not part.users:
                del self._parts[key]

    def _space(self, states: int) -> int | None:
        """Return the first state of the first gap of `states` states, or None if there is no such gap."""
        first = 0
        for part in sorted(self._parts.values(), key=lambda part: part.first):
            if part.first - first >= states:
                return first
            first = part.first + self._kind.states(part.automaton)
        return first if self._states - first >= states else None

    def _join(self) -> Any:
        return self._kind.join({part.first: part.automaton for part in self._parts.values()})


def tables_of(
    vocab: int, grammars: tuple[int, int], tokenizer: Tokenizer | None, stop_states: int, stop_in_prompt: bool
) -> dict[str, Table]:
    """Return empty tables by name: for grammars, and if there is a tokenizer, for stop strings."""
    tables = {"allowed": Table(Grammars(vocab, grammars), grammars[0])}
    if tokenizer is not None:
        tables["stop_strings"] = Table(Stops(tokenizer, vocab, stop_states, stop_in_prompt), stop_states)
    return tables
