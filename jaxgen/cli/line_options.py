"""Options that lines of --input set for themselves: their checks, the sizes that they need, and batches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxgen.buckets import power_of_two, prompt_bucket
from jaxgen.cli.input_file import Line, line_errors
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.request.keys import own_keys
from jaxgen.core.request.own_call import OwnCall, engine_reader, own_options
from jaxgen.core.request.prompt_options import per_prompt_options
from jaxgen.core.request.running.automaton_tables import with_space_for
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError

# The table of stop strings has space for all of them, but for no more than this number of states, unless one prompt
# needs more.
_STATES = 4096
_OF_ONE_LINE = ("index", "seed", "max_new_tokens")  # a batch has one value of these for each line
_LENGTHS = {"max_new_tokens", "min_new_tokens", "min_length"}


def prompt_options(lines: Iterable[Line]) -> list[str]:
    """Return the names of the options that an engine must let prompts set."""
    names = {name for line in lines for name in line.fields}
    if "min_length" in names:
        names.add("min_new_tokens")
    return [name for name in per_prompt_options() if name in names]


def entries_for(lines: Sequence[Line]) -> int:
    """Return the number of entries of the longest table of ids that a line sets."""
    names = prompt_options(lines)
    tables = (line.fields.get(name) for line in lines for name in names)
    return max([EngineSizes.id_entries, *(len(value) for value in tables if isinstance(value, list | dict))])


def width_for(lines: Iterable[Line]) -> int:
    """Return the engine's prompt width."""
    return prompt_bucket(max(len(line.ids) for line in lines))


def check_lines(lines: Sequence[Line], cfg: GenerationConfig, tokenizer: Tokenizer, source: str, slots: bool) -> None:
    """Check the options that lines set; the error names the line. Warn about lengths that cannot be reached."""
    reader = None
    if slots:  # `PromptOptions` raises an error if engines do not support the config
        names = prompt_options(lines)
        reader = engine_reader(cfg, tokenizer, width_for(lines), names, entries_for(lines))
    if others := [line for line in lines if not line.fields.keys() & _LENGTHS]:
        lengths, budgets = zip(*((len(line.ids), line.budget) for line in others), strict=True)
        OwnCall(cfg).check(np.asarray(lengths), np.asarray(budgets))
    for line in lines:
        if line.fields.keys() <= {"index"}:
            continue
        with line_errors(source, line.number):
            _refuse_shared(line, slots)
            if reader is not None:
                reader.read({"ids": line.ids, **line.fields})
                if not line.fields.keys() & _LENGTHS:
                    continue
            own_call(line, cfg, tokenizer).check(np.asarray([len(line.ids)]), np.asarray([line.budget]))


def _refuse_shared(line: Line, slots: bool) -> None:
    """Raise an error if a line sets an option that has one value for all lines, or that its answers cannot show."""
    if "top_logprobs" in line.fields:
        raise InputError("top_logprobs is not offered in lines: an answer has the log-probabilities of its own tokens")
    possible = own_options(slots)
    for name in line.fields:
        if name in OPTIONS and name not in possible:
            advice = f"use --{name.replace('_', '-')}" if OPTIONS[name].command else "leave it out"
            raise InputError(f"{name} has one value for all lines: {advice}")


def own_call(line: Line, cfg: GenerationConfig, tokenizer: Tokenizer) -> OwnCall:
    """Return the config and the grammar of a line."""
    return OwnCall.read({"ids": line.ids, **line.fields}, cfg, tokenizer)


def sizes_for(
    lines: Sequence[Line],
    cfg: GenerationConfig,
    tokenizer: Tokenizer,
    grammar: TokenAutomaton | None,
    sizes: EngineSizes,
) -> EngineSizes:
    """Return the sizes of an engine for all lines; its tables are at least as large as in `sizes`.

    `cfg` and `grammar` apply to lines that do not set their own.
    """
    grammars = {} if grammar is None else {"": grammar}
    stops = {OwnCall(cfg).stop_strings}
    for line in lines:
        text = json.dumps(line.grammar)
        if line.grammar and text not in grammars and (own := own_call(line, cfg, tokenizer).grammar) is not None:
            grammars[text] = own
        if "stop_strings" in line.fields:
            stops.add(OwnCall(cfg.replace(stop_strings=line.fields["stop_strings"])).stop_strings)
    # Stop strings need at most one state per byte.
    needed = [sum(len(text.encode()) + 1 for text in each) + 1 for each in stops if each]
    states = power_of_two(_space(needed, _STATES), sizes.stop_states) if needed else sizes.stop_states
    sizes = dataclasses.replace(sizes, prompt_width=width_for(lines), id_entries=entries_for(lines), stop_states=states)
    return with_space_for(grammars.values(), sizes)


def _space(needed: Sequence[int], most: int) -> int:
    return min(sum(needed), max(*needed, most))


def in_batches(lines: Sequence[Line], indices: Iterable[int], size: int) -> list[list[int]]:
    """Divide `indices` into batches of lines that set the same options, in the order of their first lines."""
    alike: dict[str, list[int]] = {}
    for index in indices:
        own = {name: value for name, value in lines[index].fields.items() if name not in _OF_ONE_LINE}
        alike.setdefault(json.dumps(own, sort_keys=True), []).append(index)
    return sorted(group[first : first + size] for group in alike.values() for first in range(0, len(group), size))


def keys_of(lines: Sequence[Line], key: jax.Array) -> jax.Array:
    """Return each line's key: that of its own seed, or else `fold_in(key, index)`."""
    return own_keys(key, [line.fields["index"] for line in lines], [line.fields.get("seed") for line in lines])
