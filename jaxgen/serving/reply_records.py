"""Records of the answers that are written as dicts, for /openapi.json. Tests compare them with answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxgen.serving.response_records import Logprob


class _Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A record without unknown fields. A field with the default UNSET may be absent."""


class Error(_Record):
    """An error message. `code` is the status, unless OpenAI has a name for the error."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(_Record):
    """The body of an answer with a status of 400 or more."""

    error: Error


class PromptDetails(_Record):
    """Of the tokens in a prompt: how many were found in the prefix store."""

    cached_tokens: int


class CompletionDetails(_Record):
    """Of the tokens in an answer: how many are thoughts."""

    reasoning_tokens: int


class Usage(_Record):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET


class ChatLogprobs(_Record):
    """Log-probabilities of the generated tokens."""

    content: list[Logprob]
    refusal: None


class PromptLogprob(_Record):
    """The log-probability of a token of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(_Record):
    """A function and the JSON of its arguments."""

    name: str
    arguments: str


class ToolCall(_Record):
    """A call that the model asks for."""

    id: str
    function: CalledFunction
    type: Literal["function"]


class AssistantMessage(_Record):
    """The answer to a conversation."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(_Record):
    """One of the answers to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class _Head(_Record, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    left_out: list[str] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(_Head):
    """The answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(_Record):
    """Log-probabilities of the tokens in a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]
    top_logprobs: list[dict[str, float | None] | None] | None


class CompletionChoice(_Record):
    """A continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(_Head):
    """Continuations of prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(_Record):
    """The model or an adapter; `parent` is an adapter's model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: str | msgspec.UnsetType = msgspec.UNSET


class ModelList(_Record):
    """The model and its adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(_Record):
    """The ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class DetokenizedText(_Record):
    """The text of ids."""

    prompt: str


class Version(_Record):
    """The version of jaxgen."""

    version: str


class TokenizerInfo(msgspec.Struct):
    """Special tokens by name, and the chat template."""

    chat_template: Any
