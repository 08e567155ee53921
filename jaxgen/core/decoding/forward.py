"""One pass of the model over new tokens of each row, with the hook before and after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.decoding import guidance
from jaxgen.core.decoding.hook import StepHook, StepInputs, StepOutput
from jaxgen.core.decoding.request import Tokens
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.model.cache import KVCache
from jaxgen.core.model.causal_lm import ModelOutput, embed, forward
from jaxgen.errors import InputError
from jaxgen.shapes import repeat_rows, take, where

# Function that computes scores from logits float32[streams * rows, V] and L + 1 hidden states `[streams * rows, D]`.
Score = Callable[[jax.Array, tuple[jax.Array, ...]], jax.Array]


@flax.struct.dataclass
class Forward:
    """Result of one pass over T tokens per row.

    Attributes:
        logits: float32[streams * rows, n, V], at all T positions (n = T) or at each row's last token (n = 1).
        states: L + 1 arrays of hidden states at the same positions, `[streams * rows, n, D]`. Empty unless there is a
            hook or `Needs.layer_states` is True.
        out: hidden states, attention weights and routed experts at all T positions, if requested.
        cache: the cache, with the tokens added.
        hidden: `[streams * rows, T, D]`, the last layer's normed hidden states at all T positions; None unless
            `Needs.final_states` is True.
    """

    logits: jax.Array
    states: tuple[jax.Array, ...]
    out: ModelOutput
    cache: KVCache
    hidden: jax.Array | None = None

    def fork(self, copies: int) -> Forward:
        """Return the result for `copies` sequences of each row, without `out` and `cache`."""
        read = dataclasses.replace(self, out=None, cache=None)
        return jax.tree.map(lambda x: repeat_rows(x, x.shape[0] * copies), read)

    def hidden_of_prompts(self, run: Run) -> jax.Array:
        """Return the hidden states in the stream with the prompt, `[rows, T, D]`."""
        assert self.hidden is not None
        return guidance.conditional_part(run.cfg, self.hidden)

    def select(self, rows: jax.Array) -> Forward:
        """Return the output for one row of each prompt, `rows int32[prompts]`, without `cache` and `hidden`."""
        at = self.cache.row_indices(rows)
        return jax.tree.map(lambda x: take(x, at, at.shape[0]), dataclasses.replace(self, cache=None, hidden=None))


def run_model(
    run: Run, rows: Rows, tokens: Tokens, cache: KVCache, *, all_logits: bool = False
) -> tuple[Forward, Rows]:
    """Run the newest tokens of each row through the model, in all streams.

    The result contains the logits at each row's last token or, with `all_logits`, at all positions. The other arguments
    are as in `passes.run_prompts`, except that `tokens` has the rows of one stream.
    """
    if run.guided:
        tokens = guidance.stack(run.cfg, tokens)
    tokens, rows = inputs_of(run, rows, tokens, cache)
    return in_one_pass(run, tokens, cache, None if all_logits else jnp.maximum(tokens.length - 1, 0)), rows


def inputs_of(run: Run, rows: Rows, tokens: Tokens, cache: KVCache, following: int = 0) -> tuple[Tokens, Rows]:
    """Return `tokens` with their adapters, and as changed by the hook, and the rows with the hook's new state.

    The arguments are as in `passes.run_prompts`.
    """
    if run.extensions.hook is not None:
        tokens, rows = _before(run, rows, tokens, cache, following)
    adapter = rows.values.get("adapter")
    if run.guided:
        adapter = guidance.stack(run.cfg, adapter)
    return dataclasses.replace(tokens, adapter=adapter), rows


def observe(
    run: Run, rows: Rows, read: Forward, column: int | jax.Array, live: jax.Array, score: Score | None = None
) -> tuple[jax.Array, jax.Array, Rows]:
    """Return a column's logits and unprocessed scores, both float32[rows, V], and the rows with the hook's new state.

    The hook is called first and may change the logits. The scores are the result of `score`, or the logits if `score`
    is None. If guidance is on, the scores of the two streams are then combined. The hook's state changes only in the
    rows where `live bool[rows]` is True.
    """
    logits, states = read.logits[:, column], tuple([x[:, column] for x in read.states])
    hook = run.extensions.hook
    if hook is not None:
        history, state = guidance.stack(run.cfg, rows.history), guidance.join(rows.hook)
        changed, state = _pair("after", hook.after(state, history, StepOutput(logits, states)), StepOutput)
        logits, rows = changed.logits, _with_hook(run, rows, state, live)
    scores = logits if score is None else score(logits, states)
    if run.guided:
        logits, scores = guidance.conditional_part(run.cfg, logits), guidance.guide(rows.options(run), scores)
    return logits, scores, rows


def begin_hook(run: Run, rows: Rows) -> Rows:
    """Return a copy of `rows` that contains the initial state of the user's hook."""
    hook: StepHook = run.extensions.hook
    state = hook.init(guidance.stack(run.cfg, rows.history))
    count = rows.count * guidance.streams(run.cfg)
    for leaf in jax.tree.leaves(state):
        if np.ndim(leaf) == 0 or np.shape(leaf)[0] != count:
            raise InputError(
                f"StepHook.init must return arrays whose first axis is the rows, [{count}, ...], got one of shape "
                f"{list(np.shape(leaf))}"
            )
    return dataclasses.replace(rows, hook=guidance.split(run.cfg, state))


