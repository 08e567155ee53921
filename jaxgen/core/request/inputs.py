"""The arrays of a request: prompts, masks, embeddings and negative prompts.

Concrete arrays become numpy arrays, and their values are checked. If the caller's transformation traces an array, only
the array's shape and dtype are checked. Padding is inferred and checked here, and removed by
`jaxgen.core.decoding.request.Tokens.align`.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.continuation import UNKNOWN
from jaxgen.core.decoding.request import Array
from jaxgen.core.model.config import ModelConfig
from jaxgen.errors import InputError, shown, warn


def is_traced(*trees) -> bool:
    """Return True if any array in the trees is traced by the caller's transformation."""
    return bool([leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, Tracer)])


def _array(x, message: str) -> Array:
    try:
        return jnp.asarray(x) if is_traced(x) else np.asarray(x)
    except ValueError as error:
        raise InputError(message) from error


def token_ids(prompts, model: ModelConfig) -> Array:
    """Return prompts as int32[B, P], checked against the vocabulary if they are concrete."""
    if isinstance(prompts, tuple) and hasattr(prompts, "attention_mask"):
        raise TypeError("ids is a Batch: pass batch.ids, and attention_mask=batch.attention_mask")
    if isinstance(prompts, Mapping):
        raise TypeError("ids is a dict: pass its input_ids, and its attention_mask as attention_mask=")
    ids = _array(prompts, "ids must be one array [B, P]: pad the prompts on the left and pass attention_mask")
    if ids.dtype.kind in "SU":
        raise TypeError(
            "ids is text: encode it with a tokenizer first, tok.batch([text]).ids or tok.chat(messages).ids"
        )
    if ids.dtype.kind == "O":
        raise TypeError(f"ids must be an array of token ids, got {type(prompts).__name__}")
    if ids.ndim != 2 or 0 in ids.shape:
        raise InputError(f"ids must have shape [B, P] with B and P at least 1, got {list(ids.shape)}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    if not is_traced(ids):
        check_vocabulary(ids, model, "ids")
    return ids.astype(jnp.int32)


def row_ids(tokens, model: ModelConfig, name: str = "the prompt") -> np.ndarray:
    """Return a list of ids as int32[n], checked against the vocabulary; errors call it `name`."""
    try:
        ids = np.asarray(tokens)
    except ValueError as error:
        raise TypeError(f"{name} must be a list of token ids, got {shown(tokens)}") from error
    if not ids.size and ids.ndim == 1:
        raise InputError(f"{name} has no tokens: pass at least one")
    # NumPy would convert a boolean among integers to an integer.
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (isinstance(tokens, list) and bool in set(map(type, tokens))):
        raise TypeError(f"{name} must be a list of token ids, got {shown(tokens)}")
    check_vocabulary(ids, model, name)
    return ids.astype(np.int32)


def check_vocabulary(ids, model: ModelConfig, name: str = "the prompt") -> None:
    """Raise an error if an id is outside the model's vocabulary."""
    smallest, largest = np.min(ids, initial=0), np.max(ids, initial=0)
    if smallest < 0 or largest >= model.vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise InputError(f"{name} contains the token {wrong}, but the vocabulary is 0 to {model.vocab_size - 1}")


def prompts_of(ids, embeds, cfg: GenerationConfig, continues: bool) -> tuple[Array, Array | None]:
    """Return the prompts that the caller passed: the ids, int32[B, P], and the embeddings, `[B, P, D]` or None.

    If only embeddings were passed, all ids are `UNKNOWN`. Without ids or embeddings, the prompt is `bos_token_id`.
    A call that continues a cache must have ids or embeddings.
    """
    if embeds is not None:
        embeds = embeds if is_traced(embeds) else np.asarray(embeds)
        if embeds.ndim != 3 or embeds.shape[-1] != cfg.model.hidden_size or 0 in embeds.shape:
            raise InputError(
                f"inputs_embeds must have shape [B, P, {cfg.model.hidden_size}] with B and P at least 1, got "
                f"{list(embeds.shape)}"
            )
        if not jnp.issubdtype(embeds.dtype, jnp.floating):
            raise TypeError(f"inputs_embeds must be floats, got {embeds.dtype}")
        if ids is None:
            return np.full(embeds.shape[:2], UNKNOWN, np.int32), embeds
    if ids is None:
        if continues:
            raise InputError("ids is None, but a cache was passed: pass the new tokens too")
        if cfg.bos_token_id is None:
            raise InputError("ids and bos_token_id are both None: pass prompts, or set bos_token_id, the first id")
        ids = [[cfg.bos_token_id]]
    ids = token_ids(ids, cfg.model)
    if embeds is not None and embeds.shape[:2] != ids.shape:
        raise InputError(
            f"inputs_embeds {list(embeds.shape)} and ids {list(ids.shape)} must describe the same tokens: match their "
            "shapes, or pass ids=None"
        )
    return ids, embeds


def mask_of(attention_mask, ids: Array, cfg: GenerationConfig, embedded: bool = False) -> Array:
    """Return the attention mask as bool[B, P]. In a concrete mask, each row must have at least one token.

    If `embedded`, the prompts are embeddings, and padding cannot be inferred from the ids.
    """
    if attention_mask is None:
        mask = np.ones(ids.shape, bool) if embedded else _inferred_mask(ids, cfg)
    else:
        mask = _array(attention_mask, "attention_mask must be one array of the shape of ids")
        if mask.shape != ids.shape:
            raise InputError(f"attention_mask must have the shape of ids, {list(ids.shape)}, got {list(mask.shape)}")
        if not is_traced(mask) and not np.all((mask == 0) | (mask == 1)):
            raise InputError("attention_mask must contain only 0 for padding and 1 for tokens")
        mask = mask.astype(bool)
    if not is_traced(mask) and not np.all(np.any(mask, axis=-1)):
        row = int(np.argmin(np.any(mask, axis=-1)))
        raise InputError(f"prompt {row} is empty (all padding): add a token such as BOS")
    return mask


def _inferred_mask(ids: Array, cfg: GenerationConfig) -> Array:
    """Infer the mask as in transformers' `_prepare_attention_mask_for_generation`.

    Tokens with the pad id are padding. If the pad id is also an eos id, no tokens are treated as padding.
    """
    pad, eos = cfg.pad_token_id, cfg.eos_token_id
    xp = jnp if is_traced(ids, pad, eos) else np
    if pad is None:
        return xp.ones(ids.shape, bool)
    mask = ids != pad
    if eos is not None:
        ends = xp.any(xp.atleast_1d(xp.asarray(eos)) == pad, axis=-1)
        mask = mask | (ends[:, None] if ends.ndim else ends)
    if xp is np and ids.shape[1] > 1 and np.any(ids[:, 0] == pad) and np.all(mask):
        warn(
            f"attention_mask is missing and the pad id {pad} is also an eos id, so padding in ids counts as "
            "text: pass attention_mask"
        )
    return mask


def negative_prompts(
    negative, mask, cfg: GenerationConfig, prompts: int, has_ids: bool
) -> tuple[Array | None, Array | None]:
    """Check the caller's arguments, and return the negative prompts, int32[B, Q], and their mask, bool[B, Q].

    Without guidance, both results are None. Both results are also None if the prompts have ids and the caller passes no
    negative prompts. The default negative prompt is the last id of the prompt.
    """
    if negative is None and mask is not None:
        raise InputError("negative_prompt_attention_mask is for negative_prompt_ids: pass them too")
    if negative is None or not cfg.on("guidance_scale"):
        if negative is not None and cfg.guidance_scale is None:
            raise InputError("negative_prompt_ids need guidance_scale: set it to a number other than 1, which is off")
        if cfg.on("guidance_scale") and not has_ids:
            raise InputError("guidance_scale without ids has no default negative prompt: pass negative_prompt_ids")
        return None, None
    try:
        negative = token_ids(negative, cfg.model)
        mask = np.ones(negative.shape, bool) if mask is None else mask_of(mask, negative, cfg)
    except (InputError, TypeError) as error:
        raise type(error)(f"negative_prompt_ids: {error}") from error
    if negative.shape[0] not in (1, prompts):
        raise InputError(
            f"negative_prompt_ids has {negative.shape[0]} rows for {prompts} prompts: pass one per prompt, or one for "
            "all"
        )
    xp = jnp if is_traced(negative, mask) else np
    shape = (prompts, negative.shape[1])
    return xp.broadcast_to(negative, shape), xp.broadcast_to(mask, shape)
