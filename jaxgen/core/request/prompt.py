"""Read a prompt for a running loop: check it and its options, and convert them to arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.kinds import Text
from jaxgen.core.config.values import is_array
from jaxgen.core.decoding.continuous.lanes import Lanes
from jaxgen.core.decoding.request import Request
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.request.checks import check_adapter, check_grammar, check_key, check_room, require_tokenizer, typed_key
from jaxgen.core.request.fields import OF_HOST, known_fields, translated, with_own
from jaxgen.core.request.inputs import row_ids
from jaxgen.core.request.lengths import Lengths
from jaxgen.core.request.prompt_options import PromptOptions, per_prompt_options
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import ConfigError, InputError

_NOT_OPTIONS = ("ids", "index", "key", "allowed", "metadata")  # see `translated`


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt in the form that the device needs.

    Attributes:
        index: a number that identifies the prompt's results, and is folded into the engine's key; -1 until the prompt
            has one.
        ids: int32[n], the tokens.
        budget: the maximum number of new tokens in each sequence.
        sequences: the number of sequences to generate.
        options: the value of each option that a prompt may set, converted to arrays; see `Kind.leaf`.
        key: the data of the prompt's own key, or None.
        grammar: the automaton that the answers must follow, or None.
        stop_strings: the strings that end the answers, or None.
        logged: True if the prompt's results include log-probabilities.
        top_logprobs: the number of most likely tokens in the results for each position, with log-probabilities.
        unusual: True if the prompt turns on an option that the engine's config does not turn on.
        metadata: the caller's own data, which the prompt's completions repeat.
    """

    index: int
    ids: np.ndarray
    budget: int
    sequences: int
    options: dict[str, Any]
    key: np.ndarray | None = None
    grammar: TokenAutomaton | None = None
    stop_strings: tuple[str, ...] | None = None
    logged: bool = False
    top_logprobs: int = 0
    unusual: bool = False
    metadata: Any = None


