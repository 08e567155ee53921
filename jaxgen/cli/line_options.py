"""Options that lines of --input set for themselves: their checks, and batches of lines with the same options."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence

from jaxgen.cli.input_file import Line, line_errors
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.request.known_prompts import KnownPrompts
from jaxgen.errors import InputError

_OF_ONE_LINE = ("index", "seed", "max_new_tokens")  # a batch has one value of these for each line


def check_lines(lines: Sequence[Line], prompts: KnownPrompts, source: str) -> None:
    """Check the options that lines set; the error names the line. Warn about lengths that cannot be reached."""
    prompts.check_shared()
    for line in lines:
        if line.fields.keys() <= {"index"}:
            continue
        with line_errors(source, line.number):
            _refuse_shared(line, prompts.possible)
            prompts.check(line)


def _refuse_shared(line: Line, possible: Collection[str]) -> None:
    """Raise an error if a line sets an option that has one value for all lines, or that its answers cannot show."""
    if "top_logprobs" in line.fields:
        raise InputError("top_logprobs is not offered in lines: an answer has the log-probabilities of its own tokens")
    for name in line.fields:
        if name in OPTIONS and name not in possible:
            advice = f"use --{name.replace('_', '-')}" if OPTIONS[name].command else "leave it out"
            raise InputError(f"{name} has one value for all lines: {advice}")


def in_batches(lines: Sequence[Line], indices: Iterable[int], size: int) -> list[list[int]]:
    """Divide `indices` into batches of lines that set the same options, in the order of their first lines."""
    alike: dict[str, list[int]] = {}
    for index in indices:
        own = {name: value for name, value in lines[index].fields.items() if name not in _OF_ONE_LINE}
        alike.setdefault(json.dumps(own, sort_keys=True), []).append(index)
    return sorted(group[first : first + size] for group in alike.values() for first in range(0, len(group), size))
