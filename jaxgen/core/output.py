"""The output of generate(), and its conversion to transformers' format."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.decoding.continuation import Continuation
from jaxgen.core.decoding.loop import Decoded
from jaxgen.core.decoding.recording import LayerRecording
from jaxgen.core.decoding.stop_reasons import FAILURES, StopReason
from jaxgen.core.request.inputs import is_traced
from jaxgen.core.request.prepare import Prepared
from jaxgen.errors import GenerationError, InputError

T = TypeVar("T")


@flax.struct.dataclass
class GenerateOutput:
    """Output of `generate`. Rows are in transformers' order: the R sequences of prompt 0, then those of prompt 1.

    N is the maximum number of new tokens in a row: the largest `max_new_tokens`, or as many as `max_length` allows.

    Attributes:
        sequences: int32[B*R, P + N], the prompt as passed, then the generated tokens, then pad ids. If only embeddings
            are passed, `sequences` omits the prompt. With `token_healing`, the prompt lacks the removed tokens.
        attention_mask: bool[B*R, P + N], True for tokens, False for padding.
        lengths: int32[B*R], the number of generated tokens per row, including eos.
        stop_reasons: int32[B*R], a `StopReason` per row.
        sequences_scores: float32[B*R], for beam search; otherwise None.
        beam_indices: int32[B*R, N], for beam search; otherwise None.
        drafted: int32[B], the number of drafted tokens, for assisted generation; otherwise None.
        accepted: int32[B], the number of drafted tokens that were accepted.
        scores: float32[N, B*R, V], the scores from which each step's token was chosen, with `output_scores`; zeros
            after a row's end.
        logits: float32[N, B*R, V], the model's logits, with `output_logits`.
        logprobs: float32[B*R, N], the log-probability of each generated token, with `output_logprobs`; 0 after a
            row's end.
        top_logprobs: float32[B*R, N, n], the log-probabilities of the n most likely tokens, with `top_logprobs=n`.
        top_tokens: int32[B*R, N, n], the ids of the n most likely tokens.
        hidden_states: the hidden states of all layers, with `output_hidden_states`.
        attentions: the attention weights of all layers, with `output_attentions`.
        routed_experts: int32[layers with experts, B*R, P + N, k], the experts of each token, best first, with
            `output_routed_experts`. -1 for padding, and for the last token of a row, which the model has not read.
        cache: a `Continuation`: the ids of all tokens, their number, and the keys and values of all but the last token
            of each row. None with `slots`.
        prompt_width: P, the width of the prompts in `sequences` (0 if `sequences` omits them); it is static.
    """

    sequences: jax.Array
    attention_mask: jax.Array
    lengths: jax.Array
    stop_reasons: jax.Array
    sequences_scores: jax.Array | None = None
    beam_indices: jax.Array | None = None
    drafted: jax.Array | None = None
    accepted: jax.Array | None = None
    scores: jax.Array | None = None
    logits: jax.Array | None = None
    logprobs: jax.Array | None = None
    top_logprobs: jax.Array | None = None
    top_tokens: jax.Array | None = None
    attentions: LayerRecording | None = None
    hidden_states: LayerRecording | None = None
    routed_experts: jax.Array | None = None
    cache: Continuation | None = None
    prompt_width: int = flax.struct.field(pytree_node=False, default=0)

    def __repr__(self) -> str:
        """Show shapes instead of most values, and omit fields that are None."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        parts = [f"{name}={_short(name, value)}" for name, value in values.items() if value is not None]
        return f"{type(self).__name__}({', '.join(parts)})"

    def generated(self, aligned: T) -> T:
        """Return the columns of the generated tokens, `[B*R, N, ...]`, from arrays that are aligned with `sequences`.

        >>> scores = score(params, out.sequences, cfg, attention_mask=out.attention_mask)
        >>> out.generated(scores).logprobs    # float32[B*R, N], as out.logprobs

        Args:
            aligned: an array `[B*R, P + N, ...]`, or a tree of such arrays.

        Raises:
            InputError: an array has a different shape.
        """

        def cut(x: jax.Array) -> jax.Array:
            if x.shape[:2] != self.sequences.shape:
                raise InputError(
                    f"generated() cuts arrays that begin with the axes of sequences, {list(self.sequences.shape)}, got "
                    f"shape {list(x.shape)}"
                )
            return x[:, self.prompt_width :]

        return jax.tree.map(cut, aligned)

    def to_hf(self) -> HFOutput:
        """Return the output as in transformers: tuples of numpy arrays, with one entry per step of the longest row.

        This does not work under jit, where the number of steps is unknown.

        Raises:
            InputError: the cache is split across several processes.
        """
        steps = int(np.max(self.lengths))
        width = self.prompt_width

        def per_step(record: jax.Array | None) -> tuple[np.ndarray, ...] | None:
            return None if record is None else tuple(np.asarray(record)[:steps])

        return HFOutput(
            sequences=np.asarray(self.sequences)[:, : width + steps],
            sequences_scores=None if self.sequences_scores is None else np.asarray(self.sequences_scores),
            beam_indices=None if self.beam_indices is None else np.asarray(self.beam_indices)[:, :steps],
            scores=per_step(self.scores),
            logits=per_step(self.logits),
            attentions=_layers_per_step(self.attentions, steps, tokens=True),
            hidden_states=_layers_per_step(self.hidden_states, steps, tokens=False),
            past_key_values=None if self.cache is None else self._past(width + steps - 1),
        )

    def _past(self, width: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """Return each layer's keys and values, `[rows, K, width, H]`, aligned with `sequences`; 0 for padding."""
        assert self.cache is not None
        if not jax.tree.leaves(self.cache.kv.keys)[0].is_fully_addressable:
            raise InputError(
                "the cache is divided over several processes, but to_hf() returns all of it: leave it out with "
                "dataclasses.replace(out, cache=None).to_hf()"
            )
        cache = self.cache.without_padding().kv.flatten(self.cache.slots)
        tokens = np.asarray(self.attention_mask)
        length = np.asarray(cache.length)
        # The cache lacks only a row's last generated token. `before` counts cached tokens before those in `sequences`.
        before = length - (tokens.sum(axis=-1) - (np.asarray(self.lengths) > 0))
        order = np.cumsum(tokens, axis=-1)[:, :width] - 1 + before[:, None]  # each token's index in its row
        cached = (tokens[:, :width] & (order < length[:, None]))[:, None, :, None]
        order = np.maximum(order, 0)[:, None, :, None]

        def columns(x: jax.Array) -> np.ndarray:
            return np.where(cached, np.take_along_axis(np.asarray(x), order, axis=2), 0)

        layers = (cache.layer(index) for index in range(len(cache.keys)))
        return tuple((columns(k), columns(v)) for k, v in layers)


def _short(name: str, value: Any) -> str:
    if not hasattr(value, "dtype"):
        return repr(value)
    is_here = getattr(value, "is_fully_addressable", True)  # False if other processes have some of the rows
    is_known = isinstance(value, jax.Array | np.ndarray) and not is_traced(value) and is_here
    if value.ndim > 1 or not is_known or (value.size > 8 and name != "stop_reasons"):
        return f"{value.dtype}{list(value.shape)}"
    values = np.asarray(value).tolist()
    if name != "stop_reasons":
        return str(values)
    names = [StopReason(value).name for value in values]
    if len(names) > 8:
        names = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return f"[{', '.join(names)}]"


@dataclasses.dataclass(frozen=True)
class HFOutput:
    """Fields of transformers' `GenerateDecoderOnlyOutput` and `GenerateBeamDecoderOnlyOutput`, None if not requested.

    Attributes:
        sequences: `[rows, P + steps]`.
        sequences_scores, beam_indices: for beam search.
        scores, logits: an array `[rows, V]` per step.
        attentions: an array `[rows, heads, q, P + step]` per step and layer; q is P in the first step and 1 later.
        hidden_states: an array `[rows, q, D]` per step and layer.
        past_key_values: a pair `(k, v)` per layer, both `[rows, K, P + steps - 1, H]`.
    """

    sequences: np.ndarray
    sequences_scores: np.ndarray | None
    beam_indices: np.ndarray | None
    scores: tuple[np.ndarray, ...] | None
    logits: tuple[np.ndarray, ...] | None
    attentions: tuple[tuple[np.ndarray, ...], ...] | None
    hidden_states: tuple[tuple[np.ndarray, ...], ...] | None
    past_key_values: tuple[tuple[np.ndarray, np.ndarray], ...] | None


def _layers_per_step(record: LayerRecording | None, steps: int, tokens: bool):
    """Split a record into steps. If `tokens` is True, the last axis indexes tokens and grows by one in each step."""
    if record is None:
        return None
    first = [np.asarray(x) for x in record.prefill]
    later = [np.asarray(x)[..., None, :] for x in record.decode]
    rows = later[0].shape[1]
    result = [tuple(np.repeat(x, rows // x.shape[0], axis=0) for x in first)]
    for step in range(1, steps):
        last = slice(first[0].shape[-1] + step) if tokens else slice(None)
        result.append(tuple(x[step - 1][..., last] for x in later))
    return tuple(result)


def raise_failures(out: GenerateOutput) -> None:
    """Raise an error if a row could not continue."""
    reasons = np.asarray(out.stop_reasons)
    for reason in FAILURES:
        for row in np.flatnonzero(reasons == reason)[:1]:
            raise GenerationError(f"row {row} {failure_of(out, row)}", out)


def failure_of(out: GenerateOutput, row: int) -> str | None:
    """Return why a row could not continue, or None if it could."""
    return StopReason(int(np.asarray(out.stop_reasons)[row])).failure_after(int(np.asarray(out.lengths)[row]))


def output(prepared: Prepared, decoded: Decoded) -> GenerateOutput:
    """Return the output of a call, without the padding that was added to round sizes up.

    Eager results are sliced in numpy, because each slice of a jax array would compile a program.
    """
    eager = isinstance(prepared.ids, np.ndarray) and isinstance(prepared.mask, np.ndarray) and not is_traced(decoded)
    xp, to_array = (np, jax.device_put) if eager else (jnp, jnp.asarray)
    if prepared.has_more_prompts:
        decoded = _cut_prompts(prepared, decoded)
    rows, new_tokens = decoded.lengths.shape[0], prepared.new_tokens

    def on_host(x: Any) -> Any:
        return np.asarray(x) if eager else x

    def with_prompt(prompt, generated):
        return to_array(xp.concatenate([xp.repeat(prompt, rows // prompt.shape[0], axis=0), generated], axis=1))

    def steps_first(x: jax.Array) -> jax.Array:
        return to_array(on_host(x)[:, :new_tokens].swapaxes(0, 1))

    def cut(x: jax.Array) -> jax.Array:
        return x if x.shape[1] == new_tokens else to_array(on_host(x)[:, :new_tokens])

    def layers(record: LayerRecording | None, tokens: int | None) -> LayerRecording | None:
        if record is None:
            return None
        trimmed = jax.tree.map(on_host, record).trim(prepared.width, new_tokens, tokens)
        return jax.tree.map(to_array, trimmed)

    records: dict[str, Any] = {}
    if (recording := decoded.recording) is not None:
        records["scores"], records["logits"] = jax.tree.map(steps_first, (recording.scores, recording.logits))
        records["attentions"] = layers(recording.attentions, new_tokens)
        records["hidden_states"] = layers(recording.hidden_states, None)
        if (routed := layers(recording.routed_experts, None)) is not None:
            routed, beams = jax.tree.map(on_host, (routed, decoded.beam_indices))
            records["routed_experts"] = to_array(_aligned(xp, routed, prepared.ids.shape[1], rows, beams))
    if (logprobs := decoded.logprobs) is not None:
        for name in ("logprobs", "top_logprobs", "top_tokens"):
            records[name] = jax.tree.map(cut, getattr(logprobs, name))
    lengths = on_host(decoded.lengths)
    return GenerateOutput(
        sequences=with_prompt(prepared.ids, on_host(decoded.tokens)[:, :new_tokens]),
        attention_mask=with_prompt(prepared.mask, xp.arange(new_tokens)[None, :] < lengths[:, None]),
        lengths=decoded.lengths,
        stop_reasons=decoded.reasons,
        sequences_scores=decoded.sequences_scores,
        beam_indices=jax.tree.map(cut, decoded.beam_indices),
        drafted=decoded.drafted,
        accepted=decoded.accepted,
        cache=decoded.continuation,
        prompt_width=prepared.ids.shape[1],
        **records,
    )


def _aligned(xp: Any, record: LayerRecording, width: int, rows: int, beams: Any) -> Any:
    """Return a record of experts in the columns of `sequences`, whose prompts have `width` columns.

    If there are `beams`, which are as in `GenerateOutput.beam_indices`, rows of the record are beams.
    """
    prompt, decode = xp.stack(record.prefill), xp.stack(record.decode).swapaxes(1, 2)
    steps = decode.shape[2]
    if beams is not None:
        # A token is read by the beam from which the next token is chosen.
        beams = beams[:, 1 : steps + 1]
        decode = xp.where((beams >= 0)[..., None], decode[:, xp.maximum(beams, 0), xp.arange(steps)[None, :]], -1)
    prompt = xp.repeat(prompt[:, :, prompt.shape[2] - width :], rows // prompt.shape[1], axis=1)
    unread = xp.full((*prompt.shape[:1], rows, 1, prompt.shape[3]), -1, prompt.dtype)
    return xp.concatenate([prompt, decode, unread], axis=2)


def _cut_prompts(prepared: Prepared, decoded: Decoded) -> Decoded:
    """Drop the rows of additional prompts."""
    continuation = decoded.continuation and cut_continuation(prepared, decoded.continuation)
    decoded = dataclasses.replace(decoded, continuation=None)
    decoded = jax.device_put(prepared.cut(decoded))
    return dataclasses.replace(decoded, continuation=continuation)


def cut_continuation(prepared: Prepared, continuation: Continuation) -> Continuation:
    """Drop the rows of additional prompts, except in the keys and values, which would have to be copied."""
    if not prepared.has_more_prompts:
        return continuation
    tokens, count = jax.device_put(prepared.cut((continuation.tokens, continuation.count)))
    return dataclasses.replace(continuation, tokens=tokens, count=count)
