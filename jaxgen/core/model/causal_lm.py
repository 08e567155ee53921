"""The decoder-only transformer that all `FAMILIES` share. It maps ids to logits and a cache.

Dimensions, used in all shapes in this package:
    B rows, T tokens to read, S cache slots, A attention heads, K key-value heads, G = A/K, H head size, D model width,
    F mlp width, V vocabulary, L layers.
    In generation: B prompts, R sequences per prompt, P prompt columns, Q negative-prompt columns, N new tokens at most,
    W columns for a row's tokens.

Parameters have Hugging Face's names and shapes: params["model"]["layers"]["0"]["self_attn"]["q_proj"]["weight"] has the
shape [A*H, D]. RMSNorm, the RoPE angles, the attention softmax and the loss are computed in float32 for any weight
dtype, as in transformers 4.41.1.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.control import varies
from jaxgen.core.model import workarounds
from jaxgen.core.model.attention import attention
from jaxgen.core.model.cache import KeysValues, KVCache
from jaxgen.core.model.config import LayerSpec, ModelConfig
from jaxgen.core.model.context import NO_CONTEXT, Context
from jaxgen.core.model.experts import Routing, SparseMLP
from jaxgen.core.model.feed_forward import MLP, Linear, project
from jaxgen.core.model.flash import NewTokens
from jaxgen.core.model.loss import mean_loss, router_loss
from jaxgen.core.model.masks import Placement, place
from jaxgen.core.model.rope import rotate
from jaxgen.core.model.weights import Weight, linear, look_up, parameter
from jaxgen.errors import InputError
from jaxgen.shapes import short_repr


@flax.struct.dataclass
class ModelOutput:
    """Result of one forward pass.

    Attributes:
        logits: float32[B, T, V], or `[B, n, V]` with `logits_to_keep`.
        loss: float32[], the mean over the labels that are not -100; None without labels.
        cache: the cache, including the new tokens; None if none was passed.
        hidden_states: L + 1 arrays `[B, T, D]`, from the embeddings to the final norm's output; None if not requested.
        attentions: L arrays float32[B, A, T, S], the attention weights; None if not requested.
        router_logits: one array `[B, T, E]` for each layer with experts; None if not requested.
        aux_loss: float32[], the loss of the routers, without the factor; None if `router_logits` is.
        routed_experts: one array int32[B, T, k] for each layer with experts, the experts of each token, in descending
            order of their probabilities; None if `router_logits` is.
    """

    logits: jax.Array
    loss: jax.Array | None = None
    cache: KVCache | None = None
    hidden_states: tuple[jax.Array, ...] | None = None
    attentions: tuple[jax.Array, ...] | None = None
    router_logits: tuple[jax.Array, ...] | None = None
    aux_loss: jax.Array | None = None
    routed_experts: tuple[jax.Array, ...] | None = None

    __repr__ = short_repr


class RMSNorm(nn.Module):
    """RMS norm (arXiv 1910.07467) by the family's `NormRule`, as in `Qwen2RMSNorm`, `GemmaRMSNorm`, `Olmo2RMSNorm`."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize `x [..., D]`."""
        rule = self.cfg.family.norms
        init = nn.initializers.zeros if rule.unit_offset else nn.initializers.ones
        weight = parameter(self, "weight", x.shape[-1:], init, self.cfg.dtype)
        if x.ndim == 4:  # with rows and heads merged, each device of a mesh would gather the heads of all
            return self._normed(x, weight)
        return workarounds.norm(self._normed, x.reshape(-1, x.shape[-1]), weight).reshape(x.shape)

    def _normed(self, rows: jax.Array, weight: jax.Array) -> jax.Array:
        rule, wide = self.cfg.family.norms, rows.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.cfg.rms_norm_eps)
        if rule.rounds_last:
            weight = weight.astype(jnp.float32)
        else:
            wide = wide.astype(rows.dtype)
        factor = (1 + weight if rule.unit_offset else weight).reshape(*[1] * (rows.ndim - 1), -1)
        dtype = wide.dtype if factor.dtype == wide.dtype else jnp.float32  # GGUF files have float32 weights of norms
        return (factor.astype(dtype) * wide.astype(dtype)).astype(rows.dtype)


