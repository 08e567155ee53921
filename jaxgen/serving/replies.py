"""The bodies of answers, whole and in chunks."""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgen.decoding.logprobs import LogProbs
from jaxgen.errors import ConfigError
from jaxgen.serving.protocol import ChatRequest, Common
from jaxgen.serving.reading import Asked
from jaxgen.serving.text import Answer, Delta
from jaxgen.serving.tools import Call
from jaxgen.text.tokenizer import Tokenizer

_LEAST = -9999.0  # for a log-probability of -inf, which JSON lacks; vLLM's number


class TokenTexts:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        try:
            self._bytes = tokenizer.token_bytes()
        except ConfigError:  # its text is not the concatenation of its tokens'
            self._bytes = []

    def bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; for a special token, its name."""
        own = self._bytes[token] if token < len(self._bytes) else None
        return (self._tokenizer.backend.id_to_token(token) or "").encode() if own is None else own

    def text(self, token: int, as_id: bool = False) -> str:
        """Return the text of a token, with U+FFFD for a part of a character; or with `as_id`, its number."""
        return f"token_id:{token}" if as_id else self.bytes(token).decode("utf-8", "replace")


class Scored:
    """Tokens with log-probabilities, and the most likely ones at each place.

    Attributes:
        tokens: the ids.
        logprobs: float of each; None for the first token of a text, which nothing predicts.
        most_likely: for each token, ids and log-probabilities in descending order.
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


