"""The messages of a request, in the form that the model's chat template accepts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxgen.errors import InputError, JaxgenError, bare, shown
from jaxgen.json_file import parse_json
from jaxgen.serving.formats.format import Format
from jaxgen.serving.formats.reading import Call
from jaxgen.serving.protocol import ChatMessage, PastCall

Render = Callable[[Sequence[Mapping[str, Any]]], str]
_PARTS = ("text", "refusal", "thinking")  # a part's type is also the name of the field with its text


def read_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages of a request, with their contents as text: text parts are joined without a separator.

    Raises:
        InputError: a message is unsupported; the error names the field.
    """
    if not messages:
        raise InputError("messages must have at least one message")
    return [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked(message: ChatMessage, where: str) -> ChatMessage:
    if message.role == "function":
        raise InputError(f'{where}.role is function, which is deprecated: use the role "tool"')
    for key, only in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, key) and message.role != only:
            raise InputError(f"{where}.{key} needs the role {only}; the role is {shown(message.role)}")
    if message.role == "tool" and message.tool_call_id is None:
        raise InputError(f"{where}.tool_call_id is missing")
    texts = {
        "text": message.content,
        "refusal": message.refusal,
        "thinking": message.reasoning_content or message.reasoning,
    }
    if isinstance(message.content, list):
        texts["text"] = None
        parts: dict[str, list[str]] = {}
        for number, part in enumerate(message.content):
            if part.type not in _PARTS:
                raise InputError(f"{where}.content[{number}] has the type {bare(part.type)}: only text is supported")
            if (text := getattr(part, part.type)) is None:
                raise InputError(f"{where}.content[{number}].{part.type} is missing")
            parts.setdefault(part.type, []).append(text)
        texts |= {kind: (texts[kind] or "") + "".join(pieces) for kind, pieces in parts.items()}
    content = texts["text"] if texts["text"] is not None else texts["refusal"]
    if content is None and message.role != "assistant":
        raise InputError(f"{where}.content must be a string or a list of text parts, got null")
    return msgspec.structs.replace(message, content=content, reasoning_content=texts["thinking"])


class Dialect(NamedTuple):
    """The form in which a chat template accepts past calls.

    Attributes:
        empty: the content of a message that has only calls: "" or None.
        objects: True if arguments are passed as objects, False if they are passed as text.
        strings: True if arguments may also be text that is not JSON.
        together: True if one message may have text and calls. If not, the text becomes a message of its own.
        parallel: True if one message may have several calls. If not, each call becomes a message of its own.
        writes: False if the template does not write calls. Then they are written into the content.
    """

    empty: str | None = ""
    objects: bool = True
    strings: bool = True
    together: bool = True
    parallel: bool = True
    writes: bool = True


def dialect_of(render: Render) -> Dialect:
    """Find the form in which a template accepts past calls, by rendering short conversations; see `Dialect`.

    The first form in which the calls appear in the text is chosen, so that no call is dropped.
    """
    for objects, empty in itertools.product((True, False), ("", None)):
        arguments = {"probe": "sample"} if objects else '{"probe": "sample"}'
        calls = [_probe("first_probe", arguments)]
        if not _shows(render, [_said(empty, calls)], "first_probe", "sample"):
            continue
        return Dialect(
            empty,
            objects,
            _shows(render, [_said(empty, [_probe("first_probe", '{"probe": "sam')])], "first_probe", "sam"),
            _shows(render, [_said("Two birds.", calls)], "Two birds.", "first_probe")
            or not _shows(render, [_said("Two birds."), _said(empty, calls), *_LATER], "Two birds.", "first_probe"),
            _shows(render, [_said(empty, [*calls, _probe("second_probe", arguments)])], "first_probe", "second_probe"),
        )
    return Dialect(writes=False)


