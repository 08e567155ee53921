"""Run the prompts through the model, in passes of a bounded number of tokens.

The activations of a pass take memory in proportion to its tokens. A batch with more than `TOKENS_PER_PASS` tokens is
therefore read in groups of rows, one group after another, and a longer row is read in pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.control import fori_loop, scan
from jaxgen.core.decoding.forward import Forward, in_one_pass, inputs_of
from jaxgen.core.decoding.request import Tokens
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.causal_lm import ModelOutput
from jaxgen.core.model.sharding import rows_on

# The maximum number of tokens that each device reads in one pass. Reading the weights then takes a small part of the
# time, and the activations of a 7B model take 1.3 GB.
TOKENS_PER_PASS = 4096

# Function that runs tokens through the model, given the cache of their rows and the columns whose logits are wanted.
Read = Callable[[Tokens, KVCache, jax.Array], Forward]


def run_prompts(
    run: Run, rows: Rows, tokens: Tokens, cache: KVCache, *, cache_is_empty: bool, following: int = 0
) -> tuple[Forward, Rows]:
    """Run the prompts through the model, and return the logits at each row's last token.

    Args:
        run: the constants of the run.
        rows: the rows, which are returned with the hook's new state.
        tokens: the prompts, in all streams.
        cache: a cache of the preceding tokens, to which `tokens` are added.
        cache_is_empty: True if there are no preceding tokens, so that attention need not look for any.
        following: the number of slots that generation will add, for the hook's attention mask.
    """
    tokens, rows = inputs_of(run, rows, tokens, cache, following)
    last = jnp.maximum(tokens.length - 1, 0)
    height, width = pass_shape(run, tokens, cache)

    def read(tokens: Tokens, cache: KVCache, last: jax.Array) -> Forward:
        if width < tokens.ids.shape[1]:
            return _in_pieces(run, tokens, cache, last, width)
        return in_one_pass(run, tokens, cache, last, 0 if cache_is_empty else None)

    if height is None:
        return read(tokens, cache, last), rows
    return _in_groups(read, tokens, cache, last, rows_on(run.mesh, 1), height), rows


def pass_shape(run: Run, tokens: Tokens, cache: KVCache) -> tuple[int | None, int]:
    """Return the number of rows that each device reads in one pass (None for all rows), and the number of columns."""
    rows, width = tokens.ids.shape
    columns = min(run.cfg.prefill_chunk_size or width, width)
    # Under the caller's jit, rows may be on any of several devices, and must stay there. Sizes may also be symbolic.
    is_placed = run.mesh is not None or run.context.on_one_device
    copies = [rows // part.rows for part in cache.parts[:-1] if 1 < part.rows < rows]
    if not is_placed or not isinstance(rows * width, int) or (run.mesh is not None and copies):
        return None, columns
    if columns > TOKENS_PER_PASS and run.cfg.prefill_chunk_size is None and _can_cut(run):
        columns = -(-width // -(-width // TOKENS_PER_PASS))
    each, most = rows // rows_on(run.mesh, 1), max(TOKENS_PER_PASS // columns, 1)
    groups = -(-each // most)
    if groups == 1:
        return None, columns
    if not copies:
        return -(-each // groups), columns
    # A group must have all rows of its prefix rows, or rows of only one, and the last group must not begin early.
    heights = [height for height in range(1, most + 1) if each % height == 0]
    return max(h for h in heights if all(h % count == 0 or count % h == 0 for count in copies)), columns


def _can_cut(run: Run) -> bool:
    """Return True if a row may be read in pieces: no output covers all columns, and RoPE ignores the row's length."""
    cfg, model = run.cfg, run.model
    covers_all = cfg.output_attentions or cfg.output_hidden_states or cfg.output_routed_experts
    return not covers_all and not model.has_dynamic_rope and model.short_length is None


