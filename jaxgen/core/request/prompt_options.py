"""The options that prompts of a running loop may set, in arrays of fixed sizes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from jaxgen.core.config.availability import check_options, normal_form, refuse_unavailable
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.config.generation_options import OPTIONS, RECORDS
from jaxgen.core.config.option import GREEDY, SAMPLE
from jaxgen.core.decoding.modes import mode_of
from jaxgen.errors import ConfigError, shown

ENTRIES, WIDTH = 32, 8  # the default number of entries in a table of ids, and the default number of ids per entry
_DYNAMIC = "dynamic RoPE"


class PromptOptions:
    """The options that prompts may set, with defaults from the engine's config.

    `options` contains the names of these options. Each option must allow one value per prompt. If `options` is None,
    prompts may set all options that allow one value per prompt in an engine. Tables of ids have space for `entries`
    entries.

    Attributes:
        cfg: the engine's config.
        full: the config of the program, with all options that a prompt may set.
        rare: the options in `full` that `cfg` does not turn on; see `Lanes`.
        width: the maximum number of tokens in a prompt.
        capacity: the maximum number of tokens in an answer.
        own: the names of the options that a prompt may set.
        off: for each option in `own`, the value that turns it off.
        adapters: the number of adapters in the parameters.
    """

    def __init__(
        self,
        cfg: GenerationConfig,
        width: int,
        options: Collection[str] | None = None,
        entries: int = ENTRIES,
        adapters: int = 0,
    ):
        _check(cfg)
        self.cfg, self.width, self.adapters = cfg, width, adapters
        self.capacity = int(cfg.max_new_tokens)  # pyright: ignore[reportArgumentType]
        names = per_prompt_options() if options is None else _needed(cfg, options)
        self.off = {name: _off_leaf(cfg, name, entries) for name in names if adapters or name != "adapter"}
        self.own = frozenset(self.off)
        one = cfg.replace(num_return_sequences=1, max_new_tokens=1)
        if cfg.on("do_sample"):  # a single value for all prompts would be compiled into the program
            one = one.replace(do_sample=[True])
        if cfg.on("min_length"):  # `leaves` computes each prompt's min_new_tokens instead
            least = cfg.min_new_tokens if cfg.on("min_new_tokens") else 1
            one = one.reset(["min_length"]).replace(min_new_tokens=least)
        usual = self._in_requests(one)
        self.full = self._in_requests(one.replace(do_sample=[True])).in_requests(self.off)
        self.rare = tuple(sorted(self.full.enabled - usual.enabled))
        self._defaults = {name: self._leaf(cfg, name) for name in self.off}

    def _in_requests(self, cfg: GenerationConfig) -> GenerationConfig:
        cfg = normal_form(cfg)
        return jax.tree.map(np.asarray, cfg.in_requests(cfg.enabled.intersection(self.off)))

    def leaves(self, cfg: GenerationConfig | None = None, length: int = 0) -> dict[str, Any]:
        """Return the leaf of each option in `own`, for a prompt of `length` tokens.

        `cfg` is the config with the prompt's own options; by default, the prompt sets none.
        """
        leaves = dict(self._defaults) if cfg is None else {name: self._leaf(cfg, name) for name in self.off}
        cfg = cfg or self.cfg
        if cfg.on("min_length") and not cfg.on("min_new_tokens"):
            leaves["min_new_tokens"] = np.int32(max(0, int(cfg.min_length) - length))  # pyright: ignore
        return leaves

    def is_unusual(self, cfg: GenerationConfig) -> bool:
        """Return True if a prompt's config turns on an option that the engine's config does not turn on."""
        on = cfg.enabled.intersection(self.off) - {"adapter"}
        return not (on | {"min_new_tokens"} if cfg.on("min_length") else on).isdisjoint(self.rare)

    def _leaf(self, cfg: GenerationConfig, name: str) -> Any:
        """Return the leaf of an option, padded to the size that all prompts share."""
        off, kind = self.off[name], OPTIONS[name].kind
        if name == "do_sample":
            return np.bool_(cfg.on(name))
        if not cfg.on(name):
            return off
        return jax.tree.map(lambda off, x: _into(name, off, x), off, kind.leaf(getattr(cfg, name)))


def not_in_slots(cfg: GenerationConfig) -> str | None:
    """Return the mode, option or RoPE type that prevents an engine from using a config, or None."""
    if not mode_of(cfg).refills:
        return cfg.mode
    if cfg.model.has_dynamic_rope:
        return _DYNAMIC
    names = ("max_time", "token_healing", "slots", "guidance_scale", *RECORDS)
    return next((name for name in names if cfg.on(name)), None)


def _check(cfg: GenerationConfig) -> None:
    """Raise an error for a config that an engine does not support."""
    refuse_unavailable(cfg)
    reason = not_in_slots(cfg)
    if reason in (cfg.mode, _DYNAMIC):
        raise ConfigError(f"an engine works with greedy search, sampling and DoLa, not with {reason}: use generate")
    if not isinstance(cfg.max_new_tokens, int):
        raise ConfigError(
            f"max_new_tokens must be one number in an engine's config, got {shown(cfg.max_new_tokens)}: it is the "
            "maximum for an answer, and the default for prompts"
        )
    if reason in RECORDS:
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
    if isinstance(options, str):
        raise TypeError(f"prompt_options must be a list of names, got {options!r}")
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
    if value.ndim and any(size > limit for size, limit in zip(value.shape, off.shape, strict=True)):
        # The value may be padded with unused entries. Only the used entries have to fit into the engine's table.
        used = np.argwhere(value != off.flat[0]).max(axis=0, initial=-1) + 1
        if any(used > off.shape):
            count, space = (" x ".join(map(str, shape)) for shape in (used, off.shape))
            raise ConfigError(
                f"{name} has {count} entries, but the engine has space for {space}: pass fewer or shorter ones, or "
                "create the engine with larger id_entries, or with a value of this size in its config"
            )
        value = value[tuple(map(slice, used))]
    leaf = np.array(off)
    leaf[tuple(map(slice, value.shape))] = value
    return leaf
