"""The part of the tests that a run includes, by default all: JAXGEN_SLOW_TESTS and JAXGEN_FILES=PART/PARTS:SEED.

The first chooses among the slow tests, the second among the files with tests.
"""

from __future__ import annotations

import dataclasses
import os
import re
import zlib


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of `parts` parts of the tests, numbered from 1. The seed decides which part a test or a file is in."""

    part: int = 1
    parts: int = 1
    seed: int = 0

    @classmethod
    def parse(cls, text: str, variable: str = "JAXGEN_SLOW_TESTS") -> Choice:
        found = re.fullmatch(r"(\d+)/(\d+):(\d+)", text)
        choice = cls(*map(int, found.groups())) if found else None
        if choice is None or not 1 <= choice.part <= choice.parts:
            raise ValueError(f"{variable} must be PART/PARTS:SEED, such as 1/12:0, got {text!r}")
        return choice

    @classmethod
    def of_environment(cls, variable: str = "JAXGEN_SLOW_TESTS") -> Choice:
        return cls.parse(os.environ.get(variable, "1/1:0"), variable)

    def has(self, name: str) -> bool:
        return zlib.crc32(f"{name} {self.seed}".encode()) % self.parts == self.part - 1
