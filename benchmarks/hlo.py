"""Read the operations of a compiled program from its optimized HLO."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_QUIET = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<shape>.*?) (?P<op>[a-z][a-z\-]*)\(")
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+) ")
_DECODE = '/decode/while"'  # the decode loop's name ends with this
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(rf"\b({'|'.join(_BYTES)})\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that the device executes: a kernel on a GPU, a fusion on a TPU, or a collective on either.

    Attributes:
        kind: "fusion", "all-reduce" and so on.
        dims: the shape of each array in its result, on one device.
        nbytes: the size of its result in bytes, on one device; for an in-place update, the size of the update.
        times: how often it runs, provided that the trip counts of all inner loops are known.
        name: the JAX operation from which it was compiled.
    """

    kind: str
    dims: tuple[tuple[int, ...], ...]
    nbytes: int
    times: int
    name: str

    @property
    def is_collective(self) -> bool:
        """True if the operation communicates between devices."""
        return self.kind in _COLLECTIVES


# A function that returns the operations to count, given the operations of each branch of a conditional.
Branches = Callable[[list[list[Operation]]], list[Operation]]


def all_branches(branches: list[list[Operation]]) -> list[Operation]:
    """Count every branch."""
    return [operation for branch in branches for operation in branch]


def shortest_branch(branches: list[list[Operation]]) -> list[Operation]:
    """Count only the branch with the fewest operations, which should be the common case."""
    return min(branches, key=count)


def count(operations: list[Operation]) -> int:
    """Return the number of operations that run. Operations in inner loops count once per iteration."""
    return sum(operation.times for operation in operations)


def decode_step(program: str, branches: Branches = all_branches) -> list[Operation]:
    """Return the operations in one step of the decode loop of a compiled `generate`, including the loop's condition.

    With slots, there is also an outer decode loop. XLA's text lists the inner loop first, so the inner one is found.

    Raises:
        ValueError: the program has no decode loop.
    """
    computations = parse(program)
    for lines in computations.values():
        for line in lines:
            if " while(" in line and _DECODE in line:
                parts = (_named(line, "condition"), _named(line, "body"))
                return [found for part in parts for found in _operations(computations, part, 1, branches=branches)]
    raise ValueError("the program has no decode loop")


def outside_of_decode(program: str, passes: int = 1) -> list[Operation]:
    """Return the operations outside the decode loop. A loop with an unknown trip count counts `passes` times."""
    entry = next(filter(None, (_ENTRY.match(line) for line in program.splitlines())))
    return list(_operations(parse(program), entry[1], 1, passes))


def parse(program: str) -> dict[str, list[str]]:
    """Return the instructions of each computation, by the computation's name."""
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


def _operations(
    computations: dict[str, list[str]], name: str, times: int, passes: int = 1, branches: Branches = all_branches
) -> Iterator[Operation]:
    for line in computations[name]:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        op = match["op"]
        if op == "while":
            if _DECODE not in line:
                trips = re.search(r'known_trip_count"?:\{"n":"(\d+)"', line)
                trip_count = int(trips[1]) if trips else passes
                yield from _operations(computations, _named(line, "body"), times * trip_count, passes, branches)
        elif op in ("call", "conditional", "async-start"):
            called = _CALLED.findall(line)
            for group in _BRANCHES.findall(line):
                called += re.findall(r"[\w.\-]+", group)
            inner = [list(_operations(computations, name, times, passes, branches)) for name in called]
            yield from branches(inner) if op == "conditional" else all_branches(inner)
        elif op not in _QUIET and not op.endswith("-done"):
            arrays = _arrays(match["shape"])
            if op.endswith("-start"):  # operands, then results
                arrays = arrays[len(arrays) // 2 :]
            made_for = re.search(r'op_name="([^"]*)"', line)
            updated = _update(computations, line, op)
            yield Operation(
                op.removesuffix("-start"),
                tuple(dims for _, dims in arrays),
                _size(arrays if updated is None else updated),
                times,
                made_for[1] if made_for else "",
            )


def _update(computations: dict[str, list[str]], line: str, op: str) -> list | None:
    """Return the arrays that an in-place update writes; None for any other operation."""
    if op == "fusion":
        inner = computations[_named(line, "calls")]
        root = next(inner_line for inner_line in inner if inner_line.lstrip().startswith("ROOT"))
    else:
        inner, root = [], line
    match = re.search(r" (?:dynamic-update-slice|scatter)\(([^)]*)\)", root)
    if match is None:
        return None
    operands = re.findall(r"%([\w.\-]+)", match[1])
    update = operands[1] if "dynamic-update-slice(" in root else operands[-1]
    typed = _arrays(match[1])
    for other in inner:
        if re.match(rf"^\s*%?{re.escape(update)} = ", other):
            found = _INSTRUCTION.match(other)
            return _arrays(found["shape"]) if found else None
    return typed[1:2] or None


def _arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in _ARRAY.findall(shape)]


def _size(arrays: list[tuple[str, tuple[int, ...]]]) -> int:
    return sum(_BYTES[dtype] * math.prod(dims) for dtype, dims in arrays)
