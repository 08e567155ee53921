"""Request bodies, with OpenAI's fields and some common fields that vLLM adds.

A field of a body that is not listed here is rejected, and the error names it. `None` means the same as a missing field.
Messages and tools may have other fields, which are ignored: clients add many that mean nothing to a text model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from jaxgen.errors import InputError, shown
from jaxgen.json_file import parse_json
from jaxgen.serving.http_errors import ApiError

_FIELD = re.compile(r"(unknown|missing required) field `(.*?)`")
_MAX_TOKENS = re.compile(r"\bmax_tokens\b")
_PATH = re.compile(r" - at `\$\.?(.*?)`$", re.DOTALL)
_INSTEAD = {
    "guided_grammar": "grammars are not supported: use structured_outputs with json, regex or choice",
    "guided_decoding_backend": "there is only one implementation: leave it out",
}
# Fields that are accepted with the values that change nothing, and the advice for all other values.
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "only text is supported"),
    "early_stopping": ((False,), "beams are offered by generate, not by the service"),
    "function_call": (("none",), "use tool_choice"),
    "functions": ((), "use tools"),
    "length_penalty": ((1,), "beams are offered by generate, not by the service"),
    "modalities": ((["text"],), "only text is supported"),
    "prediction": ((), "leave it out"),
    "priority": ((0,), "requests are answered in the order in which they arrive"),
    "spaces_between_special_tokens": ((True,), "tokens are decoded as the tokenizer says"),
    "suffix": (("",), "text is only generated after the prompt"),
    "use_beam_search": ((False,), "beams are offered by generate, not by the service"),
    "web_search_options": ((), "the service does not search the web"),
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
    # These fields are accepted with a value that changes nothing; see NEUTRAL.
    audio: Any = None
    best_of: int | None = None
    early_stopping: Any = None
    function_call: Any = None
    functions: Any = None
    length_penalty: float | None = None
    modalities: Any = None
    prediction: Any = None
    priority: int | None = None
    spaces_between_special_tokens: bool | None = None
    suffix: str | None = None
    use_beam_search: bool | None = None
    web_search_options: Any = None

    @property
    def renamed(self) -> Sequence[tuple[re.Pattern[str], str]]:
        """The names in errors, as patterns, that differ from those of this request's fields."""
        return ()


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


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The format of the answer."""

    type: str
    json_schema: NamedSchema | None = None


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
    type: str | None = "function"


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
    audio: Any = None
    function_call: Any = None
    prefix: bool | None = None


class Function(msgspec.Struct):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool that the model may use."""

    function: Function
    type: str = "function"


class NamedFunction(msgspec.Struct):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct):
    """A tool that a request chooses."""

    function: NamedFunction
    type: str = "function"


class AllowedFunctions(msgspec.Struct):
    """The tools that the model may or must use."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class Choice(msgspec.Struct, omit_defaults=True):
    """The value of `tool_choice` if it is an object."""

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedFunctions | None = None


class ChatRequest(Common, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tool_choice: str | Choice | None = None
    parallel_tool_calls: bool | None = None
    tools: list[Tool] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def renamed(self) -> Sequence[tuple[re.Pattern[str], str]]:
        """The names in errors, as patterns, that differ from those of this request's fields."""
        return () if self.max_completion_tokens is None else ((_MAX_TOKENS, "max_completion_tokens"),)


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
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


Body = TypeVar("Body")
_MOST_BRACKETS = 2**18


def decode(body: bytes, kind: type[Body]) -> Body:
    """Parse the body of a request, or raise an `ApiError` that says what is wrong with it."""
    if (count := body.count(b"[") + body.count(b"{")) > _MOST_BRACKETS:
        text = f"the body has {count:,} brackets and braces, but at most {_MOST_BRACKETS:,} are accepted"
        raise ApiError(400, f"{text}, because each list and object takes memory: shorten it")
    try:
        parse_json(body.decode())  # also refuses what msgspec accepts, such as duplicate keys
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    except InputError as error:
        raise ApiError(400, f"the body is {error}") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    for name, (neutral, advice) in NEUTRAL.items():
        value = getattr(request, name, None)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name} is not supported: {advice}; got {shown(value)}", name)
    return request


def _explained(text: str) -> ApiError:
    found = _PATH.search(text)
    path = found[1] if found else ""
    if field := _FIELD.search(text):
        name = ".".join(filter(None, [path, field[2]]))
        reason = "is missing" if field[1] != "unknown" else f"is not supported: {_INSTEAD.get(name, 'leave it out')}"
        return ApiError(400, f"{name} {reason}", name)
    reason = text[: found.start()] if found else text
    return ApiError(400, f"{path or 'the body'}: {reason[:1].lower()}{reason[1:]}", path or None)
