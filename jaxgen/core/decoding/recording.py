"""Per-step records of scores, logits, hidden states and attention weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.row_state import RowState
from jaxgen.core.model.causal_lm import ModelOutput
from jaxgen.shapes import put, short_repr


@flax.struct.dataclass
class LayerRecording(RowState):
    """Values from the model's layers for the prompts' tokens and for each generated token that the model has read.

    Entries along a token axis correspond to the columns of `GenerateOutput.sequences`; entries for padding are zero, or
    -1 for experts.

    Attributes:
        prefill: one array per layer: hidden states `[B, P, D]`, attention weights float32[B, A, P, P] or routed experts
            int32[B, P, k].
        decode: one array per layer: `[N - 1, rows, D]`, float32[N - 1, rows, A, P + N] or int32[N - 1, rows, k]. There
            are N - 1 steps because the first token is chosen after the prefill. Entries for steps not taken are zero
            (-1 for experts). Inside the loop, the first two axes are swapped: `[rows, N - 1, ...]`.
    """

    of_prompts = ("prefill",)

    prefill: tuple[jax.Array, ...]
    decode: tuple[jax.Array, ...]

    __repr__ = short_repr

    def trim(self, width: int, new_tokens: int, tokens: int | None) -> LayerRecording:
        """Return the record, trimmed to `width` prompt columns and `new_tokens` new tokens.

        In the result, `decode` has the steps on its first axis. Columns that pad prompts to a bucket are removed. For
        attention weights, `tokens` is the number of generated tokens to keep on the last axis; otherwise None.
        """
        padding = self.prefill[0].shape[-2] - width
        prefill = tuple(x[..., padding:, :] for x in self.prefill)
        decode = tuple(x[:, : max(new_tokens - 1, 0)].swapaxes(0, 1) for x in self.decode)
        if tokens is not None:
            prefill = tuple(x[..., padding:] for x in prefill)
            decode = tuple(x[..., padding : padding + width + tokens] for x in decode)
        return LayerRecording(prefill, decode)

    def put(self, step: jax.Array, live: jax.Array, layers: Sequence[jax.Array]) -> LayerRecording:
        """Record `layers [rows, ...]` for the `step`-th generated token of each live row; `step` is int32[rows]."""
        decode = tuple(put_step(buffer, step - 1, live, x) for buffer, x in zip(self.decode, layers, strict=True))
        return dataclasses.replace(self, decode=decode)


def columns_of(mask: jax.Array, length: jax.Array) -> jax.Array:
    """Return the index of each column's token among the prompt's prefilled tokens, int32[B, P]; -1 for padding.

    `length int32[B]` is the number of prefilled tokens in each prompt. The columns where `mask bool[B, P]` is True
    contain the last prefilled tokens of each prompt.
    """
    order = jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1
    return jnp.where(mask, order + (length - jnp.sum(mask, axis=-1, dtype=jnp.int32))[:, None], -1)


def _in_columns(x: jax.Array, columns: jax.Array, axis: int, missing: int = 0) -> jax.Array:
    """Take the entries of `x [rows, ...]` at `columns int32[rows, P]` along an axis, or `missing` at negative ones."""
    shape = [1] * x.ndim
    shape[0], shape[axis] = columns.shape
    columns = columns.reshape(shape)
    return jnp.where(
        columns >= 0, jnp.take_along_axis(x, jnp.maximum(columns, 0), axis=axis), jnp.asarray(missing, x.dtype)
    )


@flax.struct.dataclass
class Recording(RowState):
    """The records that the config requests. All other fields are None.

    Attributes:
        scores: float32[rows, N, V], the scores from which each token was chosen; zeros for steps that were not taken.
        logits: float32[rows, N, V], the model's logits.
        hidden_states: the embeddings, then the hidden states of the L layers.
        attentions: the attention weights of the L layers.
        routed_experts: the experts in the layers that have them.
        columns: int32[rows, P]; see `columns_of`.
    """

    scores: jax.Array | None = None
    logits: jax.Array | None = None
    hidden_states: LayerRecording | None = None
    attentions: LayerRecording | None = None
    routed_experts: LayerRecording | None = None
    columns: jax.Array | None = None

    @classmethod
    def begin(cls, cfg: GenerationConfig, capacity: int, out: ModelOutput, columns: jax.Array) -> Recording:
        """Allocate space for `capacity` steps, and record the prefill's output. For `columns`, see `columns_of`."""
        prompts, width = columns.shape
        everything = (prompts, capacity, cfg.model.vocab_size)
        later = max(capacity - 1, 1)  # the number of steps after the first, but at least 1, so that no array is empty
        hidden = attentions = routed = None
        if cfg.output_hidden_states and out.hidden_states is not None:
            prefill = tuple(_in_columns(x[:prompts], columns, 1) for x in out.hidden_states)
            hidden = LayerRecording(prefill, tuple(jnp.zeros((prompts, later, x.shape[-1]), x.dtype) for x in prefill))
        if cfg.output_attentions and out.attentions is not None:
            prefill = tuple(_in_columns(_in_columns(x[:prompts], columns, 2), columns, 3) for x in out.attentions)
            room = [(prompts, later, x.shape[1], width + capacity) for x in prefill]
            attentions = LayerRecording(prefill, tuple(jnp.zeros(shape, jnp.float32) for shape in room))
        if cfg.output_routed_experts and out.routed_experts is not None:
            prefill = tuple([_in_columns(x[:prompts], columns, 1, missing=-1) for x in out.routed_experts])
            decode = tuple([jnp.full((prompts, later, x.shape[-1]), -1, x.dtype) for x in prefill])
            routed = LayerRecording(prefill, decode)
        return cls(
            scores=jnp.zeros(everything, jnp.float32) if cfg.output_scores else None,
            logits=jnp.zeros(everything, jnp.float32) if cfg.output_logits else None,
            hidden_states=hidden,
            attentions=attentions,
            routed_experts=routed,
            columns=columns if attentions is not None else None,
        )

    def put(self, step: jax.Array, live: jax.Array, logits: jax.Array, scores: jax.Array) -> Recording:
        """For the live rows, record `logits` and `scores`, float32[rows, V], at index `step int32[rows]`."""
        return dataclasses.replace(
            self,
            scores=None if self.scores is None else put_step(self.scores, step, live, scores),
            logits=None if self.logits is None else put_step(self.logits, step, live, logits),
        )

    def put_layers(
        self, step: jax.Array, live: jax.Array, out: ModelOutput, column: int | jax.Array, offset: int
    ) -> Recording:
        """Record the layers' values from `column` of `out` for the `step`-th generated token of each live row.

        Generated tokens come after the `offset` slots of the cache's prefix or, without a prefix, after the prompt.
        """
        hidden, attentions, columns, routed = self.hidden_states, self.attentions, self.columns, self.routed_experts
        rows = step.shape[0]
        if hidden is not None and out.hidden_states is not None:
            hidden = hidden.put(step, live, [x[:rows, column] for x in out.hidden_states])
        if attentions is not None and out.attentions is not None and columns is not None:
            capacity = attentions.decode[0].shape[-1] - columns.shape[1]
            first = jnp.full((rows, 1), offset) if offset else jnp.max(columns, axis=-1, keepdims=True) + 1
            columns = jnp.concatenate([columns, first + jnp.arange(capacity, dtype=jnp.int32)[None, :]], axis=-1)
            layers = [_in_columns(x[:rows, :, column], columns, 2) for x in out.attentions]
            attentions = attentions.put(step, live, layers)
        if routed is not None and out.routed_experts is not None:
            routed = routed.put(step, live, [x[:rows, column] for x in out.routed_experts])
        return dataclasses.replace(self, hidden_states=hidden, attentions=attentions, routed_experts=routed)


def put_step(buffer: jax.Array, step: jax.Array, live: jax.Array, values: jax.Array) -> jax.Array:
    """Write `values [rows, ...]` to column `step int32[rows]` of `buffer [rows, N, ...]`, where `live` is True."""
    column = jnp.where(live & (step >= 0), step, buffer.shape[1])
    return put(buffer, column, values)
