"""The order in which waiting prompts are served."""

import dataclasses
import itertools
from collections.abc import Hashable

import numpy as np
import pytest

from jaxgen.core.request.running.waiting import Waiting


@dataclasses.dataclass(eq=False)
class Prompt:
    group: Hashable
    number: int
    sequences: int = 1
    blocked: bool = False


def serve(waiting: Waiting[Prompt], most: int = 10**9) -> list[Prompt]:
    """Serve up to `most` prompts that are not blocked."""
    served = []
    for prompt in waiting.in_turn():
        if len(served) == most:
            break
        if not prompt.blocked:
            waiting.serve(prompt, prompt.sequences, is_last=True)
            served.append(prompt)
    return served


def added(waiting: Waiting[Prompt], group: Hashable, count: int, sequences: int = 1) -> list[Prompt]:
    prompts = [Prompt(group, number, sequences) for number in range(count)]
    for prompt in prompts:
        waiting.add(prompt)
    return prompts


def test_groups_take_turns():
    waiting = Waiting()
    for group, count in (("a", 5), ("b", 2), ("c", 3)):
        added(waiting, group, count)
    assert [prompt.group for prompt in serve(waiting)] == ["a", "b", "c", "a", "b", "c", "a", "c", "a", "a"]
    assert not len(waiting)


def test_one_group_is_first_in_first_out():
    waiting = Waiting()
    prompts = added(waiting, None, 6)
    prompts[1].blocked = True
    waiting.remove(prompts[3])
    assert serve(waiting, 3) == [prompts[0], prompts[2], prompts[4]]
    prompts[1].blocked = False
    assert list(waiting) == serve(waiting) == [prompts[1], prompts[5]]


def test_a_prompt_with_many_sequences_counts_as_many_turns():
    waiting = Waiting()
    added(waiting, "many", 3, sequences=4)
    added(waiting, "one", 9)
    assert [prompt.group for prompt in serve(waiting)] == ["many", *["one"] * 4, "many", *["one"] * 4, "many", "one"]


def test_a_prompt_that_is_served_in_parts_keeps_its_place():
    waiting = Waiting()
    added(waiting, "parts", 2, sequences=5)
    added(waiting, "one", 4)
    served, sent = [], {}
    for prompt in waiting.in_turn():
        count = min(2, prompt.sequences - sent.get(prompt, 0))
        sent[prompt] = sent.get(prompt, 0) + count
        waiting.serve(prompt, count, is_last=sent[prompt] == prompt.sequences)
        served.append((prompt.group, prompt.number, count))
    assert [(number, count) for group, number, count in served if group == "parts"] == [
        *[(0, 2), (0, 2), (0, 1)],
        *[(1, 2), (1, 2), (1, 1)],
    ]
    assert [group for group, *_ in served[:8]] == ["parts", "one", "one", "parts", "one", "one", "parts", "parts"]
    assert not len(waiting)


def test_a_group_that_could_not_be_served_does_not_get_its_turns_all_at_once():
    waiting = Waiting()
    blocked = added(waiting, "blocked", 4)
    added(waiting, "other", 20)
    for prompt in blocked:
        prompt.blocked = True
    assert {prompt.group for prompt in serve(waiting, 10)} == {"other"}
    for prompt in blocked:
        prompt.blocked = False
    assert [prompt.group for prompt in serve(waiting, 6)] == ["blocked", "other"] * 3


@pytest.mark.parametrize("sequences", [1, 3])
def test_prompts_that_arrive_one_at_a_time_do_not_overtake_a_group_that_waits(sequences):
    waiting = Waiting()
    added(waiting, "waits", 100)
    served = []
    for number in range(40):
        added(waiting, "one at a time", 1, sequences)
        added(waiting, f"new {number}", 1)
        served += [prompt.group for prompt in serve(waiting, 2)]
    assert served.count("waits") > 15
    assert abs(sequences * served.count("one at a time") - served.count("waits")) <= sequences
    assert sum(name.startswith("new") for name in served) > 15
    serve(waiting)
    added(waiting, "last", 1)
    serve(waiting)
    assert len(waiting._groups) < 4


def test_a_group_without_prompts_is_remembered_until_its_turns_are_over():
    waiting, served = Waiting(), []
    added(waiting, "waits", 100)
    for _ in range(40):
        serve(waiting, 0)
        if "next" not in [prompt.group for prompt in waiting]:
            added(waiting, "next", 1, sequences=3)
        served += [prompt.group for prompt in serve(waiting, 1)]
    assert served.count("next") == 10


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [1, 6])
def test_random_groups(seed, most):
    """Between two turns of a group, each group with a prompt that can be served has a turn; nothing is lost."""
    rng = np.random.default_rng(seed)
    waiting, numbers = Waiting(), itertools.count()
    here: list[Prompt] = []  # those that should be waiting, in the order of their arrival
    missed: dict[tuple[int, int], int] = {}  # the sequences of group a since b had a turn, while b could be served
    gone = turns = 0
    for _ in range(400):
        for _ in range(rng.integers(4)):
            group = int(rng.integers(6)) if rng.integers(3) else 0
            prompt = Prompt(group, next(numbers), int(rng.integers(1, most + 1)), not rng.integers(6))
            waiting.add(prompt)
            here.append(prompt)
        for prompt in here:
            prompt.blocked &= bool(rng.integers(12))
        for prompt in [prompt for prompt in here if not rng.integers(20)]:
            waiting.remove(prompt)
            here.remove(prompt)
            gone += 1
        for _ in range(rng.integers(4)):
            ready = {prompt.group for prompt in here if not prompt.blocked}
            missed = {pair: count for pair, count in missed.items() if pair[1] in ready}
            got = serve(waiting, 1)
            assert bool(got) == bool(ready)
            for prompt in got:
                assert prompt == next(each for each in here if each.group == prompt.group and not each.blocked)
                for other in ready - {prompt.group}:
                    pair = (prompt.group, other)
                    missed[pair] = missed.get(pair, 0) + prompt.sequences
                    assert missed[pair] <= (1 if most == 1 else 2 * most)
                missed = {pair: count for pair, count in missed.items() if pair[1] != prompt.group}
                here.remove(prompt)
                gone, turns = gone + 1, turns + 1
        assert len(waiting) == len(here)
        assert set(waiting) == set(here)
        assert all(prompt in waiting for prompt in here)
    for prompt in here:
        prompt.blocked = False
    assert sorted(prompt.number for prompt in serve(waiting)) == sorted(prompt.number for prompt in here)
    assert gone + len(here) == next(numbers)
    assert turns > 200
