"""What is kept of each step for the output: scores, log-probabilities, hidden states, attention weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.logprobs import pick
from jaxgen.model.causal_lm import ModelOutput
from jaxgen.shapes import repeat_rows


@flax.struct.dataclass
class StepRecord:
    """Values of the model's layers, for the tokens of the prompt and for each generated one that was run.

    The axes that are tokens have the columns of `GenerateOutput.sequences`; padding has zeros.

    Attributes:
        prefill: one array per layer: hidden states `[B, P, D]`, attention weights float32[B, heads, P, P].
        decode: one array per layer, steps first: `[N - 1, rows, D]`, float32[N - 1, rows, heads, P + N]. The first
            step, in which the prompt is run, is not among them; zeros in steps that never came.
    """

    prefill: tuple[jax.Array, ...]
    decode: tuple[jax.Array, ...]

    def put(self, step: jax.Array, layers: Sequence[jax.Array]) -> StepRecord:
        """Add what the layers gave in a step, counted from 1."""
        decode = tuple(
            lax.dynamic_update_index_in_dim(buffer, layer, step - 1, axis=0)
            for buffer, layer in zip(self.decode, layers, strict=True)
        )
        return dataclasses.replace(self, decode=decode)


def columns_of(mask: jax.Array, length: jax.Array) -> jax.Array:
    """int32[B, P]: which of the tokens that were prefilled is in each column of the prompt, -1 for padding.

    Args:
        mask: bool[B, P], where the prompt has tokens.
        length: int32[B], how many were prefilled; what is more than the prompt's came before it.
    """
    order = jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1
    return jnp.where(mask, order + (length - jnp.sum(mask, axis=-1, dtype=jnp.int32))[:, None], -1)


def _in_columns(x: jax.Array, columns: jax.Array, axis: int) -> jax.Array:
    """Put the tokens along an axis of `x`, rows first, into columns int32[rows, P]."""
    shape = [1] * x.ndim
    shape[0], shape[axis] = columns.shape
    columns = columns.reshape(shape)
    return jnp.where(columns >= 0, jnp.take_along_axis(x, jnp.maximum(columns, 0), axis=axis), jnp.zeros((), x.dtype))


@flax.struct.dataclass
class Records:
    """What the config asks for; None for what it does not.

    Attributes:
        scores: float32[N, rows, V], what the tokens were chosen from; zeros in steps that never came.
        logits: float32[N, rows, V], as the model gave them.
        logprobs: float32[rows, N], of the chosen tokens.
        top_logprobs: float32[rows, N, n], of the n likeliest tokens, which are top_tokens int32[rows, N, n].
        hidden_states: L + 1 layers, the embeddings first.
        attentions: L layers.
        columns: int32[rows, P], as `columns_of` has it.
    """

    scores: jax.Array | None = None
    logits: jax.Array | None = None
    logprobs: jax.Array | None = None
    top_logprobs: jax.Array | None = None
    top_tokens: jax.Array | None = None
    hidden_states: StepRecord | None = None
    attentions: StepRecord | None = None
    columns: jax.Array | None = None

    @classmethod
    def begin(cls, cfg: GenerationConfig, rows: int, capacity: int, out: ModelOutput, columns: jax.Array) -> Records:
        """Make room for `capacity` steps and keep what the prefill gave; `columns int32[B, P]`."""
        assert cfg.model is not None
        everything = (capacity, rows, cfg.model.vocab_size)
        top = (rows, capacity, cfg.top_logprobs)
        wanted = cfg.output_logprobs is not None
        prompts, width = columns.shape
        later = max(capacity - 1, 1)  # steps after the first; XLA has no use for an array of none
        hidden = attentions = None
        if cfg.output_hidden_states and out.hidden_states is not None:
            prefill = tuple(_in_columns(x[:prompts], columns, 1) for x in out.hidden_states)
            room = [(later, rows, x.shape[-1]) for x in prefill]
            hidden = StepRecord(prefill, tuple(jnp.zeros(shape, cfg.model.dtype) for shape in room))
        if cfg.output_attentions and out.attentions is not None:
            prefill = tuple(_in_columns(_in_columns(x[:prompts], columns, 2), columns, 3) for x in out.attentions)
            room = [(later, rows, x.shape[1], width + capacity) for x in prefill]
            attentions = StepRecord(prefill, tuple(jnp.zeros(shape, jnp.float32) for shape in room))
        return cls(
            scores=jnp.zeros(everything, jnp.float32) if cfg.output_scores else None,
            logits=jnp.zeros(everything, jnp.float32) if cfg.output_logits else None,
            logprobs=jnp.zeros((rows, capacity), jnp.float32) if wanted else None,
            top_logprobs=jnp.zeros(top, jnp.float32) if cfg.top_logprobs else None,
            top_tokens=jnp.zeros(top, jnp.int32) if cfg.top_logprobs else None,
            hidden_states=hidden,
            attentions=attentions,
            columns=repeat_rows(columns, rows) if attentions is not None else None,
        )

    def put(
        self, cfg: GenerationConfig, step: jax.Array, logits: jax.Array, scores: jax.Array, tokens: jax.Array, live
    ) -> Records:
        """Add a step: `logits` and `scores` float32[rows, V], the tokens that were chosen in the rows `live`."""
        values = {"scores": _put(self.scores, scores, step, 0), "logits": _put(self.logits, logits, step, 0)}
        if cfg.output_logprobs is not None:
            source = logits if cfg.output_logprobs == "logits" else scores
            picked = pick(source, tokens, live, cfg.top_logprobs)
            for name in ("logprobs", "top_logprobs", "top_tokens"):
                values[name] = _put(getattr(self, name), getattr(picked, name), step, 1)
        return dataclasses.replace(self, **values)

    def put_layers(self, step: jax.Array, out: ModelOutput) -> Records:
        """Add what the layers of the model gave for the token before `step`."""
        hidden, attentions, columns = self.hidden_states, self.attentions, self.columns
        if hidden is not None and out.hidden_states is not None:
            rows = hidden.decode[0].shape[1]
            hidden = hidden.put(step, [x[:rows, 0] for x in out.hidden_states])
        if attentions is not None and out.attentions is not None and columns is not None:
            rows, width = attentions.decode[0].shape[1], attentions.decode[0].shape[-1]
            capacity = width - columns.shape[1]

            def in_columns(x: jax.Array) -> jax.Array:  # [rows, heads, 1, slots of prompt and generation]
                x = x[:rows, :, 0]
                return jnp.concatenate([_in_columns(x[..., :-capacity], columns, 2), x[..., -capacity:]], axis=-1)

            attentions = attentions.put(step, [in_columns(x) for x in out.attentions])
        return dataclasses.replace(self, hidden_states=hidden, attentions=attentions)


def _put(buffer: jax.Array | None, values: jax.Array | None, step: jax.Array, axis: int) -> jax.Array | None:
    return (
        None if buffer is None or values is None else lax.dynamic_update_index_in_dim(buffer, values, step, axis=axis)
    )
