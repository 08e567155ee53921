"""The error of a checkpoint that cannot be read or written."""

from jaxgen.errors import JaxgenError, one_line

SHOWN_PROBLEMS = 20
LONGEST_PROBLEM = 500  # characters


class CheckpointError(JaxgenError):
    """A checkpoint that cannot be read or written; `problems` lists all problems, one line each.

    The text is the only problem, or a heading and at most `SHOWN_PROBLEMS` of them.
    """

    def __init__(self, problems: list[str]):
        super().__init__()
        self.problems = [one_line(problem, LONGEST_PROBLEM) for problem in problems]
        self.args = (self.problems,)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        count, shown = len(self.problems), self.problems[:SHOWN_PROBLEMS]
        first = f", the first {SHOWN_PROBLEMS} of which are" if count > len(shown) else ""
        return "\n  - ".join([f"{count} problems{first}:", *shown])
