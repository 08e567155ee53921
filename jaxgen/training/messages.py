"""Messages of conversations to train on, in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgen.errors import InputError, shown
from jaxgen.json_file import parse_json

# Names of roles in ShareGPT's form, and OpenAI's newer name of the system's role
_ROLES = {
    **{"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"},
    **{name: name for name in ("user", "assistant", "system", "tool")},
    **{"function_call": "assistant", "developer": "system"},
}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of thoughts in messages and templates


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation in the form that chat templates expect.

    Text parts are joined without a separator, the role `developer` becomes `system`, keys with the value None are left
    out (except `content`), and messages in ShareGPT's form (`from` and `value`) are converted. A thought has each of
    the names that templates use.

    Raises:
        InputError: a message has a part that is not text, an invalid call, or an unknown role in ShareGPT's form.
        TypeError: `messages` is not a list of messages.
    """
    listed = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not (listed and all(isinstance(message, Mapping) for message in messages)):
        raise TypeError('a conversation must be a list of messages, {"role": "...", "content": "..."}')
    given: list[Any] = list(messages)
    return [_message(message, f"message {number}") for number, message in enumerate(given)]


def _message(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    message = {key: value for key, value in given.items() if value is not None or key == "content"}
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message, where)
    if message.get("role") == "developer":
        message["role"] = "system"
    if isinstance(parts := message.get("content"), list):
        message["content"] = "".join(_text(part, where) for part in parts)
    calls = message.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise InputError(f"{where}: tool_calls must be a list, got {shown(calls)}")
        message["tool_calls"] = [_call(call, where) for call in calls]
    thought = next((message[name] for name in _THOUGHTS if isinstance(message.get(name), str)), None)
    return message if thought is None else message | dict.fromkeys(_THOUGHTS, thought)


def _from_sharegpt(message: dict[str, Any], where: str) -> dict[str, Any]:
    name, value = message.pop("from"), message.pop("value", None)
    if not isinstance(name, str) or name not in _ROLES:
        raise InputError(f'{where}: "from" must be one of {", ".join(_ROLES)}, got {shown(name)}')
    if name != "function_call":
        return message | {"role": _ROLES[name], "content": value}
    try:
        calls = parse_json(value) if isinstance(value, str) else value
    except InputError as error:
        raise InputError(f"{where}: the value of a function_call is {error}") from error
    return message | {"role": "assistant", "content": None, "tool_calls": calls if isinstance(calls, list) else [calls]}


def _text(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise InputError(
            f'{where}: each part of the content must be {{"type": "text", "text": "..."}}, got {shown(part)}'
        )
    return text


def _call(call: Any, where: str) -> dict[str, Any]:
    call = dict(call) if isinstance(call, Mapping) else {}
    inner = call.pop("function", None) or {key: call.pop(key, None) for key in ("name", "arguments")}
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise InputError(f'{where}: each call must be {{"function": {{"name": "...", "arguments": {{...}}}}}}')
    text = arguments = inner.get("arguments") or {}
    try:
        arguments = parse_json(text) if isinstance(text, str) and text.strip() else text or {}
    except InputError as error:
        raise InputError(f"{where}: the arguments of {inner['name']} are {error}") from error
    if not isinstance(arguments, Mapping):
        raise InputError(f"{where}: the arguments of {inner['name']} must be an object, got {shown(arguments)}")
    return {"type": "function", **call, "function": {**inner, "arguments": arguments}}


def with_calls(message: Mapping[str, Any], objects: bool, empty: str | None) -> dict[str, Any]:
    """Return a message with its calls in one of the forms that templates accept.

    If `objects` is False, arguments are passed as text. `empty` is the content of a message that has only calls.
    """
    if "tool_calls" not in message:
        return dict(message)
    calls = [dict(call) for call in message["tool_calls"]]
    if not objects:
        for call in calls:
            text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            call["function"] = {**call["function"], "arguments": text}
    return {**message, "content": message.get("content") or empty, "tool_calls": calls}


def thought_and_text(message: Mapping[str, Any]) -> tuple[str, str]:
    """Return the thought in an answer, or "" if it has none, and the text that follows the thought.

    A thought is in a field of its own, or in the content before `</think>`.
    """
    before, closing, text = (message.get("content") or "").rpartition("</think>")
    thought = before.split("<think>", 1)[-1] if closing else message.get(_THOUGHTS[0], "")
    return thought.strip(), text.strip()


def with_texts(message: Mapping[str, Any], thought: str, text: str) -> dict[str, Any]:
    """Return an answer with another thought and another text. An answer without them remains without them."""
    before, after = thought_and_text(message)
    content = text if after else message.get("content")
    if "</think>" in (message.get("content") or ""):
        content = f"<think>\n{thought}\n</think>\n\n{text if after else ''}"
    thoughts = dict.fromkeys(_THOUGHTS, thought) if _THOUGHTS[0] in message and before else {}
    return {**message, **thoughts, "content": content}
