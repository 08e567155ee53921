"""Read requests of OpenAI's Responses API: each becomes a request for chat completions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from jaxgen.serving.http_errors import ApiError
from jaxgen.serving.protocol import (
    AllowedFunctions,
    ChatMessage,
    ChatRequest,
    ChosenTools,
    Function,
    Generated,
    NamedFormat,
    NamedFunction,
    NamedSchema,
    NamedTool,
    Tool,
    decode,
    explained,
)
from jaxgen.serving.response_records import (
    AllowedTools,
    ChosenFunction,
    Effort,
    FunctionCall,
    FunctionCallOutput,
    Include,
    Item,
    ItemReference,
    Message,
    ReasoningItem,
    Refusal,
    ResponseRequest,
    SchemaFormat,
)

_INSTRUCT = "system", "developer"  # the roles of instructions
_LOGPROBS = "message.output_text.logprobs"
# Fields that have the same name and meaning in a request for chat completions.
_SAME = (*Generated.__struct_fields__, "parallel_tool_calls", "chat_template_kwargs")
_TOOLS = "use function: built-in tools are not offered"
_PARTS = "use input_text or output_text: only text is supported"
_SUMMARY = "use auto: thoughts are returned whole, not summarized"
# Advice where a value or a field is refused, by its path.
_ADVICE = {
    "background": "use false, because a response is not generated after its request ends",
    "context_management": "shorten the input",
    "conversation": "use previous_response_id, or send the items of the conversation",
    "include[]": f"use {' or '.join(get_args(Include))}",
    "input[].content[].type": _PARTS,
    "input[].output[].type": _PARTS,
    "input[].role": "use user, assistant, system or developer",
    "input[].type": "use message, function_call, function_call_output, reasoning or item_reference",
    "logprobs": f"include {_LOGPROBS}",
    "max_completion_tokens": "use max_output_tokens",
    "max_tokens": "use max_output_tokens",
    "messages": "use input",
    "n": "a response has one answer: leave it out",
    "prompt": "stored prompts are not offered: send instructions and input",
    "reasoning.effort": f"use {', '.join(get_args(Effort))}",
    "reasoning.generate_summary": _SUMMARY,
    "reasoning.summary": _SUMMARY,
    "reasoning_effort": "use reasoning.effort",
    "response_format": "use text.format",
    "stop": "leave it out, or use /v1/chat/completions",
    "text.format.type": "use text, json_object or json_schema",
    "tool_choice": "use auto, none, required or a function",
    "tool_choice.tools[].type": _TOOLS,
    "tool_choice.type": _TOOLS,
    "tools[].type": _TOOLS,
    "truncation": "use disabled, and shorten the input if it is too long",
}
# Names in the errors of requests for chat completions, and what the fields are called here.
RENAMED = [
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format(\.json_schema\.schema)?\b"), "text.format"),
    (re.compile(r"(\btools\[\d+\]|\btool_choice)\.function\b"), r"\1"),
    (re.compile(r"^messages\b"), "input"),
]


def read_request(body: bytes) -> ResponseRequest:
    """Parse the body of a request, or raise an `ApiError` that says what is wrong with it."""
    fields = {name: value for name, value in decode(body, dict[str, Any]).items() if value is not None}
    if isinstance(items := fields.get("input"), list):  # the type of a message may be left out
        fields["input"] = [
            {"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in items
        ]
    try:
        request = msgspec.convert(fields, ResponseRequest)
    except msgspec.ValidationError as error:
        raise explained(error, _ADVICE) from error
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream to be true", "stream_options")
    if request.top_logprobs and _LOGPROBS not in (request.include or ()):
        raise ApiError(400, f"top_logprobs needs include to have {_LOGPROBS}", "top_logprobs")
    return request


def chat_request(request: ResponseRequest, items: Sequence[Item]) -> ChatRequest:
    """Return the request for chat completions that has the same answer; `items` are the whole conversation."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    fields["messages"] = msgspec.convert(messages_of(items, request.instructions), list[ChatMessage])
    fields["max_completion_tokens"] = request.max_output_tokens
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if _LOGPROBS in (request.include or ()):
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if request.tools:
        fields["tools"] = [Tool(Function(tool.name, tool.description, tool.parameters)) for tool in request.tools]
        fields["tool_choice"] = _choice(request.tool_choice)
    elif request.tool_choice not in (None, "auto", "none"):
        raise ApiError(400, "tool_choice requires a call, but the request has no tools", "tool_choice")
    form = None if request.text is None else request.text.format
    fields["response_format"] = NamedFormat(NamedSchema(form.schema)) if isinstance(form, SchemaFormat) else form
    return ChatRequest(**fields)


