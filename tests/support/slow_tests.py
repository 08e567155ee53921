"""The part of the slow tests that a run includes: JAXGEN_SLOW_TESTS=PART/PARTS:SEED, by default all of them."""

from __future__ import annotations

import dataclasses
import os
import re
import zlib


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of `parts` parts of the slow tests, numbered from 1. The seed decides which part a test is in."""

    part: int = 1
    parts: int = 1
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Choice:
        found = re.fullmatch(r"(\d+)/(\d+):(\d+)", text)
        choice = cls(*map(int, found.groups())) if found else None
        if choice is None or not 1 <= choice.part <= choice.parts:
            raise ValueError(f"JAXGEN_SLOW_TESTS must be PART/PARTS:SEED, as 1/12:0, got {text!r}")
        return choice

    @classmethod
    def of_environment(cls) -> Choice:
        return cls.parse(os.environ.get("JAXGEN_SLOW_TESTS", "1/1:0"))

    def has(self, test: str) -> bool:
        return zlib.crc32(f"{test} {self.seed}".encode()) % self.parts == self.part - 1
