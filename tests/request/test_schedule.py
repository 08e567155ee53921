"""The schedule, without a device: which prompts are sent when, and which events their owners get."""

import collections

import numpy as np
import pytest

from jaxgen import GenerationConfig, StopReason
from jaxgen.core.decoding.continuous.queue import NOBODY
from jaxgen.core.grammar.token_automaton import Capacity
from jaxgen.core.request.prompt import PromptReader
from jaxgen.core.request.prompt_options import PromptOptions
from jaxgen.core.request.running.automaton_tables import GrammarTable
from jaxgen.core.request.running.prefix_index import Prefixes
from jaxgen.core.request.running.schedule import Job, Pace, Schedule
from jaxgen.engine.results import PromptResults
from tests.request.test_automaton_tables import VOCAB, grammar
from tests.support.models import model_config

CFG = GenerationConfig(model=model_config(vocab_size=VOCAB), max_new_tokens=8, do_sample=True, eos_token_id=2)


def schedule(places: int = 4, slots: int = 2, states: int = 12, prefixes: Prefixes | None = None) -> Schedule:
    reader = PromptReader(PromptOptions(CFG, 8))
    tables = {"allowed": GrammarTable(VOCAB, Capacity(states, 1024, 64, 8))}
    return Schedule(reader, tables, places, slots, np.zeros(2, np.uint32), prefixes or Prefixes(0, 8, 0))


def job(plan: Schedule, index: int, automaton=None, **options) -> Job:
    prompt = plan.reader.read({"ids": [5, 6], "index": index, "allowed": automaton, **options})
    return Job(
        prompt, PromptResults(prompt, None), {} if automaton is None else {"allowed": (id(automaton), automaton)}
    )


def add(plan: Schedule, *jobs: Job) -> None:
    for each in jobs:
        plan.waiting.add(each)


def packed(waiting: int, *entries: tuple[int, int, int, int]) -> np.ndarray:
    return np.asarray([(len(entries), waiting, 0, 0), *entries, (9, 9, 9, 9)], np.int32)


def sent(plan: Schedule) -> list[int]:
    """Return the indices of the prompts that arrive."""
    arrivals = plan.arrivals()
    return [] if arrivals is None else arrivals.index[arrivals.number != NOBODY].tolist()


def parts(plan: Schedule) -> list[tuple[int, int, int]]:
    """Return the index, the first sequence and the number of sequences of each part that arrives."""
    arrivals = plan.arrivals()
    if arrivals is None:
        return []
    columns = zip(arrivals.index, arrivals.first_sequence, arrivals.sequences, arrivals.number, strict=True)
    return [tuple(map(int, column[:3])) for column in columns if column[3] != NOBODY]


def begin(plan: Schedule, job: Job, first: int, count: int, reason: int = 0) -> None:
    """Report that `count` sequences of a prompt begin, and that no prompt waits on the device."""
    list(plan.read(packed(0, *((job.number, first + number, 5, reason) for number in range(count)))))


def test_prompts_are_sent_in_order_while_places_are_free():
    plan = schedule()
    add(plan, *(job(plan, n) for n in range(7)))
    assert [sent(plan), sent(plan), sent(plan)] == [[0, 1], [2, 3], []]
    list(plan.read(packed(2)))
    assert sent(plan) == []  # the device reported two waiting prompts, and two have been sent since
    list(plan.read(packed(3, (0, 0, 5, 0))))
    assert sent(plan) == [4]


class Device:
    """The slots of a device without a model. `length` returns the number of tokens of a sequence."""

    def __init__(self, slots: int, length):
        self.slots: list[list[int] | None] = [None] * slots
        self.length, self.queue, self.steps = length, collections.deque(), 0

    def chunk(self, arrivals) -> np.ndarray:
        """Take 8 steps, and return the journal."""
        if arrivals is not None:
            parts = zip(arrivals.number, arrivals.first_sequence, arrivals.sequences, strict=True)
            for number, first, sequences in (map(int, part) for part in parts):
                self.queue.extend((number, first + sequence) for sequence in range(sequences))
        told: list[tuple[int, int, int, int]] = []
        for _ in range(8):
            self.steps += 1
            for slot in range(len(self.slots)):
                if self.slots[slot] is None and self.queue:
                    number, sequence = self.queue.popleft()
                    self.slots[slot] = [number, sequence, self.length(number, sequence)]
                if (row := self.slots[slot]) is not None:
                    row[2] -= 1
                    told.append((row[0], row[1], 5, 0 if row[2] else StopReason.EOS))
                    if not row[2]:
                        self.slots[slot] = None
        journal = packed(len({number for number, _ in self.queue}), *told)
        journal[0, 2] = self.steps
        return journal


