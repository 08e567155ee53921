"""Classifier-free guidance (arXiv 2306.17806): the model reads each row in two streams, with and without its prompt.

`UnbatchedClassifierFreeGuidanceLogitsProcessor` of transformers, in one forward pass: the streams are stacked, the rows
with the prompt first. `StepHook` documents that order; the recording and the result's cache use the first rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.prompt import Prompt
from jaxgen.decoding.run import Request, Run
from jaxgen.logits import processors
from jaxgen.logits.row_options import OptionValues, RowOptions
from jaxgen.model.cache import KVCache
from jaxgen.model.causal_lm import embed
from jaxgen.shapes import pad_axis


def streams(cfg: GenerationConfig) -> int:
    """Return the number of streams per row."""
    return 2 if cfg.on("guidance_scale") else 1


def stack(cfg: GenerationConfig, tree: Any) -> Any:
    """Return arrays `[rows, ...]` once for each stream: `[streams * rows, ...]`."""
    count = streams(cfg)
    return tree if count == 1 else jax.tree.map(lambda x: jnp.concatenate([x] * count), tree)


def split(cfg: GenerationConfig, tree: Any) -> tuple[Any, ...]:
    """Split arrays `[streams * rows, ...]` into one tree per stream."""
    count = streams(cfg)
    return tuple(jax.tree.map(lambda x, part=part: _part(x, part, count), tree) for part in range(count))


def join(trees: tuple[Any, ...]) -> Any:
    """Undo `split`."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *trees)


def _part(x: jax.Array, part: int, count: int) -> jax.Array:
    rows = x.shape[0] // count
    return x[part * rows : (part + 1) * rows]


def with_negative(run: Run, request: Request, prompt: Prompt) -> Prompt:
    """Stack the negative prompts under the prompts; by default a prompt's last token is its negative prompt."""
    if streams(run.cfg) == 1:
        return prompt
    negative = Prompt(prompt.last().ids, jnp.ones((prompt.ids.shape[0], 1), bool))
    if request.negative_ids is not None and request.negative_mask is not None:
        negative = Prompt.align(request.negative_ids, request.negative_mask)
    width = max(prompt.ids.shape[1], negative.ids.shape[1])

    def over(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.concatenate([pad_axis(a, 1, width), pad_axis(b, 1, width)])

    embeds = None
    if prompt.embeds is not None:
        embeds = over(prompt.embeds, embed(run.model, run.params, negative.ids).astype(prompt.embeds.dtype))
    return Prompt(over(prompt.ids, negative.ids), over(prompt.mask, negative.mask), embeds)


def with_empty_rows(cfg: GenerationConfig, kv: KVCache, prompts: int) -> KVCache:
    """Return a cache with the rows of `kv`, repeated for `prompts`, and an empty row for each negative prompt."""
    return kv if streams(cfg) == 1 else kv.expand(prompts // kv.rows).pad_rows(2 * prompts)


def guide(cfg: GenerationConfig, options: OptionValues, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the logits with the prompt, float32[rows, V], and the guided scores, from those of all streams."""
    if streams(cfg) == 1:
        return logits, logits
    conditional, unconditional = split(cfg, logits)
    scale = RowOptions(cfg, options).number("guidance_scale")
    # A scale of 1 is off: with one scale per prompt, that prompt keeps its logits.
    guided = jnp.where(scale == 1, conditional, processors.guidance(conditional, unconditional, scale))
    return conditional, guided


def rows_of_cache(cfg: GenerationConfig, rows: jax.Array, count: int) -> jax.Array:
    """Return the cache's row numbers, in all streams, for row numbers `rows int32[m]` of `count` rows.

    A number of `count` or more becomes a number past the cache's rows.
    """
    parts = streams(cfg)
    first = jnp.arange(parts, dtype=jnp.int32)[:, None] * count
    return jnp.where(rows < count, first + rows[None, :], parts * count).reshape(-1)


def conditional(cfg: GenerationConfig, kv: KVCache) -> KVCache:
    """Return the cache of the rows with the prompt."""
    return kv if streams(cfg) == 1 else kv.take_rows(kv.rows // 2)
