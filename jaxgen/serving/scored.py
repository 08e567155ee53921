"""Tokens with their texts and log-probabilities, in OpenAI's chat format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgen.core.decoding.logprobs import LogProbs
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import ConfigError

_LEAST = -9999.0  # replaces -inf, which JSON cannot represent; vLLM uses the same number


class TokenTexts:
    """The text and bytes of individual tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        try:
            self._bytes = tokenizer.token_bytes()
        except ConfigError:  # the text is not the concatenation of the tokens' texts
            self._bytes = []

    def bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text; for a special token, return its name as bytes."""
        data = self._bytes[token] if token < len(self._bytes) else None
        return (self._tokenizer.backend.id_to_token(token) or "").encode() if data is None else data

    def text(self, token: int, as_id: bool = False) -> str:
        """Return a token's text, with U+FFFD for incomplete characters; with `as_id`, return its id as text."""
        return f"token_id:{token}" if as_id else self.bytes(token).decode("utf-8", "replace")


class Scored:
    """Tokens with log-probabilities, and the most likely tokens at each position.

    Attributes:
        tokens: the ids.
        logprobs: a float for each token; None for the first token of a text, because the model does not predict it.
        most_likely: for each token, pairs of an id and its log-probability, with the most likely id first.
    """

    def __init__(self, tokens: Sequence[int], logprobs: LogProbs, top: int, is_beginning: bool = False):
        self.tokens = list(tokens)
        numbers = [_finite(value) for value in np.asarray(logprobs.logprobs).tolist()]
        self.logprobs: list[float | None] = [None, *numbers[1:]] if is_beginning else list(numbers)
        self.most_likely: list[list[tuple[int, float]]] = [[] for _ in self.tokens]
        if top and logprobs.top_tokens is not None and logprobs.top_logprobs is not None:
            ids, values = np.asarray(logprobs.top_tokens)[:, :top], np.asarray(logprobs.top_logprobs)[:, :top]
            rows = zip(ids.tolist(), values.tolist(), strict=True)
            self.most_likely = [[(i, _finite(x)) for i, x in zip(*row, strict=True)] for row in rows]

    def __add__(self, other: Scored) -> Scored:
        joined = object.__new__(Scored)
        joined.tokens, joined.logprobs = self.tokens + other.tokens, self.logprobs + other.logprobs
        joined.most_likely = self.most_likely + other.most_likely
        return joined


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST


def entries(scored: Scored, texts: TokenTexts, as_id: bool = False) -> list[dict[str, Any]]:
    """Return the entries of `logprobs.content` in a chat response; with `as_id`, show each token as its id."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": texts.text(token, as_id), "logprob": logprob, "bytes": list(texts.bytes(token))}

    rows = zip(scored.tokens, scored.logprobs, scored.most_likely, strict=True)
    return [
        entry(token, logprob) | {"top_logprobs": [entry(*likely) for likely in most_likely]}
        for token, logprob, most_likely in rows
    ]
