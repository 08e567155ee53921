"""Classifier-free guidance (arXiv 2306.17806): the model reads each row in two streams, with and without its prompt.

This is transformers' `UnbatchedClassifierFreeGuidanceLogitsProcessor` in a single pass. The streams are stacked along
the first axis, and the rows that read the prompt come first. Only the rows that read the prompt are recorded and
returned in the cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.request import Request, Tokens
from jaxgen.core.decoding.run import Run
from jaxgen.core.logits import processors
from jaxgen.core.logits.row_options import RowOptions
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.causal_lm import embed
from jaxgen.shapes import pad_axis


def streams(cfg: GenerationConfig) -> int:
    """Return the number of streams per row."""
    return 2 if cfg.on("guidance_scale") else 1


def stack(cfg: GenerationConfig, tree: Any) -> Any:
    """Repeat arrays `[rows, ...]` once per stream, and return `[streams * rows, ...]`."""
    count = streams(cfg)
    return tree if count == 1 else jax.tree.map(lambda x: jnp.concatenate([x] * count), tree)


def split(cfg: GenerationConfig, tree: Any) -> tuple[Any, ...]:
    """Split arrays `[streams * rows, ...]` into one tree per stream."""
    count = streams(cfg)
    return tuple(jax.tree.map(lambda x, part=part: jnp.split(x, count)[part], tree) for part in range(count))


def join(trees: tuple[Any, ...]) -> Any:
    """Undo `split`."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *trees)


def with_negative(run: Run, request: Request, prompt: Tokens) -> Tokens:
    """Append the negative prompts as rows. By default, the last token of a prompt is its negative prompt."""
    last = jnp.maximum(prompt.length - 1, 0)[:, None]
    negative = Tokens(jnp.take_along_axis(prompt.ids, last, axis=1), jnp.ones(last.shape, bool))
    if request.negative_ids is not None and request.negative_mask is not None:
        negative = run.pad(Tokens.align(request.negative_ids, request.negative_mask))
    width = max(prompt.ids.shape[1], negative.ids.shape[1])

    def over(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.concatenate([pad_axis(a, 1, width), pad_axis(b, 1, width)])

    embeds = None
    if prompt.embeds is not None:
        embeds = over(prompt.embeds, embed(run.model, run.params, negative.ids).astype(prompt.embeds.dtype))
    return Tokens(over(prompt.ids, negative.ids), over(prompt.mask, negative.mask), embeds)


def with_empty_rows(kv: KVCache, prompts: int) -> KVCache:
    """Return a cache with the rows of `kv`, repeated for all prompts, and an empty row for each negative prompt."""
    return jax.tree.map(lambda x: pad_axis(x, 0, 2 * prompts), kv.expand(prompts // kv.rows))


def conditional_part(cfg: GenerationConfig, x: jax.Array) -> jax.Array:
    """Return the part `[rows, ...]` of `x [streams * rows, ...]` that belongs to the stream with the prompt."""
    return split(cfg, x)[0]


def guide(options: RowOptions, scores: jax.Array) -> jax.Array:
    """Return the guided scores, float32[rows, V], from the scores of both streams."""
    conditional, unconditional = split(options.cfg, scores)
    scale = options.number("guidance_scale")
    # A scale of 1 means no guidance. If prompts have different scales, a prompt with scale 1 keeps its scores.
    return jnp.where(scale == 1, conditional, processors.guidance(conditional, unconditional, scale))
