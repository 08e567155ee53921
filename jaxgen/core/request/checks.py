"""Check a call to generate(): its parameters, cache, key, grammar, length limits, and the caller's functions."""

from __future__ import annotations

from typing import Any

import flax.core
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.config.generation_config import GenerationConfig, model_of
from jaxgen.core.config.generation_options import OPTIONS, RECORDS
from jaxgen.core.config.option import GREEDY, SAMPLE
from jaxgen.core.config.values import is_array, is_tracer
from jaxgen.core.decoding.continuation import Continuation
from jaxgen.core.decoding.extensions import Extensions, HostFunction, as_pytree, check_arguments, functions
from jaxgen.core.decoding.hook import StepHook
from jaxgen.core.decoding.loop import Mode
from jaxgen.core.decoding.modes import mode_of
from jaxgen.core.grammar.stop_strings import StopStrings
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.model.causal_lm import param_shapes
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.layout import expected_shapes
from jaxgen.core.model.lowrank import adapter_count
from jaxgen.core.model.weights import mismatch
from jaxgen.errors import ConfigError, InputError, warn

# The methods of a `StepHook` and their arguments.
_HOOK = {
    "init": ("history",),
    "before": ("state", "history", "inputs"),
    "after": ("state", "history", "output"),
}
_KEY_WORDS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}  # the number of words in a key of each implementation


def check_call(params, cfg: GenerationConfig) -> None:
    """Raise an error if `cfg` is not a `GenerationConfig` with a model, or if the parameters do not match the model."""
    model = model_of(cfg)
    if not isinstance(params, dict | flax.core.FrozenDict):
        raise TypeError(f"params must be the dict of parameters, got {type(params).__name__}")
    if set(params) == {"params"}:
        raise InputError('params must be the tree itself, without the outer {"params": ...}')
    given: dict[str, Any] = dict(flax.traverse_util.flatten_dict(params, sep="."))
    wanted = param_shapes(model)
    if given.keys() != wanted.keys():
        wanted = expected_shapes(model, given)
    problems = [f"{name} is missing" for name in wanted if name not in given]
    problems += [f"{name} is unexpected" for name in given if name not in wanted]
    dtype = np.dtype(model.dtype)
    for name, shape in wanted.items():
        leaf = given.get(name)
        if isinstance(leaf, jax.Array) and leaf.shape == shape and leaf.dtype == dtype:
            continue
        if leaf is not None and (reason := mismatch(leaf, shape)) is not None:
            problems.append(f"{name} {reason}")
    if not problems and (dtype := given["model.embed_tokens.weight"].dtype) != model.dtype:
        problems.append(
            f"they are {dtype} and cfg.model.dtype is {model.dtype}: make them equal with "
            f"dataclasses.replace(cfg.model, dtype={str(dtype)!r})"
        )
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise InputError(f"params do not fit cfg.model: {'; '.join(problems[:4])}{more}")
    if cfg.on("adapter"):
        check_adapter(cfg.adapter, adapter_count(params))


def check_adapter(adapter: Any, count: int) -> None:
    """Raise an error if any value of the option `adapter` is out of range for `count` adapters."""
    if not is_tracer(adapter) and (largest := int(np.max(adapter))) >= count:
        has = f"params have {count} adapters" if count else "params have no adapters to choose from"
        raise InputError(f"adapter={largest}, but {has}: load_adapter attaches a list of adapters, numbered from 0")


def check_cache(cache: Continuation, cfg: GenerationConfig, prompts: int, extensions: Extensions, mode: Mode) -> None:
    """Raise an error if the prompts cannot continue from the cache."""
    if prompts % cache.rows:
        raise InputError(
            f"the cache has {cache.rows} rows, but there are {prompts} prompts: the number of prompts must be a "
            "multiple of the cache's rows; pass an output's cache itself, not its kv, which may have more rows"
        )
    cache.kv.check_model(cfg.model)
    if (made := cache.kv.cache_dtype) != cfg.cache_dtype:
        raise ConfigError(
            f"the cache was made with cache_dtype={made!r} and cannot be continued with {cfg.cache_dtype!r}: use "
            f"cfg.replace(cache_dtype={made!r})"
        )
    if mode.no_cache:
        raise ConfigError(mode.no_cache)
    if cfg.output_attentions:
        raise ConfigError("output_attentions is not offered with cache=: run the whole prompt to get attention weights")
    readers = [option.name for option in OPTIONS.values() if option.of_tokens and cfg.on(option.name)]
    readers += ["logits_processor"] * bool(extensions.processors) + ["stopping_criteria"] * bool(extensions.criteria)
    readers += ["prefix_allowed_tokens_fn"] * isinstance(extensions.allowed, HostFunction)
    if readers and cache.tokens is None:
        raise InputError(
            f"{readers[0]} depends on all tokens of a row, but the ids of the tokens in this cache are not known: "
            "continue from the cache of a generate() output, or leave the option out"
        )