@dataclasses.dataclass
class Replies:
    """Writes the answers to one request.

    Args:
        request: the request.
        asked: the request as it was read.
        model: the model's name.
        fingerprint: identifies the weights.
        texts: of tokens.
    """

    request: Common
    asked: Asked
    model: str
    fingerprint: str
    texts: TokenTexts

    def __post_init__(self):
        self._is_chat = isinstance(self.request, ChatRequest)
        self.id = self.request.request_id or f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}  # characters of completions before their next token

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self._created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint}

    def usage(self, generated: int, cached: int) -> dict[str, Any]:
        """Return the counts of tokens."""
        prompts = sum(len(prompt["ids"]) for prompt in self.asked.prompts)
        details = {"cached_tokens": cached}
        total = {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}
        return total | {"prompt_tokens_details": details}

    def whole(
        self, choices: Sequence[tuple[Answer, Delta]], usage: dict[str, Any], of_prompts: Sequence[Scored] | None
    ) -> dict[str, Any]:
        """Return the body with all choices, those of the first prompt first; `of_prompts` has the prompts' tokens."""
        write = self._chat_choice if self._is_chat else self._completion_choice
        body = self._head("chat.completion" if self._is_chat else "text_completion")
        body["choices"] = [write(index, *choice, of_prompts) for index, choice in enumerate(choices)]
        body["usage"] = usage
        if self._is_chat and of_prompts is not None and self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._of_prompt(of_prompts[0])
        if self._is_chat and self.request.return_token_ids:
            body["prompt_token_ids"] = self.asked.prompts[0]["ids"]
        return body

    def chunk(
        self, index: int, answer: Answer, delta: Delta, is_first: bool, of_prompt: Scored | None
    ) -> dict[str, Any]:
        """Return a chunk with what was added to a choice."""
        choice: dict[str, Any] = {"index": index}
        body = self._head("chat.completion.chunk" if self._is_chat else "text_completion")
        if self._is_chat:
            content: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
            if delta.text:
                content["content"] = delta.text
            if delta.calls:
                first = answer.calls - len(delta.calls)
                content["tool_calls"] = [
                    {"index": first + number} | self._call(call) for number, call in enumerate(delta.calls)
                ]
            choice |= {"delta": content, "logprobs": self._chat_logprobs(delta)}
        else:
            prompt = self._echoed(index) if is_first else ""
            scored = self._scored(delta, of_prompt if is_first and self.asked.texts is not None else None)
            choice |= {"text": prompt + delta.text, "logprobs": self._completion_logprobs(index, scored)}
        choice |= {"finish_reason": delta.finish, "stop_reason": answer.stop_reason}
        if self.request.return_token_ids:
            choice["token_ids"] = delta.tokens
            if is_first:
                (body if self._is_chat else choice)["prompt_token_ids"] = self._prompt(index)["ids"]
        return body | {"choices": [choice]}

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk with the counts."""
        return self._head("chat.completion.chunk" if self._is_chat else "text_completion") | {
            "choices": [],
            "usage": usage,
        }

    def _prompt(self, index: int) -> dict[str, Any]:
        return self.asked.prompts[index // self.asked.sequences]

    def _echoed(self, index: int) -> str:
        return "" if self.asked.texts is None else self.asked.texts[index // self.asked.sequences]

    def _chat_choice(self, index: int, answer: Answer, delta: Delta, _: Any) -> dict[str, Any]:
        content = delta.text if delta.text or not delta.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if delta.calls:
            message["tool_calls"] = [self._call(call) for call in delta.calls]
        choice = {"index": index, "message": message, "logprobs": self._chat_logprobs(delta)}
        choice |= {"finish_reason": delta.finish, "stop_reason": answer.stop_reason}
        return choice | ({"token_ids": delta.tokens} if self.request.return_token_ids else {})

    def _completion_choice(
        self, index: int, answer: Answer, delta: Delta, of_prompts: Sequence[Scored] | None
    ) -> dict[str, Any]:
        of_prompt = None if of_prompts is None else of_prompts[index // self.asked.sequences]
        scored = self._scored(delta, of_prompt if self.asked.texts is not None else None)
        choice = {"index": index, "text": self._echoed(index) + delta.text}
        choice |= {"logprobs": self._completion_logprobs(index, scored), "finish_reason": delta.finish}
        choice["stop_reason"] = answer.stop_reason
        if of_prompt is not None and self.request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._of_prompt(of_prompt)
        if self.request.return_token_ids:
            choice |= {"token_ids": delta.tokens, "prompt_token_ids": self._prompt(index)["ids"]}
        return choice

    def _call(self, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}

    def _scored(self, delta: Delta, of_prompt: Scored | None) -> Scored | None:
        """Return the tokens that are shown, those of a prompt that is repeated first."""
        if self.asked.logprobs is None:
            return None
        if delta.logprobs is None:
            return of_prompt
        scored = Scored(delta.tokens, delta.logprobs, self.asked.logprobs)
        return scored if of_prompt is None else of_prompt + scored

    def _chat_logprobs(self, delta: Delta) -> dict[str, Any] | None:
        scored = self._scored(delta, None)
        if scored is None:
            return None
        rows = zip(scored.tokens, scored.logprobs, scored.most_likely, strict=True)
        content = [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(*likely) for likely in most_likely]}
            for token, logprob, most_likely in rows
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.texts.text(token, bool(self.request.return_tokens_as_token_ids))
        return {"token": text, "logprob": logprob, "bytes": list(self.texts.bytes(token))}

    def _completion_logprobs(self, index: int, scored: Scored | None) -> dict[str, Any] | None:
        if scored is None:
            return None
        as_id = bool(self.request.return_tokens_as_token_ids)
        tokens = [self.texts.text(token, as_id) for token in scored.tokens]
        offset, offsets = self._offsets.get(index, 0), []
        for token in scored.tokens:
            offsets.append(offset)
            offset += len(self.texts.text(token))
        self._offsets[index] = offset
        most_likely = []
        for token, logprob, likely in zip(scored.tokens, scored.logprobs, scored.most_likely, strict=True):
            # The chosen token is shown too; of several with one text, the most likely.
            pairs = [*likely[: self.asked.logprobs], (token, logprob)]
            named: dict[str, float | None] = {}
            for other, value in pairs:
                named.setdefault(self.texts.text(other, as_id), value)
            most_likely.append(None if logprob is None else named)
        values = {"tokens": tokens, "token_logprobs": scored.logprobs, "text_offset": offsets}
        return values | {"top_logprobs": most_likely if self.asked.logprobs else None}

    def _of_prompt(self, scored: Scored) -> list[dict[str, Any] | None]:
        """Return `prompt_logprobs` as vLLM has them: by the ids of tokens, with ranks where they are known."""
        entries: list[dict[str, Any] | None] = []
        most = self.request.prompt_logprobs or 0
        for token, logprob, likely in zip(scored.tokens, scored.logprobs, scored.most_likely, strict=True):
            if logprob is None:
                entries.append(None)
                continue
            ranks = {other: rank for rank, (other, _) in enumerate(likely, 1)}
            pairs = {**dict(likely[:most]), token: logprob}
            entries.append(
                {
                    str(other): {"logprob": value, "rank": ranks.get(other), "decoded_token": self.texts.text(other)}
                    for other, value in pairs.items()
                }
            )
        return entries
