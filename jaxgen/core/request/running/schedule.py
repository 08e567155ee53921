"""Decide what to send with each chunk, and read the chunk's results. This module runs only on the host."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxgen.core.decoding.continuous.chunks import Arrivals
from jaxgen.core.decoding.continuous.prefixes import StoreIndices
from jaxgen.core.decoding.continuous.queue import NOBODY
from jaxgen.core.request.fields import LARGEST_INDEX
from jaxgen.core.request.prompt import Prompt, PromptReader
from jaxgen.core.request.running.automaton_tables import Table
from jaxgen.core.request.running.prefix_index import Claim, Prefixes
from jaxgen.core.request.running.waiting import Waiting

_CHUNK_SECONDS = 0.1  # the target duration of a chunk


@dataclasses.dataclass
class Part:
    """Consecutive sequences of a prompt that were sent to the device together.

    Attributes:
        first: the index of the first sequence.
        begun: the index after the last sequence that has begun.
        version: the version of the weights when the part was sent.
        claim: the part's claim on the prefix store; None once the device has read the prompt for this part.
    """

    first: int
    begun: int
    version: int
    claim: Claim | None


@dataclasses.dataclass(eq=False)
class Job:
    """A prompt that is waiting or being answered. Its sequences are sent to the device in one or more parts.

    Attributes:
        results: the caller's record of the results.
        group: the group of prompts with which the prompt shares its turns.
        automata: the prompt's automata by table name, each with a key; equal automata have the same key.
        number: the prompt's number on the device; `NOBODY` until the prompt is sent there.
        pieces: the names of the prompt's pieces in the prefix store; None until the names are needed.
        states: the initial states of the prompt's automata by table name; None until the prompt is sent.
        parts: the parts that have been sent.
        sent: the number of the prompt's sequences that have been sent.
        begun, ended: the numbers of the prompt's sequences that have begun, and that have ended.
        cached: the number of the prompt's tokens that were in the store when the first part was sent.
    """

    prompt: Prompt
    results: Any
    automata: dict[str, tuple[Hashable, Any]] = dataclasses.field(default_factory=dict)
    group: Hashable = None
    number: int = NOBODY
    pieces: list[bytes] | None = None
    states: dict[str, int] | None = None
    parts: list[Part] = dataclasses.field(default_factory=list)
    sent: int = 0
    begun: int = 0
    ended: int = 0
    cached: int = 0

    @property
    def sequences(self) -> int:
        """The number of the prompt's sequences."""
        return self.prompt.sequences

    def part(self, sequence: int) -> Part:
        """Return the part with the sequence at index `sequence`."""
        return self.parts[bisect.bisect(self.parts, sequence, key=lambda part: part.first) - 1]


class Counts(NamedTuple):
    """An engine's statistics so far.

    Attributes:
        tokens: the number of generated tokens.
        steps: the number of steps taken.
        occupancy: the mean number of slots in use per step.
        running: the current number of unfinished prompts that have at least one token.
        waiting: the current number of prompts that have no token yet.
    """

    tokens: int
    steps: int
    occupancy: float
    running: int = 0
    waiting: int = 0


class Entries(NamedTuple):
    """The journal's entries for one sequence in a chunk.

    Attributes:
        job: the prompt.
        sequence: the index of the sequence within the prompt.
        tokens: int32[n], the new tokens.
        reason: a `StopReason`; 0 if the sequence has not ended.
        columns: int32[n, C], the other columns of the journal.
        version: the version of the weights when the sequence was sent.
    """

    job: Job
    sequence: int
    tokens: np.ndarray
    reason: int
    columns: np.ndarray
    version: int


