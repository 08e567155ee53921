"""The error of a checkpoint that cannot be read or written."""

from jaxgen.errors import JaxgenError


class CheckpointError(JaxgenError):
    """A checkpoint that cannot be read or written; `problems` lists all problems, one line each."""

    def __init__(self, problems: list[str]):
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n  - ".join([f"{len(self.problems)} problems:", *self.problems])
