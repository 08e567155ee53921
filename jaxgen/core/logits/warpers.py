"""Logits warpers: functions `(history, scores, options) -> scores` that shape the distribution for sampling.

`WARPERS` lists them; each is named after its option. Scores are float32[rows, V]; a token that cannot be drawn has the
score -inf. A search with beams must keep several tokens; see `RowOptions.min_tokens_to_keep`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.control import cond
from jaxgen.core.logits.history import History
from jaxgen.core.logits.order_statistics import (
    bisect,
    candidates,
    from_ordered_bits,
    kth_largest,
    last_of,
    ordered_bits,
)
from jaxgen.core.logits.processors import BANNED, Processor, bounded, divide
from jaxgen.core.logits.row_options import RowOptions
from jaxgen.shapes import put


def temperature(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Return `scores / temperature`: `TemperatureLogitsWarper`.

    If a row's highest score would overflow, the row is first shifted so that this score is 0, which does not change the
    distribution. In that case, all beams of a search are shifted, so that their scores can be compared.
    """
    value, beams = options.number("temperature"), options.cfg.num_beams
    best = jnp.max(scores, axis=-1, keepdims=True)
    overflows = jnp.isfinite(best) & jnp.isinf(divide(best, value))
    overflows = jnp.repeat(jnp.any(overflows.reshape(-1, beams), axis=-1), beams)[:, None]
    return bounded(divide(jnp.where(overflows, scores - best, scores), value), scores)


