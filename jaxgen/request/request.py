"""What a call of generate() asks for: checked before anything is compiled, and with its sizes rounded up."""

from __future__ import annotations

from typing import Any

import flax.core
import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxgen.config.availability import check_options
from jaxgen.config.generation_config import GenerationConfig, warn, warn_unused
from jaxgen.config.options import OPTIONS
from jaxgen.decoding.extensions import HostFunction, Rules
from jaxgen.decoding.prompt import Request, Sizes
from jaxgen.errors import ConfigError, InputError
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.model.cache import KVCache
from jaxgen.model.causal_lm import param_shapes
from jaxgen.request.prompts import (
    check_mask_shape,
    host_mask,
    host_negative,
    host_prompts,
    inferred_mask,
    traced_negative,
    traced_prompts,
)
from jaxgen.shapes import capacity_for, prompt_bucket

# Options that depend on the tokens of the prompt.
_OF_TOKENS = tuple(option.name for option in OPTIONS.values() if option.of_tokens)


@flax.struct.dataclass
class Inputs:
    """The arrays that `generate` takes beside ids and key, as they are given."""

    attention_mask: Any = None
    inputs_embeds: Any = None
    cache: Any = None
    negative_prompt_ids: Any = None
    negative_prompt_attention_mask: Any = None