def _with_hook(run: Run, rows: Rows, state: Any, live: jax.Array) -> Rows:
    """Return the rows with the hook's new state. Rows that are not live keep their old state."""
    return dataclasses.replace(rows, hook=where(live, guidance.split(run.cfg, state), rows.hook))


def _before(run: Run, rows: Rows, tokens: Tokens, cache: KVCache, following: int) -> tuple[Tokens, Rows]:
    embeds = embed(run.model, run.params, tokens.ids) if tokens.embeds is None else tokens.embeds
    count, width = tokens.ids.shape
    positions = cache.total_length[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    attended = jnp.ones((count, cache.offset + cache.slots + following), bool)
    given = StepInputs(tokens.ids, embeds, positions, attended, tokens.mask)
    before = run.extensions.hook.before(guidance.join(rows.hook), guidance.stack(run.cfg, rows.history), given)
    given, state = _pair("before", before, StepInputs)
    tokens = dataclasses.replace(
        tokens,
        embeds=given.inputs_embeds,
        position_ids=given.position_ids,
        key_mask=given.attention_mask.astype(bool),
    )
    return tokens, _with_hook(run, rows, state, rows.live)


def _pair(name: str, result: Any, kind: type) -> tuple[Any, Any]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], kind)):
        raise TypeError(f"StepHook.{name} must return ({kind.__name__}, state), got {type(result).__name__}")
    return result


def in_one_pass(
    run: Run, tokens: Tokens, cache: KVCache, column: jax.Array | None, start: int | None = None
) -> Forward:
    """Run all tokens in one pass, and return the logits for one column per row or for all columns.

    `column int32[rows]` contains each row's column; None means all columns. Each row's first new token goes into slot
    `start` of the cache. Without `start`, each row's new tokens are added after its cached tokens.
    """
    if tokens.mask.shape[1] == 1:
        column = None
    out = forward(
        run.model,
        run.params,
        tokens.ids if tokens.embeds is None else None,
        inputs_embeds=tokens.embeds,
        attention_mask=tokens.mask,
        position_ids=tokens.position_ids,
        key_mask=tokens.key_mask,
        cache=cache,
        cache_position=start,
        logits_to_keep=0 if column is None else column[:, None],
        output_hidden_states=run.cfg.output_hidden_states or run.reads_states or run.needs.final_states,
        output_attentions=run.cfg.output_attentions,
        output_router_logits=run.cfg.output_routed_experts,
        context=dataclasses.replace(run.context, adapter=tokens.adapter, left_aligned=True),
    )
    assert out.cache is not None
    hidden = None
    if run.needs.final_states and out.hidden_states is not None:
        hidden = out.hidden_states[-1]
    states: tuple[jax.Array, ...] = ()
    if run.reads_states and out.hidden_states is not None:
        states = out.hidden_states
        if column is not None:
            states = tuple(jnp.take_along_axis(x, column[:, None, None], axis=1) for x in out.hidden_states)
    of_rows = dataclasses.replace(out, cache=None, aux_loss=None)  # all arrays have the rows on their first axis
    return Forward(out.logits, states, of_rows, out.cache, hidden)
