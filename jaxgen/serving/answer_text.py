"""Build an answer as tokens arrive: decode whole characters, cut at stop strings, split off thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxgen.core.decoding.logprobs import LogProbs
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.text.streaming import StopCut, TextStream
from jaxgen.engine.results import Event
from jaxgen.serving.formats.format import CallParser
from jaxgen.serving.formats.reading import Call
from jaxgen.serving.thoughts import ThoughtParser


class Delta(NamedTuple):
    """Addition to an answer.

    Attributes:
        text: the new text, without thoughts and tool calls.
        calls: complete tool calls.
        tokens: the new tokens, including those whose text is held back.
        logprobs: the log-probabilities of the tokens, or None.
        finish: OpenAI's finish reason; None before the end.
        thought: the new text of the thought.
        offsets: for each token with a log-probability, the number of characters that were complete before the token;
            only if the answer has neither thoughts nor calls.
    """

    text: str
    calls: list[Call]
    tokens: list[int]
    logprobs: LogProbs | None
    finish: str | None
    thought: str = ""
    offsets: Sequence[int] = ()


class Answer:
    """The text of one sequence, updated with each event.

    Attributes:
        count: the number of tokens so far.
        thinking: the number of tokens of the thought so far.
        reason: why the sequence ended; `StopReason.NONE` before it ends.
    """

    def __init__(
        self, stream: TextStream, cut: StopCut, thoughts: ThoughtParser | None, parser: CallParser | None, forced: bool
    ):
        self._stream, self._cut, self._thoughts, self._parser, self._forced = stream, cut, thoughts, parser, forced
        self.count = self.thinking = self._length = 0
        self._has_calls = False
        self.reason = StopReason.NONE

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._cut.found

    def put(self, event: Event) -> Delta:
        """Process an event of the sequence, and return what the event adds to the answer."""
        self.count += len(event.tokens)
        self.reason = event.stop_reason
        offsets: list[int] = []
        thought, text = self._read(event.tokens, offsets if event.logprobs is not None else None)
        calls: list[Call] = []
        if self._parser is not None:
            text, calls = self._parser.put(text)
            if self.reason:
                rest, more = self._parser.end()
                text, calls = text + rest, calls + more
        self._has_calls = self._has_calls or bool(calls)
        return Delta(
            text, calls, event.tokens, event.logprobs, self._finish() if self.reason else None, thought, offsets
        )

    def _read(self, tokens: Sequence[int], offsets: list[int] | None) -> tuple[str, str]:
        """Return the thought and the other text that tokens add; add the tokens' offsets to `offsets`, if given."""
        parts = []
        if self._thoughts is None and offsets is not None:
            for token in tokens:
                offsets.append(self._length)
                parts.append(("", self._cut.put(self._stream.put(token))))
                self._length += len(parts[-1][1])
        elif self._thoughts is None:
            parts.append(("", self._cut.put(self._stream.put(tokens))))
        else:
            for token in tokens:  # one by one, to count the tokens of the thought
                was_open = self._thoughts.is_open
                parts.append(self._thoughts.put(self._cut.put(self._stream.put(token))))
                self.thinking += was_open or self._thoughts.is_open
        if self.reason:
            rest = self._cut.put(self._stream.end()) + self._cut.end()
            parts += [("", rest)] if self._thoughts is None else [self._thoughts.put(rest), self._thoughts.end()]
        return "".join(thought for thought, _ in parts), "".join(text for _, text in parts)

    def _finish(self) -> str:
        if self.reason == StopReason.LENGTH:
            return "length"
        return "tool_calls" if self._has_calls and not self._forced else "stop"
