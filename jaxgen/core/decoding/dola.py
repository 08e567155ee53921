"""DoLa (arXiv 2309.03883) subtracts the log-probabilities of an earlier layer from those of the last layer.

The implementation follows `GenerationMixin._dola_decoding` in transformers 4.45.2, except that each row chooses its own
layer. The hidden states of an earlier layer pass through the head's matrix alone, without the final norm.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jaxgen.control import cond
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding import guidance
from jaxgen.core.decoding.forward import Forward, observe
from jaxgen.core.decoding.needs import Needs
from jaxgen.core.decoding.rows import Rows
from jaxgen.core.decoding.run import Run
from jaxgen.core.decoding.sample import Sample, choose, process
from jaxgen.core.model.causal_lm import head
from jaxgen.errors import ConfigError

# With more than _DEEP layers, "low" selects from the first _DEEP_REACH layers, and "high" from the last _DEEP_REACH.
_DEEP, _DEEP_REACH = 40, 20


class Dola(Sample):
    """Greedy search or sampling with contrasted scores."""

    takes_draft = replays = False

    def needs(self, cfg: GenerationConfig) -> Needs:
        """Require the states of all layers, because the head is also applied to the candidate layers."""
        return Needs(sequences=cfg.num_return_sequences, layer_states=True)

    def extend(self, run: Run, rows: Rows, read: Forward, column: int | jax.Array, live: jax.Array) -> Rows:
        """Choose a token for each row from its contrasted scores, and append the tokens to the live rows."""
        logits, scores, rows = observe(
            run, rows, read, column, live, functools.partial(contrast, run, rows.values.get("adapter"))
        )
        processed = process(run, rows, scores)
        # If processors or a grammar ban all tokens that DoLa keeps, use the logits; transformers would choose token 0.
        banned = jnp.all(processed == -jnp.inf, axis=-1, keepdims=True)
        processed = cond(
            jnp.any(banned), lambda: jnp.where(banned, process(run, rows, logits), processed), lambda: processed
        )
        return rows.push(run, *choose(rows, processed), live, logits, processed)


def candidate_layers(cfg: GenerationConfig) -> tuple[int, ...]:
    """Return the candidate layers that `dola_layers` selects. Layer 0 refers to the embeddings.

    Raises:
        ConfigError: `dola_layers` selects no layers, or a layer that does not come before the last layer.
    """
    model = cfg.model
    layers, given = model.num_hidden_layers, cfg.dola_layers
    if isinstance(given, tuple):
        if max(given) >= layers:
            raise ConfigError(
                f"dola_layers={list(given)} has the layer {max(given)}, but the layers before the last are 0 (the "
                f"embeddings) to {layers - 1}"
            )
        return given
    deep = layers > _DEEP
    if given == "high":
        return tuple(range(layers - _DEEP_REACH if deep else layers // 2, layers, 2))
    # With tied embeddings, layer 0 would predict the input token.
    start = min(2, layers - 1) if model.tie_word_embeddings else 0
    end = _DEEP_REACH if deep else layers // 2
    chosen = (start,) if start == layers // 2 else tuple(range(start, end, 2))
    if not chosen:
        raise ConfigError(
            f"dola_layers='low' selects no layer in a model of {layers} layers with tied embeddings: "
            "set dola_layers='high' or a list"
        )
    return chosen


def contrast(run: Run, adapter: jax.Array | None, logits: jax.Array, states: tuple[jax.Array, ...]) -> jax.Array:
    """Return the contrasted scores of the first stream and the unchanged logits of the other streams.

    `logits` and `states` are as in `forward.Score`. `adapter int32[rows]` is the adapter of each row, or None.
    """
    mature, *others = guidance.split(run.cfg, logits)
    candidates = [guidance.conditional_part(run.cfg, states[layer]) for layer in candidate_layers(run.cfg)]
    with jax.named_scope("dola"):
        of_all = None if adapter is None else jnp.tile(adapter, len(candidates))
        context = dataclasses.replace(run.context, adapter=of_all)
        premature = head(run.model, run.params, jnp.stack(candidates), context, plain=True)
        return guidance.join((contrasted(mature, premature), *others))


def contrasted(mature: jax.Array, premature: jax.Array) -> jax.Array:
    """Return the contrasted scores, float32[rows, V], in which unlikely tokens are banned.

    From each row's log-probabilities, subtract those of the candidate layer that differs most from the last layer.

    Args:
        mature: float32[rows, V], the model's logits.
        premature: float32[C, rows, V], the logits of the candidate layers.
    """
    log_mature = jax.nn.log_softmax(mature, axis=-1)
    log_premature = jax.nn.log_softmax(premature, axis=-1)
    layer = jnp.argmax(_divergence(log_mature[None], log_premature), axis=0)
    base = jnp.take_along_axis(log_premature, layer[None, :, None], axis=0)[0]
    # Tokens that are less than a tenth as likely as the most likely token are banned.
    least = jnp.max(log_mature, axis=-1, keepdims=True) + math.log(0.1)
    return jnp.where(log_mature < least, -jnp.inf, log_mature - base)


def _divergence(log_mature: jax.Array, log_premature: jax.Array) -> jax.Array:
    """Return the divergence between the distributions of each candidate layer and the last layer, float32[C, rows].

    This is transformers' variant of the Jensen-Shannon divergence: the mean of KL(average, mature) and KL(average,
    premature), where `average` is the mean of the two distributions. Tokens that a hook has banned are not counted.
    `log_mature` is float32[1, rows, V], and `log_premature` is float32[C, rows, V].
    """
    average = 0.5 * (jnp.exp(log_mature) + jnp.exp(log_premature))
    log_average = jnp.log(jnp.where(average > 0, average, 1))
    terms = average * (log_average - 0.5 * (log_mature + log_premature))
    return jnp.mean(jnp.where(log_mature == -jnp.inf, 0, terms), axis=-1)
