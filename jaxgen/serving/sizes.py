"""Estimate the sizes of answers, in bytes, before any work begins."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.limits import Limits
from jaxgen.serving.protocol import ChatRequest, Common
from jaxgen.serving.requests import Asked
from jaxgen.serving.scored import TokenTexts

_HEAD, _CHOICE, _ENTRY, _USAGE = 350, 250, 60, 200  # bytes of fields without texts
_COMMON = 0.99  # share of the tokens whose text is at most as long as the estimate for a log-probability
_FIELDS = "max_tokens", "n", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "return_token_ids"


class Size(NamedTuple):
    """The estimated size of an answer.

    Attributes:
        fixed: the bytes that do not depend on the tokens that are generated, such as those of an echo.
        token: the bytes of one generated token.
        tokens: the maximum number of generated tokens, in all sequences.
    """

    fixed: int
    token: int
    tokens: int

    @property
    def total(self) -> int:
        """The bytes of the whole answer."""
        return self.fixed + self.token * self.tokens

    @property
    def limit(self) -> int:
        """The bytes after which an answer is stopped. Few tokens are longer than most; only an attack has many."""
        return 2 * self.total


class Sizes:
    """Estimates answers for a model.

    Args:
        texts: the texts of the tokens.
        count: the number of tokens.
        limits: contains the maximum size of an answer.
    """

    def __init__(self, texts: TokenTexts, count: int, limits: Limits):
        self._limits = limits
        written = [len(msgspec.json.encode(texts.text(token))) - 2 for token in range(count)]
        entries = sorted(text + 4 * len(texts.bytes(token)) for token, text in enumerate(written))
        self._longest = max(written)
        self._entry = _ENTRY + entries[int(_COMMON * (count - 1))]

    def of(self, request: Common, asked: Asked, repeated: int = 0, copies: int = 1) -> Size:
        """Return the size of the answer to a request.

        Args:
            request: the request.
            asked: the same request, as read by `Reader`.
            repeated: the number of bytes of the request that the answer repeats.
            copies: the number of times that the answer contains each generated token.

        Raises:
            ApiError: the answer would be too large.
        """
        sequences = asked.sequences if asked.budget else 1
        head = _HEAD + len(request.request_id or "")
        token = self._longest + (0 if asked.logprobs is None else (2 + asked.logprobs) * self._entry)
        token += 8 * bool(request.return_token_ids)
        if request.stream:
            token += head + _CHOICE
            if request.stream_options is not None and request.stream_options.continuous_usage_stats:
                token += _USAGE
        of_prompts = 0
        for prompt, text in zip(asked.prompts, asked.echoes or [None] * len(asked.prompts), strict=True):
            of_token = 8 * bool(request.return_token_ids)
            if text is not None:
                of_prompts += len(msgspec.json.encode(text.text))
                of_token += 0 if asked.logprobs is None else (2 + asked.logprobs) * self._entry
            if request.prompt_logprobs is not None:
                of_token += (2 + request.prompt_logprobs) * (_ENTRY + self._entry)
            of_prompts += len(prompt.ids) * of_token + _CHOICE
        of_prompts *= 1 if isinstance(request, ChatRequest) else sequences
        count = len(asked.prompts) * sequences
        fixed = head + _USAGE + of_prompts + count * _CHOICE + repeated
        size = Size(fixed, copies * token, sum(prompt.budget for prompt in asked.prompts) * sequences)
        # The tokens of a stream are sent as they come.
        if (size.fixed if request.stream else size.total) > (limit := self._limits.answer):
            fields = [name for name in _FIELDS if getattr(request, name, None)] or ["max_tokens"]
            raise ApiError(
                400,
                f"the answer could have {size.total:,} bytes, but at most {limit:,} are accepted: lower "
                f"{' or '.join(fields)}, or shorten the prompt",
                fields[0],
            )
        return size

    def memory(self, size: Size, streams: bool) -> int:
        """Return the number of bytes of memory that an answer may need at a time."""
        return size.fixed + min(size.total - size.fixed, self._limits.unread) if streams else 2 * size.total
