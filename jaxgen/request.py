"""What a request may hold: the checks before anything is compiled, and the buckets that sizes are rounded up to."""

from __future__ import annotations

from typing import Any

import flax.core
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxgen.errors import ConfigError, InputError, NotBuiltYetError
from jaxgen.generation_config import WARPERS, GenerationConfig, warn
from jaxgen.model.cache import KVCache
from jaxgen.model.causal_lm import param_shapes
from jaxgen.options import eos_list

# Options that work, or that say nothing where the mode is greedy search or sampling.
_BUILT = frozenset(
    "max_length max_new_tokens min_length min_new_tokens do_sample temperature top_k top_p min_p repetition_penalty "
    "output_scores output_logits return_dict_in_generate pad_token_id bos_token_id eos_token_id num_return_sequences "
    "cache_implementation use_cache model num_assistant_tokens num_assistant_tokens_schedule "
    "max_matching_ngram_size early_stopping length_penalty diversity_penalty".split()
)
# What is settled before the loop, or belongs to other modes.
_UNUSED_BY_THE_LOOP = (
    "max_length max_new_tokens return_dict_in_generate bos_token_id early_stopping length_penalty diversity_penalty "
    "num_assistant_tokens num_assistant_tokens_schedule max_matching_ngram_size cache_implementation"
).split()
_OF_OTHER_MODES = frozenset(["typical_p", "epsilon_cutoff", "eta_cutoff"])  # looked at when sampling only
_NEVER = {
    "decoder_start_token_id": "is for encoder-decoder models: leave it out",
    "low_memory": "is not offered: rows share the prompt's cache already; leave it out",
    "generation_kwargs": "is not looked at by anything: leave it out",
}


def refuse_unbuilt(cfg: GenerationConfig) -> None:
    """Raise for an option that does not work, by its name."""
    if cfg.use_cache is not True:
        raise ConfigError("use_cache=False is not offered: generation always uses the cache; leave it out")
    if cfg.cache_implementation not in (None, "static"):
        raise ConfigError(
            f"cache_implementation={cfg.cache_implementation!r} is not offered: use 'static' or leave it out"
        )
    unbuilt = []
    for name in GenerationConfig.__dataclass_fields__:
        value = getattr(cfg, name)
        if name in _BUILT or (name in _OF_OTHER_MODES and not cfg.do_sample) or _is_default(cfg, name):
            continue
        if name in _NEVER:
            raise ConfigError(f"{name} {_NEVER[name]}")
        unbuilt.append(f"{name}={value!r}")
    if unbuilt:
        raise NotBuiltYetError(f"not built yet: {', '.join(unbuilt)}")


def _is_default(cfg: GenerationConfig, name: str) -> bool:
    value, default = getattr(cfg, name), GenerationConfig.__dataclass_fields__[name].default
    if isinstance(value, np.ndarray | jax.Array):
        return False
    return value is None or value is False or value == default or value in ((), {})


def refuse_options(options: dict[str, Any]) -> None:
    """Raise for keyword arguments that `generate` does not have."""
    for name in options:
        if name in GenerationConfig.__dataclass_fields__:
            raise TypeError(f"generate() takes {name} from the config: use cfg.replace({name}=...)")
        if name in ("synced_gpus", "position_ids"):
            raise TypeError(f"generate() does not offer {name}: leave it out")
        if name == "assistant_model":
            raise TypeError("generate() takes an assistant as assistant=(params, cfg), not assistant_model")
        GenerationConfig().replace(**{name: None})  # an unknown name: raises and offers the nearest


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
    if ids is None:
        raise NotBuiltYetError("not built yet: generation without ids")
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


def host_mask(attention_mask, ids, cfg: GenerationConfig) -> np.ndarray:
    """Return the attention mask as bool[B, P]; every row has a token."""
    if attention_mask is None:
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


def check_cache(cache, cfg: GenerationConfig, prompts: int) -> None:
    """Raise for a cache that these prompts cannot go on from."""
    if cache is None:
        return
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be the cache of an earlier output, a jaxgen.KVCache, got {type(cache).__name__}")
    if cache.rows != prompts:
        raise InputError(f"the cache has {cache.rows} rows and there are {prompts} prompts: give one for each row")
    if cfg.on("repetition_penalty") and any(part.tokens is None for part in cache.parts):
        raise InputError(
            "repetition_penalty looks at all tokens, and this cache does not know those that it holds: go on from the "
            "cache of a generate() output, or leave the option out"
        )


def check_knobs(cfg: GenerationConfig, prompts: int) -> None:
    """Raise where an option has one value per prompt for another number of prompts."""
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_length", "min_new_tokens"):
        value = getattr(cfg, name)
        if np.ndim(value) == 1 and value.shape[0] != prompts:
            raise InputError(f"{name} has {value.shape[0]} values for {prompts} prompts: give one per prompt or one")


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
    """Warn where a row must not end before its budget is spent: `_validate_generated_length`."""
    if cfg.on("min_new_tokens"):
        name, least = "min_new_tokens", np.asarray(cfg.min_new_tokens)
    else:
        name, least = "min_length", np.asarray(cfg.min_length) - lengths
    if np.any(least > budget):
        warn(f"{name}={getattr(cfg, name)} is more than there is room for: the budget of new tokens is {budget.max()}")


def traced_budgets(cfg: GenerationConfig, width: int, mask, cache: KVCache | None) -> tuple[int, jax.Array]:
    """Return the capacity for new tokens, which must be static, and the budget per prompt under the caller's jit.

    `width`: the most tokens that a prompt can have, what its cache holds included.
    """
    prompts = mask.shape[0]
    lengths = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    if cache is not None:
        lengths += cache.total_known
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


# --- Buckets ------------------------------------------------------------------------------------------------------


def prompt_bucket(width: int) -> int:
    """Round a prompt's width up: to a power of two, from 256 on to the half between two of them as well."""
    power = max(32, 1 << (width - 1).bit_length())
    return power * 3 // 4 if power >= 512 and width <= power * 3 // 4 else power


def capacity_for(new_tokens: int, recorded: bool) -> int:
    """Round the number of new tokens up; less where scores of the whole vocabulary are kept for each."""
    return -(-new_tokens // 16) * 16 if recorded else prompt_bucket(max(new_tokens, 128))


def normal_form(cfg: GenerationConfig) -> GenerationConfig:
    """Drop what no longer matters, so that it makes no difference to which program runs."""
    defaults = GenerationConfig.__dataclass_fields__
    unused: dict[str, Any] = {name: defaults[name].default for name in _UNUSED_BY_THE_LOOP}
    if not cfg.do_sample:
        unused |= dict.fromkeys(WARPERS)
    if cfg.pad_token_id is None:  # as in the loop, here so that the program is that of a given pad id
        unused["pad_token_id"] = (eos_list(cfg.eos_token_id) or [0])[0]
    return cfg.replace(**unused)
