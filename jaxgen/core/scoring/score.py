"""Log-probabilities of the tokens of any text, computed in a single forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxgen.buckets import prompt_bucket
from jaxgen.core.config.availability import check_options, normal_form, refuse_unavailable, with_hints
from jaxgen.core.config.generation_config import GenerationConfig, model_of
from jaxgen.core.config.tables import TokenIds
from jaxgen.core.decoding.extensions import Extensions, functions
from jaxgen.core.decoding.logprobs import LogProbs
from jaxgen.core.decoding.modes import mode_of
from jaxgen.core.decoding.replay import Replay
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.logits.row_options import repeat_values
from jaxgen.core.model.context import Context
from jaxgen.core.model.sharding import REPLICATED, mesh_of, place_rows
from jaxgen.core.request.checks import check_call, check_grammar
from jaxgen.core.request.inputs import is_traced, mask_of, token_ids
from jaxgen.core.scoring.compiled import logprobs
from jaxgen.errors import ConfigError, InputError, check_whole
from jaxgen.programs import under_jit

# The default maximum number of logits in memory at a time: 128 MiB in float32.
LOGITS_AT_ONCE = 2**25


@with_hints
def score(
    params,
    ids,
    cfg: GenerationConfig,
    *,
    attention_mask=None,
    of: str = "logits",
    prompt_width: int | None = None,
    logits_processor: Sequence[Callable] | None = None,
    prefix_allowed_tokens_fn: TokenAutomaton | None = None,
    top_logprobs: int = 0,
    chunk: int | None = None,
    routed_experts=None,
) -> LogProbs:
    """Return the log-probability of every token given the tokens before it.

    >>> out = generate(params, batch.ids, key, cfg, attention_mask=batch.attention_mask)
    >>> given = {"attention_mask": out.attention_mask, "prompt_width": out.prompt_width}
    >>> score(params, out.sequences, cfg, **given).logprobs.sum(axis=1)    # of each answer
    >>> score(params, out.sequences, cfg, of="scores", **given).logprobs   # as it was drawn

    Scoring takes one forward pass. Logits are computed for a few positions at a time, and recomputed for gradients. The
    result is differentiable with respect to `params`. Under the caller's jit, ids outside the vocabulary result in NaN.

    Args:
        params: the parameters, a tree with Hugging Face's names.
        ids: int32[B, L], texts padded to the same width.
        cfg: with `of="logits"`, only `model`, `adapter`, and the pad and eos ids (to infer the mask) are used. With
            `of="scores"`, pass the same config as to `generate`. An option's value for a prompt applies to all rows of
            the prompt. If rows are not grouped by prompt, set `num_return_sequences=1` and pass one value per row.
        attention_mask: `[B, L]`, 0 for padding, which may be anywhere. By default, it is inferred as in `generate`.
        of: "logits" for the model's own distribution, or "scores" for the distribution after all processors and warpers
            of `cfg`. "scores" supports greedy search, contrastive search and sampling. Warpers never remove the scored
            token; tokens banned by a processor or a grammar get -inf.
        prompt_width: the number of columns on the left that are not scored. With `of="scores"`, these columns contain
            the prompts, and the other columns contain the generated tokens, up to each row's end. The budget affects
            `forced_eos_token_id` and automata. As in `generate`, `max_new_tokens` or `max_length` sets the budget. If
            neither is set and a row is longer than the default `max_length`, the budget is the number of new columns.
        logits_processor, prefix_allowed_tokens_fn: a list of processors and a `TokenAutomaton`, only for `of="scores"`.
        top_logprobs: n, the number of most likely tokens to return for each position.
        chunk: the number of columns whose logits are in memory at a time; by default, as many as fit into 128 MiB.
        routed_experts: int32[layers with experts, B, L, k], the experts to use for each token, as in
            `GenerateOutput.routed_experts`. Negative entries leave the choice to the routers, as by default.

    Raises:
        InputError: params, ids or mask do not match the model or each other, or `generate` could not have produced
            these rows.
        ConfigError: `cfg` has no model or an unsupported mode, or a size is out of range.
        TypeError: an argument has the wrong type.
    """
    check_call(params, cfg)
    check_whole("top_logprobs", top_logprobs, 0, cfg.model.vocab_size, ConfigError)
    if chunk is not None:
        check_whole("chunk", chunk, error=ConfigError)
    extensions = _rules(cfg, of, logits_processor, prefix_allowed_tokens_fn)
    traced = is_traced(params, ids, cfg, attention_mask, extensions) or under_jit()
    ids = token_ids(ids, cfg.model)
    mask = mask_of(attention_mask, ids, cfg)
    if prompt_width is not None:
        check_whole("prompt_width", prompt_width, 1, ids.shape[1] - 1, ConfigError)
    start = int(prompt_width or 0)
    replay = None if extensions is None else _replay(cfg, extensions, ids, mask, start, traced)
    routed = None if routed_experts is None else _checked_experts(routed_experts, cfg, ids)
    return _scored(params, cfg, ids, mask, replay, start, int(top_logprobs), chunk, routed, traced)


def _scored(
    params, cfg: GenerationConfig, ids, mask, replay, start: int, top: int, chunk, routed, traced: bool
) -> LogProbs:
    """Compute the result of `score` from checked arguments, rounding sizes up if the call is eager."""
    rows, width = ids.shape
    left = right = 0
    if not traced:
        left, right = (prompt_bucket(part) - part if part else 0 for part in (start, width - start))
        ids, mask = (np.pad(x, ((0, 0), (left, right))) for x in (ids, mask))
        if routed is not None:
            routed = np.pad(routed, ((0, 0), (0, 0), (left, right), (0, 0)), constant_values=-1)
    size = chunk_size(chunk, width - start + right, rows * cfg.model.vocab_size)
    sizes = {"start": start + left, "top": top, "chunk": size}
    mesh = None if traced else mesh_of(params)
    ids, mask = place_rows((ids, mask), mesh)
    adapter = None
    if cfg.on("adapter"):
        adapter = repeat_values({"adapter": cfg.adapter}, rows)["adapter"].astype(jnp.int32)
    context = Context(None if traced else mesh is not None, adapter)
    scores = logprobs(params, ids, mask, replay, routed, context=context, model=cfg.model, **sizes)
    if mesh is not None:
        scores = jax.device_put(scores, NamedSharding(mesh, REPLICATED))
    if left + right == 0:
        return scores
    # Slice on the host, because slicing a jax array would compile a program for each width.
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x)[:, left : left + width]), scores)


def _checked_experts(experts: Any, cfg: GenerationConfig, ids: Any) -> Any:
    """Return `routed_experts` if it fits the model and the ids; on the host, if it is not traced."""
    model = model_of(cfg)
    if not model.sparse_layers:
        raise InputError(f"routed_experts needs a model with experts, got model_type {model.model_type}")
    if not is_traced(experts):
        experts = np.asarray(experts)
    shape = (model.sparse_layers, *ids.shape, model.num_experts_per_tok)
    if experts.shape != shape or not jnp.issubdtype(experts.dtype, jnp.integer):
        found = f"{experts.dtype}{list(experts.shape)}"
        raise InputError(f"routed_experts must be integers of shape {list(shape)}, got {found}")
    if not is_traced(experts) and (largest := int(experts.max())) >= (model.num_experts or 0):
        raise InputError(
            f"routed_experts has expert {largest}, but the model's are 0 to {(model.num_experts or 0) - 1}"
        )
    return experts.astype(np.int32)


def chunk_size(given: int | None, columns: int, logits: int) -> int:
    """Return the number of columns per chunk; `logits` is the number of logits per column across all rows."""
    if given is not None:
        return min(int(given), columns)
    chunks = -(-columns // max(1, LOGITS_AT_ONCE // logits))
    return -(-columns // chunks)


def _rules(cfg: GenerationConfig, of: str, processors, allowed) -> Extensions | None:
    """Return the extensions that, together with `cfg`, produce the scores; None for the model's own distribution."""
    if of not in ("logits", "scores"):
        raise ConfigError(
            "of must be 'logits', for the model's own distribution, or 'scores', for the distribution that generate "
            f"chooses from, got {of!r}"
        )
    if of == "logits":
        for name, value in {"logits_processor": processors, "prefix_allowed_tokens_fn": allowed}.items():
            if value is not None:
                raise ConfigError(f"{name} has no effect on the model's own distribution: set of='scores'")
        return None
    if not mode_of(cfg).replays:
        raise ConfigError(f"of='scores' does not support the mode of cfg, {cfg.mode}: use of='logits'")
    refuse_unavailable(cfg)
    if cfg.on("guidance_scale"):
        raise ConfigError("of='scores' does not offer guidance_scale, which needs negative prompts: use of='logits'")
    if cfg.token_healing:
        raise ConfigError("of='scores' does not offer token_healing, which changes the prompts: use of='logits'")
    if allowed is not None and not isinstance(allowed, TokenAutomaton):
        raise TypeError(f"prefix_allowed_tokens_fn must be a TokenAutomaton here, got {type(allowed).__name__}")
    return Extensions(processors=functions("logits_processor", processors or ()), allowed=allowed)


