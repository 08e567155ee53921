"""GenerationConfig: every option of transformers 4.41.1's generate(), with the same name and default.

The config is a pytree. Everything that determines the program is part of its structure: the mode, the model, the static
options, and the set of enabled options. So changing a traced value never causes recompilation, and the structure alone
determines which processors run, even inside the caller's own jit.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from jaxgen.core.config.constraints import as_forced_words
from jaxgen.core.config.file_options import usable_options
from jaxgen.core.config.generation_options import OPTIONS, TRACED, GenerationOptions
from jaxgen.core.config.option import (
    ASSISTED,
    BEAM,
    BEAM_SAMPLE,
    CONSTRAINED,
    CONTRASTIVE,
    DOLA,
    GREEDY,
    GROUP_BEAM,
    PROMPT_LOOKUP,
    SAMPLE,
    Option,
)
from jaxgen.core.config.tables import eos_list
from jaxgen.core.config.values import is_array, is_tracer, thawed
from jaxgen.core.model.config import ModelConfig
from jaxgen.errors import ConfigError, shown, warn

# The smallest repetition penalty that transformers recommends for DoLa.
DOLA_PENALTY = 1.2
_NAMES = (*OPTIONS, "model")
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_STATIC = tuple(name for name in _NAMES if name not in TRACED)
_PER_PROMPT = {name: option for name, option in TRACED.items() if option.kind.per_prompt and not option.host}


@dataclasses.dataclass(frozen=True)
class _Inherited:
    """Names of the options that have the checkpoint's values, and the checkpoint's config (None without a checkpoint).

    Comparisons ignore the fields, so different values do not cause recompilation.
    """

    names: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    config: GenerationConfig | None = dataclasses.field(default=None, compare=False)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _InRequest:
    """Placeholder for an option value that is stored in the requests; the placeholder is never a neutral value."""


IN_REQUEST = _InRequest()


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class GenerationConfig(GenerationOptions):
    """Options of `generate`. Fields, meanings and defaults are those of transformers 4.41.1's `GenerationConfig`.

    docs/options.md lists the options; their records are in `jaxgen.core.config.generation_options`. Fields from later
    releases default to None, which means off. Most options accept one value for all prompts or one value per prompt.
    Options that jaxgen recognizes but does not support are rejected. Only `from_hf` leaves them out, with a warning, so
    that it can read every checkpoint's config. `model` is the checkpoint's `ModelConfig`; `generate` needs it.

    An option is in one of four states:

    | state | attribute | in `enabled` | in the pytree |
    | --- | --- | --- | --- |
    | off | the neutral value | no | nothing for a traced option, the value in the structure for a static one |
    | on, static | the value | yes | the value in the structure |
    | on, traced | the value, or arrays | yes | a leaf, or leaves |
    | on, in the requests (see `split`) | `IN_REQUEST` | yes | `IN_REQUEST` in the structure |

    >>> cfg = GenerationConfig(do_sample=True, temperature=0.7)
    >>> cfg.replace(temperature=1).temperature
    1.0

    Raises:
        ConfigError: a value is not allowed, or options contradict each other.
        TypeError: a value has the wrong type.
    """

    # `model` is None until it is set. `model_of` checks configs from callers, so other code can assume a `ModelConfig`.
    model: ModelConfig = None  # pyright: ignore[reportAssignmentType]

    _inherited = _Inherited()
    # The names of the options that are on.
    enabled: ClassVar[frozenset[str]] = frozenset(
        name for name, option in OPTIONS.items() if not option.kind.is_off(option.default)
    )

    def __post_init__(self):
        values = vars(self)
        given = {name: values[name] for name, option in OPTIONS.items() if values[name] is not option.default}
        self._set(given)
        _refuse_values(self, given)
        _refuse_endless(self)

    def _set(self, fields: Mapping[str, Any]) -> None:
        values = {name: OPTIONS[name].parse(value) for name, value in fields.items() if name != "model"}
        on = {name for name, value in values.items() if not OPTIONS[name].kind.is_off(value)}
        vars(self).update({**fields, **values}, enabled=self.enabled.difference(values) | on)
        if self.model is not None and not isinstance(self.model, ModelConfig):
            raise TypeError(f"model must be a ModelConfig, got {type(self.model).__name__}")
        _check(self)

    def replace(self, **fields: Any) -> GenerationConfig:
        """Return a copy with new values for some fields.

        Raises:
            ConfigError: a field is unknown (the message suggests a similar name), or a value is not allowed.
        """
        _refuse_unknown(fields)
        inherited = dataclasses.replace(self._inherited, names=self._inherited.names.difference(fields))
        config = self._changed({"_inherited": inherited})
        config._set(fields)
        _refuse_values(config, fields)
        if "eos_token_id" in fields or _vocabulary(config) != _vocabulary(self):
            _refuse_endless(config)
        return config

    def greedy(self) -> GenerationConfig:
        """Return a copy for greedy search with one sequence per prompt; options of other modes have their defaults."""
        config = self.replace(do_sample=False, num_beams=1, num_return_sequences=1, penalty_alpha=None)
        unread = [option for option in config.unread() if option.is_given(getattr(config, option.name))]
        return config.replace(**{option.name: option.default for option in unread})

    def split(self) -> tuple[GenerationConfig, dict[str, Any]]:
        """Return the config that all prompts share, and a dict of the values of enabled per-prompt options.

        Each value is a pytree of arrays, which apply to all prompts or have one entry per prompt. In the returned
        config, these options remain on, with the placeholder `IN_REQUEST` as their value.
        """
        values = {
            name: leaf
            for name, option in _PER_PROMPT.items()
            if name in self.enabled and (leaf := option.kind.leaf(getattr(self, name))) is not None
        }
        return self._changed(dict.fromkeys(values, IN_REQUEST)), values

    def in_requests(self, names: Collection[str]) -> GenerationConfig:
        """Return an unchecked copy in which the options in `names` are on and have the value `IN_REQUEST`."""
        return self._changed(dict.fromkeys(names, IN_REQUEST) | {"enabled": self.enabled.union(names)})

    def reset(self, names: Collection[str]) -> GenerationConfig:
        """Return an unchecked copy in which the options in `names` have their neutral values."""
        return self._changed(
            {name: OPTIONS[name].kind.neutral for name in names} | {"enabled": self.enabled.difference(names)}
        )

    def _changed(self, attributes: dict[str, Any]) -> GenerationConfig:
        """Return a copy with changed attributes and without cached properties."""
        config = object.__new__(type(self))
        kept = {name: value for name, value in vars(self).items() if name not in ("_flat", "mode")}
        vars(config).update(kept | attributes)
        return config

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], model: ModelConfig | None = None) -> GenerationConfig:
        """Create a config from the contents of a generation_config.json, without transformers' bookkeeping fields.

        A warning names the options that are left out: unknown ones, unsupported ones that do not change the tokens, and
        invalid ones that the decode mode does not read, such as `temperature=0.0` in greedy search.

        `eos_token_id` may contain ids outside the model's vocabulary, because some checkpoints have them. The
        constructor and `replace` reject such ids. An option in `config` that the decode mode does not read causes no
        warning unless `replace` sets it later.

        Raises:
            ConfigError: a value is not allowed.
        """
        fields, notes = usable_options(cls, config)
        if notes:
            warn(f"generation_config.json: {'; '.join(notes)}")
        result = cls()
        vars(result)["_inherited"] = _Inherited(frozenset(fields))
        result._set({**fields, "model": model})
        return result._changed({"_inherited": _Inherited(frozenset(fields), result)})

    def of_checkpoint(self) -> GenerationConfig:
        """Return the config to save with the model: the options that `from_hf` read, not those that `replace` changed.

        The ids of special tokens are the current ones, because they describe the model. A config that does not come
        from `from_hf` is returned as it is.
        """
        if (config := self._inherited.config) is None:
            return self
        changed = {name: getattr(self, name) for name in _SPECIAL if name not in self._inherited.names}
        return config.replace(**changed, model=self.model)

    def to_hf(self) -> dict[str, Any]:
        """Return the transformers options that differ from their defaults, as a dict for a generation_config.json.

        `constraints` become part of `force_words_ids`, which has the same meaning.

        Raises:
            ConfigError: a field has one value per prompt, which transformers cannot express.
        """
        fields = {}
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if option.kind.prompt_count(value) is not None:
                raise ConfigError(f"{name} has one value per prompt; generation_config.json stores only one value")
            if option.kind.traced:
                value = option.parse(jax.device_get(value))
            both_off = option.kind.is_off(value) and option.kind.is_off(option.default)
            if option.since != "jaxgen" and value != option.default and not (option.kind.traced and both_off):
                fields[name] = thawed(value)
        if "constraints" in fields:  # constraints are objects, which JSON cannot store
            words = as_forced_words(fields.pop("constraints"))
            fields["force_words_ids"] = [*words, *fields.get("force_words_ids", [])]
        return fields

    def on(self, name: str) -> bool:
        """Return True if an option is on, that is, not at its neutral value.

        Raises:
            KeyError: the name is unknown.
        """
        return OPTIONS[name].name in self.enabled

    @property
    def constrained(self) -> bool:
        """True if `constraints` or `force_words_ids` is set."""
        return self.constraints is not None or self.force_words_ids is not None

    @property
    def records(self) -> bool:
        """True if any per-step values are requested."""
        of_layers = self.output_attentions or self.output_hidden_states or self.output_routed_experts
        return bool(self.output_scores or self.output_logits or of_layers)

    @functools.cached_property
    def mode(self) -> str:
        """The decode mode: transformers' `GenerationMode`, chosen as in `get_generation_mode`, or "prompt_lookup".

        Raises:
            ConfigError: two options select different modes.
        """
        if self.constrained:
            mode = CONSTRAINED
        elif self.num_beams == 1:
            if self.on("do_sample"):
                mode = SAMPLE
            elif self.on("penalty_alpha") and (not isinstance(self.top_k, int) or self.top_k > 1):
                mode = CONTRASTIVE
            else:
                mode = GREEDY
        elif self.num_beam_groups > 1:
            mode = GROUP_BEAM
        else:
            mode = BEAM_SAMPLE if self.on("do_sample") else BEAM
        others = {"prompt_lookup_num_tokens": PROMPT_LOOKUP, "assistant_early_exit": ASSISTED, "dola_layers": DOLA}
        chosen = [name for name in others if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} exclude each other: choose one")
        if chosen and mode not in (GREEDY, SAMPLE):
            raise ConfigError(f"{chosen[0]} works with greedy search and sampling, not with {mode}")
        return others[chosen[0]] if chosen else mode

    def unread(self) -> list[Option]:
        """Return the options that the decode mode does not read."""
        modes = {self.mode, SAMPLE} if self.on("do_sample") else {self.mode}
        return [option for option in OPTIONS.values() if option.modes is not None and modes.isdisjoint(option.modes)]

    def tree_flatten(self):
        """Split the config into its traced values and its static data."""
        return self._flat

    @functools.cached_property
    def _flat(self) -> tuple[tuple, tuple]:
        values = vars(self)
        # Without max_length, max_new_tokens determines the array sizes of a program traced with this config.
        sized = isinstance(self.max_new_tokens, int) and self.max_length == OPTIONS["max_length"].default
        static = {"max_new_tokens": self.max_new_tokens} if sized else {}
        if isinstance(self.do_sample, bool):
            static["do_sample"] = self.do_sample
        # In contrastive search, top_k also determines array sizes.
        contrastive = self.on("penalty_alpha") and self.num_beams == 1 and not self.on("do_sample")
        if contrastive and isinstance(self.top_k, int):
            static["top_k"] = self.top_k
        on = [name in self.enabled and name not in static for name in TRACED]
        leaves = [
            (value if (value := values[name]) is IN_REQUEST else option.kind.leaf(value)) if is_on else None
            for is_on, (name, option) in zip(on, TRACED.items(), strict=True)
        ]
        fixed = tuple([values[name] for name in _STATIC])
        return tuple(leaves), (fixed, tuple(static.items()), self._inherited, self.enabled)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        """Rebuild from the result of `tree_flatten`. Values are not checked, because jax may pass arbitrary objects."""
        config = object.__new__(cls)
        values, sized, inherited, enabled = static
        vars(config).update(zip(_STATIC, values, strict=True), _inherited=inherited, enabled=enabled)
        for (name, option), leaf in zip(TRACED.items(), leaves, strict=True):
            vars(config)[name] = option.kind.neutral if leaf is None else leaf
        vars(config).update(sized)
        return config

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GenerationConfig):
            return NotImplemented
        (mine, structure), (theirs, other_structure) = jax.tree.flatten(self), jax.tree.flatten(other)
        return structure == other_structure and all(map(np.array_equal, mine, theirs))

    def __hash__(self) -> int:
        raise TypeError(
            "a GenerationConfig cannot be hashed. It is a pytree: pass it to a compiled function as an ordinary "
            "argument, without static_argnums or static_argnames"
        )

    def __repr__(self) -> str:
        """Show the options that differ from their defaults, and the model in a few words."""
        values = [(name, option.default, getattr(self, name)) for name, option in OPTIONS.items()]
        given = [f"{name}={value!r}" for name, default, value in values if is_array(value) or value != default]
        if (model := self.model) is not None:
            size = f"{model.num_hidden_layers} layers, hidden size {model.hidden_size}"
            given.append(f"model=<{model.model_type}, {size}, {model.vocab_size:,} tokens, {model.dtype}>")
        return f"GenerationConfig({', '.join(given)})"


# Notebooks complete the names of options from the signature.
_FIELDS = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=...) for name in _NAMES]
_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
vars(GenerationConfig.replace)["__signature__"] = inspect.Signature([_SELF, *_FIELDS])


def model_of(cfg: GenerationConfig) -> ModelConfig:
    """Return `cfg.model`. Raise ConfigError if the model is None, and TypeError if `cfg` is not a GenerationConfig."""
    if not isinstance(cfg, GenerationConfig):
        raise TypeError(
            f"cfg must be a GenerationConfig, got {type(cfg).__name__}: load_hf(path) returns one with the parameters, "
            "GenerationConfig.from_hf(fields, model) reads a dict"
        )
    if cfg.model is None:
        raise ConfigError("cfg.model is None: set it to the checkpoint's ModelConfig (load_hf does)")
    return cfg.model


def endless_ids(eos_token_id: Any, model: ModelConfig) -> list[int]:
    """Return the ids in a concrete `eos_token_id` that are outside the vocabulary and so can never end a text."""
    return [token for token in eos_list(eos_token_id) if token >= model.vocab_size]


def _refuse_endless(cfg: GenerationConfig) -> None:
    if cfg.model is not None and (endless := endless_ids(cfg.eos_token_id, cfg.model)):
        raise ConfigError(
            f"eos_token_id contains the token {endless[0]}, which can never end a text: the vocabulary is 0 to "
            f"{cfg.model.vocab_size - 1}"
        )


def _vocabulary(cfg: GenerationConfig) -> int | None:
    return None if cfg.model is None else cfg.model.vocab_size


def _refuse_values(cfg: GenerationConfig, names: Collection[str]) -> None:
    """Raise an error if an option in `names` has an unsupported value."""
    for option in OPTIONS.values():
        if not option.refused or option.name not in names:
            continue
        value = getattr(cfg, option.name)
        if value is not option.default and option.is_given(value) and value not in option.offered:
            raise ConfigError(f"{option.name}={value!r} {option.refused}")


def _refuse_unknown(fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name not in _NAMES:
            near = difflib.get_close_matches(name[:100], _NAMES, n=1)
            raise ConfigError(f"unknown option {shown(name)}" + (f": did you mean {near[0]!r}?" if near else ""))


def _check(cfg: GenerationConfig) -> None:
    """Reject combinations that transformers' `GenerationConfig.validate` rejects.

    jaxgen also rejects `top_logprobs` without `output_logprobs`, and groups of beams with `do_sample`.
    """
    if cfg.top_logprobs and cfg.output_logprobs is None:
        raise ConfigError(f"top_logprobs={cfg.top_logprobs} needs output_logprobs='logits' or 'scores'")
    if cfg.num_beams > 1:
        if not isinstance(cfg.do_sample, bool):
            raise ConfigError("do_sample with one value per prompt works with num_beams=1: set it to True or False")
        _check_beams(cfg)
    elif cfg.num_return_sequences > 1 and not is_tracer(cfg.do_sample) and not np.all(cfg.do_sample):
        which = "greedy search" if cfg.mode == SAMPLE else cfg.mode
        some = " for some prompts, which do_sample chooses" if cfg.mode == SAMPLE else ""
        raise ConfigError(
            f"num_return_sequences={cfg.num_return_sequences}: {which} has one result per prompt{some}; "
            "set do_sample=True, or num_beams"
        )


def _check_beams(cfg: GenerationConfig) -> None:
    if cfg.constrained and (cfg.do_sample or cfg.num_beam_groups != 1):
        name = "constraints" if cfg.constraints is not None else "force_words_ids"
        raise ConfigError(f"{name} works only with plain beam search: set do_sample=False and num_beam_groups=1")
    if cfg.on("diversity_penalty") or cfg.num_beam_groups != 1:
        if cfg.do_sample:
            raise ConfigError("num_beam_groups and diversity_penalty need do_sample=False")
        if cfg.num_beams % cfg.num_beam_groups:
            raise ConfigError(f"num_beams={cfg.num_beams} must be a multiple of num_beam_groups={cfg.num_beam_groups}")
        if not cfg.on("diversity_penalty"):
            raise ConfigError("num_beam_groups > 1 needs diversity_penalty > 0, or all groups are the same")
    if cfg.num_return_sequences > cfg.num_beams:
        raise ConfigError(f"num_return_sequences={cfg.num_return_sequences} must be <= num_beams={cfg.num_beams}")


def warn_unused(cfg: GenerationConfig) -> None:
    """Like transformers' `GenerationConfig.validate`, warn about options that are set but unused in the decode mode.

    Traced values cause no warning, because they may equal the default. Unused values from the checkpoint cause no
    warning either.
    """
    inherited = cfg._inherited.names
    values = [(option, getattr(cfg, option.name)) for option in cfg.unread() if option.name not in inherited]
    given = [
        f"{option.name}={value}"
        for option, value in values
        if value is not option.default and not is_tracer(value) and option.is_given(value)
    ]
    if given:
        warn(f"{cfg.mode} does not read {', '.join(given)}")
    penalty = cfg.repetition_penalty
    if cfg.dola_layers is not None and not is_tracer(penalty) and np.min(penalty) < DOLA_PENALTY:
        warn(f"dola_layers with repetition_penalty={penalty} may repeat itself: at least {DOLA_PENALTY} is recommended")
    if cfg.on("min_new_tokens") and cfg.on("min_length") and "min_length" not in inherited:
        warn("min_new_tokens and min_length are both set: min_length is ignored")
