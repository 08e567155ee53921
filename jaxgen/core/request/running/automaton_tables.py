"""Tables for grammar and stop-string automata, shared by all prompts in flight."""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Collection, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.buckets import power_of_two
from jaxgen.core.grammar.row_parts import BLOCK
from jaxgen.core.grammar.stop_strings import StopAutomaton, StopStrings
from jaxgen.core.grammar.token_automaton import OF_PART, OF_STATE, OF_TRANSITION, Capacity, TokenAutomaton
from jaxgen.core.grammar.token_table import compact
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError
from jaxgen.programs import Program

_PIECES = 1024, 8192, 1  # the numbers of states, transitions and automata that are written at a time


@dataclasses.dataclass
class _Entry:
    """An automaton in a table, its first index in each of the table's spaces, and the number of prompts that use it."""

    automaton: Any
    first: tuple[int, ...]
    sizes: tuple[int, ...]
    users: int = 0


class Table(abc.ABC):
    """A table of automata that can be added and removed while prompts use it. States in use are never renumbered.

    A table has one or more spaces, such as that of the states, and an automaton occupies a range of each. An automaton
    that no prompt uses any more stays in the table until its space is needed.

    Args:
        name: the name of an automaton in error messages.
        spaces: the size of each space by name. The first is that of the states.
        free: the automaton for prompts without an automaton of their own.
        joint: the table without automata.

    Attributes:
        joint: the table of all current automata, on the device.
    """

    def __init__(self, name: str, spaces: dict[str, int], free: Any, joint: Any):
        self._name, self._spaces, self.joint = name, spaces, joint
        self._entries: dict[Hashable, _Entry] = {}
        self._lock = threading.Lock()
        self.enter(None, free)

    @abc.abstractmethod
    def sizes(self, automaton: Any) -> tuple[int, ...]:
        """Return the size of an automaton in each space."""

    @abc.abstractmethod
    def limits(self, automaton: Any) -> dict[str, tuple[int, int]]:
        """Return the sizes of an automaton by name, each with the maximum for one automaton."""

    @abc.abstractmethod
    def write(self, first: tuple[int, ...], automaton: Any) -> None:
        """Write an automaton to `joint`. `first` is its first index in each space."""

    def fits(self, automaton: Any) -> None:
        """Raise an error if an automaton is larger than the table allows."""
        for name, (needed, limit) in self.limits(automaton).items():
            if needed > limit:
                raise InputError(
                    f"{self._name} needs {needed:,} {name}, but the engine allows at most {limit:,}: create the engine "
                    "with larger tables, or use fewer or shorter texts"
                )

    def enter(self, key: Hashable, automaton: Any) -> int | None:
        """Register a user of an automaton, and return the automaton's initial state in the table.

        If the automaton is not in the table yet, add it; if there is currently no space for it, return None.
        """
        with self._lock:
            entry = self._entries.pop(key, None) or self._added(automaton)
            if entry is None:
                return None
            self._entries[key] = entry  # the automaton that prompts began to use last is the last one
            entry.users += 1
            return entry.first[0] + np.asarray(entry.automaton.start).item()  # a stack of one has shape [1]

    def leave(self, key: Hashable) -> None:
        """Record that a prompt no longer uses an automaton."""
        with self._lock:
            self._entries[key].users -= 1

    def _added(self, automaton: Any) -> _Entry | None:
        sizes = self.sizes(automaton)
        unused = [key for key, entry in self._entries.items() if not entry.users]
        while (first := self._gaps(sizes)) is None and unused:
            del self._entries[unused.pop(0)]
        if first is None:
            return None
        entry = _Entry(automaton, first, sizes)
        self.write(first, automaton)
        return entry

    def _gaps(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the start of the first gap of the given size in each space, or None if a space has no such gap."""
        found = []
        for space, (size, total) in enumerate(zip(sizes, self._spaces.values(), strict=True)):
            first = 0
            for entry in sorted(self._entries.values(), key=lambda entry: entry.first[space]):
                if entry.first[space] - first >= size:
                    break
                # An automaton of size 0 may have the same first index as a larger one.
                first = max(first, entry.first[space] + entry.sizes[space])
            if total - first < size:
                return None
            found.append(first)
        return tuple(found)


class GrammarTable(Table):
    """A table of token automata, of the given capacity.

    An automaton may use half of each space, so any two that are accepted fit into an empty table.
    Prompts without a grammar may generate any token, including special tokens.
    """

    def __init__(self, vocab: int, capacity: Capacity):
        one = np.ones(1, bool)
        free = compact(np.zeros(vocab, np.int64), np.zeros((1, 1), np.int16), one, np.asarray(0))[1]
        spaces = {"states": capacity.states, "transitions": capacity.transitions, "automata": capacity.automata}
        # The automaton of prompts without a grammar has one state, one transition and one row of classes.
        self._capacity = capacity._replace(**{name: size + 1 for name, size in spaces.items()})
        # The transitions are rounded up so that a TPU can divide them into blocks; see `row_parts`.
        unused = -(self._capacity.transitions + capacity.width) % BLOCK
        self._capacity = self._capacity._replace(transitions=self._capacity.transitions + unused)
        self._largest = {name: max(size // 2, 1) for name, size in spaces.items()}
        spaces = {name: size + 1 for name, size in spaces.items()}
        empty = jax.device_put(TokenAutomaton.empty(self._capacity, vocab))
        super().__init__("the grammar", spaces, TokenAutomaton.of_table(free, one), empty)

    def sizes(self, automaton: TokenAutomaton) -> tuple[int, ...]:
        """Return the numbers of states, transitions and automata."""
        needs = automaton.needs
        return needs.states, needs.transitions, needs.automata

    def limits(self, automaton: TokenAutomaton) -> dict[str, tuple[int, int]]:
        """Return the limits, named after the arguments of `Engine` that raise them."""
        needs, space = automaton.needs, self._capacity
        return {
            "states (grammar_states: twice as many)": (needs.states, self._largest["states"]),
            "transitions (grammar_transitions: twice as many)": (needs.transitions, self._largest["transitions"]),
            "classes of tokens (grammar_classes)": (needs.classes, space.classes),
            "transitions in one state (grammar_classes: eight times as many)": (automaton.longest_row, space.width),
            "automata (grammars: twice as many)": (needs.automata, self._largest["automata"]),
        }

    def write(self, first: tuple[int, ...], automaton: TokenAutomaton) -> None:
        """Write only the automaton's own part, in pieces of fixed sizes, so that nothing is compiled."""
        arrays = automaton.moved(*first)
        for names, start, piece in zip((OF_STATE, OF_TRANSITION, OF_PART), first, _PIECES, strict=True):
            for begin in range(0, len(arrays[names[0]]), piece):
                new = {name: arrays[name][begin : begin + piece] for name in names}
                count = len(new[names[0]])
                padded = {name: np.pad(x, [(0, piece - count)] + [(0, 0)] * (x.ndim - 1)) for name, x in new.items()}
                old = {name: getattr(self.joint, name) for name in names}
                self.joint = dataclasses.replace(
                    self.joint, **_write(old, padded, np.int32(start + begin), np.int32(count))
                )


def _written(old: dict[str, jax.Array], new: dict[str, jax.Array], first: jax.Array, count: jax.Array) -> Any:
    """Return the arrays of `old` with the first `count` entries of each array of `new`, from index `first`."""
    index = jnp.arange(jax.tree.leaves(new)[0].shape[0], dtype=jnp.int32)
    index = jnp.where(index < count, first + index, np.iinfo(np.int32).max)
    return {name: x.at[index].set(new[name], mode="drop") for name, x in old.items()}


_write = Program(_written, "Engine (grammar)")


class StopTable(Table):
    """A table of stop-string automata, with space for `capacity` states."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, capacity: int, spans_prompt: bool = True):
        self._tokenizer, self._vocab, self._capacity, self._spans_prompt = tokenizer, vocab, capacity, spans_prompt
        super().__init__("stop_strings", {"states": capacity}, StopAutomaton.of((), tokenizer, vocab), None)

    def sizes(self, automaton: StopAutomaton) -> tuple[int, ...]:
        """Return the number of states."""
        return (automaton.states,)

    def limits(self, automaton: StopAutomaton) -> dict[str, tuple[int, int]]:
        """Return the limit of the states, one of which belongs to prompts without stop strings."""
        return {"states (stop_states)": (automaton.states + 1, self._capacity)}

    def write(self, first: tuple[int, ...], automaton: StopAutomaton) -> None:
        """Build the table of all automata again."""
        parts = {entry.first[0]: entry.automaton for entry in self._entries.values()} | {first[0]: automaton}
        joint = StopStrings.join(parts, self._tokenizer, self._vocab, capacity=self._capacity)
        self.joint = dataclasses.replace(joint, spans_prompt=self._spans_prompt)


def tables_of(vocab: int, sizes: EngineSizes, tokenizer: Tokenizer | None, stop_in_prompt: bool) -> dict[str, Table]:
    """Return empty tables by name: one for grammars and, if there is a tokenizer, one for stop strings."""
    tables: dict[str, Table] = {"allowed": GrammarTable(vocab, grammar_capacity(sizes))}
    if tokenizer is not None:
        tables["stop_strings"] = StopTable(tokenizer, vocab, sizes.stop_states, stop_in_prompt)
    return tables


def grammar_capacity(sizes: EngineSizes) -> Capacity:
    """Return the size of an engine's table of grammars."""
    return Capacity(sizes.grammar_states, sizes.grammar_transitions, sizes.grammar_classes, sizes.grammars)


def with_space_for(automata: Collection[TokenAutomaton], sizes: EngineSizes) -> EngineSizes:
    """Return sizes that are large enough for each of the automata."""
    needs = [automaton.needs for automaton in automata]
    classes = [size for each in automata for size in (each.needs.classes, 8 * each.longest_row)]
    return dataclasses.replace(
        sizes,
        grammar_states=max([sizes.grammar_states, *(2 * need.states for need in needs)]),
        grammar_transitions=max([sizes.grammar_transitions, *(2 * need.transitions for need in needs)]),
        grammar_classes=power_of_two(max(classes, default=1), sizes.grammar_classes),
    )