def can_continue(cache: Continuation, cfg: GenerationConfig) -> bool:
    """Return True if a call with the config `cfg` can continue from the cache of an earlier call."""
    return not mode_of(cfg).no_cache and cache.kv.cache_dtype == cfg.cache_dtype


def check_slots(cfg: GenerationConfig, cache: Continuation | None, extensions: Extensions, mode: Mode) -> None:
    """Raise an error for options that are not supported with `slots`."""
    if not mode.refills:
        what = "an assistant" if mode.drafts and cfg.mode in (GREEDY, SAMPLE) else cfg.mode
        raise ConfigError(
            f"slots={cfg.slots} works with greedy search, sampling and DoLa, not with {what}: leave slots out"
        )
    for name in RECORDS:
        if getattr(cfg, name):
            raise ConfigError(
                f"{name} is not offered with slots={cfg.slots}: use output_logprobs, or run fewer prompts without slots"
            )
    if isinstance(extensions.allowed, HostFunction):
        raise ConfigError(
            f"prefix_allowed_tokens_fn receives the index of a row, but with slots={cfg.slots}, the sequences in the "
            "rows change: use a TokenAutomaton"
        )
    if cache is not None and cache.rows != 1:
        raise InputError(
            f"with slots={cfg.slots} the cache must have one row, which all prompts share, but it has {cache.rows}: "
            "leave slots out, or run the prompts of each row separately"
        )


def check_processes(cfg: GenerationConfig, extensions: Extensions) -> None:
    """Raise an error for options that do not work with several processes."""
    if cfg.max_time is not None:
        raise ConfigError("max_time cannot stop several processes at the same step: leave it out")
    if isinstance(extensions.allowed, HostFunction):
        raise ConfigError(
            "prefix_allowed_tokens_fn is called on the host of one process, but the mesh has several: use a "
            "TokenAutomaton, or one process"
        )


def check_grammar(automaton: TokenAutomaton, cfg: GenerationConfig, prompts: int) -> None:
    """Raise an error for an automaton built for a different vocabulary or stacked for a different number of prompts."""
    tokens, starts = automaton.vocab_size, automaton.start.size
    vocab = cfg.model.vocab_size
    if tokens != vocab:
        raise InputError(
            f"the automaton has a vocabulary of {tokens}, but the model's is {vocab}: build it with vocab_size={vocab}"
        )
    if starts not in (1, prompts):
        raise InputError(f"the automaton is stacked for {starts} prompts, but there are {prompts}: stack one for each")


def check_room(automaton: TokenAutomaton, cfg: GenerationConfig, budget: np.ndarray) -> None:
    """Raise an error if an automaton's shortest string has more tokens than the budget allows."""
    least = np.asarray(automaton.shortest)[np.asarray(automaton.start)]
    least = np.broadcast_to(least, budget.shape)
    if len(rows := np.flatnonzero(least > budget)):
        text = "the text that token_healing takes back" if cfg.token_healing else "the constraint's shortest text"
        raise InputError(
            f"{text} has {least[rows[0]]} tokens, which exceeds the budget of {budget[rows[0]]}: raise max_new_tokens"
        )


def require_tokenizer(tokenizer: Any) -> None:
    """Raise an error if there is no tokenizer for stop strings."""
    if tokenizer is None:
        raise InputError("stop_strings are text: pass the tokenizer too, tokenizer=tokenizer")


def check_stop_strings(cfg: GenerationConfig, tokenizer: Any) -> None:
    """Raise an error if the tokenizer's tokens cannot form one of the stop strings."""
    if cfg.stop_strings is not None:
        require_tokenizer(tokenizer)
        StopStrings.build(cfg.stop_strings, tokenizer, cfg.model.vocab_size)


