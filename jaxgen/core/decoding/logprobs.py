"""Log-probabilities of tokens, as `generate` and `score` return them."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.shapes import short_repr


@flax.struct.dataclass
class LogProbs:
    """Result of `score`, aligned with the ids. To select only generated tokens, use `GenerateOutput.generated`.

    Attributes:
        logprobs: float32[B, L], the log-probability of each token given the tokens before it; 0 for tokens that are not
            scored: a row's first token (which nothing predicts), padding, and columns before `prompt_width`.
        top_logprobs: float32[B, L, n], the log-probabilities of the n most likely tokens at each position, in
            descending order; 0 for tokens that are not scored. None with `top_logprobs=0`.
        top_tokens: int32[B, L, n], the ids of these tokens.
        is_greedy: bool[B, L], True if greedy search would choose the token: the most likely one or, in a tie, the one
            with the lowest id. False for tokens that are not scored. None in the output of `generate`.
    """

    logprobs: jax.Array | None
    top_logprobs: jax.Array | None = None
    top_tokens: jax.Array | None = None
    is_greedy: jax.Array | None = None

    __repr__ = short_repr


def logprobs_of(logits: jax.Array, targets: jax.Array, predicted: jax.Array, top: int) -> LogProbs:
    """Return the log-probabilities of `targets int32[...]` under `logits float32[..., V]`.

    The log-probabilities are 0 where `predicted bool[...]` is False.
    """
    # The highest logit is subtracted first, because rounding a sum with a huge logit would lose the logarithm.
    highest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    highest = jnp.where(highest == -jnp.inf, 0.0, highest)
    total = jnp.log(jnp.sum(jnp.exp(logits - highest), axis=-1, keepdims=True))
    targets = jnp.where(targets < 0, logits.shape[-1], targets)  # a negative index would wrap around
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill", fill_value=jnp.nan)
    logprobs = jnp.where(predicted, (chosen - highest - total)[..., 0], 0.0)
    if not top:
        return LogProbs(logprobs)
    best, tokens = lax.top_k(logits, top)
    best, shown = best - highest - total, predicted[..., None]
    return LogProbs(logprobs, jnp.where(shown, best, 0.0), jnp.where(shown, tokens.astype(jnp.int32), 0))
