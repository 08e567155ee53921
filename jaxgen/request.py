"""What a request may hold: the checks before anything is compiled, and the buckets that sizes are rounded up to."""

from __future__ import annotations

from typing import Any

import flax.core
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxgen.decoding.prompt import UNKNOWN, Request, Sizes
from jaxgen.decoding.rules import HostFunction, Rules
from jaxgen.errors import ConfigError, InputError
from jaxgen.generation_config import GenerationConfig, warn, warn_unused
from jaxgen.model.cache import KVCache
from jaxgen.model.causal_lm import param_shapes
from jaxgen.options import TRACED
from jaxgen.support import check_options

# Options that look at the tokens of a row.
_OF_TOKENS = (
    "repetition_penalty encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "sequence_bias watermarking_config stop_strings"
).split()


def eager_request(ids, key, cfg: GenerationConfig, given: dict[str, Any], rules: Rules):
    """Check concrete arguments and round their sizes up.

    Returns the request, its sizes, the prompt as given (ids int32[B, P], mask bool[B, P], the mask's P) and the number
    of new tokens.
    """
    assert cfg.model is not None
    cache = given["cache"]
    without_ids = ids is None and given["inputs_embeds"] is not None
    ids, embeds = _host_prompts(ids, given["inputs_embeds"], cfg, cache)
    mask = host_mask(given["attention_mask"], ids, cfg, embeds is not None)
    prompts, width = ids.shape
    key = check_key(key, cfg, prompts)
    check_options(cfg, prompts)
    check_cache(cache, cfg, prompts, rules)
    negative = _host_negative(given, cfg, prompts, without_ids)
    warn_unused(cfg)
    lengths = (mask & (ids != UNKNOWN)).sum(axis=-1, dtype=np.int32)
    held = mask.sum(axis=-1, dtype=np.int32)
    slots = 0
    if cache is not None:
        known = np.repeat(np.asarray(_total_known(cache)), prompts // cache.rows)
        lengths, held = lengths + known, held + known
        own = cache.rows == prompts or cfg.on("guidance_scale")
        slots = prompt_bucket(int(held.max() if own else known.max()))
    budget = budgets(cfg, lengths)
    warn_unfeasible(cfg, lengths, held, budget)
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


def traced_request(ids, key, cfg: GenerationConfig, given: dict[str, Any], rules: Rules):
    """Check arguments some of which are traced, what is concrete as it is eagerly; the results are as there."""
    assert cfg.model is not None
    cache, embeds = given["cache"], given["inputs_embeds"]
    without_ids = ids is None and embeds is not None
    if any(isinstance(x, Tracer) for x in (ids, embeds)):
        ids, embeds = _traced_prompts(ids, embeds, cfg)
    else:
        ids, embeds = _host_prompts(ids, embeds, cfg, cache)
        ids = jnp.asarray(ids)
    prompts, width = ids.shape
    mask = given["attention_mask"]
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
    key = check_key(key, cfg, prompts)
    slots = 0
    known = None
    if cache is not None:
        own = cache.rows == prompts or cfg.on("guidance_scale")
        slots = cache.offset + cache.slots + (width if own else 0)
        known = jnp.repeat(cache.total_known, prompts // cache.rows, total_repeat_length=prompts)
    negative = given["negative_prompt_ids"], given["negative_prompt_attention_mask"]
    if any(isinstance(x, Tracer) for x in negative):
        negative = _traced_negative(*negative, cfg, prompts)
    else:
        negative = _host_negative(given, cfg, prompts, without_ids)
    counted = mask & (ids != UNKNOWN)
    before = 0 if cache is None else cache.offset + cache.slots
    capacity, budget = traced_budgets(cfg, before + width, counted, known)
    request = Request(ids, mask, budget, key, cache, embeds, *negative)
    shown = (ids, mask, width)
    if without_ids:
        shown = (ids[:, :0], mask[:, :0], width)
    return request, Sizes(capacity, slots), shown, capacity


def check_params(params, cfg: GenerationConfig) -> None:
    """Raise where the parameters are not those of `cfg.model`, naming what is missing, unexpected or misshapen."""
    assert cfg.model is not None
    if not isinstance(params, dict | flax.core.FrozenDict):
        raise TypeError(f"params must be the dict of parameters, got {type(params).__name__}")
    if set(params) == {"params"}:
        raise InputError('params must be the tree itself, without the outer {"params": ...}')
    given: dict[str, Any] = dict(flax.traverse_util.flatten_dict(params, sep="."))
    wanted = param_shapes(cfg.model)
    problems = [f"{name} is missing" for name in wanted if name not in given]
    problems += [f"{name} is unexpected" for name in given if name not in wanted]
    problems += [
        f"{name} has shape {list(given[name].shape)}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in given and given[name].shape != shape
    ]
    problems += [
        f"{name} has dtype {given[name].dtype}, wanted a float"
        for name in wanted
        if name in given and not jnp.issubdtype(given[name].dtype, jnp.floating)
    ]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise InputError(f"params do not fit cfg.model: {'; '.join(problems[:4])}{more}")


# --- What the request holds ---------------------------------------------------------------------------------------


def check_ids_shape(ids) -> None:
    """Raise unless ids are integers of shape [B, P]."""
    if ids.ndim != 2 or 0 in ids.shape:
        raise InputError(f"ids must have shape [B, P] with B and P at least 1, got {list(ids.shape)}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids must be integers, got {ids.dtype}")


def host_ids(ids, cfg: GenerationConfig) -> np.ndarray:
    """Return the prompts as int32[B, P], checked against the vocabulary."""
    assert cfg.model is not None
    if isinstance(ids, tuple) and hasattr(ids, "attention_mask"):
        raise TypeError("ids is a whole Batch: give batch.ids, and attention_mask=batch.attention_mask")
    try:
        ids = np.asarray(ids)
    except ValueError as error:
        raise InputError("ids must be one array [B, P]: pad the prompts on the left and give attention_mask") from error
    check_ids_shape(ids)
    if ids.min() < 0 or ids.max() >= cfg.model.vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise InputError(f"ids has the token {wrong}, the vocabulary goes from 0 to {cfg.model.vocab_size - 1}")
    return ids.astype(np.int32)


def check_mask_shape(mask, ids) -> None:
    """Raise unless the mask has the shape of ids."""
    if mask.shape != ids.shape:
        raise InputError(f"attention_mask must have the shape of ids, {list(ids.shape)}, got {list(mask.shape)}")


def host_mask(attention_mask, ids, cfg: GenerationConfig, embedded: bool = False) -> np.ndarray:
    """Return the attention mask as bool[B, P]; every row has a token. `embedded`: ids says nothing of padding."""
    if attention_mask is None and embedded:
        mask = np.ones(ids.shape, bool)
    elif attention_mask is None:
        mask = np.asarray(inferred_mask(ids, cfg, np))
        pad = cfg.pad_token_id
        if pad is not None and ids.shape[1] > 1 and np.any(ids[:, 0] == pad) and np.all(mask):
            warn(
                f"attention_mask is missing and the pad id {pad} is an eos id too, so padding in ids counts as "
                "text: give attention_mask"
            )
    else:
        mask = np.asarray(attention_mask)
        check_mask_shape(mask, ids)
        if not np.all((mask == 0) | (mask == 1)):
            raise InputError("attention_mask must hold 0 for padding and 1 for tokens only")
        mask = mask != 0
    if not np.all(mask.any(axis=-1)):
        row = int(np.argmin(mask.any(axis=-1)))
        raise InputError(f"prompt {row} is empty, all of it is padding: give it a token, the BOS for example")
    return mask


def inferred_mask(ids, cfg: GenerationConfig, xp=jnp):
    """Pad tokens are padding unless the pad id is an eos id: `_prepare_attention_mask_for_generation`."""
    if cfg.pad_token_id is None:
        return xp.ones(ids.shape, bool)
    mask = ids != cfg.pad_token_id
    if cfg.eos_token_id is None:
        return mask
    eos = xp.atleast_1d(xp.asarray(cfg.eos_token_id))
    return mask | xp.any(eos == cfg.pad_token_id)


def _host_prompts(ids, embeds, cfg: GenerationConfig, cache) -> tuple[np.ndarray, np.ndarray | None]:
    """Return ids int32[B, P], `UNKNOWN` where there are embeddings alone, and the embeddings."""
    assert cfg.model is not None
    if embeds is not None:
        embeds = np.asarray(embeds)
        _check_embeds(embeds, cfg)
        if ids is None:
            return np.full(embeds.shape[:2], UNKNOWN, np.int32), embeds
    if ids is None:
        if cache is not None:
            raise InputError("ids is None and cache= goes on: give the new tokens")
        if cfg.bos_token_id is None:
            raise InputError("ids is None and bos_token_id too: give prompts, or the id to begin with")
        ids = [[cfg.bos_token_id]]
    ids = host_ids(ids, cfg)
    if embeds is not None and embeds.shape[:2] != ids.shape:
        raise InputError(
            f"inputs_embeds {list(embeds.shape)} and ids {list(ids.shape)} must be of the same tokens: give as many, "
            "or ids=None"
        )
    return ids, embeds


def _traced_prompts(ids, embeds, cfg: GenerationConfig) -> tuple[jax.Array, jax.Array | None]:
    if embeds is not None:
        _check_embeds(embeds, cfg)
        if ids is None:
            ids = np.full(embeds.shape[:2], UNKNOWN, np.int32)
    if not isinstance(ids, Tracer) and np.any(np.asarray(ids) != UNKNOWN):
        ids = host_ids(ids, cfg)
    ids = jnp.asarray(ids)
    check_ids_shape(ids)
    if embeds is not None and embeds.shape[:2] != ids.shape:
        raise InputError(f"inputs_embeds {list(embeds.shape)} and ids {list(ids.shape)} must be of the same tokens")
    return ids.astype(jnp.int32), embeds


def _check_embeds(embeds, cfg: GenerationConfig) -> None:
    assert cfg.model is not None
    if embeds.ndim != 3 or embeds.shape[-1] != cfg.model.hidden_size or 0 in embeds.shape:
        raise InputError(
            f"inputs_embeds must have shape [B, P, {cfg.model.hidden_size}] with B and P at least 1, got "
            f"{list(embeds.shape)}"
        )
    if not jnp.issubdtype(embeds.dtype, jnp.floating):
        raise TypeError(f"inputs_embeds must be floats, got {embeds.dtype}")


def _host_negative(given, cfg: GenerationConfig, prompts: int, without_ids: bool):
    """Return the negative prompts of guidance, int32[B, Q], and their mask, in a bucket; None, None without them."""
    negative, mask = given["negative_prompt_ids"], given["negative_prompt_attention_mask"]
    _check_guidance(negative, mask, cfg)
    if negative is None:
        if cfg.on("guidance_scale") and without_ids:
            raise InputError("guidance_scale takes a prompt's last id as negative prompt: give negative_prompt_ids")
        return None, None
    try:
        negative = host_ids(negative, cfg)
        mask = np.ones(negative.shape, bool) if mask is None else host_mask(mask, negative, cfg)
    except (InputError, TypeError) as error:
        raise type(error)(f"negative_prompt_ids: {error}") from error
    negative, mask = (_per_prompt(x, prompts, np) for x in (negative, mask))
    padding = ((0, 0), (prompt_bucket(negative.shape[1]) - negative.shape[1], 0))
    return np.pad(negative, padding), np.pad(mask, padding)


def _traced_negative(negative, mask, cfg: GenerationConfig, prompts: int):
    _check_guidance(negative, mask, cfg)
    negative = jnp.asarray(negative)
    check_ids_shape(negative)
    mask = jnp.ones(negative.shape, bool) if mask is None else jnp.asarray(mask).astype(bool)
    check_mask_shape(mask, negative)
    return _per_prompt(negative.astype(jnp.int32), prompts, jnp), _per_prompt(mask, prompts, jnp)


def _check_guidance(negative, mask, cfg: GenerationConfig) -> None:
    if negative is None and mask is not None:
        raise InputError("negative_prompt_attention_mask is for negative_prompt_ids: give them too")
    if negative is not None and not cfg.on("guidance_scale"):
        raise InputError("negative_prompt_ids need guidance_scale, other than 1: set it with cfg.replace")


def _per_prompt(x, prompts: int, xp):
    if x.shape[0] not in (1, prompts):
        raise InputError(f"negative_prompt_ids has {x.shape[0]} rows for {prompts} prompts: give one per prompt or one")
    return xp.broadcast_to(x, (prompts, x.shape[1]))


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
    looking = [name for name in _OF_TOKENS if getattr(cfg, name) not in (None, 0) and _is_on(cfg, name)]
    looking += ["logits_processor"] * bool(rules.processors) + ["stopping_criteria"] * bool(rules.criteria)
    looking += ["prefix_allowed_tokens_fn"] * isinstance(rules.allowed, HostFunction)
    if looking and any(part.tokens is None for part in cache.parts):
        raise InputError(
            f"{looking[0]} looks at all tokens, and this cache does not know those that it holds: go on from the "
            "cache of a generate() output, or leave the option out"
        )


def _is_on(cfg: GenerationConfig, name: str) -> bool:
    return cfg.on(name) if name in TRACED else bool(getattr(cfg, name))


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


def warn_unfeasible(cfg: GenerationConfig, lengths: np.ndarray, held: np.ndarray, budget: np.ndarray) -> None:
    """Warn where a row must not end before its budget is spent, or may outgrow the model.

    `_validate_generated_length`, `MaxLengthCriteria`.

    Args:
        cfg: the config.
        lengths: int32[B], the prompts' tokens.
        held: int32[B], likewise, with those that came as embeddings.
        budget: int32[B].
    """
    assert cfg.model is not None
    if (longest := int((held + budget).max())) > cfg.model.context_length:
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


# --- Buckets ------------------------------------------------------------------------------------------------------


def prompt_bucket(width: int) -> int:
    """Round a prompt's width up: to a power of two, from 256 on to the half between two of them as well."""
    power = max(32, 1 << (width - 1).bit_length())
    return power * 3 // 4 if power >= 512 and width <= power * 3 // 4 else power


def capacity_for(new_tokens: int, recorded: bool) -> int:
    """Round the number of new tokens up; less where scores of the whole vocabulary are kept for each."""
    return -(-new_tokens // 16) * 16 if recorded else prompt_bucket(max(new_tokens, 128))
