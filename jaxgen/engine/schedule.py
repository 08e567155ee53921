"""What each chunk begins with, and what happened in it: the engine's view of its prompts, without a device."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxgen.decoding.chunks import Arrivals
from jaxgen.decoding.queue import NOBODY
from jaxgen.engine.forms import Form, Prompt
from jaxgen.engine.tables import Table

_NUMBERS = 2**31 - 1


@dataclasses.dataclass(eq=False)
class Flight:
    """A prompt that waits or is being answered.

    Attributes:
        prompt: the prompt.
        owner: who gets its results.
        automata: its automata by the names of their tables, each with the key that equal ones share.
        number: its number on the device, `NOBODY` before it is sent there.
        remaining: how many of its sequences have not ended.
    """

    prompt: Prompt
    owner: Any
    automata: dict[str, tuple[Hashable, Any]] = dataclasses.field(default_factory=dict)
    number: int = NOBODY
    remaining: int = 0

    def __post_init__(self):
        self.remaining = self.prompt.sequences


class Entries(NamedTuple):
    """What happened to one sequence in a chunk.

    Attributes:
        flight: its prompt.
        sequence: which of the prompt's sequences.
        tokens: int32[n].
        reason: a `StopReason`, 0 if it has not ended.
        rest: int32[n, C], the further columns of the journal.
    """

    flight: Flight
    sequence: int
    tokens: np.ndarray
    reason: int
    rest: np.ndarray


class Schedule:
    """The prompts of an engine, in the order in which they came.

    Args:
        form: of the prompts.
        tables: the tables of automata, by name.
        places: the most prompts that can wait on the device.
        arrivals: the most prompts that can arrive before a chunk.
    """

    def __init__(self, form: Form, tables: dict[str, Table], places: int, arrivals: int, key: np.ndarray):
        self.form, self.tables, self.places, self.most, self.key = form, tables, places, arrivals, key
        self.waiting: collections.deque[Flight] = collections.deque()
        self.flying: dict[int, Flight] = {}
        self._numbers = itertools.cycle(range(_NUMBERS))
        self._cancelled: collections.deque[int] = collections.deque()
        self._sent: collections.deque[int] = collections.deque()  # in the chunks that have not been read
        self._queued = 0  # on the device, when the last chunk that was read ended

    @property
    def idle(self) -> bool:
        """True if there is nothing to do."""
        return not (self.waiting or self.flying or self._cancelled)

    def cancel(self, flight: Flight) -> None:
        """Give up a prompt, which gets no more results; nothing happens if it has ended."""
        if flight in self.waiting:
            self.waiting.remove(flight)
        elif self.flying.get(flight.number) is flight:
            self._cancelled.append(flight.number)
            self._land(flight)

    def arrivals(self) -> Arrivals:
        """Return what has changed since the last chunk: prompts leave `waiting` while there are places for them."""
        space = min(self.most, self.places - self._queued - sum(self._sent))
        sent: list[Flight] = []
        starts: dict[str, list[int]] = {name: [] for name in self.tables}
        blocked: set[str] = set()  # tables for which an earlier prompt waits
        for flight in list(self.waiting):
            if len(sent) >= space:
                break
            if (states := self._enter(flight, blocked)) is not None:
                sent.append(flight)
                for name, state in states.items():
                    starts[name].append(state)
        for flight in sent:
            self.waiting.remove(flight)
            flight.number = next(number for number in self._numbers if number not in self.flying)
            self.flying[flight.number] = flight
        self._sent.append(len(sent))
        return self._arrivals(sent, starts)

    def _enter(self, flight: Flight, blocked: set[str]) -> dict[str, int] | None:
        """Add a prompt to the tables; return its first states, or None if it must wait."""
        states: dict[str, int] = {}
        for name, table in self.tables.items():
            state = 0
            if name in flight.automata:
                state = table.enter(*flight.automata[name], may_join=name not in blocked)
            if state is None:
                blocked.add(name)
                for entered in states.keys() & flight.automata.keys():
                    self.tables[entered].leave(flight.automata[entered][0])
                return None
            states[name] = state
        return states

    def _arrivals(self, sent: list[Flight], starts: dict[str, list[int]]) -> Arrivals:
        rows = self.most
        prompts = [flight.prompt for flight in sent]
        number, sequences = np.full(rows, NOBODY, np.int32), np.zeros(rows, np.int32)
        key, index = np.broadcast_to(self.key, (rows, *self.key.shape)).copy(), np.zeros(rows, np.uint32)
        own_key = np.zeros(rows, bool)
        for row, (flight, prompt) in enumerate(zip(sent, prompts, strict=True)):
            number[row], sequences[row], index[row] = flight.number, prompt.sequences, prompt.index
            if prompt.key is not None:
                key[row], own_key[row] = prompt.key, True
        cancelled = np.full(rows, NOBODY - 1, np.int32)  # a number that nobody has
        for place in range(min(rows, len(self._cancelled))):
            cancelled[place] = self._cancelled.popleft()
        request = self.form.request(prompts, rows, starts.get("allowed", ()), starts.get("stop_strings", ()))
        return Arrivals(request, number, sequences, key, index, own_key, cancelled)

    def read(self, packed: np.ndarray) -> Iterator[Entries]:
        """Yield what happened in the oldest chunk that has not been read, by sequence; prompts that end leave."""
        self._sent.popleft()
        count, self._queued = int(packed[0, 0]), int(packed[0, 1])
        entries = packed[1 : 1 + count]
        order = np.lexsort((np.arange(count), entries[:, 1], entries[:, 0]))
        entries = entries[order]
        begins = np.flatnonzero(np.any(np.diff(entries[:, :2], axis=0, prepend=NOBODY - 1), axis=1))
        for part in np.split(entries, begins[1:]) if count else ():
            flight = self.flying.get(int(part[0, 0]))
            if flight is None:  # cancelled
                continue
            sequence, reason = int(part[0, 1]), int(part[-1, 3])
            part = part[part[:, 2] >= 0]  # an end without a token
            yield Entries(flight, sequence, part[:, 2], reason, part[:, 4:])
            if reason:
                flight.remaining -= 1
                if not flight.remaining:
                    self._land(flight)

    def forget(self) -> None:
        """Do not expect to read the last chunk."""
        self._sent.pop()

    def _land(self, flight: Flight) -> None:
        del self.flying[flight.number]
        for name, (key, _) in flight.automata.items():
            self.tables[name].leave(key)