def top_k(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Keep the k highest scores, and scores that tie with the k-th: `TopKLogitsWarper`. k = 0 keeps all scores."""
    k = _kept(options.number("top_k"), _at_most_all(scores, options), scores.shape[-1])
    best, _ = candidates(scores, options.mesh)
    kth, known = _kth(best, k, scores.shape[-1])
    return _or_bisected(_at_least(scores, kth), known, lambda: _bisected_top_k(scores, k))


def top_p(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Keep the smallest set of most likely tokens whose probability reaches p: `TopPLogitsWarper` (arXiv 1904.09751).

    A token is kept if the total probability of all more likely tokens is less than p. In a tie at the boundary, the
    highest ids are kept, as in a stable ascending sort. If p is 1, all tokens are kept.
    """
    p, at_least = options.number("top_p"), _at_most_all(scores, options)
    kept, known = _nucleus(scores, *candidates(scores, options.mesh), p, at_least)
    return _or_bisected(kept, known, lambda: _bisected_top_p(scores, p, at_least))


def top_k_top_p(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Apply `top_k` and then `top_p`, with only one search for the highest scores."""
    p, at_least = options.number("top_p"), _at_most_all(scores, options)
    k = _kept(options.number("top_k"), at_least, scores.shape[-1])
    best, ids = candidates(scores, options.mesh)
    kth, has_kth = _kth(best, k, scores.shape[-1])
    kept, has_nucleus = _nucleus(_at_least(scores, kth), _at_least(best, kth), ids, p, at_least)
    return _or_bisected(kept, has_kth & has_nucleus, lambda: _bisected_top_p(_bisected_top_k(scores, k), p, at_least))


# The candidates usually determine the results of `top_k` and `top_p`. Otherwise, all scores are searched by bisection.


def _or_bisected(kept: jax.Array, known: jax.Array, bisected: Callable[[], jax.Array]) -> jax.Array:
    """Return `kept` in rows where `known bool[rows, 1]` is True, and `bisected()` in all other rows.

    `known` is True for a row if the candidates determine the row's result. Each warper has only one conditional per
    step, because a GPU waits for the host at each conditional.
    """
    return cond(jnp.all(known), lambda: kept, lambda: jnp.where(known, kept, bisected()))


def _at_least(scores: jax.Array, threshold: jax.Array) -> jax.Array:
    return jnp.where(scores >= threshold, scores, BANNED)


def _at_most_all(scores: jax.Array, options: RowOptions) -> jax.Array:
    """Return `min_tokens_to_keep` for each row, but at most V, as int32[rows, 1]."""
    rows, vocab = scores.shape
    return jnp.broadcast_to(jnp.minimum(options.min_tokens_to_keep(rows), vocab), (rows, 1))


def _kept(k: jax.Array, at_least: jax.Array, vocab: int) -> jax.Array:
    """Return how many scores top_k keeps, from 1 to `vocab`, not counting ties."""
    return jnp.where(k == 0, vocab, jnp.clip(k, at_least, vocab))


def _kth(best: jax.Array, k: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """Return two arrays `[rows, 1]`: the lowest score that top_k keeps, and whether `best` determines that score."""
    kth = jnp.take_along_axis(best, jnp.minimum(k, best.shape[-1]) - 1, axis=-1)
    return jnp.where(k == vocab, -jnp.inf, kth), (k <= best.shape[-1]) | (k == vocab)


def _bisected_top_k(scores: jax.Array, k: jax.Array) -> jax.Array:
    return _at_least(scores, from_ordered_bits(kth_largest(ordered_bits(scores), k[:, 0]))[:, None])


def _nucleus(
    scores: jax.Array, best: jax.Array, ids: jax.Array, p: jax.Array, at_least: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute `top_p` from the candidates; also return bool[rows, 1], True if the candidates determine the result."""
    vocab, size = scores.shape[-1], best.shape[-1]
    total = jnp.sum(jnp.exp(scores - best[:, :1]), axis=-1, keepdims=True)
    reached = jnp.cumsum(jnp.exp(best - best[:, :1]), axis=-1) >= p * total

    # The lowest score that is kept, and how many tokens with exactly this score are kept.
    last = jnp.minimum(jnp.sum(~reached, axis=-1, dtype=jnp.int32, keepdims=True), size - 1)
    last = jnp.clip(last, at_least - 1, size - 1)
    threshold = jnp.take_along_axis(best, last, axis=-1)
    count = last + 1 - jnp.sum(best > threshold, axis=-1, dtype=jnp.int32, keepdims=True)

    # If the threshold exceeds the candidates' lowest score, all tokens whose score equals the threshold are candidates.
    ends = jnp.any(reached, axis=-1, keepdims=True) & (at_least <= size) & (threshold > best[:, -1:])
    tied = (scores == threshold) & (jnp.arange(vocab)[None, :] >= _first_kept(ids, best == threshold, count))
    kept = jnp.where((scores > threshold) | tied | (p >= 1.0), scores, BANNED)
    return kept, ends | (p >= 1.0) | (size == vocab)


def _first_kept(ids: jax.Array, tied: jax.Array, count: jax.Array) -> jax.Array:
    """Return the `count`-th highest id of each row's tied candidates; `count` and the result are int32[rows, 1]."""
    higher = jnp.sum(tied[:, None, :] & (ids[:, None, :] > ids[:, :, None]), axis=-1, dtype=jnp.int32)
    return jnp.min(jnp.where(tied & (higher < count), ids, jnp.iinfo(ids.dtype).max), axis=-1, keepdims=True)


def _bisected_top_p(scores: jax.Array, p: jax.Array, at_least: jax.Array) -> jax.Array:
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    rest = (1 - p) * jnp.sum(weights, axis=-1, keepdims=True)
    threshold, count = _boundary(scores, weights, rest, at_least)
    tied = last_of(scores == threshold, count[:, 0])
    return jnp.where((scores > threshold) | tied | (p >= 1.0), scores, BANNED)


def _boundary(
    scores: jax.Array, weights: jax.Array, rest: jax.Array, at_least: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the lowest score that top_p keeps, and how many of the tokens with that score are kept.

    The results are float32[rows, 1] and int32[rows, 1]. The least likely tokens are removed as long as their total
    weight is at most `rest float32[rows, 1]`. Summing the kept weights instead would be unreliable: near p = 1,
    the sum's rounding error is too large, and the sum may never reach p.
    """
    bits = ordered_bits(scores)

    def mass(chosen: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(chosen, weights, 0.0), axis=-1, keepdims=True)

    threshold = bisect(lambda value: (mass(bits < value[:, None]) <= rest)[:, 0], scores.shape[0], reads=scores)
    threshold = jnp.minimum(threshold, kth_largest(bits, at_least[:, 0]))[:, None]
    above, equal = bits > threshold, bits == threshold
    ties, greater = (jnp.sum(x, axis=-1, dtype=jnp.int32, keepdims=True) for x in (equal, above))
    each = jnp.max(jnp.where(equal, weights, 0.0), axis=-1, keepdims=True)
    removed = jnp.floor((rest - mass(bits < threshold)) / each)
    removed = jnp.clip(removed, 0, ties.astype(jnp.float32)).astype(jnp.int32)
    return from_ordered_bits(threshold), jnp.maximum(ties - removed, jnp.maximum(at_least - greater, 1))


def min_p(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Keep tokens at least p times as likely as the most likely one: `MinPLogitsWarper`. p = 0 keeps all tokens."""
    kept = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)) >= options.number("min_p")
    return jnp.where(_with_first(kept, scores, options.min_tokens_to_keep(scores.shape[0])), scores, BANNED)


def typical_p(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Keep the tokens whose surprise is closest to the expected surprise, until their total probability reaches a mass.

    `TypicalLogitsWarper` (arXiv 2202.00666). The most likely token may be removed. In a tie at the boundary, all tied
    tokens are kept. If `min_tokens_to_keep` is an int above 1 and tokens are added to reach this number, the lowest ids
    win a tie for the last place. A mass of 1 keeps all tokens.
    """
    mass = options.value("typical_p")
    log_probs = jax.nn.log_softmax(scores, axis=-1)
    probs = jnp.exp(log_probs)
    distance = jnp.abs(-log_probs - _entropy(log_probs))
    bits = lax.bitcast_convert_type(distance, jnp.uint32)  # non-negative floats have the same order as their bits

    def falls_short(value: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(bits < value[:, None], probs, 0.0), axis=-1) < mass

    kept = (bits <= bisect(falls_short, scores.shape[0], bits=31, reads=scores)[:, None]) | (mass >= 1)[:, None]
    return jnp.where(_with_first(kept, -distance, options.min_tokens_to_keep(scores.shape[0])), scores, BANNED)


def epsilon_cutoff(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Keep the tokens whose probability is at least the cutoff: `EpsilonLogitsWarper` (arXiv 2210.15191).

    A cutoff of 0 keeps all tokens.
    """
    return _cut(scores, options.number("epsilon_cutoff"), options)


def eta_cutoff(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Apply `epsilon_cutoff` with the cutoff `min(cutoff, sqrt(cutoff) * exp(-H))`, where H is the entropy.

    `EtaLogitsWarper` (arXiv 2210.15191).
    """
    cutoff = options.number("eta_cutoff")
    lowered = jnp.sqrt(cutoff) * jnp.exp(-_entropy(jax.nn.log_softmax(scores, axis=-1)))
    return _cut(scores, jnp.minimum(cutoff, lowered), options)


def _cut(scores: jax.Array, cutoff: jax.Array, options: RowOptions) -> jax.Array:
    kept = jax.nn.softmax(scores, axis=-1) >= cutoff
    return jnp.where(kept | _reaches_kth(scores, options.min_tokens_to_keep(scores.shape[0])), scores, BANNED)


def top_h(history: History, scores: jax.Array, options: RowOptions) -> jax.Array:
    """Keep the most likely tokens whose entropy is at most `top_h` times the entropy of the 100 most likely tokens.

    `TopHLogitsWarper` from transformers 5 (arXiv 2509.02510). Both entropies are sums of `-p * log(p)`, where p is a
    token's probability among the 100 tokens. The most likely token is always kept. A value of 1 keeps the 100 most
    likely tokens, and infinity keeps all tokens.
    """
    value = options.number("top_h")
    best, tokens = lax.top_k(scores, min(100, scores.shape[-1]))
    log_probs = jax.nn.log_softmax(best, axis=-1)
    entropy = jnp.cumsum(_entropy_terms(log_probs), axis=-1)
    kept = (entropy <= value * entropy[:, -1:]).at[:, 0].set(True)
    cut = put(jnp.full_like(scores, BANNED), tokens, jnp.where(kept, best, BANNED))
    return jnp.where(value > 1, scores, cut)


# The warpers by option, in transformers' order.
WARPERS: dict[str, Processor] = {
    "temperature": temperature,
    "top_h": top_h,
    "top_k": top_k,
    "top_p": top_p,
    "min_p": min_p,
    "typical_p": typical_p,
    "epsilon_cutoff": epsilon_cutoff,
    "eta_cutoff": eta_cutoff,
}


def _entropy_terms(log_probs: jax.Array) -> jax.Array:
    probs = jnp.exp(log_probs)
    return jnp.where(probs > 0, -probs * log_probs, 0.0)


def _entropy(log_probs: jax.Array) -> jax.Array:
    """Return the entropy in nats, as float32[rows, 1]."""
    return jnp.sum(_entropy_terms(log_probs), axis=-1, keepdims=True)


def _with_first(kept: jax.Array, order: jax.Array, count: int | jax.Array) -> jax.Array:
    """Also keep the `count` tokens with the highest values in `order float32[rows, V]`.

    `count` is an int or int32[rows, 1]. If `count` is an array or the int 1, all tokens that tie with the `count`-th
    highest value are also kept.
    """
    if not isinstance(count, int) or count == 1:
        return kept | _reaches_kth(order, count)
    best = lax.top_k(order, min(count, order.shape[-1]))[1]
    return put(kept, best, jnp.ones(best.shape, bool))


def _reaches_kth(scores: jax.Array, k: int | jax.Array) -> jax.Array:
    """Return bool[rows, V], True for scores that are at least the k-th highest; `k` is an int or int32[rows, 1]."""
    if not isinstance(k, int):
        bits = ordered_bits(scores)
        return bits >= kth_largest(bits, jnp.minimum(k[:, 0], scores.shape[-1]))[:, None]
    if k == 1:
        return scores >= jnp.max(scores, axis=-1, keepdims=True)
    return scores >= lax.top_k(scores, min(k, scores.shape[-1]))[0][:, -1:]
