"""Response bodies, sent whole or in chunks."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxgen.serving.answer_text import Answer, Delta
from jaxgen.serving.formats.reading import Call
from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.protocol import ChatRequest, Common
from jaxgen.serving.requests import Asked
from jaxgen.serving.scored import Scored, TokenTexts, entries

SHORTER = "lower max_tokens, n or the number of log-probabilities"


@dataclasses.dataclass
class Replies:
    """Builds the response bodies for one request. `asked` is the request as read by `Reader`."""

    request: Common
    asked: Asked
    model: str
    fingerprint: str
    texts: TokenTexts

    def __post_init__(self):
        self._is_chat = isinstance(self.request, ChatRequest)
        self.id = self.request.request_id or f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._as_id = bool(self.request.return_tokens_as_token_ids)
        self._calls: dict[int, int] = {}  # for each choice, the number of calls that were sent

    def _head(self, of_chat: str, is_first: bool) -> dict[str, Any]:
        """Return the fields that all bodies have, and those that only the first body with a choice has.

        For a chat request, the field `object` is set to `of_chat`.
        """
        kind = of_chat if self._is_chat else "text_completion"
        head: dict[str, Any] = {"id": self.id, "object": kind, "created": self._created, "model": self.model}
        head["system_fingerprint"] = self.fingerprint
        if is_first and self._is_chat and self.request.return_token_ids:
            head["prompt_token_ids"] = self.asked.prompts[0].ids.tolist()
        if is_first and self.asked.left_out:
            head["left_out"] = self.asked.left_out
        return head

    def usage(self, answers: Sequence[Answer], cached: int) -> dict[str, Any]:
        """Return the token counts."""
        prompts = sum(len(prompt.ids) for prompt in self.asked.prompts)
        generated = sum(answer.count for answer in answers)
        total = {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}
        total |= {"prompt_tokens_details": {"cached_tokens": cached}}
        if thinking := sum(answer.thinking for answer in answers):
            total["completion_tokens_details"] = {"reasoning_tokens": thinking}
        return total

    def whole(
        self,
        choices: Sequence[tuple[Answer, Delta]],
        usage: dict[str, Any],
        of_prompts: Sequence[Scored] | None,
        limit: int,
    ) -> dict[str, Any]:
        """Return a body with all choices, in the order of the prompts.

        Each choice is encoded at once, because its values take far more memory than its JSON.

        Args:
            choices: the answers.
            usage: the token counts.
            of_prompts: the prompts' scored tokens, or None.
            limit: the maximum number of bytes in all choices.
        """
        body = self._head("chat.completion", True)
        encoded, size = [], 0
        for index, (answer, delta) in enumerate(choices):
            of_prompt = None if of_prompts is None else of_prompts[index // self.asked.sequences]
            choice = self._choice(index, answer, delta, True, of_prompt, is_whole=True)
            encoded.append(msgspec.Raw(msgspec.json.encode(choice)))
            size += len(encoded[-1])
            if size > limit:
                raise ApiError(400, f"the answer has more than {limit:,} bytes: {SHORTER}")
        body["choices"] = encoded
        body["usage"] = usage
        if self._is_chat and of_prompts is not None and self.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._of_prompt(of_prompts[0])
        return body

    def chunk(
        self, index: int, answer: Answer, delta: Delta, is_first: bool, of_prompt: Scored | None
    ) -> dict[str, Any]:
        """Return a chunk that adds `delta` to a choice."""
        body = self._head("chat.completion.chunk", is_first)
        body["choices"] = [self._choice(index, answer, delta, is_first, of_prompt, is_whole=False)]
        return body

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the last chunk, which contains the token counts."""
        return self._head("chat.completion.chunk", False) | {"choices": [], "usage": usage}

    def _echoed(self, index: int) -> str:
        return "" if self.asked.echoes is None else self.asked.echoes[index // self.asked.sequences].text

    def _choice(
        self, index: int, answer: Answer, delta: Delta, is_first: bool, of_prompt: Scored | None, *, is_whole: bool
    ) -> dict[str, Any]:
        """Return a choice, or a chunk's addition to one."""
        choice: dict[str, Any] = {"index": index}
        scored = self._scored(delta, of_prompt if is_first and self.asked.echoes is not None else None)
        if self._is_chat:
            choice["message" if is_whole else "delta"] = self._message(index, delta, is_first, is_whole)
            logprobs = (
                None if scored is None else {"content": entries(scored, self.texts, self._as_id), "refusal": None}
            )
        else:
            choice["text"] = (self._echoed(index) if is_first else "") + delta.text
            logprobs = self._completion_logprobs(index, scored, delta)
            if is_whole and of_prompt is not None and self.request.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._of_prompt(of_prompt)
        # The answer may have more events than this one.
        stop_reason = answer.stop_reason if delta.finish else None
        choice |= {"logprobs": logprobs, "finish_reason": delta.finish, "stop_reason": stop_reason}
        if self.request.return_token_ids:
            choice["token_ids"] = delta.tokens
            if is_first and not self._is_chat:
                choice["prompt_token_ids"] = self.asked.prompts[index // self.asked.sequences].ids.tolist()
        return choice

    def _message(self, index: int, delta: Delta, is_first: bool, is_whole: bool) -> dict[str, Any]:
        """Return the message of a choice, or a chunk's addition to it."""
        message: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        if is_whole:
            message |= {"content": None if delta.calls or delta.thought else "", "refusal": None}
        if delta.thought:
            message["reasoning_content"] = delta.thought
        if delta.text:
            message["content"] = delta.text
        if delta.calls:
            first = self._calls.get(index, 0)
            self._calls[index] = first + len(delta.calls)
            calls = enumerate(map(self._call, delta.calls), first)
            message["tool_calls"] = [call if is_whole else {"index": number} | call for number, call in calls]
        return message

    def _call(self, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.id or self.asked.call_id(), "type": "function", "function": function}

    def _scored(self, delta: Delta, of_prompt: Scored | None) -> Scored | None:
        """Return the tokens whose log-probabilities are shown, or None; an echoed prompt's tokens come first."""
        if self.asked.logprobs is None:
            return None
        if delta.logprobs is None:
            return of_prompt
        scored = Scored(delta.tokens, delta.logprobs, self.asked.logprobs)
        return scored if of_prompt is None else of_prompt + scored

    def _completion_logprobs(self, index: int, scored: Scored | None, delta: Delta) -> dict[str, Any] | None:
        if scored is None:
            return None
        tokens = [self.texts.text(token, self._as_id) for token in scored.tokens]
        most_likely = []
        for token, logprob, likely in zip(scored.tokens, scored.logprobs, scored.most_likely, strict=True):
            # Include the chosen token. If several tokens have the same text, show only the most likely one.
            named: dict[str, float | None] = {}
            for other, value in (*likely[: self.asked.logprobs], (token, logprob)):
                named.setdefault(self.texts.text(other, self._as_id), value)
            most_likely.append(None if logprob is None else named)
        offsets = [len(self._echoed(index)) + offset for offset in delta.offsets]
        if self.asked.echoes is not None and len(scored.tokens) > len(offsets):  # the prompt's tokens come first
            offsets = self.asked.echoes[index // self.asked.sequences].offsets + offsets
        values = {"tokens": tokens, "token_logprobs": scored.logprobs, "text_offset": offsets}
        return values | {"top_logprobs": most_likely if self.asked.logprobs else None}

    def _of_prompt(self, scored: Scored) -> list[dict[str, Any] | None]:
        """Return `prompt_logprobs` in vLLM's format, keyed by token id; unknown ranks are None."""
        entries: list[dict[str, Any] | None] = []
        count = self.request.prompt_logprobs or 0
        for token, logprob, likely in zip(scored.tokens, scored.logprobs, scored.most_likely, strict=True):
            if logprob is None:
                entries.append(None)
                continue
            ranks = {other: rank for rank, (other, _) in enumerate(likely, 1)}
            pairs = {**dict(likely[:count]), token: logprob}
            entries.append(
                {
                    str(other): {"logprob": value, "rank": ranks.get(other), "decoded_token": self.texts.text(other)}
                    for other, value in pairs.items()
                }
            )
        return entries
