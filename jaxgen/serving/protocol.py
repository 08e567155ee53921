"""Request bodies, with OpenAI's fields and some common fields that vLLM adds.

A field of a body that is not listed here is rejected, and the error names it. `None` means the same as a missing field.
Messages and tools may have other fields, which are ignored: clients add many that mean nothing to a text model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from jaxgen.errors import InputError
from jaxgen.json_file import parse_json
from jaxgen.serving.http_errors import ApiError

_FIELD = re.compile(r"(unknown|missing required) field `(.*?)`")
_INDEX = re.compile(r"\[\d+\]")
_PATH = re.compile(r" - at `\$\.?(.*?)`$", re.DOTALL)
_BEAMS = "beams are offered by generate, not by the service"
_TEXT = "only text is supported"
# Advice where a value or a field is refused, by its path.
_ADVICE = {
    "audio": _TEXT,
    "early_stopping": _BEAMS,
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_decoding_backend": "there is only one implementation: leave it out",
    "guided_grammar": "grammars are not supported: use structured_outputs with json, regex or choice",
    "length_penalty": _BEAMS,
    "messages[].audio": "leave it out",
    "messages[].function_call": "use tool_calls",
    "messages[].prefix": "use continue_final_message",
    "modalities[]": _TEXT,
    "prediction": "leave it out",
    "priority": "requests are answered in the order in which they arrive",
    "response_format.type": "use text, json_object or json_schema",
    "spaces_between_special_tokens": "tokens are decoded as the tokenizer says",
    "suffix": "text is only generated after the prompt",
    "tool_choice": "use auto, none, required, or an object with the type function or allowed_tools",
    "tool_choice.type": "use function or allowed_tools",
    "use_beam_search": _BEAMS,
    "web_search_options": "the service does not search the web",
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options for additional content in a stream's chunks."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # random padding that hides lengths from network observers


class Structured(msgspec.Struct, forbid_unknown_fields=True):
    """A constraint on the text; exactly one field must be set."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None


class Generated(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that all requests for generated text share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stream: bool | None = False
    unsupported: Literal["error", "warn"] = "error"
    # These fields have no effect on the answer.
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Common(Generated, kw_only=True):
    """The fields that requests for completions and for chat completions share."""

    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool = True
    stream_options: StreamOptions | None = None
    structured_outputs: Structured | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    request_id: str | None = None
    # These fields have no effect on the answer.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    verbosity: str | None = None
    # These fields are accepted with the values that change nothing.
    audio: None = None
    best_of: int | None = None
    early_stopping: Literal[False] | None = None
    function_call: Literal["none"] | None = None
    functions: None = None
    length_penalty: Annotated[float, msgspec.Meta(ge=1, le=1)] | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: None = None
    priority: Literal[0] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    suffix: Literal[""] | None = None
    use_beam_search: Literal[False] | None = None
    web_search_options: None = None


class CompletionRequest(Common, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = False
    add_special_tokens: bool = True


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema. Only `schema` has an effect."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class PlainFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text of any form."""


class JsonFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A JSON object."""


class NamedFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""

    json_schema: NamedSchema


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class PastFunction(msgspec.Struct):
    """The function of a call; `arguments` is the text of a JSON object, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class PastCall(msgspec.Struct):
    """A call that an earlier answer made."""

    function: PastFunction
    id: str | None = None
    type: Literal["function"] | None = "function"


class ChatMessage(msgspec.Struct):
    """A message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # These fields have a meaning that is not supported; they must be empty.
    audio: None = None
    function_call: None = None
    prefix: Literal[False] | None = None


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool that the model may use."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    """A tool that a request chooses."""

    function: NamedFunction


class AllowedFunctions(msgspec.Struct):
    """The tools that the model may or must use."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], msgspec.Meta(min_length=1)]


class ChosenTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """The value of `tool_choice` that names several tools."""

    allowed_tools: AllowedFunctions


class ChatRequest(Common, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: PlainFormat | JsonFormat | NamedFormat | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    tools: list[Tool] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


Body = TypeVar("Body")
_MOST_BRACKETS = 2**18


def decode(body: bytes, kind: type[Body]) -> Body:
    """Parse the body of a request, or raise an `ApiError` that says what is wrong with it."""
    if (count := body.count(b"[") + body.count(b"{")) > _MOST_BRACKETS:
        text = f"the body has {count:,} brackets and braces, but at most {_MOST_BRACKETS:,} are accepted"
        raise ApiError(400, f"{text}, because each list and object takes memory: shorten it")
    try:
        parse_json(body.decode())  # also refuses what msgspec accepts, such as duplicate keys
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise explained(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    except InputError as error:
        raise ApiError(400, f"the body is {error}") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error


def explained(error: msgspec.ValidationError, advice: Mapping[str, str] = _ADVICE) -> ApiError:
    """Return the `ApiError` for a body that does not fit its record; `advice` says what to do, by path."""
    text = str(error)
    found = _PATH.search(text)
    path = found[1] if found else ""
    if field := _FIELD.search(text):
        name = ".".join(filter(None, [path, field[2]]))
        reason = "is missing" if field[1] != "unknown" else f"is not supported: {advice.get(name, 'leave it out')}"
        return ApiError(400, f"{name} {reason}", name)
    reason = text[: found.start()] if found else text
    reason = ": ".join(filter(None, [reason[:1].lower() + reason[1:], advice.get(_INDEX.sub("[]", path))]))
    return ApiError(400, f"{path or 'the body'}: {reason}", path or None)
