"""Prompts that are all known in advance and may set options of their own, as the lines of --input do."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxgen.buckets import power_of_two, prompt_bucket
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.config.kinds import Text
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.request.checks import check_adapter, check_grammar, check_lengths, check_room
from jaxgen.core.request.fields import GRAMMARS, OF_HOST, translated, with_own
from jaxgen.core.request.prompt import PromptReader
from jaxgen.core.request.prompt_options import PromptOptions, per_prompt_options
from jaxgen.core.request.random_keys import KEY_IMPL, own_keys
from jaxgen.core.request.running.automaton_tables import with_space_for
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.core.text.tokenizer import Tokenizer

# The table of stop strings has space for all of them, but for no more than this number of states, unless one prompt
# needs more.
_STATES = 4096
_LENGTHS = {"max_new_tokens", "min_new_tokens", "min_length"}
_IN_CALLS = frozenset([*OF_HOST, *(name for name, option in OPTIONS.items() if option.kind.per_prompt)])


class KnownPrompt(Protocol):
    """A prompt whose length and options are known."""

    @property
    def ids(self) -> list[int]:
        """The tokens."""
        ...

    @property
    def budget(self) -> int:
        """The maximum number of new tokens."""
        ...

    @property
    def fields(self) -> Mapping[str, Any]:
        """The options, and the index, in the format of `Engine.submit`."""
        ...


class OwnCall(NamedTuple):
    """The config and the grammar of a prompt, or of several prompts that set the same options."""

    cfg: GenerationConfig
    grammar: TokenAutomaton | None


@dataclasses.dataclass(frozen=True)
class KnownPrompts:
    """Prompts that an engine answers or, if `in_engine` is False, calls to generate().

    `cfg` is the config for prompts that set no options of their own.
    """

    prompts: Sequence[KnownPrompt]
    cfg: GenerationConfig
    tokenizer: Tokenizer
    in_engine: bool

    @property
    def possible(self) -> frozenset[str]:
        """The options that a prompt may set."""
        return frozenset([*OF_HOST, *per_prompt_options()]) if self.in_engine else _IN_CALLS

    @property
    def options(self) -> list[str]:
        """The options that the engine must let prompts set."""
        names = {name for prompt in self.prompts for name in prompt.fields}
        if "min_length" in names:
            names.add("min_new_tokens")
        return [name for name in per_prompt_options() if name in names]

    @functools.cached_property
    def reader(self) -> PromptReader:
        """The engine's reader of prompts. An error is raised if an engine does not support the config."""
        options = PromptOptions(self.cfg, self._width, self.options, self._entries)
        return PromptReader(options, self.tokenizer, KEY_IMPL)

    @property
    def _width(self) -> int:
        return prompt_bucket(max(len(prompt.ids) for prompt in self.prompts))

    @property
    def _entries(self) -> int:
        """The number of entries of the longest table of ids that a prompt sets."""
        names = self.options
        tables = (prompt.fields.get(name) for prompt in self.prompts for name in names)
        return max([EngineSizes.id_entries, *(len(value) for value in tables if isinstance(value, list | dict))])

    def call(self, prompt: KnownPrompt) -> OwnCall:
        """Return the config and the grammar of a prompt. Raise an error if one of its options is invalid."""
        fields = {"ids": prompt.ids, **prompt.fields}
        values = translated(fields, self.tokenizer, self.cfg.model.vocab_size, None)
        own = {name: value for name, value in values.items() if name in OPTIONS}
        return OwnCall(with_own(self.cfg, own, _IN_CALLS) if own else self.cfg, values.get("allowed"))

    def check_shared(self) -> None:
        """Check the config with the lengths of the prompts that set no lengths, and warn as `generate` does."""
        if self.in_engine:
            _ = self.reader
        if others := [prompt for prompt in self.prompts if not prompt.fields.keys() & _LENGTHS]:
            _check(OwnCall(self.cfg, None), others)

    def check(self, prompt: KnownPrompt) -> None:
        """Check the options that a prompt sets, and warn of lengths that cannot be reached."""
        if self.in_engine:
            self.reader.read({"ids": prompt.ids, **prompt.fields})
        if not self.in_engine or prompt.fields.keys() & _LENGTHS:
            _check(self.call(prompt), [prompt])

    def sizes(self, grammar: TokenAutomaton | None, least: EngineSizes) -> EngineSizes:
        """Return the sizes of an engine for all prompts; its tables are at least as large as in `least`.

        `grammar` applies to prompts without a grammar of their own.
        """
        grammars, stops = {} if grammar is None else {"": grammar}, {_stop_strings(self.cfg)}
        for prompt in self.prompts:
            names = [name for name in (*GRAMMARS, "unsupported") if name in prompt.fields]
            own = json.dumps({name: prompt.fields[name] for name in names})
            if names and own not in grammars and (automaton := self.call(prompt).grammar) is not None:
                grammars[own] = automaton
            if "stop_strings" in prompt.fields:
                stops.add(_stop_strings(self.cfg.replace(stop_strings=prompt.fields["stop_strings"])))
        # Stop strings need at most one state per byte.
        needed = [sum(len(text.encode()) + 1 for text in strings) + 1 for strings in stops if strings]
        space = min(sum(needed), max([*needed, _STATES]))
        states = power_of_two(space, least.stop_states) if needed else least.stop_states
        sizes = dataclasses.replace(least, prompt_width=self._width, id_entries=self._entries, stop_states=states)
        return with_space_for(grammars.values(), sizes)

    def keys(self, key: jax.Array) -> jax.Array:
        """Return each prompt's key: that of its own seed, or else `fold_in(key, index)`."""
        fields = [prompt.fields for prompt in self.prompts]
        return own_keys(key, [each["index"] for each in fields], [each.get("seed") for each in fields])


def _stop_strings(cfg: GenerationConfig) -> tuple[str, ...]:
    return Text().sets(cfg.stop_strings)[0] or ()


def _check(call: OwnCall, prompts: Sequence[KnownPrompt]) -> None:
    """Raise an error if prompts without adapters of their own cannot be answered, and warn as `generate` does."""
    lengths, budgets = (np.asarray(x) for x in zip(*((len(each.ids), each.budget) for each in prompts), strict=True))
    check_adapter(call.cfg.adapter, 0)
    check_lengths(call.cfg, lengths, budgets, begun=0)
    if call.grammar is not None:
        check_grammar(call.grammar, call.cfg, len(prompts))
        check_room(call.grammar, call.cfg, budgets)