LENGTHS = {
    "always 5": lambda rng: 5,
    "always 17": lambda rng: 17,
    "1 to 20": lambda rng: int(rng.integers(1, 21)),
    "1 to 200": lambda rng: int(rng.integers(1, 201)),
    "often short": lambda rng: int(rng.geometric(1 / 8)),
}


def steps_and_waiting(kind: str, copies: int, is_limited: bool) -> tuple[int, int, int]:
    """Return the steps for 600 sequences, and the most that waited on the device and that began in a chunk."""
    rng, lengths = np.random.default_rng(0), {}
    device = Device(8, lambda *key: lengths.setdefault(key, LENGTHS[kind](rng)))
    plan = schedule(places=16, slots=8)
    if not is_limited:
        plan._space = lambda: 10**9
    add(plan, *(job(plan, number, n=copies) for number in range(600 // copies)))
    running, most, most_begun = None, 0, 0
    while running is not None or not plan.idle:
        started = None
        if not plan.idle:
            started = device.chunk(plan.arrivals())  # before the journal of the previous chunk is read, as in an engine
            most = max(most, len(device.queue))
        if running is not None:
            begun = plan._begun
            list(plan.read(running))
            most_begun = max(most_begun, plan._begun - begun)
        running = started
    return device.steps, most, most_begun


@pytest.mark.parametrize("copies", [1, 4, 60])
@pytest.mark.parametrize("kind", LENGTHS)
def test_few_sequences_wait_on_the_device_and_no_slot_waits_for_a_prompt(kind, copies):
    steps, most, begun = steps_and_waiting(kind, copies, is_limited=True)
    unlimited, many, _ = steps_and_waiting(kind, copies, is_limited=False)
    assert steps <= unlimited + 8
    assert most <= 8 + 2 * begun + min(copies, 8)
    assert most < many or copies == 1


def test_a_prompt_that_arrives_late_waits_for_a_part_of_another_groups_prompt():
    plan = schedule(places=16, slots=8)
    add(plan, *(job(plan, number, n=60) for number in range(20)))
    device, running, after = Device(8, lambda *_: 30), None, 0
    late = job(plan, 100)
    late.group = "late"
    for number in range(10**3):
        if number == 40:
            add(plan, late)
            before = device.steps
        running, journal = device.chunk(plan.arrivals()), running
        if journal is not None:
            list(plan.read(journal))
        if late.begun:
            after = device.steps
            break
    assert 0 < after - before <= (8 + 3 * 8) * 30 / 8 + 3 * 8  # otherwise, at least 60 sequences come before it


def test_a_prompt_comes_before_most_sequences_of_nine_other_groups():
    plan = schedule(places=16, slots=8)
    many = [job(plan, number, n=64) for number in range(9)]
    for each in many:
        each.group = each.prompt.index
    single = job(plan, 100)
    single.group = "single"
    add(plan, *many, single)
    device, running = Device(8, lambda *_: 32), None
    for _ in range(200):
        running, journal = device.chunk(plan.arrivals()), running
        if journal is not None:
            list(plan.read(journal))
        if single.begun:
            break
    assert single.begun
    assert sum(each.begun for each in many) <= 9 * 24
    assert device.steps <= 9 * 24 / 8 * 32 + 3 * 8  # otherwise, 9 * 64 sequences come before it


def test_a_prompt_is_sent_in_parts_in_turn_with_the_prompts_of_other_groups():
    plan = schedule(places=8, slots=2)
    one, other, single, next_one = (job(plan, number, n=n) for number, n in enumerate([9, 5, 1, 1]))
    other.group, single.group = "other", "single"
    add(plan, one, other, single, next_one)
    assert parts(plan) == [(0, 0, 6)]  # two slots, and as many again in this chunk and in the next
    assert parts(plan) == []
    begin(plan, one, 0, 3)  # 3 wait, and 2 + 2 * 3 may wait
    assert parts(plan) == [(1, 0, 5)]
    begin(plan, one, 3, 3, StopReason.EOS)
    assert parts(plan) == [(2, 0, 1), (0, 6, 2)]  # 5 waited, and 2 + 2 * 3 may wait
    begin(plan, other, 0, 5, StopReason.EOS)
    begin(plan, single, 0, 1, StopReason.EOS)
    assert parts(plan) == [(0, 8, 1), (3, 0, 1)]
    assert plan.on_device == {0: one, 3: next_one}


def test_a_part_of_a_prompt_does_not_have_fewer_sequences_than_there_are_slots():
    plan = schedule(places=8, slots=2)
    long, single = job(plan, 0, n=9), job(plan, 1)
    add(plan, *(job(plan, number + 2) for number in range(2)))
    plan.arrivals()
    add(plan, single, job(plan, 4), job(plan, 5), long)
    assert parts(plan) == [(1, 0, 1), (4, 0, 1)]
    assert parts(plan) == [(5, 0, 1), (0, 0, 2)]  # 5 wait, and 6 may wait


def test_a_prompt_that_is_cancelled_between_its_parts():
    plan = schedule(places=8, slots=2, prefixes=Prefixes(4, 1, 1))
    automaton = grammar("[a-c]{1,4}")
    one, other = job(plan, 0, automaton, n=20), job(plan, 1)
    add(plan, one)
    assert parts(plan) == [(0, 0, 6)]
    assert one in plan.waiting
    number = one.number
    plan.cancel(one)
    plan.cancel(one)
    assert (len(plan.waiting), plan.on_device) == (0, {})
    assert plan.tables["allowed"]._entries[id(automaton)].users == 0
    add(plan, other)
    arrivals = plan.arrivals()
    assert arrivals.cancelled.tolist() == [number, NOBODY - 1]
    assert arrivals.index[arrivals.number != NOBODY].tolist() == [1]
    begin(plan, one, 0, 2)
    begin(plan, other, 0, 1, StopReason.EOS)
    assert plan.arrivals() is None
    assert plan.idle
    assert len(plan.prefixes._free) + len(plan.prefixes._stored) == 4


def test_all_parts_of_a_prompt_use_one_place_in_a_table():
    plan = schedule(places=8, slots=2)
    automaton = grammar("[a-c]{1,4}")
    one = job(plan, 0, automaton, n=8)
    add(plan, one)
    starts = [plan.arrivals().request.grammar[0]]
    part = plan.tables["allowed"]._entries[id(automaton)]
    begin(plan, one, 0, 6, StopReason.EOS)
    assert part.users == 1  # none of the sequences that were sent is left, but not all have been sent
    starts.append(plan.arrivals().request.grammar[0])
    assert starts == [part.first[0]] * 2
    begin(plan, one, 6, 2, StopReason.EOS)
    assert part.users == 0
    assert plan.idle


def test_later_parts_copy_what_the_first_part_has_stored():
    plan = schedule(places=8, slots=2, prefixes=Prefixes(4, 1, 1))
    one, plain = job(plan, 0, n=20), job(plan, 1)
    add(plan, one)
    first = plan.arrivals().prefixes
    assert first.have[0].tolist() == [-1]
    begin(plan, one, 0, 0)
    plan._begins.extend([9, 9])
    assert plan.arrivals() is None  # the first part has not been read
    begin(plan, one, 0, 1)
    second = plan.arrivals().prefixes
    assert second.have[0].tolist() == first.keep[0].tolist() != [-1]
    assert second.keep[0].tolist() == [-1]
    assert one.cached == 0
    add(plan, plain)
    begin(plan, one, 1, 19)
    plan.arrivals()
    assert plain.cached == 1


def test_each_part_has_its_own_version_of_the_weights():
    plan = schedule(places=8, slots=2)
    one = job(plan, 0, n=9)
    add(plan, one)
    plan.arrivals()
    begin(plan, one, 0, 6)
    plan.version = 3
    assert parts(plan) == [(0, 6, 3)]
    told = plan.read(packed(0, (one.number, 5, 7, 0), (one.number, 6, 7, 0), (one.number, 8, 7, 0)))
    assert [(entries.sequence, entries.version) for entries in told] == [(5, 0), (6, 3), (8, 3)]


def test_rest_of_a_prompt_is_sent_while_others_are_held():
    plan = schedule(places=8, slots=2)
    one, other = job(plan, 0, n=9), job(plan, 1)
    other.group = "other"
    add(plan, one)
    plan.arrivals()
    plan.holds = True
    add(plan, other)
    begin(plan, one, 0, 6, StopReason.EOS)
    assert parts(plan) == [(0, 6, 3)]
    begin(plan, one, 6, 3, StopReason.EOS)
    assert plan.idle
    plan.holds = False
    assert parts(plan) == [(1, 0, 1)]


def test_counts_of_a_prompt_that_is_sent_in_parts():
    plan = schedule(places=8, slots=2)
    one = job(plan, 0, n=9)
    add(plan, one, job(plan, 1))
    plan.arrivals()
    assert plan.counts[3:] == (0, 2)
    begin(plan, one, 0, 2)
    assert plan.counts[3:] == (1, 1)


def test_entries_are_reported_by_sequence_and_numbers_are_freed_after_the_last():
    plan = schedule()
    assert plan.arrivals() is None
    one, two = job(plan, 0, n=2), job(plan, 1)
    add(plan, one, two)
    plan.arrivals()
    eos = StopReason.EOS
    told = list(
        plan.read(packed(0, (0, 1, 7, 0), (1, 0, 8, 0), (0, 0, 5, eos), (0, 1, 9, 0), (1, 0, -1, StopReason.NO_TOKEN)))
    )
    assert [(e.job.prompt.index, e.sequence, e.tokens.tolist(), e.reason) for e in told] == [
        (0, 0, [5], eos),
        (0, 1, [7, 9], 0),
        (1, 0, [8], StopReason.NO_TOKEN),
    ]
    assert list(plan.on_device) == [0]
    plan.arrivals()
    [last] = plan.read(packed(0, (0, 1, 2, eos)))
    assert (last.tokens.tolist(), last.reason) == ([2], eos)
    assert plan.idle


def test_a_cancelled_prompt_gets_no_more_entries():
    plan = schedule()
    one, two, three = (job(plan, n) for n in range(3))
    add(plan, one, two, three)
    plan.arrivals()
    plan.cancel(two)
    plan.cancel(three)
    plan.cancel(three)
    arrivals = plan.arrivals()
    assert arrivals.cancelled.max() == two.number
    told = list(plan.read(packed(0, (one.number, 0, 5, 0), (two.number, 0, 6, 0))))
    assert [e.job.prompt.index for e in told] == [0]
    assert not plan.waiting


def test_a_prompt_whose_grammar_has_no_space_waits_and_plain_ones_do_not():
    plan = schedule(places=9, slots=9)
    large, other, small = grammar("[a-c]{1,8}"), grammar("[d-f]{1,8}"), grammar("z")
    add(plan, *(job(plan, n, g) for n, g in enumerate([large, None, other, large, small, None])))
    assert sent(plan) == [0, 1, 5]  # no grammar overtakes another, or some would wait forever
    for expected in ([2], [3, 4]):
        ends = [(f.number, 0, 5, StopReason.EOS) for f in list(plan.on_device.values())]
        list(plan.read(packed(0, *ends)))
        assert sent(plan) == expected


def test_a_grammar_that_waits_for_space_keeps_its_place_when_its_group_is_served():
    plan = schedule(places=9, slots=9, states=12)
    plain, first, large, other = (
        job(plan, number, automaton)
        for number, automaton in enumerate([None, grammar("[a-c]{1,4}"), grammar("[d-f]{1,8}"), grammar("y")])
    )
    add(plan, first, large, plain)
    assert sent(plan) == [1, 0]
    other.group = "b"
    add(plan, other)
    assert sent(plan) == []  # the grammar of b is small, and b has the turn, but the large grammar waited first
    list(plan.read(packed(0, (first.number, 0, 5, StopReason.EOS))))
    assert sent(plan) == [2, 3]
    list(plan.read(packed(0, (other.number, 0, 5, StopReason.EOS))))
    blocked, behind = job(plan, 4, grammar("[d-f]{1,9}")), job(plan, 5, grammar("z"))
    add(plan, blocked, behind)
    assert sent(plan) == []
    plan.cancel(blocked)
    assert sent(plan) == [5]


@pytest.mark.parametrize(
    ("options", "unusual"),
    [({}, False), ({"temperature": 0.5}, True), ({"do_sample": False}, False), ({"min_length": 3}, True)],
)
def test_unusual_prompts_are_recognized(options, unusual):
    assert schedule().reader.read({"ids": [5], **options}).unusual == unusual


def test_a_grammar_does_not_turn_on_the_other_options():
    assert not schedule().reader.read({"ids": [5], "allowed": grammar("[a-c]")}).unusual


def test_a_chunk_takes_at_least_a_tenth_of_a_second():
    pace = Pace(8)
    assert pace.steps == 1
    pace.measure(0, 0.0, 60.0)  # 0 steps: the time was spent compiling
    assert pace.steps == 1
    for number in range(1, 20):
        pace.measure(number, 0.0, 60.0 + 0.03 * number)
    assert pace.steps == 4
    pace.measure(20, 100.0, 101.0)
    assert pace.steps == 1
    for number in range(21, 40):
        pace.measure(number, 100.0, 101.0 + 0.001 * number)
    assert pace.steps == 8


def test_counts_of_the_schedule():
    plan = schedule()
    assert plan.counts == (0, 0, 0, 0, 0)
    add(plan, job(plan, 0, n=2), job(plan, 1))
    plan.arrivals()
    happened = packed(0, (0, 0, 5, 0), (0, 0, 6, 0), (0, 1, 7, 0), (0, 1, 8, StopReason.EOS), (0, 0, 6, StopReason.EOS))
    happened[0, 2] = 4
    list(plan.read(happened))
    assert plan.counts == (5, 4, (5 - 2) / 4, 0, 1)
    plan.arrivals()
    happened = packed(0, (1, 0, 5, 0), (1, 0, 6, 0))
    happened[0, 2] = 5
    list(plan.read(happened))
    assert plan.counts == (7, 5, (7 - 3) / 5, 1, 0)