class Embedding(nn.Module):
    """`torch.nn.Embedding`; a model with tied embeddings also uses it to compute logits."""

    cfg: ModelConfig

    def setup(self):
        """Declare the table [V, D]."""
        init, shape = nn.initializers.normal(self.cfg.initializer_range), (self.cfg.vocab_size, self.cfg.hidden_size)
        self.weight: jax.Array | Weight = parameter(self, "weight", shape, init, self.cfg.dtype)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return the embeddings of `ids int32[B, T]`, as `[B, T, D]`."""
        rows = look_up(ids, self.weight)
        return rows * jnp.asarray(self.cfg.hidden_size**0.5, rows.dtype) if self.cfg.family.scales_embedding else rows

    def attend(self, x: jax.Array, context: Context) -> jax.Array:
        """Map `x [..., D]` to logits `[..., V]`."""
        return linear(x, self.weight, None, context)


class Attention(nn.Module):
    """Attention with grouped key-value heads, as in `LlamaAttention` and the classes of all other families."""

    cfg: ModelConfig
    layer: LayerSpec

    @nn.compact
    def __call__(self, x: jax.Array, placement: Placement, parts: tuple[KeysValues, ...]):
        """Return the output `[B, T, D]`, the attention weights, and the last part, which includes the new tokens."""
        cfg, layer = self.cfg, self.layer
        batch, steps, _ = x.shape

        def apply(width: int, name: str) -> jax.Array:
            return Linear(width, cfg.attention_bias, cfg, name=name)(x, placement.context)

        q, k, v = project(self, "qkv_proj", cfg.qkv_sizes, apply, cfg.family.fused)
        norms = cfg.family.norms.queries_keys
        if norms == "projection":
            q, k = RMSNorm(cfg, name="q_norm")(q), RMSNorm(cfg, name="k_norm")(k)
        q, k, v = [part.reshape(batch, steps, -1, cfg.head_dim).swapaxes(1, 2) for part in (q, k, v)]
        if norms == "head":
            q, k = RMSNorm(cfg, name="q_norm")(q), RMSNorm(cfg, name="k_norm")(k)
        if layer.rope is not None:
            cos, sin = placement.rotations[cfg.ropes.index(layer.rope)]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        last = KeysValues(k, v, k.dtype.name) if placement.slots is None else parts[-1].push(k, v, placement.slots)
        dropout = None
        if cfg.attention_dropout > 0 and self.has_rng("dropout"):
            dropout = nn.Dropout(cfg.attention_dropout, deterministic=False)
        with jax.named_scope("attention"):
            visible = dataclasses.replace(
                placement.visible,
                window=layer.window,
                scale=cfg.attention_scale,
                softcap=cfg.attn_logit_softcapping,
            )
            new = None
            if placement.before is not None and placement.context.calls_libraries and not varies(q):
                new = NewTokens(k, v, placement.before)
            out, weights = attention(q, [*parts[:-1], last], visible, dropout, placement.output_attentions, new)
        out = out.swapaxes(1, 2).reshape(batch, steps, -1)
        return Linear(cfg.hidden_size, cfg.output_bias, cfg, name="o_proj")(out, placement.context), weights, last


class DecoderLayer(nn.Module):
    """Attention and feed-forward layer with the norms of the family's `NormRule`, as in `Qwen2DecoderLayer`."""

    cfg: ModelConfig
    layer: LayerSpec

    @nn.compact
    def __call__(
        self, x: jax.Array, placement: Placement, parts: tuple[KeysValues, ...], experts: jax.Array | None = None
    ):
        """Return the layer's output `[B, T, D]`, the attention weights, the cache's last part, and the `Routing`.

        The last is None in a layer without experts. `experts` replaces the router's choice.
        """
        cfg, norms = self.cfg, self.cfg.family.norms

        def normed(x: jax.Array, name: str, wanted: bool) -> jax.Array:
            return RMSNorm(cfg, name=name)(x) if wanted else x

        def added(x: jax.Array, out: jax.Array) -> jax.Array:
            return x + (out if cfg.residual_multiplier is None else out * cfg.residual_multiplier)

        attention = Attention(cfg, self.layer, name="self_attn")
        out, weights, last = attention(normed(x, "input_layernorm", norms.before), placement, parts)
        x = added(x, normed(out, "post_attention_layernorm", norms.after))
        # Without a norm of attention's output, transformers uses that norm's name for the norm before the MLP.
        name = "pre_feedforward_layernorm" if norms.after else "post_attention_layernorm"
        with jax.named_scope("mlp"):
            inputs, routing = normed(x, name, norms.before), None
            if self.layer.experts:
                out, routing = SparseMLP(cfg, name="mlp")(inputs, placement.context, experts)
            else:
                out = MLP(cfg, cfg.intermediate_size, name="mlp")(inputs, placement.context)
            return added(x, normed(out, "post_feedforward_layernorm", norms.after)), weights, last, routing


