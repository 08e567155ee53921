"""Options that lines of --input set for themselves: their checks, the sizes that they need, and batches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxgen.buckets import power_of_two, prompt_bucket
from jaxgen.cli.input_file import Line, line_errors
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.generation_options import OPTIONS
from jaxgen.config.kinds import Text
from jaxgen.decoding.rng import folded, seed_words
from jaxgen.errors import InputError
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.request.checks import check_adapter, check_grammar, check_room, warn_infeasible
from jaxgen.request.fields import GRAMMARS, OF_HOST, translated, with_own
from jaxgen.request.prompt import PromptReader
from jaxgen.request.prompt_options import PromptOptions, per_prompt_options
from jaxgen.request.running.automaton_tables import with_space_for
from jaxgen.request.running.engine_sizes import EngineSizes
from jaxgen.text.tokenizer import Tokenizer

KEY_IMPL = "threefry2x32"  # of the keys that --seed gives
# The table of stop strings has space for all of them, but for no more than this number of states, unless one prompt
# needs more.
_STATES = 4096
_OF_ONE_LINE = ("index", "seed", "max_new_tokens")  # a batch has one value of these for each line
_LENGTHS = {"max_new_tokens", "min_new_tokens", "min_length"}
_IN_BATCHES = {*OF_HOST, *(name for name, option in OPTIONS.items() if option.kind.per_prompt)}


def prompt_options(lines: Iterable[Line]) -> list[str]:
    """Return the names of the options that an engine must let prompts set."""
    names = {name for line in lines for name in line.fields}
    if "min_length" in names:
        names.add("min_new_tokens")
    return [name for name in per_prompt_options() if name in names]


def entries_for(lines: Iterable[Line]) -> int:
    """Return the number of entries of the longest table of ids that a line sets."""
    tables = (value for line in lines for name, value in line.fields.items() if name not in (*OF_HOST, *GRAMMARS))
    return max([EngineSizes.id_entries, *(len(value) for value in tables if isinstance(value, list | dict))])


def width_for(lines: Iterable[Line]) -> int:
    """Return the engine's prompt width."""
    return prompt_bucket(max(len(line.ids) for line in lines))


def check_lines(lines: Sequence[Line], cfg: GenerationConfig, tokenizer: Tokenizer, source: str, slots: bool) -> None:
    """Check the options that lines set; the error names the line. Warn about lengths that cannot be reached."""
    reader = None
    if slots:  # `PromptOptions` raises an error if engines do not support the config
        names = prompt_options(lines)
        reader = PromptReader(PromptOptions(cfg, width_for(lines), names, entries_for(lines)), tokenizer, KEY_IMPL)
    if others := [line for line in lines if not line.fields.keys() & _LENGTHS]:
        lengths, budgets = zip(*((len(line.ids), line.budget) for line in others), strict=True)
        warn_infeasible(cfg, np.asarray(lengths), np.asarray(budgets))
    for line in lines:
        if line.fields.keys() <= {"index"}:
            continue
        with line_errors(source, line.number):
            _refuse_shared(line, slots)
            if reader is not None:
                reader.read({"ids": line.ids, **line.fields})
                if not line.fields.keys() & _LENGTHS:
                    continue
            own, more = own_config(line, cfg, tokenizer)
            check_adapter(own.adapter, 0)  # the command attaches an adapter to all prompts
            budget = np.asarray([line.budget])
            warn_infeasible(own, np.asarray([len(line.ids)]), budget)
            if (grammar := more.get("allowed")) is not None:
                check_grammar(grammar, own, 1)
                check_room(grammar, own, budget)


def _refuse_shared(line: Line, slots: bool) -> None:
    """Raise an error if a line sets an option that has one value for all lines, or that its answers cannot show."""
    if "top_logprobs" in line.fields:
        raise InputError("top_logprobs is not offered in lines: an answer has the log-probabilities of its own tokens")
    possible = {*OF_HOST, *per_prompt_options()} if slots else _IN_BATCHES
    for name in line.fields:
        if name in OPTIONS and name not in possible:
            advice = f"use --{name.replace('_', '-')}" if OPTIONS[name].command else "leave it out"
            raise InputError(f"{name} has one value for all lines: {advice}")


def own_config(line: Line, cfg: GenerationConfig, tokenizer: Tokenizer) -> tuple[GenerationConfig, dict[str, Any]]:
    """Return the config for a line, and the fields of the line that are not options, as `translated` returns them."""
    fields = translated({"ids": line.ids, **line.fields}, tokenizer, cfg.model.vocab_size, KEY_IMPL)
    own = {name: value for name, value in fields.items() if name in OPTIONS}
    more = {name: value for name, value in fields.items() if name not in OPTIONS}
    return (with_own(cfg, own, _IN_BATCHES) if own else cfg), more


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
    stops = {cfg.stop_strings}
    for line in lines:
        if (name := next(iter(line.fields.keys() & set(GRAMMARS)), None)) is not None:
            text = json.dumps([name, line.fields[name]])
            if text not in grammars:
                grammars[text] = own_config(line, cfg, tokenizer)[1]["allowed"]
        if "stop_strings" in line.fields:
            stops.add(cfg.replace(stop_strings=line.fields["stop_strings"]).stop_strings)
    # Stop strings need at most one state per byte.
    texts = [Text().sets(value)[0] or () for value in stops if value is not None]
    needed = [sum(len(text.encode()) + 1 for text in each) + 1 for each in texts]
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
    indices: Any = np.asarray([line.fields["index"] for line in lines], np.uint32)
    data: Any = np.array(jax.random.key_data(folded(key, indices)))
    for place, line in enumerate(lines):
        if "seed" in line.fields:
            data[place] = seed_words(line.fields["seed"])
    return jax.random.wrap_key_data(data, impl=KEY_IMPL)