def typed_key(key: Any) -> Any:
    """Convert an old-style key, uint32[2] from `jax.random.PRNGKey`, or uint32[B, 2], to the keys of `jax.random.key`.

    Any other value is returned unchanged.
    """
    impl = str(jax.config.jax_default_prng_impl)  # pyright: ignore[reportAttributeAccessIssue]
    if is_array(key) and key.dtype == np.uint32 and key.ndim in (1, 2) and key.shape[-1] == _KEY_WORDS.get(impl):
        return jax.random.wrap_key_data(key, impl=impl)
    return key


def check_key(key, cfg: GenerationConfig, prompts: int):
    """Check and return the key for sampling; return None for greedy search."""
    if not cfg.on("do_sample"):
        return None
    if key is None:
        raise InputError("key is None, but sampling needs a key: pass jax.random.key(seed), or one key per prompt")
    key = typed_key(key)
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        got = f"{key.dtype}{list(key.shape)}" if is_array(key) else type(key).__name__
        raise TypeError(f"key must be a jax.random.key, or a jax.random.PRNGKey (uint32[2]), got {got}")
    if key.ndim and key.shape != (prompts,):
        raise InputError(f"key must be one key or one per prompt, [{prompts}], got shape {list(key.shape)}")
    return key


def check_lengths(
    cfg: GenerationConfig, lengths: np.ndarray, budget: np.ndarray, begun: np.ndarray | int | None = None
) -> None:
    """Warn if a row cannot reach its minimum length within its budget, or may exceed the model's context.

    transformers' `_validate_generated_length` and `MaxLengthCriteria` emit the same warnings. `lengths` and `budget`
    are int32[B]. `lengths` counts all tokens of a prompt, including cached tokens and tokens given as embeddings. For
    `begun`, see `check_longrope`.

    Raises:
        InputError: `check_longrope` raises it.
    """
    check_longrope(cfg.model, lengths, budget, begun)
    longest, model = int((lengths + budget).max()), cfg.model
    if longest > model.max_position_embeddings and longest > (context := model.context_length):
        warn(
            f"prompt and answer may reach {longest} tokens and the model was trained for {context}: "
            "quality may degrade beyond that"
        )
    if cfg.on("min_new_tokens"):
        name, least = "min_new_tokens", np.asarray(cfg.min_new_tokens)
    else:
        name, least = "min_length", np.asarray(cfg.min_length) - lengths
    if len(short := budget[least > budget]):
        warn(f"{name}={getattr(cfg, name)} cannot be reached with {short.min()} new tokens")


def check_longrope(model: ModelConfig, lengths: Any, budget: Any, begun: Any = None) -> None:
    """Raise an `InputError` if a row begins with the short factors of longrope and may pass the length for them.

    `begun` is the number of tokens in the pass that begins each row; None for the whole prompt.
    """
    short = model.short_length
    if short is not None and np.any((lengths + budget > short) & ((lengths if begun is None else begun) <= short)):
        raise InputError(
            f"prompt and answer may reach {int(np.max(lengths + budget))} tokens. longrope has other factors beyond "
            f"{short} tokens, and a row keeps those with which it begins: let prompt and answer have at most {short} "
            "tokens, or pass a longer prompt in one piece"
        )


def extensions_of(cfg: GenerationConfig, logits_processor, stopping_criteria, tokenizer, hook) -> Extensions:
    """Return the caller's functions and the automaton for the stop strings. The arguments are as in `generate`."""
    return Extensions(
        processors=() if logits_processor is None else functions("logits_processor", logits_processor),
        criteria=() if stopping_criteria is None else functions("stopping_criteria", stopping_criteria),
        stop_strings=None if cfg.stop_strings is None else _stop_strings(cfg, tokenizer),
        hook=None if hook is None else _hook(hook),
    )


def _stop_strings(cfg: GenerationConfig, tokenizer) -> StopStrings:
    assert cfg.stop_strings is not None
    require_tokenizer(tokenizer)
    return StopStrings.build(cfg.stop_strings, tokenizer, cfg.model.vocab_size)


def _hook(given):
    if not isinstance(given, StepHook):
        raise TypeError(f"hook must be an object of a class derived from jaxgen.StepHook, got {given!r}")
    for name, arguments in _HOOK.items():
        check_arguments(f"hook's {name}", getattr(given, name), *arguments)
    return as_pytree(given)