class Layers(nn.Module):
    """The stack of layers. One layer is traced, and the others reuse the trace with their own parameters."""

    cfg: ModelConfig
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array, placement: Placement, cache: KVCache | None, routed: jax.Array | None):
        """Return the hidden states (each layer's input and the final output), the attention weights, and the cache.

        The fourth result is the list of `Routing`s of the layers with experts; `routed` replaces their choices.
        """
        decoder_layer = nn.jit(nn.remat(DecoderLayer) if self.remat else DecoderLayer)
        states, attentions, written, routings = [x], [], [], []
        for index, layer in enumerate(self.cfg.layers):
            parts = tuple([part.layers[index] for part in cache.parts]) if cache else ()
            own = None if routed is None or not layer.experts else routed[len(routings)]
            x, weights, last, routing = decoder_layer(self.cfg, layer, name=str(index))(x, placement, parts, own)
            routings += [] if routing is None else [routing]
            states.append(x)
            attentions.append(weights)
            written.append(last)
        if cache is not None:
            cache = dataclasses.replace(cache, layers=tuple(written))
        return states, attentions, cache, routings


class Model(nn.Module):
    """Embeddings, layers and final norm, as in `Qwen2Model`."""

    cfg: ModelConfig
    remat: bool

    def setup(self):
        """Declare the submodules under Hugging Face's names."""
        self.embed_tokens = Embedding(self.cfg)
        self.layers = Layers(self.cfg, self.remat)
        self.norm = RMSNorm(self.cfg)

    def __call__(self, x: jax.Array, placement: Placement, cache: KVCache | None, routed: jax.Array | None):
        """Return the L + 1 hidden states (only the last is normalized), and the other results of the layers."""
        if self.cfg.embedding_multiplier is not None:
            x = x * self.cfg.embedding_multiplier
        states, attentions, cache, routings = self.layers(x, placement, cache, routed)
        states[-1] = self.norm(states[-1])
        return states, attentions, cache, routings


