"""The prompts that wait in an engine. Groups of prompts take turns."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar


class _Prompt(Hashable, Protocol):
    @property
    def group(self) -> Hashable: ...


P = TypeVar("P", bound=_Prompt)


@dataclasses.dataclass
class _Group(Generic[P]):
    """The waiting prompts of a group, in the order of their arrival.

    `turn` says when the group's next turn is: after how many sequences of each group, and a number that breaks ties.
    """

    turn: tuple[int, int]
    prompts: OrderedDict[P, None] = dataclasses.field(default_factory=OrderedDict)


class Waiting(Generic[P]):
    """Waiting prompts, in groups. Groups take turns, and the prompts of a group are served in the order of arrival.

    A prompt can be served in parts. A part with n sequences counts as n turns, so groups that always have waiting
    prompts get the same number of sequences, however they divide them among prompts.
    """

    def __init__(self):
        self._groups: dict[Hashable, _Group[P]] = {}
        self._count = 0
        self._now = 0  # when the latest turn was; see `_Group.turn`
        self._ties = itertools.count()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, prompt: P) -> bool:
        return prompt.group in self._groups and prompt in self._groups[prompt.group].prompts

    def __iter__(self) -> Iterator[P]:
        return itertools.chain.from_iterable(group.prompts for group in self._groups.values())

    def add(self, prompt: P) -> None:
        """Add a prompt after all others of its group. The first turn of a new group is in the next round."""
        if prompt.group not in self._groups:
            self._groups[prompt.group] = _Group((self._now + 1, next(self._ties)))
        self._groups[prompt.group].prompts[prompt] = None
        self._count += 1

    def remove(self, prompt: P) -> None:
        """Remove a prompt, which does not count as a turn."""
        del self._groups[prompt.group].prompts[prompt]
        self._count -= 1

    def serve(self, prompt: P, sequences: int, is_last: bool) -> None:
        """Count a part of a prompt with `sequences` sequences. Remove the prompt if this is its last part."""
        group = self._groups[prompt.group]
        # A group that could not be served for a while has lost its turns, so that it does not get them all at once.
        self._now = max(self._now, group.turn[0])
        group.turn = self._now + sequences, next(self._ties)
        if is_last:
            self.remove(prompt)

    def in_turn(self) -> Iterator[P]:
        """Yield the prompts in the order in which they should be served.

        After each prompt, the caller calls `serve` if the prompt can be served. If this was not the prompt's last part,
        the prompt follows again when its group has its next turn. If the prompt cannot be served, it does not follow
        again, and the next prompt of the group may have the turn.
        """
        # A group without prompts is forgotten only when its turns are over. Otherwise, a group that always has just one
        # waiting prompt would be a new one each time.
        self._groups = {
            name: group for name, group in self._groups.items() if group.prompts or group.turn[0] > self._now
        }
        groups = [(group.turn, group, iter(list(group.prompts))) for group in self._groups.values()]
        heapq.heapify(groups)  # never compares groups, because no two turns are equal
        while groups:
            turn, group, prompts = groups[0]
            for prompt in prompts:
                yield prompt
                if group.turn != turn:
                    rest = itertools.chain([prompt], prompts) if prompt in group.prompts else prompts
                    heapq.heapreplace(groups, (group.turn, group, rest))
                    break
            else:
                heapq.heappop(groups)
