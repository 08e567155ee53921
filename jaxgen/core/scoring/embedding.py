"""embed(): one vector for each text, pooled from the model's last hidden states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jaxgen.buckets import prompt_bucket
from jaxgen.core.config.availability import with_hints
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.logits.row_options import repeat_values
from jaxgen.core.model.causal_lm import hidden
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.model.context import Context
from jaxgen.core.model.sharding import REPLICATED, mesh_of, place_rows
from jaxgen.core.request.checks import check_call
from jaxgen.core.request.inputs import is_traced, mask_of, token_ids
from jaxgen.core.scoring.pooling import Pooling
from jaxgen.programs import program, under_jit


@with_hints
def embed(params, ids, cfg: GenerationConfig, *, attention_mask=None, pooling: Pooling | None = None) -> jax.Array:
    """Return one vector for each text, as sentence-transformers computes it.

    >>> pooling = Pooling("mean")    # Pooling.from_pretrained(directory) reads how a checkpoint pools
    >>> vectors = embed(params, batch.ids, cfg, attention_mask=batch.attention_mask, pooling=pooling)
    >>> similarity = vectors @ vectors.T    # cosines, because the vectors are normalized

    The model runs once, without its head, and stores no keys and values. The hidden states are those after the final
    norm (`last_hidden_state` of transformers' base models). A text's vector does not depend on the other texts or on
    padding, up to rounding. The result is differentiable with respect to `params`.

    Args:
        params: the parameters, a tree with Hugging Face's names.
        ids: int32[B, P], texts padded to the same width.
        cfg: only `model`, `adapter`, and the pad and eos ids (to infer the mask) are used.
        attention_mask: `[B, P]`, 0 for padding, which may be anywhere. By default, it is inferred as in `generate`.
        pooling: how the states become a vector; by default, the last token's state is normalized.

    Returns:
        float32[B, D]. D is the model's `hidden_size`.

    Raises:
        InputError: params, ids or mask do not match the model or each other.
        ConfigError: `cfg` has no model.
        TypeError: an argument has the wrong type.
    """
    check_call(params, cfg)
    pooling = Pooling() if pooling is None else pooling
    if not isinstance(pooling, Pooling):
        raise TypeError(f"pooling must be a Pooling, got {type(pooling).__name__}")
    traced = is_traced(params, ids, cfg, attention_mask) or under_jit()
    ids = token_ids(ids, cfg.model)
    mask = mask_of(attention_mask, ids, cfg)
    rows, width = ids.shape
    mesh = None
    if not traced:
        mesh = mesh_of(params)
        padding = (0, 0), (0, prompt_bucket(width) - width)
        ids, mask = (np.pad(x, padding) for x in (ids, mask))
    ids, mask = place_rows((ids, mask), mesh)
    adapter = None
    if cfg.on("adapter"):
        adapter = repeat_values({"adapter": cfg.adapter}, rows)["adapter"].astype(jnp.int32)
    context = Context(None if traced else mesh is not None, adapter)
    vectors = embeddings(
        params, ids, mask, context=context, model=cfg.model, kind=pooling.kind, normalized=pooling.normalized
    )
    return vectors if mesh is None else jax.device_put(vectors, NamedSharding(mesh, REPLICATED))


@program("embed", static_argnames=["model", "kind", "normalized"])
def embeddings(
    params, ids: jax.Array, mask: jax.Array, *, context: Context, model: ModelConfig, kind: str, normalized: bool
) -> jax.Array:
    """Return the vectors of `ids int32[B, P]`, float32[B, D]; see `embed`. `mask bool[B, P]` is False for padding."""
    ids = jnp.where(mask, ids, 0)  # padding may have any id, and a NaN in that id's embedding would spread
    states, _ = hidden(model, params, ids, attention_mask=mask, context=context)
    with jax.named_scope("pool"):
        states = states.astype(jnp.float32)
        if kind == "mean":
            states = jnp.where(mask[..., None], states, 0)
            vectors = jnp.sum(states, axis=1) / jnp.sum(mask, axis=1, dtype=jnp.float32)[:, None]
        else:
            first = jnp.argmax(mask, axis=1)
            last = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
            column = first if kind == "cls" else last
            vectors = jnp.take_along_axis(states, column[:, None, None], axis=1)[:, 0]
        if normalized:
            vectors *= lax.rsqrt(jnp.maximum(jnp.sum(vectors**2, axis=-1, keepdims=True), 1e-24))
    return vectors
