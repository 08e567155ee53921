"""Check prompts and their options, and convert them to arrays of fixed sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxgen.config.availability import check_options, normal_form, refuse_unavailable
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.generation_options import OPTIONS
from jaxgen.config.kinds import Text
from jaxgen.config.option import GREEDY, SAMPLE
from jaxgen.config.values import is_array
from jaxgen.decoding.lanes import Lanes
from jaxgen.decoding.modes import mode_of
from jaxgen.decoding.request import Request
from jaxgen.engine.fields import LARGEST_INDEX, OF_HOST, translated, with_own
from jaxgen.errors import ConfigError, InputError, check_whole, shown
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.request.checks import check_adapter, check_grammar, check_key, check_room, typed_key
from jaxgen.text.tokenizer import Tokenizer

ENTRIES, WIDTH = 32, 8  # the default number of entries in a table of ids, and the default number of ids per entry
_NOT_OPTIONS = ("ids", "index", "key", "allowed", "metadata")  # see `translated`
_DYNAMIC = "dynamic RoPE"
_RECORDS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt in the form that the device needs.

    Attributes:
        index: a number that identifies the prompt's results, and is folded into the engine's key.
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


class Form:
    """The options that prompts may set, with defaults from the engine's config.

    `options` contains the names of these options. Each option must allow one value per prompt. If `options` is None,
    prompts may set all options that allow one value per prompt in an engine. Tables of ids have space for `entries`
    entries. `key_impl` is the implementation of random keys for prompts with their own key; None if prompts cannot have
    their own key. `adapters` is the number of adapters in the parameters.

    Attributes:
        cfg: the engine's config.
        full: the config of the program, with all options that a prompt may set.
        rare: the options in `full` that `cfg` does not turn on; see `Lanes`.
        width: the maximum number of tokens in a prompt.
        capacity: the maximum number of tokens in an answer.
        own: the names of the options that a prompt may set.
        off: for each option in `own`, the value that turns it off.
    """

    def __init__(
        self,
        cfg: GenerationConfig,
        tokenizer: Tokenizer | None,
        width: int,
        options: Collection[str] | None = None,
        entries: int = ENTRIES,
        key_impl: str | None = None,
        adapters: int = 0,
    ):
        refuse_unavailable(cfg)
        _check(cfg)
        self.cfg, self.tokenizer, self.width = cfg, tokenizer, width
        self._key_impl, self._adapters = key_impl, adapters
        self.capacity = int(cfg.max_new_tokens)  # pyright: ignore[reportArgumentType]
        names = per_prompt_options() if options is None else _needed(cfg, options)
        self.off = {name: _off_leaf(cfg, name, entries) for name in names if adapters or name != "adapter"}
        self.own = frozenset(self.off)
        one = cfg.replace(num_return_sequences=1, max_new_tokens=1)
        if cfg.on("do_sample"):  # a single value for all prompts would be compiled into the program
            one = one.replace(do_sample=[True])
        if cfg.on("min_length"):  # `read` computes each prompt's min_new_tokens instead
            least = cfg.min_new_tokens if cfg.on("min_new_tokens") else 1
            one = one.reset(["min_length"]).replace(min_new_tokens=least)
        usual = self._in_requests(one)
        self.full = self._in_requests(one.replace(do_sample=[True])).in_requests(self.off)
        self.rare = tuple(sorted(self.full.enabled - usual.enabled))
        self._defaults = self._leaves(cfg)

    def _in_requests(self, cfg: GenerationConfig) -> GenerationConfig:
        cfg = normal_form(cfg)
        return jax.tree.map(np.asarray, cfg.in_requests(cfg.enabled.intersection(self.off)))

    def _leaves(self, cfg: GenerationConfig) -> dict[str, Any]:
        return {name: self._leaf(cfg, name) for name in self.off}

    def _leaf(self, cfg: GenerationConfig, name: str) -> Any:
        """Return the leaf of an option, padded to the size that all prompts share."""
        off, kind = self.off[name], OPTIONS[name].kind
        if name == "do_sample":
            return np.bool_(cfg.on(name))
        if not cfg.on(name):
            return off
        return jax.tree.map(lambda off, x: _into(name, off, x), off, kind.leaf(getattr(cfg, name)))

    def read(self, given: Any, index: int) -> Prompt:
        """Check a prompt, and return it in the form that the device needs.

        Args:
            given: a prompt in the format of `Engine.submit`.
            index: the index to use if the prompt does not contain `index`.

        Raises:
            InputError, ConfigError, TypeError: the prompt or one of its options is invalid or not supported.
        """
        fields = translated(given, self.tokenizer, self.cfg.model.vocab_size, self._key_impl)
        named = {name: fields.pop(name) for name in _NOT_OPTIONS if name in fields}
        cfg = self._own(fields)
        ids = self._ids(named["ids"])
        if not cfg.on("max_new_tokens"):
            raise ConfigError("max_new_tokens must be a number: leave it out to use the engine's value")
        budget = int(cfg.max_new_tokens)  # pyright: ignore[reportArgumentType]
        if budget > self.capacity:
            raise ConfigError(
                f"max_new_tokens={budget} is more than the engine's max_new_tokens={self.capacity}, for which memory "
                "is reserved: lower it, or raise it in the engine's config"
            )
        if cfg.output_logprobs not in (None, self.cfg.output_logprobs):
            raise ConfigError(
                f"output_logprobs={cfg.output_logprobs!r} differs from the engine's {self.cfg.output_logprobs!r}: a "
                "prompt can only turn it off, with None"
            )
        if cfg.top_logprobs > self.cfg.top_logprobs:
            raise ConfigError(
                f"top_logprobs={cfg.top_logprobs} is more than the engine's top_logprobs={self.cfg.top_logprobs}"
            )
        grammar = self._grammar(named.get("allowed"), cfg, budget)
        options = self._leaves(cfg) if fields else dict(self._defaults)
        if cfg.on("min_length") and not cfg.on("min_new_tokens"):
            options["min_new_tokens"] = np.int32(max(0, int(cfg.min_length) - len(ids)))  # pyright: ignore
        asked = cfg.enabled.intersection(self.off) - {"adapter"}
        if cfg.on("min_length"):
            asked |= {"min_new_tokens"}
        return Prompt(
            index=check_whole("index", named.get("index", index), 0, LARGEST_INDEX),
            ids=ids,
            budget=budget,
            sequences=cfg.num_return_sequences,
            options=options,
            key=self._key_data(named.get("key"), cfg),
            grammar=grammar,
            stop_strings=self._stop_strings(cfg),
            logged=cfg.output_logprobs is not None,
            top_logprobs=cfg.top_logprobs,
            unusual=not asked.isdisjoint(self.rare),
            metadata=named.get("metadata"),
        )

    def _own(self, fields: Mapping[str, Any]) -> GenerationConfig:
        """Return the config with the prompt's options applied."""
        if not fields:
            return self.cfg
        possible = {*per_prompt_options(), *OF_HOST}
        allowed = self.own.union(OF_HOST) - (set() if "min_new_tokens" in self.own else {"min_length"})
        left_out = "; or name it in prompt_options" if possible.intersection(fields).difference(allowed) else ""
        if "adapter" in fields:
            check_adapter(self.cfg.replace(adapter=fields["adapter"]).adapter, self._adapters)
        return with_own(self.cfg, fields, allowed, left_out)

    def _ids(self, given: Any) -> np.ndarray:
        try:
            ids = np.asarray(given)
        except ValueError as error:
            raise TypeError(f"ids must be a list of token ids, got {shown(given)}") from error
        if not ids.size and ids.ndim == 1:
            raise InputError("the prompt has no tokens: pass at least one")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TypeError(f"ids must be a list of token ids, got {shown(given)}")
        vocab = self.cfg.model.vocab_size
        if len(wrong := ids[(ids < 0) | (ids >= vocab)]):
            raise InputError(f"the prompt contains the id {wrong[0]}, but the vocabulary is 0 to {vocab - 1}")
        if len(ids) > self.width:
            raise InputError(
                f"the prompt has {len(ids)} tokens, more than prompt_width={self.width}: raise it, or shorten "
                "the prompt"
            )
        return ids.astype(np.int32)

    def _key_data(self, key: Any, cfg: GenerationConfig) -> np.ndarray | None:
        if key is None:
            return None
        key = typed_key(key)
        if is_array(key) and key.ndim:
            raise InputError(f"key must be one key, got shape {list(key.shape)}")
        check_key(key, cfg.replace(do_sample=True), 1)
        if (impl := str(jax.random.key_impl(key))) != self._key_impl:
            raise InputError(f"key has the implementation {impl}, but the engine's keys have {self._key_impl}")
        return np.asarray(jax.random.key_data(key))

    def _grammar(self, allowed: Any, cfg: GenerationConfig, budget: int) -> TokenAutomaton | None:
        if allowed is None:
            return None
        if not isinstance(allowed, TokenAutomaton):
            raise TypeError(f"allowed must be a TokenAutomaton, got {type(allowed).__name__}")
        check_grammar(allowed, cfg, 1)
        check_room(allowed, cfg, np.asarray([budget]))
        return allowed

    def _stop_strings(self, cfg: GenerationConfig) -> tuple[str, ...] | None:
        if cfg.stop_strings is None:
            return None
        if self.tokenizer is None:
            raise InputError("stop_strings are text: pass the engine a tokenizer")
        return Text().sets(cfg.stop_strings)[0]

    def request(self, prompts: Sequence[Prompt], rows: int, grammar: Sequence[int], stops: Sequence[int]) -> Request:
        """Return the prompts as a request without keys, padded with empty prompts to `rows` prompts.

        `grammar` contains each prompt's initial state in the table of grammars, and `stops` contains each prompt's
        initial state in the table of stop strings.
        """
        ids, mask = np.zeros((rows, self.width), np.int32), np.zeros((rows, self.width), bool)
        budget, unusual = np.zeros(rows, np.int32), np.zeros(rows, bool)
        logged = None if self.cfg.output_logprobs is None else np.zeros(rows, bool)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt.ids)], mask[row, : len(prompt.ids)] = prompt.ids, True
            budget[row], unusual[row] = prompt.budget, prompt.unusual
            if logged is not None:
                logged[row] = prompt.logged
        missing = [self._defaults] * (rows - len(prompts))
        options = jax.tree.map(lambda *x: np.stack(x), *[prompt.options for prompt in prompts], *missing)
        first, stop = (np.asarray([*given, *[0] * (rows - len(given))], np.int32) for given in (grammar, stops))
        lanes = Lanes(unusual, logged, self.rare)
        return Request(ids, mask, budget, options, grammar=first, stop_strings=stop, lanes=lanes)


