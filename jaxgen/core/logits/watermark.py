"""The KGW watermark (arXiv 2301.10226, 2306.04634), which adds a bias to the scores of green tokens, and its detector.

A token is green if an integer hash of the key, the context and the token is small enough. Marking therefore costs O(V),
and the detector needs neither the model nor the vocabulary. The green lists differ from transformers', which come from
torch's random generator and depend on the device. A watermark can therefore be detected only by the library that made
it. jaxgen's lists are the same on every backend, and must not change in later releases.

The key has 32 bits and the hash is not cryptographic. Different keys make watermarks distinguishable, but do not
prevent forgery.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.config.watermarking import WatermarkingConfig
from jaxgen.errors import InputError


def watermark(scores: jax.Array, context: jax.Array, config: WatermarkingConfig) -> jax.Array:
    """Add the bias to the scores of green tokens: `WatermarkLogitsProcessor`, with jaxgen's own green lists.

    With "selfhash", transformers tests only the 40 most likely tokens. jaxgen's hash is fast enough to test the entire
    vocabulary. Every green token that sampling may draw therefore gets the bias, as in the paper.

    Args:
        scores: float32[rows, V].
        context: int32[rows, context_width], the last tokens of each row. A row with fewer tokens is padded with -1 on
            the left, and is not marked.
        config: ratio, bias, key and scheme.
    """
    tokens = jnp.arange(scores.shape[1], dtype=jnp.int32)[None, :]
    marked = green(context[:, None, :], tokens, config) & jnp.all(context >= 0, axis=1, keepdims=True)
    return jnp.where(marked, scores + config.bias, scores)


def green(context, token, config: WatermarkingConfig):
    """Return bool[...], True where a token is green after its context. The arguments may be numpy or jax arrays.

    Args:
        context: int32[..., C], the preceding tokens, in order. "lefthash" uses the last token, and "selfhash" uses the
            last `context_width - 1` tokens.
        token: int32[...], with at least one axis; broadcast against the context's leading axes.
        config: the config, whose ratio and key may be traced.
    """
    ratio, _, key = config.tree_flatten()[0]
    if config.seeding_scheme == "lefthash":
        seed = _hash(key, context[..., -1])
    else:
        # The seed is the smallest hash in the window, so replacing one token of the context usually has no effect.
        least = np.minimum if isinstance(token, np.ndarray) else jnp.minimum
        seed = _hash(_hash(key, token), token)
        for back in range(1, config.context_width):
            seed = least(seed, _hash(_hash(key, context[..., -back]), token))
    # The hash's top 24 bits, which float32 represents exactly, as a number from 0 to 1.
    return (_hash(seed, token) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24) < ratio


def _hash(seed, token):
    """Hash a uint32 and an id to a uint32, so that neighboring inputs have unrelated hashes."""
    return _mix(seed ^ _mix(token.astype(np.uint32) + np.uint32(0x9E3779B9)))


def _mix(x):
    """Map uint32s one to one; each output bit depends on all input bits (lowbias32 by C. Wellons, public domain)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


@dataclasses.dataclass(frozen=True)
class WatermarkDetectorOutput:
    """The detector's result for each row, as numpy arrays `[B]`, with the fields of transformers' class.

    Attributes:
        num_tokens_scored: int64, the number of tokens whose whole context is in the row.
        num_green_tokens: int64, the number of green tokens among the scored tokens.
        green_fraction: float64, the fraction of green tokens.
        z_score: float64, the number of green tokens minus the number expected in unmarked text, in standard deviations.
        p_value: float64, the probability that unmarked text reaches this z-score, from the normal distribution.
            (The approximation in transformers 4.41.1 lacks a square root.)
        prediction: bool, True if the z-score exceeds the threshold.
        confidence: float64, 1 - p_value.
    """

    num_tokens_scored: np.ndarray
    num_green_tokens: np.ndarray
    green_fraction: np.ndarray
    z_score: np.ndarray
    p_value: np.ndarray
    prediction: np.ndarray
    confidence: np.ndarray


class WatermarkDetector:
    """Detects text marked by `watermark`, like transformers' `WatermarkDetector`, but with jaxgen's own green lists.

    >>> detect = WatermarkDetector(WatermarkingConfig())
    >>> text = np.random.default_rng(0).integers(0, 1000, (2, 200))
    >>> detect(text).prediction.tolist()
    [False, False]

    Args:
        config: the config used to watermark the text, or its dict; only ratio, key, scheme and context width are used.
        bos_token_id: a token that is skipped at the start of a row.
        ignore_repeated_ngrams: count each pair of context and token only once, so that repetition is not mistaken for a
            watermark. (This argument has no effect in transformers 4.41.1.)
    """

    def __init__(
        self,
        config: WatermarkingConfig | Mapping[str, Any],
        bos_token_id: int | None = None,
        ignore_repeated_ngrams: bool = False,
    ):
        self.config: WatermarkingConfig = OPTIONS["watermarking_config"].kind.parse("config", config)
        self.bos_token_id = bos_token_id
        self.ignore_repeated_ngrams = ignore_repeated_ngrams

    def __call__(self, ids, attention_mask=None, z_threshold: float = 3.0) -> WatermarkDetectorOutput:
        """Test each row for the watermark. If possible, pass only generated tokens, as prompts are not watermarked.

        >>> ids, mask = out.generated((out.sequences, out.attention_mask))
        >>> detect(ids, mask).prediction

        Args:
            ids: int[B, L].
            attention_mask: `[B, L]`, 0 for padding, which may be anywhere; by default, there is no padding.
            z_threshold: the z-score above which a text is considered marked; about 0.13% of unmarked texts exceed 3.

        Raises:
            InputError: a row is too short to score, or the mask has a different shape.
        """
        ids = np.asarray(ids)
        if ids.ndim != 2 or 0 in ids.shape or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"ids must be integers of shape [B, L], got {ids.dtype}{list(ids.shape)}")
        mask = np.ones(ids.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
        if mask.shape != ids.shape:
            raise InputError(f"attention_mask must have the shape of ids, {list(ids.shape)}, got {list(mask.shape)}")
        rows = [self._count(row, ids[row][mask[row]]) for row in range(len(ids))]
        scored, greens = np.asarray(rows, np.int64).T
        ratio = float(self.config.greenlist_ratio)
        z_score = (greens - ratio * scored) / np.sqrt(scored * ratio * (1 - ratio))
        p_value = np.asarray([math.erfc(z / math.sqrt(2)) / 2 for z in z_score])
        return WatermarkDetectorOutput(
            num_tokens_scored=scored,
            num_green_tokens=greens,
            green_fraction=greens / scored,
            z_score=z_score,
            p_value=p_value,
            prediction=z_score > z_threshold,
            confidence=1 - p_value,
        )

    def _count(self, row: int, tokens: np.ndarray) -> tuple[int, int]:
        """Return the number of scored tokens in a row, and the number of green ones."""
        if len(tokens) and tokens[0] == self.bos_token_id:
            tokens = tokens[1:]
        width = self.config.context_width
        if len(tokens) <= width:
            raise InputError(f"row {row} has {len(tokens)} tokens, too few for context_width={width}: leave it out")
        # The number of tokens that determine whether a token is green, including the token itself.
        size = width if self.config.seeding_scheme == "selfhash" else width + 1
        ngrams = np.lib.stride_tricks.sliding_window_view(tokens, size)
        if self.ignore_repeated_ngrams:
            ngrams = np.unique(ngrams, axis=0)
        return len(ngrams), int(green(ngrams[:, :-1], ngrams[:, -1], self.config).sum())