def _in_groups(read: Read, tokens: Tokens, cache: KVCache, last: jax.Array, parts: int, height: int) -> Forward:
    """Read `height` rows of each of `parts` equal parts of the batch at a time. On a mesh, a part is on one device.

    The last group may begin with rows that the group before it has read. They have no new tokens.
    """
    rows = tokens.ids.shape[0]
    each = rows // parts

    def cut(tree: Any, begin: jax.Array) -> Any:
        def of_part(x: jax.Array) -> jax.Array:
            x = lax.dynamic_slice_in_dim(x.reshape(parts, each, *x.shape[1:]), begin, height, axis=1)
            return x.reshape(parts * height, *x.shape[2:])

        return jax.tree.map(of_part, tree)

    def put(tree: Any, new: Any, begin: jax.Array) -> Any:
        def to_part(x: jax.Array, new: jax.Array) -> jax.Array:
            divided, new = x.reshape(parts, each, *x.shape[1:]), new.reshape(parts, height, *new.shape[1:])
            return lax.dynamic_update_slice_in_dim(divided, new, begin, axis=1).reshape(x.shape)

        return jax.tree.map(to_part, tree, new)

    def of_group(prefix: KVCache | None, begin: jax.Array) -> KVCache | None:
        if prefix is None or prefix.rows == 1:
            return prefix
        copies, part = rows // prefix.rows, dataclasses.replace(prefix, prefix=None, streams=1)
        if copies == 1:
            part = cut(part, begin)
        else:  # see `pass_shape`
            part = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, begin // copies, max(height // copies, 1)), part)
        return dataclasses.replace(part, prefix=of_group(prefix.prefix, begin))

    def one(own: KVCache, group: jax.Array) -> tuple[KVCache, Forward]:
        begin = jnp.minimum(group * height, each - height)
        index = begin + jnp.arange(height, dtype=jnp.int32)
        is_new = jnp.tile(index >= group * height, parts)
        given = cut(tokens, begin)
        given = dataclasses.replace(given, mask=given.mask & is_new[:, None])
        before = cut(own, begin)
        prefix = of_group(cache.prefix, begin)
        out = read(given, dataclasses.replace(before, prefix=prefix), cut(last, begin))
        length = jnp.where(is_new, out.cache.length, before.length)
        own = put(own, dataclasses.replace(out.cache, prefix=None, length=length), begin)
        return own, dataclasses.replace(out, cache=None)

    groups = -(-each // height)
    own = dataclasses.replace(cache, prefix=None, streams=1)
    own, outs = scan(one, own, jnp.arange(groups, dtype=jnp.int32), reads=(tokens, last))
    index = jnp.arange(each, dtype=jnp.int32)
    group = index // height
    within = index - jnp.minimum(group * height, each - height)

    def in_order(x: jax.Array) -> jax.Array:
        x = x.reshape(groups, parts, height, *x.shape[2:])
        return jnp.moveaxis(x[group, :, within], 0, 1).reshape(rows, *x.shape[3:])

    cache = dataclasses.replace(own, prefix=cache.prefix, streams=cache.streams)
    return dataclasses.replace(jax.tree.map(in_order, outs), cache=cache)


def _in_pieces(run: Run, tokens: Tokens, cache: KVCache, last: jax.Array, size: int) -> Forward:
    """Run the tokens in pieces of `size` columns, and return the logits in column `last int32[rows]`."""
    model = run.model
    rows, width = tokens.mask.shape
    tokens = tokens.padded(-(-width // size) * size)

    def one(piece: jax.Array, so_far: Forward) -> Forward:
        first = piece * size
        column = jnp.clip(last - first, 0, size - 1)
        read = in_one_pass(run, tokens.columns(first, size), so_far.cache, column)
        is_here = (last // size == piece)[:, None, None]
        logits, states = jax.tree.map(
            lambda new, old: jnp.where(is_here, new, old), (read.logits, read.states), (so_far.logits, so_far.states)
        )
        hidden = so_far.hidden
        if hidden is not None and read.hidden is not None:
            hidden = lax.dynamic_update_slice_in_dim(hidden, read.hidden, first, axis=1)
        return dataclasses.replace(so_far, logits=logits, states=states, cache=read.cache, hidden=hidden)

    layers = model.num_hidden_layers + 1 if run.reads_states else 0
    logits = jnp.zeros((rows, 1, model.vocab_size), jnp.float32)
    states = tuple(jnp.zeros((rows, 1, model.hidden_size), model.dtype) for _ in range(layers))
    hidden = None
    if run.needs.final_states:
        hidden = jnp.zeros((rows, tokens.mask.shape[1], model.hidden_size), model.dtype)
    begin = Forward(logits, states, ModelOutput(logits), cache, hidden)
    return fori_loop(0, jnp.max(last) // size + 1, one, begin)
