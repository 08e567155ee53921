"""The forms of a line of training data."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError, shown
from jaxgen.json_file import parse_json
from jaxgen.training.conversations import chat_examples
from jaxgen.training.examples import Example, completion_example, text_example

_FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("text",))
_BESIDE = ("tools", "system", "chat_template_kwargs")  # optional keys of a conversation
_KNOWN = (*(name for form in _FORMS for name in form), *_BESIDE)
_SIMILAR = 0.87  # similarity above which a key counts as misspelt; "prompt_id" and "prompt" have 0.8
_RESERVED = ("conversation", "messages", "tools", "add_generation_prompt")  # arguments of `render_chat`


def line_examples(tokenizer: Tokenizer, entry: Any) -> tuple[list[Example], list[str]]:
    """Return the examples for a line of training data, and the names of its keys that are not used.

    Keys with the value None count as absent, because some writers give every line the same keys.

    Raises:
        InputError: the line has none of the forms, or several, or a key is invalid or looks misspelt.
        TypeError: a conversation is not a list of messages.
    """
    given = {name: value for name, value in entry.items() if value is not None} if isinstance(entry, dict) else {}
    found = [form for form in _FORMS if all(name in given for name in form)]
    unused = sorted(name for name in given if name not in _KNOWN)
    for name in unused:
        _check_spelling(name)
    if len(found) > 1:
        names = " and ".join(form[0] for form in found)
        raise InputError(f"the line has {names}: keep only one of them")
    if not found:
        raise InputError(
            'each line must be {"messages": [...]}, {"conversations": [...]}, {"prompt": ..., "completion": ...} or '
            f'{{"text": "..."}}, got {json.dumps(entry)[:80]}'
        )
    used = (*found[0], *_BESIDE)
    unused += sorted(name for name in given if name in _KNOWN and name not in used)
    return _examples(tokenizer, found[0], given), unused


def _check_spelling(name: str) -> None:
    plain = name[:100].lower()
    near = ["tools"] if plain == "functions" else difflib.get_close_matches(plain, _KNOWN, n=1, cutoff=_SIMILAR)
    if near:
        raise InputError(f"unknown key {shown(name)}: did you mean {near[0]!r}? If not, rename or remove it")


def _examples(tokenizer: Tokenizer, form: tuple[str, ...], given: Mapping[str, Any]) -> list[Example]:
    first, last = given[form[0]], given[form[-1]]
    plain = isinstance(first, str) and isinstance(last, str)
    if form == ("text",) and not (plain and first):
        raise InputError(f'"text" must be a string that is not empty, got {shown(first)}')
    if form == ("text",) or (plain and len(form) == 2 and tokenizer.chat_template is None):
        if extra := [name for name in _BESIDE if given.get(name)]:
            raise InputError(f'"{extra[0]}" needs a conversation: it cannot be used with "{form[0]}" here')
        return [text_example(tokenizer, first) if len(form) == 1 else completion_example(tokenizer, first, last)]
    messages: Any = first
    learnt_from = 0
    if len(form) == 2:
        if plain:
            first, last = [{"role": "user", "content": first}], [{"role": "assistant", "content": last}]
        if not isinstance(first, list) or not isinstance(last, list):
            raise InputError('"prompt" and "completion" must be two strings or two lists of messages')
        messages, learnt_from = first + last, len(first)
    if (system := given.get("system")) not in (None, ""):
        messages, learnt_from = _with_system(system, messages), learnt_from + 1
    tools, variables = _tools(given.get("tools")), _variables(given)
    return chat_examples(tokenizer, messages, tools=tools, learnt_from=learnt_from, **variables)


def _with_system(system: Any, messages: Any) -> list[Any]:
    if not isinstance(system, str):
        raise InputError(f'"system" must be a string, got {shown(system)}')
    if not isinstance(messages, list):
        raise TypeError("a conversation must be a list of messages")
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    if "system" in (first.get("role"), first.get("from")):
        raise InputError('the line has "system" and a system message: keep only one of them')
    return [{"role": "system", "content": system}, *messages]


def _tools(given: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a line, which can be a list or its JSON, or None if there are none."""
    try:
        tools = parse_json(given) if isinstance(given, str) and given.strip() else given or None
    except InputError as error:
        raise InputError(f'"tools" is {error}') from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InputError(f'"tools" must be a list of objects, got {shown(tools)}')
    return tools or None


def _variables(given: Mapping[str, Any]) -> dict[str, Any]:
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise InputError(f'"chat_template_kwargs" must be an object, got {shown(variables)}')
    if wrong := [name for name in variables if name in _RESERVED]:
        raise InputError(f'"chat_template_kwargs" must not have the key {wrong[0]}: put it beside the messages')
    return variables
