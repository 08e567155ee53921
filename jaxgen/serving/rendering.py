"""Render the conversation of a request, and say how its answer is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgen.core.grammar.grammar import Grammar
from jaxgen.core.text.chat_template import continued
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.serving import thoughts
from jaxgen.serving.conversation import Dialect, dialect_of, read_messages, template_messages
from jaxgen.serving.formats.format import CallParser, Format
from jaxgen.serving.formats.formats import check_format, format_of
from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.protocol import ChatMessage, ChatRequest, TokenizeRequest
from jaxgen.serving.thoughts import Tags, ThoughtParser
from jaxgen.serving.tools import Tools

# Names that chat_template_kwargs must not have, because they are set in other ways
_TAKEN = {"add_generation_prompt", "conversation", "documents", "messages", "self", "tools"}
# A template may reject a conversation without tools if there are calls, so the probe has tools if the request does.
_PROBE = {"name": "first_probe", "description": "A probe.", "parameters": {"type": "object", "properties": {}}}


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A rendered conversation, and how the answer to it is read.

    Attributes:
        text: the text of the conversation.
        tools: the tools of the request, or None.
        form: the format of tool calls.
        tags: the tags around thoughts; None if the model does not think, or thoughts are left in the content.
        is_open: True if the answer begins inside a thought.
    """

    text: str
    tools: Tools | None
    form: Format
    tags: Tags | None
    is_open: bool

    @property
    def marks(self) -> tuple[str, ...]:
        """The tags that must be in the answer's text even if they are special tokens."""
        parses = self.tools is not None and self.tools.parses
        return (*(self.form.marks if parses else ()), *(self.tags or ()))

    @property
    def before(self) -> Grammar | None:
        """The grammar of the thought before a text that has a grammar, or None."""
        return None if self.tags is None else thoughts.before(self.tags, self.text, self.is_open)

    @property
    def key(self) -> tuple[Any, ...]:
        """Cache key of `before` and `marks`."""
        return (self.marks, self.is_open, self.before is None)

    def thoughts(self) -> ThoughtParser | None:
        """Return a parser for the thought of an answer, or None."""
        return None if self.tags is None else ThoughtParser(self.tags, self.is_open)

    def calls(self) -> CallParser | None:
        """Return a parser for the calls in an answer, or None."""
        return self.tools.parser(self.form) if self.tools is not None and self.tools.parses else None


class Renderer:
    """Renders the conversations of requests with the tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer, thinks: bool):
        self._tokenizer, self._thinks = tokenizer, thinks
        self._dialects: dict[bool, Dialect] = {}

    def prompt(self, request: ChatRequest | TokenizeRequest, tools: Tools | None) -> Rendered:
        """Render the conversation in a request.

        Raises:
            ApiError: a field is invalid.
            InputError: a message is unsupported, or the template rejects the conversation.
        """
        for_template = None if tools is None else tools.for_template
        template = self._tokenizer.chat_template_for(for_template)
        form = format_of(template)
        read = read_messages(request.messages or ())
        if for_template is not None or any(message.tool_calls for message in read):
            check_format(template)
        messages = template_messages(read, self._dialect(read, for_template is not None), form)
        prompted, variables = request.add_generation_prompt, _variables(request)

        def render(conversation: Sequence[Mapping[str, Any]]) -> str:
            documents = request.documents
            return self._tokenizer.render_chat(
                conversation, prompted, tools=for_template, documents=documents, **variables
            )

        beginning = ""
        if request.continue_final_message:
            if prompted or messages[-1]["role"] != "assistant":
                reason = "add_generation_prompt to be false, and a last message of the assistant"
                raise ApiError(400, f"continue_final_message needs {reason}", "continue_final_message")
            text, beginning = continued(render, messages), messages[-1]["content"]
        else:
            text = render(messages)
        tags = thoughts.tags_of(template) if self._thinks else None
        return Rendered(text, tools, form, tags, tags is not None and thoughts.is_open(text, tags, beginning))

    def _dialect(self, messages: Sequence[ChatMessage], has_tools: bool) -> Dialect:
        """Return the form in which the template accepts past calls; it is found when it is first needed."""
        if not any(message.tool_calls for message in messages):
            return Dialect()
        if has_tools not in self._dialects:
            tools = [{"type": "function", "function": _PROBE}] if has_tools else None

            def render(conversation: Sequence[Mapping[str, Any]]) -> str:
                return self._tokenizer.render_chat(conversation, False, tools=tools)

            self._dialects[has_tools] = dialect_of(render)
        return self._dialects[has_tools]


def _variables(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Return the variables that a request sets for the chat template."""
    extra = dict(request.chat_template_kwargs or {})
    if taken := _TAKEN & extra.keys():
        reserved = f"{', '.join(sorted(_TAKEN))} are reserved"
        raise ApiError(400, f"chat_template_kwargs must not have {min(taken)}: {reserved}", "chat_template_kwargs")
    variables: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            variables["enable_thinking"] = False
    if request.enable_thinking is not None:
        variables["enable_thinking"] = request.enable_thinking
    return variables | extra
