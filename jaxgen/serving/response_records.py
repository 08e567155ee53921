"""Records of OpenAI's Responses API: requests, the items of a conversation, and responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from jaxgen.serving.protocol import Generated, JsonFormat, PlainFormat

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A record whose unknown fields are refused."""


class _Open(msgspec.Struct, kw_only=True, tag_field="type"):
    """A record whose unknown fields are ignored: clients add fields to items that mean nothing to a text model."""


class InputText(_Open, tag="input_text"):
    """Text in a message, or in the output of a function."""

    text: str


class TopLogprob(_Record):
    """One of the most likely tokens."""

    token: str
    logprob: float | None
    bytes: list[int]


class Logprob(TopLogprob):
    """The log-probability of a generated token."""

    top_logprobs: list[TopLogprob]


class OutputText(_Open, tag="output_text"):
    """Text that the model generated."""

    text: str
    annotations: list[dict[str, Any]] = []
    logprobs: list[Logprob] | None = []


class Refusal(_Open, tag="refusal"):
    """Text with which another model refused a request."""

    refusal: str


class _Item(_Open, omit_defaults=True):
    id: str | None = None
    status: ItemStatus | None = None


class Message(_Item, kw_only=True, tag="message"):
    """A message. The role `assistant` has output text, and the other roles have input text."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]


class FunctionCall(_Item, kw_only=True, tag="function_call"):
    """A call that the model asked for; `arguments` is the JSON of an object."""

    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(_Item, kw_only=True, tag="function_call_output"):
    """The result of a call."""

    call_id: str
    output: str | list[InputText]


class SummaryText(_Open, tag="summary_text"):
    """A summary of thoughts."""

    text: str


class ReasoningText(_Open, tag="reasoning_text"):
    """Thoughts."""

    text: str


class ReasoningItem(_Item, kw_only=True, tag="reasoning"):
    """Thoughts before an answer. This service returns them in `content`, never encrypted or summarized."""

    summary: list[SummaryText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class ItemReference(_Open, tag="item_reference"):
    """An item of the output of a stored response."""

    id: str


Item = Message | FunctionCall | FunctionCallOutput | ReasoningItem
OutputItem = Message | FunctionCall | ReasoningItem


class FunctionTool(_Record, tag_field="type", tag="function"):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ChosenFunction(_Record, tag_field="type", tag="function"):
    """The function that must be called."""

    name: str


class AllowedTools(_Record, tag_field="type", tag="allowed_tools"):
    """The functions that may be called, or of which one must be called."""

    mode: Literal["auto", "required"]
    tools: list[ChosenFunction]


class SchemaFormat(_Record, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(_Record):
    """The format of the answer; `verbosity` has no effect."""

    format: PlainFormat | JsonFormat | SchemaFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(_Record):
    """Options for thoughts. `effort` is a variable of the chat template; there are no summaries."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(_Record):
    """Options of a stream."""

    include_obfuscation: bool = False  # random padding that hides lengths from network observers; there is none


Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponseRequest(Generated, kw_only=True):
    """The body of a request to create a response."""

    input: str | list[Item | ItemReference]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    include: list[Include] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # as in requests for chat completions
    # These fields have no effect on the answer.
    metadata: dict[str, str] | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: int | None = None  # counts only calls of built-in tools


class IncompleteDetails(_Record):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseError(_Record):
    """Why a response failed."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class InputDetails(_Record):
    """Of the tokens in a prompt: how many were found in the prefix store."""

    cached_tokens: int
    cache_write_tokens: int = 0  # a number for bills, which OpenAI's client requires


class OutputDetails(_Record):
    """Of the tokens in an answer: how many are thoughts."""

    reasoning_tokens: int


class ResponseUsage(_Record):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseBody(_Record):
    """A response, complete or in progress."""

    id: str
    created_at: int
    model: str
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: TextOptions
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | AllowedTools
    tools: list[FunctionTool]
    reasoning: ReasoningOptions
    top_logprobs: int
    store: bool
    object: Literal["response"] = "response"
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    output: list[OutputItem] = []
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    user: str | None = None
    left_out: list[str] | msgspec.UnsetType = msgspec.UNSET


class Deleted(_Record):
    """The answer to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