def _replay(cfg: GenerationConfig, extensions: Extensions, ids, mask, start: int, traced: bool) -> Replay:
    """Check that `generate` could have returned these rows, and return a `Replay` to recompute their scores."""
    if not start:
        raise ConfigError("of='scores' needs prompt_width, the first generated column: out.prompt_width of the output")
    rows, width = ids.shape
    prompts, rest = divmod(rows, cfg.num_return_sequences)
    prompts = rows if rest else prompts
    check_options(cfg, prompts)
    if isinstance(extensions.allowed, TokenAutomaton):
        check_grammar(extensions.allowed, cfg, prompts)
    if not is_traced(ids, mask, cfg.eos_token_id):
        _check_rows(cfg, ids, np.asarray(mask), start)
    # If any row is longer than the default max_length, the rows were generated without this limit, so ignore it.
    longest_row = width if is_traced(mask) else int(np.sum(mask, axis=-1).max())
    fits = cfg.max_length != GenerationConfig.max_length or longest_row <= cfg.max_length
    counts_prompt = not cfg.on("max_new_tokens") and fits
    longest = cfg.max_length if counts_prompt else np.iinfo(np.int32).max
    new_tokens = cfg.max_new_tokens if cfg.on("max_new_tokens") else width - start
    leaves = cfg if traced else normal_form(cfg)
    # Convert numbers to arrays, so that the result is the same under jax.disable_jit().
    return Replay(jax.tree.map(jnp.asarray, leaves), extensions, jnp.asarray(new_tokens, jnp.int32), jnp.int32(longest))


def _check_rows(cfg: GenerationConfig, ids: np.ndarray, mask: np.ndarray, start: int) -> None:
    """Raise an error for any row of `ids [rows, L]` that `generate` could not have returned."""
    tokens, live = ids[:, start:], mask[:, start:]
    ended = ~live
    if cfg.on("eos_token_id"):
        eos = np.atleast_2d(TokenIds().leaf(cfg.eos_token_id))
        eos = np.repeat(eos, len(ids) // len(eos), axis=0)
        ended |= np.any(tokens[:, :, None] == eos[:, None, :], axis=-1)
    ended = np.logical_or.accumulate(ended, axis=-1)
    problems = {
        "has no token before prompt_width": ~np.any(mask[:, :start], axis=-1),
        "has tokens after its end, an eos token or padding: pass attention_mask and prompt_width of the output": np.any(
            live[:, 1:] & ended[:, :-1], axis=-1
        ),
    }
    for text, found in problems.items():
        if np.any(found):
            raise InputError(f"row {np.argmax(found)} {text}")