# The conversation after a call. Some templates count the messages, and reject a text and its calls in two messages.
_LATER = [
    {"role": "tool", "content": "Hello", "tool_call_id": "probe0001"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Hello"},
]


def _said(content: str | None, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def _probe(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "probe0001", "type": "function", "function": {"name": name, "arguments": arguments}}


def _shows(render: Render, messages: list[dict[str, Any]], *words: str) -> bool:
    """Return True if a template accepts the messages and writes the words, and neither Python's None nor its dicts."""
    try:
        text = render([{"role": "user", "content": "Hello"}, *messages])
        plain = render([{"role": "user", "content": "Hello"}, _said("Hello")])
    except JaxgenError:
        return False
    unwanted = ("None", "'probe'", '\\"probe')
    return all(word in text for word in words) and not any(text.count(word) > plain.count(word) for word in unwanted)


def template_messages(messages: Sequence[ChatMessage], dialect: Dialect, form: Format) -> list[dict[str, Any]]:
    """Return the messages for the chat template; the role `developer` becomes `system`.

    Arguments that are not the JSON of an object, such as an answer that was cut off, remain text. A template that needs
    an object gets one in which this text is the value of "arguments". Without arguments, the object is empty.
    """
    if not dialect.parallel:
        messages = list(_one_call_each(messages))
    return [turn for message in messages for turn in _turns(message, dialect, form)]


def _turns(message: ChatMessage, dialect: Dialect, form: Format) -> Iterator[dict[str, Any]]:
    read: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    read["content"] = message.content if isinstance(message.content, str) else ""
    if message.name is not None:
        read["name"] = message.name
    if message.reasoning_content:
        read |= dict.fromkeys(("reasoning_content", "reasoning"), message.reasoning_content)
    if message.role == "tool" and message.tool_call_id is not None:
        read["tool_call_id"] = form.past_id(message.tool_call_id)
    if calls := message.tool_calls:
        if not dialect.writes:
            texts = [Call(call.function.name, json.dumps(_object(call), ensure_ascii=False), call.id) for call in calls]
            read["content"] = "\n".join(filter(None, [read["content"], form.write(texts)]))
        else:
            if read["content"] and not dialect.together:
                yield read
                read = {"role": read["role"], "content": ""}
            read["content"] = read["content"] or dialect.empty
            read["tool_calls"] = [_call(call, dialect, form) for call in calls]
    yield read


def _call(call: PastCall, dialect: Dialect, form: Format) -> dict[str, Any]:
    arguments: Any = _arguments(call)
    if isinstance(arguments, str) and not dialect.strings:
        arguments = _object(call)
    if isinstance(arguments, dict) and not dialect.objects:
        text = call.function.arguments
        arguments = text if isinstance(text, str) and text.strip() else json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": form.past_id(call.id or ""), "type": "function", "function": function}


def _arguments(call: PastCall) -> dict[str, Any] | str:
    """Return a past call's arguments as an object, or as their text if it is not the JSON of an object."""
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        value = parse_json(arguments) if arguments.strip() else {}
    except InputError:
        return arguments
    return value if isinstance(value, dict) else {} if value is None else arguments


def _object(call: PastCall) -> dict[str, Any]:
    arguments = _arguments(call)
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def _one_call_each(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages with each call in a message of its own, followed by the call's results."""
    turns: list[tuple[ChatMessage, list[ChatMessage]]] = []  # each message, with its results
    for message in messages:
        if message.role == "tool" and turns and turns[-1][0].tool_calls:
            turns[-1][1].append(message)
        else:
            turns.append((message, []))
    for message, results in turns:
        calls = message.tool_calls or []
        if len(calls) < 2:
            yield from (message, *results)
            continue
        of_call: dict[str | None, list[ChatMessage]] = {}
        for result in results:
            of_call.setdefault(result.tool_call_id, []).append(result)
        for number, call in enumerate(calls):
            first = message if number == 0 else ChatMessage(role=message.role)
            yield msgspec.structs.replace(first, tool_calls=[call])
            yield from of_call.pop(call.id, ())
        yield from (result for result in results if result.tool_call_id in of_call)
