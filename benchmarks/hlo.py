"""The collectives of a compiled program, read off its optimised HLO."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<shape>.*?) (?P<op>[a-z][a-z\-]*)\(")
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+) ")
_DECODE = '/decode/while"'  # the end of the decode loop's name
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(rf"\b({'|'.join(_BYTES)})\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation.

    Attributes:
        kind: "all-reduce" and so on.
        dims: the shape of each array of its result, on one device.
        nbytes: the bytes of its result, on one device.
        times: how often it runs, if all inner loops have known trip counts.
        name: the operation that it was made for.
    """

    kind: str
    dims: tuple[tuple[int, ...], ...]
    nbytes: int
    times: int
    name: str


def decode_step(program: str) -> list[Collective]:
    """Return the collectives of one step of the decode loop of a compiled `generate`, its condition included.

    Raises:
        ValueError: the program has no such loop.
    """
    computations = parse(program)
    for lines in computations.values():
        for line in lines:
            if " while(" in line and _DECODE in line:
                parts = (_named(line, "condition"), _named(line, "body"))
                return [found for part in parts for found in _collectives(computations, part, 1)]
    raise ValueError("the program has no decode loop")


def outside_of_decode(program: str, passes: int = 1) -> list[Collective]:
    """Return the collectives before and after the decode loop; a loop of unknown length takes `passes`."""
    entry = next(filter(None, (_ENTRY.match(line) for line in program.splitlines())))
    return list(_collectives(parse(program), entry[1], 1, passes))


def parse(program: str) -> dict[str, list[str]]:
    """Return the instructions of each computation by its name."""
    computations: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in program.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[1], [])
        elif current is not None:
            current.append(line)
    return computations


def _named(line: str, part: str) -> str:
    found = re.search(rf"\b{part}=%?([\w.\-]+)", line)
    if found is None:
        raise ValueError(f"no {part}= in {line.strip()[:200]}")
    return found[1]


def _collectives(computations: dict[str, list[str]], name: str, times: int, passes: int = 1) -> Iterator[Collective]:
    for line in computations[name]:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        kind = match["op"].removesuffix("-start")
        if kind in _KINDS:
            arrays = [
                (dtype, tuple(map(int, filter(None, dims.split(",")))))
                for dtype, dims in _ARRAY.findall(match["shape"])
            ]
            if match["op"].endswith("-start"):  # operands, then results
                arrays = arrays[len(arrays) // 2 :]
            size = sum(_BYTES[dtype] * math.prod(dims) for dtype, dims in arrays)
            made_for = re.search(r'op_name="([^"]*)"', line)
            yield Collective(kind, tuple(dims for _, dims in arrays), size, times, made_for[1] if made_for else "")
        elif match["op"] == "while":
            if _DECODE not in line:
                trips = re.search(r'known_trip_count"?:\{"n":"(\d+)"', line)
                count = int(trips[1]) if trips else passes
                yield from _collectives(computations, _named(line, "body"), times * count, passes)
        else:
            called = _CALLED.findall(line)
            for group in _BRANCHES.findall(line):
                called += re.findall(r"[\w.\-]+", group)
            for inner in called:
                if inner in computations:
                    yield from _collectives(computations, inner, times, passes)