def not_in_slots(cfg: GenerationConfig) -> str | None:
    """Return the mode, option or RoPE type that prevents an engine from using a config, or None."""
    if not mode_of(cfg).refills:
        return cfg.mode
    if cfg.model.rope.type == "dynamic":
        return _DYNAMIC
    names = ("max_time", "token_healing", "slots", "guidance_scale", *_RECORDS)
    return next((name for name in names if cfg.on(name)), None)


def _check(cfg: GenerationConfig) -> None:
    """Raise an error for a config that an engine does not support."""
    reason = not_in_slots(cfg)
    if reason in (cfg.mode, _DYNAMIC):
        raise ConfigError(f"an engine works with greedy search, sampling and DoLa, not with {reason}: use generate")
    if not isinstance(cfg.max_new_tokens, int):
        raise ConfigError(
            f"max_new_tokens must be one number in an engine's config, got {shown(cfg.max_new_tokens)}: it is the "
            "maximum for an answer, and the default for prompts"
        )
    if reason in _RECORDS:
        raise ConfigError(f"{reason} is not offered by an engine: use output_logprobs, or generate")
    if reason is not None:
        raise ConfigError(f"{reason} is not an option of an engine: leave it out")
    for name in cfg.enabled:
        if OPTIONS[name].kind.prompt_count(getattr(cfg, name)) is not None:
            raise ConfigError(f"{name} has one value per prompt, but an engine has no fixed prompts: set one value")
    check_options(cfg, 1)