def conversation(request: ResponseRequest, previous: bytes | None, stored: Mapping[str, bytes]) -> list[Item]:
    """Return the items of a conversation: those before a request, and those of its input.

    Args:
        request: the request.
        previous: the items before the request, as JSON.
        stored: the items of stored responses as JSON, by the ids of the items to which the request refers.
    """
    items: list[Item] = [] if previous is None else _items(previous)
    if isinstance(request.input, str):
        return [*items, Message(role="user", content=request.input)]
    found: dict[str | None, Item] = {}
    for encoded in dict.fromkeys(stored.values()):
        found |= {item.id: item for item in _items(encoded) if item.id and stored.get(item.id) == encoded}
    return [*items, *(found[item.id] if isinstance(item, ItemReference) else item for item in request.input)]


def references(request: ResponseRequest) -> set[str]:
    """Return the ids of stored items to which a request refers."""
    items = () if isinstance(request.input, str) else request.input
    return {item.id for item in items if isinstance(item, ItemReference)}


def _items(encoded: bytes) -> list[Item]:
    return msgspec.json.decode(encoded, type=list[Item])


def _choice(choice: Literal["auto", "none", "required"] | ChosenFunction | AllowedTools | None) -> Any:
    match choice:
        case ChosenFunction(name=name):
            return NamedTool(NamedFunction(name))
        case AllowedTools(mode=mode, tools=tools):
            return ChosenTools(AllowedFunctions(mode, [NamedTool(NamedFunction(tool.name)) for tool in tools]))
    return choice


def messages_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of a conversation. Instructions at its beginning become one system message.

    The time is linear in the size of the conversation, so texts are joined only at the end.
    """
    leading = list(itertools.takewhile(lambda item: isinstance(item, Message) and item.role in _INSTRUCT, items))
    texts = [instructions] if instructions else []
    texts += [_text(item.content) for item in leading if isinstance(item, Message)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    for item in items[len(leading) :]:
        last = messages[-1] if messages else {"role": ""}
        match item:
            case FunctionCallOutput(call_id=call_id, output=output):
                messages.append({"role": "tool", "tool_call_id": call_id, "content": _text(output)})
            case Message(role="user" | "system" | "developer" as role, content=content):
                messages.append({"role": role.replace("developer", "system"), "content": _text(content)})
            case _:
                if last["role"] != "assistant" or _begins_turn(item, last):
                    messages.append(last := {"role": "assistant", "content": None})
                _extend(last, item)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


def _begins_turn(item: Message | FunctionCall | ReasoningItem, last: dict[str, Any]) -> bool:
    """Return True if an item begins another message: a message of the assistant has thoughts, text, and then calls."""
    return not isinstance(item, FunctionCall) and (last["content"] is not None or "tool_calls" in last)


def _extend(turn: dict[str, Any], item: Message | FunctionCall | ReasoningItem) -> None:
    """Add an item to a message of the assistant."""
    match item:
        case Message(content=content):
            turn["content"] = _text(content)
        case FunctionCall(call_id=call_id, name=name, arguments=arguments):
            function = {"name": name, "arguments": arguments}
            turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        case ReasoningItem(content=content, summary=summary):
            thoughts = "\n".join(part.text for part in content or summary)
            if thoughts:
                turn.setdefault("reasoning_content", []).append(thoughts)


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in content)
