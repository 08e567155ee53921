"""Write a response of OpenAI's Responses API, item by item, with the events of its stream."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.serving.answer_text import Delta
from jaxgen.serving.formats.reading import Call
from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.requests import Asked
from jaxgen.serving.response_records import (
    FunctionCall,
    IncompleteDetails,
    InputDetails,
    Logprob,
    Message,
    OutputDetails,
    OutputText,
    PlainFormat,
    ReasoningItem,
    ReasoningOptions,
    ReasoningText,
    ResponseBody,
    ResponseError,
    ResponseRequest,
    ResponseUsage,
    TextOptions,
)
from jaxgen.serving.scored import Scored, TokenTexts, entries

Event = dict[str, Any]  # an event of a stream, in OpenAI's form

# Fields of a request that its response repeats.
_REPEATED = (
    "instructions max_output_tokens max_tool_calls previous_response_id prompt_cache_key safety_identifier".split()
)
_REPEATED += ["service_tier", "user"]


def new_response(request: ResponseRequest, model: str, cfg: GenerationConfig) -> ResponseBody:
    """Return the response to a request before anything is generated; `cfg` has the defaults for sampling."""
    text = request.text or TextOptions()
    return ResponseBody(
        id=f"resp_{secrets.token_hex(24)}",
        created_at=int(time.time()),
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        temperature=float(cfg.temperature if request.temperature is None else request.temperature),
        top_p=float(cfg.top_p if request.top_p is None else request.top_p),
        text=TextOptions(format=text.format or PlainFormat(), verbosity=text.verbosity),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        reasoning=request.reasoning or ReasoningOptions(),
        top_logprobs=request.top_logprobs or 0,
        store=request.store is not False,
        metadata=request.metadata or {},
        **{name: getattr(request, name) for name in _REPEATED},
    )


class ResponseWriter:
    """Adds generated text, thoughts and calls to a response, and returns the events of each addition.

    Attributes:
        response: the response so far. The last item is added when it is complete.
    """

    def __init__(self, response: ResponseBody, texts: TokenTexts, asked: Asked):
        self.response = response
        self._texts, self._asked = texts, asked
        if asked.left_out:
            response.left_out = list(asked.left_out)
        self._number = 0  # of the next event
        self._open: Message | ReasoningItem | None = None
        self._pieces: list[str] = []  # the text of the open item
        self._logprobs: list[Logprob] = []  # of the open item, or of the message that may follow
        self._sent = 0  # number of log-probabilities that were sent

    def begin(self) -> list[Event]:
        """Return the first events."""
        return [self._event("created", response=self._now()), self._event("in_progress", response=self._now())]

    def put(self, delta: Delta) -> list[Event]:
        """Add generated tokens."""
        thoughts = delta.thought
        events = self._write(ReasoningItem, thoughts) if thoughts else []
        if self._asked.logprobs is not None and delta.logprobs is not None and not (thoughts or delta.calls):
            scored = Scored(delta.tokens, delta.logprobs, self._asked.logprobs)
            self._logprobs += msgspec.convert(entries(scored, self._texts), list[Logprob])
        if delta.text:
            events += self._write(Message, delta.text)
        for call in delta.calls:
            events += [*self._close("completed"), *self._call(call)]
        if delta.finish:
            if not self.response.output and self._open is None:
                events += self._begin(Message)
            is_cut = delta.finish == "length"
            events += self._close("incomplete" if is_cut else "completed")
            self.response.status = "incomplete" if is_cut else "completed"
        return events

    def end(self, prompt_tokens: int, cached_tokens: int, tokens: int, thought_tokens: int) -> list[Event]:
        """Return the last event; call this method after the last `put`."""
        self.response.usage = ResponseUsage(
            input_tokens=prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=cached_tokens),
            output_tokens=tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=thought_tokens),
            total_tokens=prompt_tokens + tokens,
        )
        if self.response.status == "incomplete":
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
            return [self._event("incomplete", response=self.response)]
        self.response.completed_at = int(time.time())
        return [self._event("completed", response=self.response)]

    def fail(self, error: ApiError) -> Event:
        """Return the last event of a response that failed."""
        self.response.status = "failed"
        code = "invalid_prompt" if error.status == 400 else "server_error"
        self.response.error = ResponseError(code=code, message=error.message)
        return self._event("failed", response=self.response)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _now(self) -> ResponseBody:
        return msgspec.structs.replace(self.response, output=list(self.response.output))

    def _position(self) -> dict[str, Any]:
        """Return the fields that identify the content of the open item."""
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self.response.output), "content_index": 0}

    def _begin(self, kind: type[Message] | type[ReasoningItem]) -> list[Event]:
        """Close the open item and begin another one."""
        events = self._close("completed")
        if kind is Message:
            item = Message(role="assistant", content=[], id=f"msg_{secrets.token_hex(24)}", status="in_progress")
            part = OutputText(text="")
        else:
            item = ReasoningItem(summary=[], id=f"rs_{secrets.token_hex(24)}", status="in_progress")
            part = ReasoningText(text="")
        self._open, self._pieces, self._sent = item, [], 0
        added = self._event(
            "output_item.added", output_index=len(self.response.output), item=msgspec.structs.replace(item)
        )
        return [*events, added, self._event("content_part.added", part=part, **self._position())]

    def _write(self, kind: type[Message] | type[ReasoningItem], text: str) -> list[Event]:
        """Add text to the open item, or to a new item if the open one is of another kind."""
        events = [] if isinstance(self._open, kind) else self._begin(kind)
        self._pieces.append(text)
        if kind is ReasoningItem:
            return [*events, self._event("reasoning_text.delta", delta=text, **self._position())]
        logprobs, self._sent = self._logprobs[self._sent :], len(self._logprobs)
        return [*events, self._event("output_text.delta", delta=text, logprobs=logprobs, **self._position())]

    def _close(self, status: Any) -> list[Event]:
        """Complete the open item, if any."""
        item, text, index = self._open, "".join(self._pieces), len(self.response.output)
        if item is None:
            return []
        if isinstance(item, Message):
            logprobs, self._logprobs = self._logprobs, []
            part: Any = OutputText(text=text, logprobs=logprobs)
            item.content = [part]
            done = self._event("output_text.done", text=text, logprobs=logprobs, **self._position())
        else:
            part = ReasoningText(text=text)
            item.content = [part]
            done = self._event("reasoning_text.done", text=text, **self._position())
        item.status = status
        events = [done, self._event("content_part.done", part=part, **self._position())]
        self._open = None
        self.response.output = [*self.response.output, item]
        return [*events, self._event("output_item.done", output_index=index, item=item)]

    def _call(self, call: Call) -> list[Event]:
        """Add a call."""
        index, self._logprobs = len(self.response.output), []
        item = FunctionCall(
            call_id=call.id or self._asked.call_id(),
            name=call.name,
            arguments=call.arguments,
            id=f"fc_{secrets.token_hex(24)}",
            status="completed",
        )
        started = msgspec.structs.replace(item, arguments="", status="in_progress")
        where = {"item_id": item.id, "output_index": index}
        self.response.output = [*self.response.output, item]
        return [
            self._event("output_item.added", output_index=index, item=started),
            self._event("function_call_arguments.delta", delta=call.arguments, **where),
            self._event("function_call_arguments.done", name=call.name, arguments=call.arguments, **where),
            self._event("output_item.done", output_index=index, item=item),
        ]
