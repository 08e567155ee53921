"""How the loop runs the model: over one token per row or over the prompts, whole or in chunks, with the hook around."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.extensions import Rules
from jaxgen.decoding.hook import StepInputs, StepOutput
from jaxgen.decoding.prompt import Prompt
from jaxgen.errors import InputError
from jaxgen.logits.history import History
from jaxgen.model.cache import KVCache
from jaxgen.model.causal_lm import ModelOutput, forward
from jaxgen.model.linear import look_up as embed


def prefill(
    params, cfg: GenerationConfig, rules: Rules, history: History, prompt: Prompt, cache: KVCache, capacity: int
) -> tuple[jax.Array, ModelOutput, KVCache, Any]:
    """Run the prompts into the cache.

    Returns the logits of each row's last token float32[rows, V], what else the model gave, the cache with its tokens
    noted, and the hook's state. `capacity`: how many tokens will follow, for the hook's attention mask.
    """
    hook_state = None
    if rules.hook is not None:
        history = _lanes(history, prompt.ids.shape[0])
        hook_state = rules.hook.init(history)
        _check_state(hook_state, prompt.ids.shape[0])
    held = _tokens_of(cache, prompt)
    with jax.named_scope("prefill"):
        logits, out, cache, hook_state = read(
            params, cfg, rules, history, hook_state, prompt, cache, following=capacity
        )
    return logits, out, dataclasses.replace(cache, tokens=held, known=cache.length), hook_state


def read(
    params,
    cfg: GenerationConfig,
    rules: Rules,
    history: History,
    hook_state: Any,
    prompt: Prompt,
    cache: KVCache,
    cache_position: jax.Array | None = None,
    following: int = 0,
) -> tuple[jax.Array, ModelOutput, KVCache, Any]:
    """Run the tokens of `prompt` through the model, with the hook before and after.

    `following`: how many tokens there will be room for besides those of the cache, for the hook's attention mask.
    """
    last = prompt.length - 1
    inputs: dict[str, Any] = {"attention_mask": prompt.mask}
    inputs |= {"ids": prompt.ids} if prompt.embeds is None else {"inputs_embeds": prompt.embeds}
    if rules.hook is not None:
        history = _lanes(history, prompt.ids.shape[0])
        before = rules.hook.before(hook_state, history, _inputs(params, prompt, cache, following))
        given, hook_state = _pair("before", before, StepInputs)
        inputs = {"attention_mask": prompt.mask, "key_mask": given.attention_mask.astype(bool)}
        inputs |= {"inputs_embeds": given.inputs_embeds, "position_ids": given.position_ids}
    if cfg.prefill_chunk_size is not None and cfg.prefill_chunk_size < prompt.ids.shape[1]:
        out = _in_chunks(params, cfg, rules, inputs, cache, last)
        states = out.hidden_states
    else:
        out = _forward(params, cfg, rules, cache=cache, cache_position=cache_position, column=last, **inputs)
        states = None if rules.hook is None else _at(out.hidden_states, last)
    assert out.cache is not None
    logits = out.logits[:, 0]
    if rules.hook is not None:
        states = tuple(x[:, 0] for x in states or ())
        after = rules.hook.after(hook_state, history, StepOutput(logits, states))
        seen, hook_state = _pair("after", after, StepOutput)
        logits = seen.logits
    return logits, out, out.cache, hook_state


def _forward(params, cfg: GenerationConfig, rules: Rules, column: jax.Array, **inputs) -> ModelOutput:
    """Run the model; only the logits of `column int32[rows]` are wanted."""
    assert cfg.model is not None
    steps = inputs["attention_mask"].shape[1]
    return forward(
        cfg.model,
        params,
        inputs.pop("ids", None),
        logits_to_keep=0 if steps == 1 else column[:, None],
        output_hidden_states=cfg.output_hidden_states or rules.hook is not None,
        output_attentions=cfg.output_attentions,
        **inputs,
    )


def _in_chunks(params, cfg: GenerationConfig, rules: Rules, inputs: dict, cache: KVCache, last: jax.Array):
    """Run the tokens in chunks of columns; gives logits and, with a hook, states of column `last int32[rows]` alone."""
    model, chunk = cfg.model, cfg.prefill_chunk_size
    assert model is not None
    assert chunk is not None
    rows, width = inputs["attention_mask"].shape
    per_row = {name: x for name, x in inputs.items() if name == "key_mask"}
    per_token = {name: _widen(x, -(-width // chunk) * chunk) for name, x in inputs.items() if name not in per_row}

    def one(number: jax.Array, so_far: ModelOutput) -> ModelOutput:
        first = number * chunk
        part = {name: lax.dynamic_slice_in_dim(x, first, chunk, axis=1) for name, x in per_token.items()}
        column = jnp.clip(last - first, 0, chunk - 1)
        out = _forward(params, cfg, rules, cache=so_far.cache, column=column, **part, **per_row)
        is_here = (last // chunk == number)[:, None, None]
        states = None if rules.hook is None else _at(out.hidden_states, column)
        logits, states = jax.tree.map(
            lambda new, old: jnp.where(is_here, new, old),
            (out.logits, states),
            (so_far.logits, so_far.hidden_states),
        )
        return ModelOutput(logits=logits, cache=out.cache, hidden_states=states)

    states = tuple(jnp.zeros((rows, 1, model.hidden_size), model.dtype) for _ in range(model.num_hidden_layers + 1))
    begin = ModelOutput(
        logits=jnp.zeros((rows, 1, model.vocab_size), jnp.float32),
        cache=dataclasses.replace(cache, tokens=None, known=None),  # as the model leaves it
        hidden_states=None if rules.hook is None else states,
    )
    return lax.fori_loop(0, jnp.max(last) // chunk + 1, one, begin)


def _widen(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, width - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))


def _inputs(params, prompt: Prompt, cache: KVCache, following: int) -> StepInputs:
    embeds = prompt.embeds
    if embeds is None:
        embeds = embed(prompt.ids, params["model"]["embed_tokens"]["weight"])
    rows, width = prompt.ids.shape
    positions = cache.total_length[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    everything = (rows, cache.offset + cache.slots + following)
    return StepInputs(prompt.ids, embeds, positions, jnp.ones(everything, bool), prompt.mask)


def _check_state(state: Any, rows: int) -> None:
    for leaf in jax.tree.leaves(state):
        if np.ndim(leaf) == 0 or np.shape(leaf)[0] != rows:
            raise InputError(
                f"StepHook.init must return arrays with the rows first, [{rows}, ...], got one of shape "
                f"{list(np.shape(leaf))}"
            )


def _pair(name: str, result: Any, kind: type) -> tuple[Any, Any]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], kind)):
        raise TypeError(f"StepHook.{name} must return ({kind.__name__}, state), got {type(result).__name__}")
    return result


def _at(states: tuple[jax.Array, ...] | None, column: jax.Array) -> tuple[jax.Array, ...]:
    """Select column `int32[rows]` of each `[rows, T, D]`: `[rows, 1, D]`."""
    return tuple(jnp.take_along_axis(x, column[:, None, None], axis=1) for x in states or ())


def _lanes(history: History, rows: int) -> History:
    """Repeat the rows for the model's, of which guidance has two for each."""
    have = history.length.shape[0]
    if have == rows:
        return history
    return jax.tree.map(lambda x: jnp.concatenate([x] * (rows // have)) if x.ndim else x, history)


def _tokens_of(cache: KVCache, prompt: Prompt) -> jax.Array | None:
    """int32[B, S]: the ids in the last part's slots when the prompt is in; None where it held others, unknown ones."""
    if cache.tokens is None and cache.known is not None:
        return None
    row = jnp.arange(prompt.ids.shape[0])[:, None]
    slot = cache.length[:, None] + jnp.arange(prompt.ids.shape[1], dtype=jnp.int32)[None, :]
    slot = jnp.where(prompt.mask, slot, cache.slots)
    tokens = jnp.zeros((cache.rows, cache.slots), jnp.int32) if cache.tokens is None else cache.tokens
    return tokens.at[row, slot].set(prompt.ids, mode="drop")