def per_prompt_options() -> list[str]:
    """Return all options that can have one value per prompt in an engine."""
    return [
        name
        for name, option in OPTIONS.items()
        if option.kind.traced
        and option.kind.per_prompt
        and not option.host
        and (option.modes is None or {GREEDY, SAMPLE}.intersection(option.modes))
        and name not in ("min_length", "guidance_scale")
    ]


def _needed(cfg: GenerationConfig, options: Collection[str]) -> list[str]:
    """Return the options that need one value per prompt: `do_sample`, those in `options`, and those `cfg` turns on."""
    possible = per_prompt_options()
    if unknown := sorted(set(options).difference(possible)):
        raise ConfigError(f"prompt_options has {unknown[0]}, which is not an option of a prompt: {', '.join(possible)}")
    needed = {"do_sample", *options, *(["min_new_tokens"] if cfg.on("min_length") else [])}
    return [name for name in possible if name in needed or cfg.on(name)]


def _off_leaf(cfg: GenerationConfig, name: str, entries: int) -> Any:
    """Return the leaf that turns an option off. Tables are large enough for the values in `cfg`."""
    kind, width = OPTIONS[name].kind, WIDTH
    if cfg.on(name):
        for leaf in jax.tree.leaves(kind.leaf(getattr(cfg, name))):
            entries = max([entries, *np.shape(leaf)[:1]])
            width = max([width, *np.shape(leaf)[1:]])
    return kind.off_leaf(entries, width)


def _into(name: str, off: np.ndarray, value: Any) -> np.ndarray:
    """Pad an option's array to the shape of `off`, taking the padding from `off`."""
    value = np.asarray(value, off.dtype)
    if value.ndim and any(size > most for size, most in zip(value.shape, off.shape, strict=True)):
        # The value may be padded with unused entries. Only the used entries have to fit into the engine's table.
        used = np.argwhere(value != off.flat[0]).max(axis=0, initial=-1) + 1
        if any(used > off.shape):
            raise ConfigError(f"{name} has {used.tolist()} entries, but the engine's table has {list(off.shape)}")
        value = value[tuple(map(slice, used))]
    leaf = np.array(off)
    leaf[tuple(map(slice, value.shape))] = value
    return leaf