@dataclasses.dataclass(frozen=True)
class PromptReader:
    """Reads the prompts of a running loop.

    Attributes:
        options: the options that prompts may set, with defaults from the config.
        tokenizer: the tokenizer for prompts given as text, and for stop strings; or None.
        key_impl: the implementation of random keys for prompts with their own key; None if prompts cannot have one.
    """

    options: PromptOptions
    tokenizer: Tokenizer | None = None
    key_impl: str | None = None

    @property
    def cfg(self) -> GenerationConfig:
        """The config whose options apply to prompts that do not set their own."""
        return self.options.cfg

    @property
    def lengths(self) -> Lengths:
        """The limits for a prompt and its answer."""
        return Lengths(self.options.width, self.options.capacity, context=self.cfg.model.short_length)

    def read(self, prompt: Any, **more: Any) -> Prompt:
        """Check a prompt in the format of `Engine.submit`, and return it in the form that the device needs.

        `more` are further fields of the prompt.

        Raises:
            InputError, ConfigError, TypeError: the prompt or one of its options is invalid or not supported.
        """
        fields = known_fields(prompt)
        if both := fields.keys() & more.keys():
            raise InputError(f"{min(both)} is in the prompt and among the options: pass it once")
        fields = translated(fields | more, self.tokenizer, self.cfg.model.vocab_size, self.key_impl)
        named = {name: fields.pop(name) for name in _NOT_OPTIONS if name in fields}
        cfg = self._own(fields)
        ids = row_ids(named["ids"], cfg.model)
        if not cfg.on("max_new_tokens"):
            raise ConfigError("max_new_tokens must be a number: leave it out to use the engine's value")
        budget = self.lengths.budget(len(ids), int(cfg.max_new_tokens))  # pyright: ignore[reportArgumentType]
        if cfg.output_logprobs not in (None, self.cfg.output_logprobs):
            raise ConfigError(
                f"output_logprobs={cfg.output_logprobs!r} differs from the engine's {self.cfg.output_logprobs!r}: a "
                "prompt can only turn it off, with None"
            )
        if cfg.top_logprobs > self.cfg.top_logprobs:
            raise ConfigError(
                f"top_logprobs={cfg.top_logprobs} is more than the engine's top_logprobs={self.cfg.top_logprobs}"
            )
        return Prompt(
            index=named.get("index", -1),
            ids=ids,
            budget=budget,
            sequences=cfg.num_return_sequences,
            options=self.options.leaves(cfg if fields else None, len(ids)),
            key=self._key_data(named.get("key"), cfg),
            grammar=None if (allowed := named.get("allowed")) is None else self._grammar(allowed, budget),
            stop_strings=self._stop_strings(cfg),
            logged=cfg.output_logprobs is not None,
            top_logprobs=cfg.top_logprobs,
            unusual=self.options.is_unusual(cfg),
            metadata=named.get("metadata"),
        )

    def _own(self, fields: Mapping[str, Any]) -> GenerationConfig:
        """Return the config with the prompt's options applied."""
        if not fields:
            return self.cfg
        own, possible = self.options.own, {*per_prompt_options(), *OF_HOST}
        allowed = own.union(OF_HOST) - (set() if "min_new_tokens" in own else {"min_length"})
        left_out = "; or name it in prompt_options" if possible.intersection(fields).difference(allowed) else ""
        if "adapter" in fields:
            check_adapter(self.cfg.replace(adapter=fields["adapter"]).adapter, self.options.adapters)
        return with_own(self.cfg, fields, allowed, left_out)

    def _key_data(self, key: Any, cfg: GenerationConfig) -> np.ndarray | None:
        if key is None:
            return None
        key = typed_key(key)
        if is_array(key) and key.ndim:
            raise InputError(f"key must be one key, got shape {list(key.shape)}")
        check_key(key, cfg.replace(do_sample=True), 1)
        if (impl := str(jax.random.key_impl(key))) != self.key_impl:
            raise InputError(f"key has the implementation {impl}, but the engine's keys have {self.key_impl}")
        return np.asarray(jax.random.key_data(key))

    def following(self, prompt: Prompt, grammar: TokenAutomaton) -> Prompt:
        """Return a prompt whose answers must follow a grammar."""
        return dataclasses.replace(prompt, grammar=self._grammar(grammar, prompt.budget))

    def _grammar(self, allowed: Any, budget: int) -> TokenAutomaton:
        if not isinstance(allowed, TokenAutomaton):
            raise TypeError(f"allowed must be a TokenAutomaton, got {type(allowed).__name__}")
        check_grammar(allowed, self.cfg, 1)
        check_room(allowed, self.cfg, np.asarray([budget]))
        return allowed

    def _stop_strings(self, cfg: GenerationConfig) -> tuple[str, ...] | None:
        if cfg.stop_strings is None:
            return None
        require_tokenizer(self.tokenizer)
        return Text().sets(cfg.stop_strings)[0]

    def stack(self, prompts: Sequence[Prompt], rows: int, grammar: Sequence[int], stops: Sequence[int]) -> Request:
        """Return the prompts as a request without keys, padded with empty prompts to `rows` prompts.

        `grammar` contains each prompt's initial state in the table of grammars, and `stops` contains each prompt's
        initial state in the table of stop strings.
        """
        ids, mask = np.zeros((rows, self.options.width), np.int32), np.zeros((rows, self.options.width), bool)
        budget, unusual = np.zeros(rows, np.int32), np.zeros(rows, bool)
        logged = None if self.cfg.output_logprobs is None else np.zeros(rows, bool)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt.ids)], mask[row, : len(prompt.ids)] = prompt.ids, True
            budget[row], unusual[row] = prompt.budget, prompt.unusual
            if logged is not None:
                logged[row] = prompt.logged
        missing = [self.options.leaves()] * (rows - len(prompts))
        options = jax.tree.map(lambda *x: np.stack(x), *[prompt.options for prompt in prompts], *missing)
        first, stop = (np.asarray([*states, *[0] * (rows - len(states))], np.int32) for states in (grammar, stops))
        lanes = Lanes(unusual, logged, self.options.rare)
        return Request(ids, mask, budget, options, grammar=first, stop_strings=stop, lanes=lanes)
