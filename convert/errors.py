"""The error for checkpoints that cannot be read or written."""

import itertools

from jaxgen.errors import LONGEST, JaxgenError, one_line

SHOWN_PROBLEMS = 20
LONGEST_PROBLEM = 500  # characters
_AROUND = 100  # number of characters reserved for the text around the listed problems
_BULLET = "\n  - "


class CheckpointError(JaxgenError):
    """Error for a checkpoint that cannot be read or written; `problems` lists the reasons, one line each.

    If there is only one problem, the message is the text of that problem. If there are several problems, the message is
    a heading followed by the problems in `first`.
    """

    def __init__(self, problems: list[str]):
        super().__init__()
        self.problems = [one_line(problem, LONGEST_PROBLEM) for problem in problems]
        self.args = (self.problems,)

    @property
    def first(self) -> list[str]:
        """The first `SHOWN_PROBLEMS` problems, or as many of them as fit into `LONGEST` characters."""
        candidates = self.problems[:SHOWN_PROBLEMS]
        ends = itertools.accumulate(len(_BULLET) + len(problem) for problem in candidates)
        return [problem for problem, end in zip(candidates, ends, strict=True) if end <= LONGEST - _AROUND]

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        count, first = len(self.problems), self.first
        which = f", the first {len(first)} of which are" if count > len(first) else ""
        return _BULLET.join([f"{count} problems{which}:", *first])
