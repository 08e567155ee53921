"""Tool calls in OpenAI's format, for models that generate them in the Hermes format, as Qwen2.5 does.

A call is `<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>` in the generated text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from jaxgen.errors import InputError, shown
from jaxgen.grammar.expression import Expression, Repeat, Text, choice, sequence
from jaxgen.grammar.json_schema import read_schema
from jaxgen.grammar.keywords import bare, plain
from jaxgen.grammar.token_automaton import TokenAutomaton
from jaxgen.text.json_file import parse_json
from jaxgen.text.tokenizer import Tokenizer

OPENING, CLOSING = "<tool_call>", "</tool_call>"
# Fields that clients copy from an answer into the next request. Only empty values are supported.
_RETURNED = ("refusal", "audio", "annotations", "function_call")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SPACE = " \t\n\r"
_JSON = frozenset(_SPACE + '{}[]",:+-.0123456789E' + "truefalsenull")  # characters that JSON allows outside strings


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a request in the form that chat templates expect.

    The role `developer` becomes `system`, text parts are joined without a separator, and the arguments of calls are
    converted from JSON strings to objects. Roles that OpenAI does not define are passed to the template unchanged.

    Raises:
        InputError: a message is invalid or unsupported; the error names the field.
    """
    if not messages:
        raise InputError("messages must have at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    given = _object(message, where, ("role", "content", "name", "tool_calls", "tool_call_id", *_RETURNED))
    for key in _RETURNED:
        if given.get(key):
            raise InputError(f"{where}.{key} is not supported: leave it out")
    role = _string(given.get("role"), f"{where}.role")
    if role == "function":
        raise InputError(f'{where}.role is function, which is deprecated: use the role "tool"')
    read: dict[str, Any] = {"role": "system" if role == "developer" else role}
    for key, only in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if given.get(key) and role != only:
            raise InputError(f"{where}.{key} needs the role {only}; the role is {shown(role)}")
    calls = given.get("tool_calls") or []
    lacks_text = given.get("content") is None and bool(calls)
    read["content"] = "" if lacks_text else _content(given.get("content"), f"{where}.content")
    if given.get("name") is not None:
        read["name"] = _string(given["name"], f"{where}.name")
    if calls:
        calls = _list(calls, f"{where}.tool_calls")
        read["tool_calls"] = [_past_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if role == "tool":
        read["tool_call_id"] = _string(given.get("tool_call_id"), f"{where}.tool_call_id")
    return read


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, "a string or a list of parts (null only with tool_calls)", content)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            raise InputError(f"{where}[{i}] has the type {bare(kind)}: only text is supported")
        given = _typed(part, f"{where}[{i}]", "text")
        texts.append(_string(given["text"], f"{where}[{i}].text"))
    return "".join(texts)


def _past_call(call: Any, where: str) -> dict[str, Any]:
    given = _typed(call, where, "function", "id", "index")
    inner = _object(given["function"], f"{where}.function", ("name", "arguments"))
    name = _string(inner.get("name"), f"{where}.function.name")
    text = _string(inner.get("arguments"), f"{where}.function.arguments")
    try:
        arguments = parse_json(text)
    except InputError as error:
        raise InputError(f"{where}.function.arguments: {error}") from error
    if not isinstance(arguments, dict):
        _refuse(f"{where}.function.arguments", "the JSON of an object", arguments)
    function = {"name": name, "arguments": arguments}
    return {"id": _string(given.get("id"), f"{where}.id"), "type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """The tools of a request, and how the model may use them.

    Attributes:
        for_template: the tools for `Tokenizer.render_chat`; None if `tool_choice` is "none".
        names: the functions that may be called.
        forced: True if the answer must consist of calls.
        named: True if the request names the one function that must be called.
        most_calls: the maximum number of calls (None for no limit). Additional calls are dropped.
    """

    for_template: list[dict[str, Any]] | None
    names: tuple[str, ...]
    forced: bool
    named: bool
    most_calls: int | None
    _parameters: Mapping[str, dict[str, Any] | None] = field(repr=False)  # keyed by function name

    @classmethod
    def of(cls, tools: Any, tool_choice: Any, parallel_tool_calls: Any) -> Tools | None:
        """Read a request's tool fields; None stands for an absent field. Return None if the request has no tools.

        Raises:
            InputError: a field is invalid or unsupported; the error names the field.
        """
        if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
            _refuse("parallel_tool_calls", "true or false", parallel_tool_calls)
        if tools is None:
            if tool_choice not in (None, "none"):
                raise InputError(f"tool_choice needs tools, got tool_choice {shown(tool_choice)} without tools")
            return None
        functions: dict[str, dict[str, Any]] = {}
        for i, tool in enumerate(_list(tools, "tools")):
            function = _function(tool, f"tools[{i}]")
            if functions.setdefault(function["name"], function) is not function:
                raise InputError(f"tools[{i}].function.name is {function['name']}, as in an earlier tool: rename it")
        mode, names = _choice(tool_choice, functions)
        return cls(
            None if mode == "none" else [{"type": "function", "function": part} for part in functions.values()],
            names,
            forced=mode in ("required", "named"),
            named=mode == "named",
            most_calls=1 if mode == "named" or parallel_tool_calls is False else None,
            _parameters={name: functions[name].get("parameters") for name in names},
        )

    @property
    def parses(self) -> bool:
        """True if the answer may contain calls."""
        return self.for_template is not None

    @property
    def key(self) -> tuple[int | None, str] | None:
        """Cache key of the automaton (for a fixed vocabulary), or None if there is no automaton.

        The key depends on the order of a schema's properties, because arguments are generated in this order.
        """
        return (self.most_calls, json.dumps(self._parameters)) if self.forced else None

    def automaton(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> TokenAutomaton | None:
        """Return the automaton for forced calls, or None if no call is forced.

        If `most_calls` is 1, the automaton accepts exactly one call. If `most_calls` is None, the automaton accepts one
        or more calls.

        Raises:
            InputError: the parameters are not supported by the grammar, or are too large.
        """
        if not self.forced:
            return None
        functions = choice(
            sequence(f'"{name}", "arguments": ', _arguments(name, schema)) for name, schema in self._parameters.items()
        )
        call = sequence(f'{OPENING}\n{{"name": ', functions, f"}}\n{CLOSING}")
        calls = Repeat(call, 1, self.most_calls, Text(b"\n"))
        return TokenAutomaton.from_expression(
            calls, tokenizer, name="the grammar of the tool calls", vocab_size=vocab_size
        )


def _function(tool: Any, where: str) -> dict[str, Any]:
    """Return a tool's function for the template: the name, description and parameters (if set), in HF's order."""
    given = _typed(tool, where, "function")["function"]
    where = f"{where}.function"
    given = _object(given, where, ("name", "description", "parameters", "strict"))
    name, parameters = given.get("name"), given.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(f"{where}.name", "1 to 64 of the characters a-z, A-Z, 0-9, _ and -", name)
    if given.get("description") is not None:
        _string(given["description"], f"{where}.description")
    if not isinstance(given.get("strict"), bool | None):
        _refuse(f"{where}.strict", "true or false", given["strict"])
    if not isinstance(parameters, dict | None):
        _refuse(f"{where}.parameters", "a JSON schema, which is an object", parameters)
    if parameters and parameters.get("type", "object") != "object":
        _refuse(f"{where}.parameters.type", "'object'", parameters["type"])
    if parameters:
        try:
            plain(parameters)  # rejects a schema that is not JSON, before the template or the grammar reads it
        except InputError as error:
            raise InputError(f"{where}.parameters: {error}") from error
    return {key: given[key] for key in ("name", "description", "parameters") if given.get(key) is not None}


def _choice(value: Any, functions: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the choice (auto, none, required or named), and the functions that may be called."""
    if value is None or (isinstance(value, str) and value in ("auto", "none", "required")):
        return value or "auto", () if value == "none" else tuple(functions)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "function":
        return "named", (_chosen(value, "tool_choice", functions),)
    if kind != "allowed_tools":
        _refuse("tool_choice", "'auto', 'none', 'required' or an object of the type function or allowed_tools", value)
    where = "tool_choice.allowed_tools"
    inner = _typed(value, "tool_choice", "allowed_tools")["allowed_tools"]
    inner = _object(inner, where, ("mode", "tools"))
    if inner.get("mode") not in ("auto", "required"):
        _refuse(f"{where}.mode", "'auto' or 'required'", inner.get("mode"))
    tools = enumerate(_list(inner.get("tools"), f"{where}.tools"))
    allowed = {_chosen(tool, f"{where}.tools[{i}]", functions) for i, tool in tools}
    return inner["mode"], tuple(name for name in functions if name in allowed)


def _chosen(tool: Any, where: str, functions: Mapping[str, Any]) -> str:
    inner = _typed(tool, where, "function")["function"]
    name = _string(_object(inner, f"{where}.function", ("name",)).get("name"), f"{where}.function.name")
    if name not in functions:
        raise InputError(f"{where}.function.name is {shown(name)}, which is not one of the tools")
    return name


def _arguments(name: str, parameters: dict[str, Any] | None) -> Expression:
    """Return the grammar of a function's arguments; a function without a schema has no arguments."""
    if parameters is None:
        return Text(b"{}")
    try:
        return read_schema({"type": "object", **parameters}, name=f"{name}.parameters")
    except InputError as error:
        raise InputError(f"the tool {name}: {error}") from error


class Call(NamedTuple):
    """A function call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class CallParser:
    r"""Parser for generated text that arrives in pieces. The result does not depend on how the text is split.

    Strings in a call's JSON may contain `<tool_call>` and `</tool_call>`. A call and its tags are treated as content if
    the JSON is invalid, the name is not in `names`, or the arguments are not an object. If `names` is None, any name is
    allowed. Missing arguments are read as `{}`. Calls after the first `most_calls` are dropped.

    Whitespace before a call is dropped. If the text contains calls, whitespace at its end is also dropped.

        >>> parser = CallParser({"f"}, None)
        >>> parser.put('Yes.\n<tool_call>\n{"name": "f", "arguments": {"x"')
        ('Yes.', [])
        >>> parser.put(": 1}}\n</tool_call>")
        ('', [Call(name='f', arguments='{"x": 1}')])
        >>> parser.end()
        ('', [])
    """

    def __init__(self, names: Collection[str] | None, most_calls: int | None):
        self._names, self._most, self._found = names, most_calls, 0
        self._held: list[str] = []  # characters of a possible call, and the whitespace before it
        self._place = "opening"  # in plain text, `_place` is "opening" and `_matched` is 0
        self._matched = 0  # number of matched characters of the opening or closing tag
        self._depth = 0  # number of open objects and lists

    def put(self, text: str) -> tuple[str, list[Call]]:
        """Read more text; return the content and calls that can no longer change."""
        content: list[str] = []
        calls: list[Call] = []
        for char in text:
            self._put(char, content, calls)
        return "".join(content), calls

    def end(self) -> tuple[str, list[Call]]:
        """Return the content and calls that were held back; a call that lacks only the closing tag is accepted."""
        content: list[str] = []
        calls: list[Call] = []
        if self._place == "closing":
            self._close(content, calls)
        elif not (self._found and "".join(self._held).isspace()):
            content += self._held
        return "".join(content), calls

    def _put(self, char: str, content: list[str], calls: list[Call]) -> None:
        if self._reads(char):
            self._held.append(char)
            if self._place == "closing" and self._matched == len(CLOSING):
                self._close(content, calls)
        elif self._place == "opening" and not self._matched:
            content += [*self._held, char]
            self._held = []
        else:  # the held text is not a call, but a tag may begin at `char` or at a "<" directly before `char`
            again = "<" if self._place == "closing" and self._matched == 1 else ""
            text = "".join(self._held).removesuffix(again)
            content.append(text.rstrip(_SPACE))
            self._held = [text[len(content[-1]) :]]
            self._place, self._matched = "opening", 0
            for next_char in again + char:
                self._put(next_char, content, calls)

    def _reads(self, char: str) -> bool:
        """Advance by one character; return False if the character is not part of a call or the whitespace before it."""
        place = self._place
        if place in ("string", "escape"):
            if place == "escape" or char not in '"\\':
                self._place = "string"
            else:
                self._place = "json" if char == '"' else "escape"
            return char >= " "
        if place == "json":
            self._depth += (char in "{[") - (char in "}]")
            if char == '"':
                self._place = "string"
            elif not self._depth:
                self._place, self._matched = "closing", 0
            return char in _JSON
        if place == "body":
            if char == "{":
                self._place, self._depth = "json", 1
            return char in _SPACE or char == "{"
        if char in _SPACE:
            return not self._matched
        tag = OPENING if place == "opening" else CLOSING
        if char != tag[self._matched]:
            return False
        self._matched += 1
        if self._matched == len(OPENING) and place == "opening":
            self._place = "body"
        return True

    def _close(self, content: list[str], calls: list[Call]) -> None:
        """Add the held text to the calls if it is a valid call, and to the content otherwise."""
        text = "".join(self._held)
        call = self._call(text.lstrip(_SPACE)[len(OPENING) : -self._matched or None])
        if call is None:
            content.append(text)
        else:
            self._found += 1
            calls += [call] if self._most is None or self._found <= self._most else []
        self._held, self._place, self._matched = [], "opening", 0

    def _call(self, text: str) -> Call | None:
        try:
            value = parse_json(text)
        except InputError:
            return None
        name, arguments = value.get("name"), value.get("arguments", {})  # text begins with a brace, so value is a dict
        known = isinstance(name, str) and (self._names is None or name in self._names)
        return Call(name, json.dumps(arguments, ensure_ascii=False)) if known and isinstance(arguments, dict) else None


def _refuse(where: str, wanted: str, value: Any) -> NoReturn:
    raise InputError(f"{where} must be {wanted}, got {shown(value)}")


def _string(value: Any, where: str) -> str:
    return value if isinstance(value, str) else _refuse(where, "a string", value)


def _list(value: Any, where: str) -> list[Any]:
    return value if isinstance(value, list) and value else _refuse(where, "a list that is not empty", value)


def _object(value: Any, where: str, keys: Collection[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(where, "an object", value)
    unknown = next((key for key in value if key not in keys), None)
    if unknown is not None:
        raise InputError(f"{where} has the key {shown(unknown)}, which is not supported: leave it out")
    return value


def _typed(value: Any, where: str, kind: str, *optional: str) -> Mapping[str, Any]:
    """Check that a value is an object of the form `{"type": kind, kind: ...}`, and return the value."""
    if isinstance(value, Mapping) and value.get("type") != kind:
        _refuse(f"{where}.type", shown(kind), value.get("type"))
    given = _object(value, where, ("type", kind, *optional))
    if kind not in given:
        raise InputError(f"{where} must have the key {kind!r}")
    return given