class Schedule:
    """The prompts of an engine: those that wait, and those that have been sent to the device.

    Args:
        reader: the reader of the prompts.
        tables: the tables of automata, by name.
        queue_capacity: the maximum number of prompts waiting on the device.
        slots: the number of slots, which is also the maximum number of prompts sent with a chunk, and the number of
            sequences in the smallest part of a prompt, apart from its last part.
        key: the data of the engine's key.
        prefixes: the index of the prefix store.

    Attributes:
        version: the version of the current weights.
        holds: if True, only prompts of which a part has been sent are sent.
        waiting: the prompts with sequences that have not been sent.
        on_device: the prompts of which a part has been sent and which have not ended, by number.
    """

    def __init__(
        self,
        reader: PromptReader,
        tables: dict[str, Table],
        queue_capacity: int,
        slots: int,
        key: np.ndarray,
        prefixes: Prefixes,
    ):
        self.reader, self.tables, self.queue_capacity, self.slots, self.key = reader, tables, queue_capacity, slots, key
        self.prefixes, self.version, self.holds = prefixes, 0, False
        self.waiting: Waiting[Job] = Waiting()
        self.on_device: dict[int, Job] = {}
        # The prompts for which a table had no space, oldest first, with the names of the tables. While a prompt waits
        # for space in a table, younger prompts that need this table wait too, even if their automata are already in the
        # table. Otherwise, the prompt might wait forever.
        self._blocked: dict[Job, str] = {}
        self._numbers = itertools.cycle(range(2**31 - 1))  # stored as int32 on the device
        self._cancelled: collections.deque[Job] = collections.deque()
        self._sent: collections.deque[int] = collections.deque()  # number of prompts in each unread chunk
        self._queued = 0  # number of prompts waiting on the device at the end of the most recently read chunk
        # The number of sequences that began in each of the latest chunks. If no prompt was left in the queue at the end
        # of a chunk, more could have begun, so the number is at least that of the slots.
        self._begins = collections.deque([slots, slots], maxlen=2)
        self._tokens = self._begun = self._steps = self._next_index = 0

    @property
    def joint(self) -> dict[str, Any]:
        """The tables of all current automata, by name."""
        return {name: table.joint for name, table in self.tables.items()}

    @property
    def idle(self) -> bool:
        """True if there is nothing to do."""
        return not ((self.waiting and not self.holds) or self.on_device or self._cancelled)

    @property
    def counts(self) -> Counts:
        """Statistics up to the last chunk that was read."""
        # A sequence gets its first token when it enters a slot, and one more token in each later step.
        rows = max(self._tokens - self._begun, 0)
        running = sum(job.begun > 0 for job in self.on_device.values())
        waiting = len({*self.waiting, *self.on_device.values()}) - running
        return Counts(self._tokens, self._steps, rows / max(self._steps, 1), running, waiting)

    def add(self, job: Job) -> None:
        """Let a prompt wait. If it has no index, it gets one more than the largest index so far."""
        index = self._next_index if job.prompt.index < 0 else job.prompt.index
        job.prompt = dataclasses.replace(job.prompt, index=index)
        self._next_index = max(self._next_index, index + 1) % (LARGEST_INDEX + 1)
        self.waiting.add(job)

    def cancel(self, job: Job) -> None:
        """Cancel a prompt, so that it gets no more results. If the prompt has already ended, do nothing."""
        if job in self.waiting:
            self.waiting.remove(job)
            self._blocked.pop(job, None)
        if self.on_device.get(job.number) is job:
            self._cancelled.append(job)
            self._release(job)

    def no_arrivals(self) -> Arrivals:
        """Return `Arrivals` without new prompts or cancellations."""
        return self._arrivals([], [])

    def arrivals(self) -> Arrivals | None:
        """Return the changes since the last chunk, or None if there are none.

        Prompts are sent as long as there is space for them. If a prompt has more sequences than may be sent, a part of
        them is sent, and the prompt stays in `waiting`. The device reads the prompt again for each part, so a part does
        not have fewer sequences than there are slots, unless it is the last part.
        """
        cancelled = [self._cancelled.popleft() for _ in range(min(self.slots, len(self._cancelled)))]
        for job in cancelled:
            for claim in [part.claim for part in job.parts if part.claim is not None]:
                self.prefixes.release(claim)
        space, sequences = min(self.slots, self.queue_capacity - self._queued - sum(self._sent)), self._space()
        sent: list[Job] = []
        for job in self.waiting.in_turn():
            if len(sent) >= space or sequences <= 0:
                break
            if (self.holds and not job.sent) or (claim := self._enter(job)) is None:
                continue
            if not job.sent:
                job.number = next(number for number in self._numbers if number not in self.on_device)
                self.on_device[job.number] = job
                job.cached = len(claim.have) * self.prefixes.block
            count = min(job.sequences - job.sent, max(sequences, self.slots))
            job.parts.append(Part(job.sent, job.sent, self.version, claim))
            job.sent += count
            self.waiting.serve(job, count, is_last=job.sent == job.sequences)
            sequences -= count
            sent.append(job)
        self._sent.append(len(sent))
        return self._arrivals(sent, cancelled) if sent or cancelled else None

    def _space(self) -> int:
        """Return the number of sequences that may be sent; the last part may have more.

        A prompt that arrives later waits until all sequences sent before have begun. So no more are sent than slots may
        need until the next arrivals: those of this chunk, and of the chunk that the device is running.
        """
        waiting = sum(job.sent - job.begun for job in self.on_device.values())
        return self.slots + 2 * max(self._begins) - waiting

    def _enter(self, job: Job) -> Claim | None:
        """Add the prompt of the next part to the tables, and return the part's claim, or None if it must wait."""
        if job.pieces is None:
            job.pieces = self.prefixes.names(job.prompt.ids, int(job.prompt.options.get("adapter", -1)))
        if self.prefixes.must_wait(job.pieces):
            return None
        if job.states is None:
            job.states = self._initial_states(job)
        return None if job.states is None else self.prefixes.enter(job.pieces)

    def _initial_states(self, job: Job) -> dict[str, int] | None:
        """Add a prompt to the tables, and return its initial states, or None if a table has no space."""
        states: dict[str, int] = {}
        for name, table in self.tables.items():
            state = 0
            if name in job.automata:
                is_blocked = self._is_blocked(name, job)
                state = None if is_blocked else table.enter(*job.automata[name])
                if state is None:
                    if not is_blocked:
                        self._blocked[job] = name
                    for entered in states.keys() & job.automata.keys():
                        self.tables[entered].leave(job.automata[entered][0])
                    return None
            states[name] = state
        self._blocked.pop(job, None)
        return states

    def _is_blocked(self, name: str, job: Job) -> bool:
        """Return True if an older prompt waits for space in a table."""
        older = itertools.takewhile(lambda other: other is not job, self._blocked)
        return any(self._blocked[other] == name for other in older)

    def _arrivals(self, sent: list[Job], cancelled: list[Job]) -> Arrivals:
        """Return the arrivals with the newest part of each of the prompts in `sent`."""
        rows, parts = self.slots, [job.parts[-1] for job in sent]
        ended = np.full(rows, NOBODY - 1, np.int32)  # padded with a number that is never assigned to a prompt
        ended[: len(cancelled)] = [job.number for job in cancelled]
        prompts = [job.prompt for job in sent]
        number = np.full(rows, NOBODY, np.int32)
        first_sequence, sequences = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        key, index = np.broadcast_to(self.key, (rows, *self.key.shape)).copy(), np.zeros(rows, np.uint32)
        own_key = np.zeros(rows, bool)
        for row, (job, prompt, part) in enumerate(zip(sent, prompts, parts, strict=True)):
            number[row], index[row] = job.number, prompt.index
            first_sequence[row], sequences[row] = part.first, job.sent - part.first
            if prompt.key is not None:
                key[row], own_key[row] = prompt.key, True
        starts = {name: [job.states[name] for job in sent if job.states] for name in self.tables}
        request = self.reader.stack(prompts, rows, starts.get("allowed", ()), starts.get("stop_strings", ()))
        prefixes = None
        if self.prefixes.capacity:
            prefixes = StoreIndices(*self.prefixes.arrays([part.claim for part in parts if part.claim], rows))
        return Arrivals(request, number, first_sequence, sequences, key, index, own_key, ended, prefixes)

    def read(self, packed: np.ndarray) -> Iterator[Entries]:
        """Yield the entries of the oldest unread chunk, grouped by sequence, and remove prompts that have ended."""
        self._sent.popleft()
        count, self._queued, self._steps = packed[0, :3].tolist()
        before = self._begun
        entries = packed[1 : 1 + count]
        order = np.lexsort((np.arange(count), entries[:, 1], entries[:, 0]))
        entries = entries[order]
        begins = np.flatnonzero(np.any(np.diff(entries[:, :2], axis=0, prepend=NOBODY - 1), axis=1))
        for news in np.split(entries, begins[1:]) if count else ():
            job = self.on_device.get(int(news[0, 0]))
            if job is None:  # cancelled
                continue
            sequence, reason = int(news[0, 1]), int(news[-1, 3])
            part = job.part(sequence)
            if part.claim is not None:  # an entry in the journal shows that the device has read the whole prompt
                self.prefixes.confirm(part.claim)
                part.claim = None
            news = news[news[:, 2] >= 0]  # drop entries that only end the sequence
            self._tokens += len(news)
            begun = max(sequence + 1 - part.begun, 0)  # the sequences of a part begin in order
            part.begun, job.begun, self._begun = part.begun + begun, job.begun + begun, self._begun + begun
            yield Entries(job, sequence, news[:, 2], reason, news[:, 4:], part.version)
            if reason:
                job.ended += 1
                if job.ended == job.sequences:
                    self._release(job)
        self._begins.append(max(self._begun - before, 0 if self._queued else self.slots))

    def _release(self, job: Job) -> None:
        del self.on_device[job.number]
        for name, (key, _) in job.automata.items():
            self.tables[name].leave(key)


class Pace:
    """Controller for the number of steps in a chunk.

    The target is the smallest number of steps that together take at least 0.1 seconds. Shorter chunks reduce latency,
    because the host reads a chunk's tokens only after the chunk has ended. Prompts that arrive during a chunk wait for
    the next chunk.

    Attributes:
        limit: the maximum number of steps.
        steps: the number of steps in the next chunk.
    """

    def __init__(self, limit: int):
        self.limit, self.steps = limit, 1
        self._seconds, self._taken, self._ended = 0.0, 0, 0.0

    def measure(self, taken: int, begun: float, ended: float) -> None:
        """Set `steps` after a chunk that ran from `begun` to `ended`. `taken` is the total number of steps so far."""
        steps, seconds = taken - self._taken, ended - max(begun, self._ended)
        self._taken, self._ended = taken, ended
        if steps > 0:
            self._seconds = (self._seconds or seconds / steps) / 2 + seconds / steps / 2
            self.steps = min(math.ceil(_CHUNK_SECONDS / max(self._seconds, 1e-9)), self.limit)