class CausalLM(nn.Module):
    """Decoder-only transformer with its language-model head: a pure function of parameters, ids and cache.

    >>> out = CausalLM(cfg.model).apply({"params": params}, ids)
    >>> out.logits.shape == (*ids.shape, cfg.model.vocab_size)
    True

    Attributes:
        cfg: the model's config.
        remat: recompute each layer's activations in the backward pass instead of storing them (`jax.checkpoint`).
    """

    cfg: ModelConfig
    remat: bool = False

    def setup(self):
        """Declare the submodules under Hugging Face's names; a tied model has no `lm_head`."""
        self.model = Model(self.cfg, self.remat)
        if not self.cfg.tie_word_embeddings:
            self.lm_head = Linear(self.cfg.vocab_size, False, self.cfg)

    def __call__(
        self,
        ids: jax.Array | None = None,
        *,
        inputs_embeds: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: KVCache | None = None,
        cache_position: jax.Array | int | None = None,
        key_mask: jax.Array | None = None,
        labels: jax.Array | None = None,
        logits_to_keep: int | jax.Array = 0,
        routed_experts: jax.Array | tuple[jax.Array, ...] | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        output_router_logits: bool = False,
        context: Context = NO_CONTEXT,
    ) -> ModelOutput:
        """Run the model on T new tokens per row. Attention dropout is active if a "dropout" rng is passed.

        Args:
            ids, inputs_embeds: pass one of the two, ids int32[B, T] or embeddings `[B, T, D]`.
            attention_mask: `[B, T]`, 0 for padding, which may be on either side; all ones by default. Padding is never
                attended to or stored. (Unlike in transformers, the mask never covers cached tokens.)
            position_ids: int32[B, T], for RoPE; by default a token's index in its row, not counting padding. Causal
                masking always uses the token's index, never `position_ids`.
            segment_ids: int32[B, T], for training on rows packed with several texts. Adjacent tokens with the same
                segment id form a text. Tokens attend only to tokens of their own text, and each text starts at
                position 0. Incompatible with a cache.
            cache: the cache of the preceding tokens, to which the new tokens are appended; or None.
            cache_position: the slot of the first new token, a scalar or one per row, int32[B]; by default the first
                free slot. Cached tokens from this slot on are discarded.
            key_mask: bool[B, n], for the first n tokens of each row, not counting padding: True if a token may be
                attended to. By default, all may. Tokens after the first n may always be attended to.
            labels: int32[B, T], the ids, with -100 where no loss is wanted; the model shifts the labels.
            logits_to_keep: an int n, to compute logits only for the last n positions (0 for all), or an array
                int32[B, n] of positions.
            routed_experts: int32[layers with experts, B, T, k], or a tuple with an array per layer: the experts to use.
                Negative entries leave the choice to the routers, which compute the weights of all experts.
            output_hidden_states, output_attentions: also return the hidden states or the attention weights.
            output_router_logits: also return the routers' logits, choices and loss. `loss` then includes the routers'
                loss, times `router_aux_loss_coef`.
            context: information about the pass; see `Context`.

        Raises:
            InputError: shapes do not match, or a row's tokens would extend past the cache's end, start in its prefix,
                or leave a gap. If the cache's new length is traced, a row that does not fit gets NaN logits instead,
                and its tokens are not written.
        """
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise InputError("labels need the logits of all positions: leave logits_to_keep at 0")
        x = self._inputs(ids, inputs_embeds)
        placement, cache, overflow = place(
            self.cfg, x, attention_mask, cache, cache_position, position_ids, segment_ids, key_mask, context
        )
        placement = dataclasses.replace(placement, output_attentions=output_attentions)
        if isinstance(routed_experts, tuple):
            routed_experts = jnp.stack(routed_experts)
        self._check_routing(x, routed_experts, output_router_logits)
        states, attentions, cache, routings = self.model(x, placement, cache, routed_experts)
        if overflow is not None:
            states[-1] = jnp.where(overflow[:, None, None], jnp.nan, states[-1])
        if cache is not None and output_attentions:
            attentions = map(cache.by_token, attentions)
        logits = self.head(_keep(states[-1], logits_to_keep), context)
        loss = None if labels is None else mean_loss(logits, labels)
        hidden_states = tuple(states) if output_hidden_states else None
        out = ModelOutput(logits, loss, cache, hidden_states, tuple(attentions) if output_attentions else None)
        return self._with_routing(out, routings, attention_mask) if output_router_logits else out

    def _check_routing(self, x: jax.Array, routed: jax.Array | None, wanted: bool) -> None:
        layers, count = self.cfg.sparse_layers, self.cfg.num_experts_per_tok
        if not layers and (wanted or routed is not None):
            raise InputError("output_router_logits and routed_experts need a model with experts, which this one is not")
        shape = (layers, *x.shape[:2], count)
        if routed is not None and (routed.shape != shape or not jnp.issubdtype(routed.dtype, jnp.integer)):
            found = f"{routed.dtype}{list(routed.shape)}"
            raise InputError(f"routed_experts must be integers of shape {list(shape)}, got {found}")

    def _with_routing(self, out: ModelOutput, routings: list[Routing], mask: jax.Array | None) -> ModelOutput:
        logits = tuple([routing.logits for routing in routings])
        aux_loss = router_loss(logits, mask, self.cfg.num_experts_per_tok or 0)
        loss = None if out.loss is None else out.loss + (self.cfg.router_aux_loss_coef or 0.0) * aux_loss
        experts = tuple([routing.experts for routing in routings])
        return dataclasses.replace(out, loss=loss, router_logits=logits, aux_loss=aux_loss, routed_experts=experts)

    def embed(self, ids: jax.Array) -> jax.Array:
        """Return the embeddings of `ids int32[B, T]`, as `[B, T, D]`; an id outside the vocabulary gives NaN."""
        ids = jnp.asarray(ids)
        if ids.ndim != 2 or 0 in ids.shape or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise InputError(f"ids must be integers of shape [B, T], got {ids.dtype}{list(ids.shape)}")
        return self.model.embed_tokens(ids)

    def head(self, x: jax.Array, context: Context = NO_CONTEXT, plain: bool = False) -> jax.Array:
        """Map normalized hidden states `x [..., D]` to logits float32[..., V].

        With `plain`, logits are neither divided by `logits_scaling` nor capped.
        """
        if x.size == 0:
            return jnp.zeros((*x.shape[:-1], self.cfg.vocab_size), jnp.float32)
        with jax.named_scope("lm_head"):
            apply = self.model.embed_tokens.attend if self.cfg.tie_word_embeddings else self.lm_head
            logits = apply(workarounds.for_head(x), context)
        if self.cfg.logits_scaling is not None and not plain:
            logits = logits / self.cfg.logits_scaling
        if (cap := self.cfg.final_logit_softcapping) is not None and not plain:
            logits = jnp.tanh(logits / cap) * cap
        return logits.astype(jnp.float32)

    def _inputs(self, ids: jax.Array | None, inputs_embeds: jax.Array | None) -> jax.Array:
        if (ids is None) == (inputs_embeds is None):
            raise InputError("pass exactly one of ids and inputs_embeds")
        if ids is not None:
            return self.embed(ids)
        assert inputs_embeds is not None
        if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != self.cfg.hidden_size:
            raise InputError(
                f"inputs_embeds must have shape [B, T, {self.cfg.hidden_size}], got {list(inputs_embeds.shape)}"
            )
        return inputs_embeds.astype(self.cfg.dtype)


