"""The arrays of a request: prompts, masks, embeddings, negative prompts; checked before anything is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxgen.config.generation_config import GenerationConfig, warn
from jaxgen.decoding.prompt import UNKNOWN
from jaxgen.errors import InputError
from jaxgen.shapes import prompt_bucket


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
        try:
            mask = np.asarray(attention_mask)
        except ValueError as error:
            raise InputError("attention_mask must be one array of the shape of ids") from error
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
    ends = xp.any(eos == cfg.pad_token_id, axis=-1)
    return mask | (ends[:, None] if ends.ndim else ends)


def host_prompts(ids, embeds, cfg: GenerationConfig, cache) -> tuple[np.ndarray, np.ndarray | None]:
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


def traced_prompts(ids, embeds, cfg: GenerationConfig) -> tuple[jax.Array, jax.Array | None]:
    """Return the same of arrays that are traced."""
    if embeds is not None:
        _check_embeds(embeds, cfg)
        if ids is None:
            ids = np.full(embeds.shape[:2], UNKNOWN, np.int32)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(ids)):
        ids = jnp.asarray(ids)
    elif np.any(np.asarray(ids) != UNKNOWN):
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


def host_negative(negative, mask, cfg: GenerationConfig, prompts: int, without_ids: bool):
    """Return the negative prompts of guidance, int32[B, Q], and their mask, in a bucket; None, None without them."""
    _check_guidance(negative, mask, cfg)
    if not cfg.on("guidance_scale"):
        return None, None
    if negative is None:
        if without_ids:
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


def traced_negative(negative, mask, cfg: GenerationConfig, prompts: int):
    """Return the same of arrays that are traced."""
    _check_guidance(negative, mask, cfg)
    if not cfg.on("guidance_scale"):
        return None, None
    negative = jnp.asarray(negative)
    check_ids_shape(negative)
    mask = jnp.ones(negative.shape, bool) if mask is None else jnp.asarray(mask).astype(bool)
    check_mask_shape(mask, negative)
    return _per_prompt(negative.astype(jnp.int32), prompts, jnp), _per_prompt(mask, prompts, jnp)


def _check_guidance(negative, mask, cfg: GenerationConfig) -> None:
    if negative is None and mask is not None:
        raise InputError("negative_prompt_attention_mask is for negative_prompt_ids: give them too")
    if negative is not None and not cfg.on("guidance_scale"):
        warn("negative_prompt_ids has no effect: guidance_scale is off, set it to another number than 1")


def _per_prompt(x, prompts: int, xp):
    if x.shape[0] not in (1, prompts):
        raise InputError(f"negative_prompt_ids has {x.shape[0]} rows for {prompts} prompts: give one per prompt or one")
    return xp.broadcast_to(x, (prompts, x.shape[1]))