def eager_request(ids, key, cfg: GenerationConfig, given: Inputs, rules: Rules):
    """Check concrete arguments and round their sizes up.

    Returns the request, its sizes, the prompt as given (ids int32[B, P], mask bool[B, P], the mask's P) and the number
    of new tokens.
    """
    assert cfg.model is not None
    cache = given.cache
    without_ids = ids is None and given.inputs_embeds is not None
    ids, embeds = host_prompts(ids, given.inputs_embeds, cfg, cache)
    mask = host_mask(given.attention_mask, ids, cfg, embeds is not None)
    prompts, width = ids.shape
    key = check_key(key, cfg, prompts)
    check_options(cfg, prompts)
    check_cache(cache, cfg, prompts, rules)
    check_grammar(rules, cfg, prompts)
    negative = given.negative_prompt_ids, given.negative_prompt_attention_mask
    negative = host_negative(*negative, cfg, prompts, without_ids)
    warn_unused(cfg)
    lengths = mask.sum(axis=-1, dtype=np.int32)
    slots = 0
    if cache is not None:
        known = np.repeat(np.asarray(_total_known(cache)), prompts // cache.rows)
        lengths = lengths + known
        own = cache.rows == prompts or cfg.on("guidance_scale")
        negatives = 0 if negative[1] is None else negative[1].sum(axis=-1).max()
        slots = prompt_bucket(int(max(lengths.max() if own else known.max(), negatives)))
    budget = budgets(cfg, lengths)
    warn_unfeasible(cfg, lengths, budget)
    check_room(rules, budget)
    new_tokens = int(budget.max())
    recorded = cfg.output_scores or bool(cfg.output_logits) or cfg.output_attentions or cfg.output_hidden_states
    padding = ((0, 0), (prompt_bucket(width) - width, 0))
    request = Request(
        ids=np.pad(ids, padding),
        mask=np.pad(mask, padding),
        budget=budget,
        key=key,
        cache=cache,
        embeds=None if embeds is None else np.pad(embeds, (*padding, (0, 0))),
        negative_ids=negative[0],
        negative_mask=negative[1],
    )
    shown = (ids, mask, width)
    if without_ids:
        shown = (ids[:, :0], mask[:, :0], width)
    return request, Sizes(capacity_for(new_tokens, recorded), slots), shown, new_tokens


def traced_request(ids, key, cfg: GenerationConfig, given: Inputs, rules: Rules):
    """Check arguments some of which are traced, what is concrete as it is eagerly; the results are as there."""
    assert cfg.model is not None
    cache, embeds = given.cache, given.inputs_embeds
    without_ids = ids is None and embeds is not None
    if is_traced(ids, embeds):
        ids, embeds = traced_prompts(ids, embeds, cfg)
    else:
        ids, embeds = host_prompts(ids, embeds, cfg, cache)
        ids = jnp.asarray(ids)
    prompts, width = ids.shape
    mask = given.attention_mask
    if isinstance(mask, Tracer):
        mask = mask.astype(bool)
        check_mask_shape(mask, ids)
    elif mask is None:
        mask = inferred_mask(ids, cfg) if embeds is None else jnp.ones(ids.shape, bool)
    else:
        mask = jnp.asarray(host_mask(mask, ids, cfg, embeds is not None))
    warn_unused(cfg)
    check_options(cfg, prompts)
    check_cache(cache, cfg, prompts, rules)
    check_grammar(rules, cfg, prompts)
    key = check_key(key, cfg, prompts)
    slots = 0
    known = None
    if cache is not None:
        own = cache.rows == prompts or cfg.on("guidance_scale")
        slots = cache.offset + cache.slots + (width if own else 0)
        if given.negative_prompt_ids is not None:
            slots = max(slots, np.shape(given.negative_prompt_ids)[-1])
        known = jnp.repeat(cache.total_known, prompts // cache.rows, total_repeat_length=prompts)
    negative = given.negative_prompt_ids, given.negative_prompt_attention_mask
    if is_traced(negative):
        negative = traced_negative(*negative, cfg, prompts)
    else:
        negative = host_negative(*negative, cfg, prompts, without_ids)
    before = 0 if cache is None else cache.offset + cache.slots
    capacity, budget = traced_budgets(cfg, before + width, mask, known)
    request = Request(ids, mask, budget, key, cache, embeds, *negative)
    shown = (ids, mask, width)
    if without_ids:
        shown = (ids[:, :0], mask[:, :0], width)
    return request, Sizes(capacity, slots), shown, capacity


def is_traced(*trees) -> bool:
    """Whether some array in them is traced by the caller's own transformation."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


def under_jit() -> bool:
    """Whether the caller's code is being traced, whatever the arguments are."""
    return isinstance(jax.device_put(np.float32(0)), Tracer)  # compiles nothing where it is not


def check_call(params, cfg: GenerationConfig) -> None:
    """Raise where `cfg` is no config with a model, or the parameters are not the model's, naming what is wrong."""
    if not isinstance(cfg, GenerationConfig):
        raise TypeError(f"cfg must be a jaxgen.GenerationConfig, got {type(cfg).__name__}")
    if cfg.model is None:
        raise ConfigError("cfg.model is None: set it to the checkpoint's ModelConfig (convert.load_hf does)")
    if not isinstance(params, dict | flax.core.FrozenDict):
        raise TypeError(f"params must be the dict of parameters, got {type(params).__name__}")
    if set(params) == {"params"}:
        raise InputError('params must be the tree itself, without the outer {"params": ...}')
    given: dict[str, Any] = dict(flax.traverse_util.flatten_dict(params, sep="."))
    wanted = param_shapes(cfg.model)
    problems = [f"{name} is missing" for name in wanted if name not in given]
    problems += [f"{name} is unexpected" for name in given if name not in wanted]
    problems += [
        f"{name} has shape {list(np.shape(given[name]))}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in given and np.shape(given[name]) != shape
    ]
    problems += [
        f"{name} is {getattr(given[name], 'dtype', type(given[name]).__name__)}, wanted an array of floats"
        for name in wanted
        if name in given and not jnp.issubdtype(getattr(given[name], "dtype", int), jnp.floating)
    ]
    dtype = None if problems else given["model.embed_tokens.weight"].dtype
    if dtype is not None and dtype != cfg.model.dtype:
        problems.append(
            f"they are {dtype} and cfg.model.dtype is {cfg.model.dtype}: make that the same, "
            f"dataclasses.replace(cfg.model, dtype={str(dtype)!r})"
        )
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise InputError(f"params do not fit cfg.model: {'; '.join(problems[:4])}{more}")


def check_cache(cache, cfg: GenerationConfig, prompts: int, rules: Rules) -> None:
    """Raise for a cache that these prompts cannot go on from."""
    if cache is None:
        return
    assert cfg.model is not None
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be the cache of an earlier output, a jaxgen.KVCache, got {type(cache).__name__}")
    if prompts % cache.rows:
        raise InputError(
            f"the cache has {cache.rows} rows and there are {prompts} prompts: give one for each row, or a multiple, "
            "where several share a row"
        )
    cache.check_model(cfg.model)
    if cfg.output_attentions:
        raise ConfigError("output_attentions is not offered with cache=: run the whole prompt to see them")
    looking = [name for name in _OF_TOKENS if cfg.on(name)]
    looking += ["logits_processor"] * bool(rules.processors) + ["stopping_criteria"] * bool(rules.criteria)
    looking += ["prefix_allowed_tokens_fn"] * isinstance(rules.allowed, HostFunction)
    if looking and any(part.tokens is None for part in cache.parts):
        raise InputError(
            f"{looking[0]} looks at all tokens, and this cache does not know those that it holds: go on from the "
            "cache of a generate() output, or leave the option out"
        )


def check_grammar(rules: Rules, cfg: GenerationConfig, prompts: int) -> None:
    """Raise for an automaton of another vocabulary, or one that is stacked for another number of prompts."""
    if not isinstance(rules.allowed, TokenAutomaton):
        return
    assert cfg.model is not None
    tokens, starts = rules.allowed.classes.shape[0], rules.allowed.start.size
    if tokens != cfg.model.vocab_size:
        raise InputError(
            f"the automaton is of {tokens} tokens and the model has {cfg.model.vocab_size}: build it with "
            f"vocab_size={cfg.model.vocab_size}"
        )
    if starts not in (1, prompts):
        raise InputError(f"the automaton is stacked for {starts} prompts and there are {prompts}: stack one for each")


def check_room(rules: Rules, budget: np.ndarray) -> None:
    """Raise where an automaton's shortest text is longer than there is room for."""
    if isinstance(rules.allowed, TokenAutomaton):
        least = np.asarray(rules.allowed.shortest)[np.asarray(rules.allowed.start)]
        if np.any(least > budget):
            raise InputError(
                f"the automaton's shortest text has {int(np.max(least))} tokens, and there is room for "
                f"{int(budget.min())}: raise max_new_tokens"
            )


def check_key(key, cfg: GenerationConfig, prompts: int):
    """Return the key where something is drawn, else None."""
    if not cfg.do_sample:
        return None
    if key is None:
        raise InputError("key is None and do_sample=True draws: give jax.random.key(seed), or one key per prompt")
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"key must be a jax.random.key (not PRNGKey), got {getattr(key, 'dtype', type(key).__name__)}")
    if key.ndim and key.shape != (prompts,):
        raise InputError(f"key must be one key or one per prompt, [{prompts}], got shape {list(key.shape)}")
    return key


def budgets(cfg: GenerationConfig, lengths: np.ndarray) -> np.ndarray:
    """int32[B], the most new tokens per prompt; `max_new_tokens` wins over `max_length`, which counts the prompt."""
    if cfg.on("max_new_tokens"):
        budget = np.asarray(cfg.max_new_tokens, np.int32)
        if budget.ndim and budget.shape != lengths.shape:
            raise InputError(f"max_new_tokens has {budget.shape[0]} values for {lengths.shape[0]} prompts")
        return np.broadcast_to(budget, lengths.shape)
    if cfg.max_length == GenerationConfig.max_length:
        warn(f"neither max_new_tokens nor max_length is set: prompt and answer end at {cfg.max_length} tokens")
    if lengths.max() >= cfg.max_length:
        raise InputError(
            f"the longest prompt has {lengths.max()} tokens and max_length={cfg.max_length} counts them: raise it, "
            "or set max_new_tokens"
        )
    return (cfg.max_length - lengths).astype(np.int32)


def warn_unfeasible(cfg: GenerationConfig, lengths: np.ndarray, budget: np.ndarray) -> None:
    """Warn where a row must not end before its budget is spent, or may outgrow the model.

    `_validate_generated_length`, `MaxLengthCriteria`.

    Args:
        cfg: the config.
        lengths: int32[B], the prompts' tokens, those that came as embeddings too.
        budget: int32[B].
    """
    assert cfg.model is not None
    if (longest := int((lengths + budget).max())) > cfg.model.context_length:
        warn(
            f"prompt and answer may reach {longest} tokens and the model was trained for {cfg.model.context_length}: "
            "beyond, what it says may get worse"
        )
    if cfg.on("min_new_tokens"):
        name, least = "min_new_tokens", np.asarray(cfg.min_new_tokens)
    else:
        name, least = "min_length", np.asarray(cfg.min_length) - lengths
    if np.any(least > budget):
        warn(f"{name}={getattr(cfg, name)} is more than there is room for: the budget of new tokens is {budget.max()}")


def traced_budgets(cfg: GenerationConfig, width: int, mask, known: jax.Array | None) -> tuple[int, jax.Array]:
    """Return the capacity for new tokens, which must be static, and the budget per prompt under the caller's jit.

    `width`: the most tokens that a prompt can have, what its cache holds included; `known int32[B]`: what it does hold.
    """
    prompts = mask.shape[0]
    lengths = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    if known is not None:
        lengths += known
    if not cfg.on("max_new_tokens"):
        if width >= cfg.max_length:
            raise InputError(
                f"max_length={cfg.max_length} counts what comes before the answer, for which there is room for {width} "
                "tokens: raise it"
            )
        return cfg.max_length - width, jnp.minimum(cfg.max_length - lengths, cfg.max_length - width)
    budget: Any = cfg.max_new_tokens
    if np.ndim(budget) == 1 and budget.shape != (prompts,):
        raise InputError(f"max_new_tokens has {budget.shape[0]} values for {prompts} prompts")
    if isinstance(budget, Tracer):
        if cfg.max_length <= width:
            raise ConfigError(
                "max_new_tokens is traced under jit, where the room for tokens must be static: set max_length to the "
                f"most that prompt and answer may have, more than the room for {width} tokens before the answer; "
                f"it is {cfg.max_length}"
            )
        capacity = cfg.max_length - width
    else:
        capacity = int(np.max(budget))
    return capacity, jnp.broadcast_to(jnp.asarray(budget, jnp.int32), (prompts,))


_total_known = jax.jit(lambda cache: cache.total_known)