def _keep(x: jax.Array, logits_to_keep: int | jax.Array) -> jax.Array:
    """Select the positions of `x [B, T, D]` whose logits are requested."""
    if isinstance(logits_to_keep, int | np.integer) and not isinstance(logits_to_keep, bool) and logits_to_keep >= 0:
        return x[:, -int(logits_to_keep) :]
    if not isinstance(logits_to_keep, jax.Array | np.ndarray) or logits_to_keep.ndim != 2:
        raise InputError(
            "logits_to_keep must be an int >= 0 (0 keeps all positions) or an int32 array of shape [B, n], "
            f"got {logits_to_keep!r}"
        )
    return jnp.take_along_axis(x, logits_to_keep[:, :, None], axis=1)


def forward(
    cfg: ModelConfig, params, ids: jax.Array | None, *, remat: bool = False, rngs=None, **inputs
) -> ModelOutput:
    """Run `CausalLM(cfg)` as a function of its parameters."""
    module: Any = CausalLM(cfg, remat)  # according to flax's annotation, `apply` may return a pair
    return module.apply({"params": params}, ids, rngs=rngs, **inputs)


def embed(cfg: ModelConfig, params, ids: jax.Array) -> jax.Array:
    """Return the embeddings of `ids int32[B, T]`, as `[B, T, D]`; an id outside the vocabulary gives NaN."""
    module: Any = CausalLM(cfg)
    return module.apply({"params": params}, ids, method="embed")


def hidden(cfg: ModelConfig, params, ids: jax.Array | None, **inputs) -> tuple[jax.Array, KVCache | None]:
    """Run the model without its head; return the normalized hidden states `[B, T, D]` and the cache (or None)."""
    nowhere = np.zeros((1, 0), np.int32)
    out = forward(cfg, params, ids, logits_to_keep=nowhere, output_hidden_states=True, **inputs)
    assert out.hidden_states is not None
    return out.hidden_states[-1], out.cache


def head(cfg: ModelConfig, params, x: jax.Array, context: Context = NO_CONTEXT, plain: bool = False) -> jax.Array:
    """Map normalized hidden states `x [..., D]` to logits float32[..., V]; for `plain`, see `CausalLM.head`."""
    module: Any = CausalLM(cfg)
    return module.apply({"params": params}, x, context, plain, method="head")


@functools.lru_cache
def param_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, keyed by its Hugging Face name, such as "model.embed_tokens.weight"."""
    # All layers of a kind have the same shapes.
    kinds = {layer.experts: layer for layer in cfg.layers}
    few = dataclasses.replace(cfg, num_hidden_layers=len(kinds), layers=tuple(kinds.values()))
    variables = jax.eval_shape(lambda: CausalLM(few).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    flat: dict[str, Any] = dict(flax.traverse_util.flatten_dict(dict(variables["params"]), sep="."))
    prefix = "model.layers."
    shapes = {name: leaf.shape for name, leaf in flat.items() if not name.startswith(prefix)}
    for index, layer in enumerate(cfg.layers):
        same = f"{prefix}{list(kinds).index(layer.experts)}."
        own = {name.removeprefix(same): leaf.shape for name, leaf in flat.items() if name.startswith(same)}
        shapes |= {f"{prefix}{index}.{name}": shape for name, shape in own.items()}
    return dict(sorted(shapes.items(), key=lambda item: item[0].split(".")))  # the order of the pytree's leaves
