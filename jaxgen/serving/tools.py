"""The tools of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from jaxgen.core.grammar.grammar import Grammar
from jaxgen.errors import InputError, shown
from jaxgen.serving.formats.format import CallParser, Format
from jaxgen.serving.protocol import AllowedFunctions, ChosenTools, Function, NamedTool, Tool

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


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
    def of(
        cls,
        tools: list[Tool] | None,
        tool_choice: Literal["auto", "none", "required"] | NamedTool | ChosenTools | None,
        parallel_tool_calls: bool | None,
    ) -> Tools | None:
        """Read a request's tool fields; None stands for an absent field. Return None if the request has no tools.

        Raises:
            InputError: a field is unsupported; the error names the field.
        """
        if tools is None:
            if tool_choice not in (None, "none"):
                raise InputError(
                    f"tool_choice needs tools, got tool_choice {shown(msgspec.to_builtins(tool_choice))} without tools"
                )
            return None
        if not tools:
            raise InputError("tools must be a list that is not empty, got []")
        functions: dict[str, Function] = {}
        for i, tool in enumerate(tools):
            function = _function(tool, f"tools[{i}]")
            if functions.setdefault(function.name, function) is not function:
                raise InputError(f"tools[{i}].function.name is {function.name}, as in an earlier tool: rename it")
        mode, names = _choice(tool_choice, functions)
        return cls(
            None if mode == "none" else [_for_template(function) for function in functions.values()],
            names,
            forced=mode in ("required", "named"),
            named=mode == "named",
            most_calls=1 if mode == "named" or parallel_tool_calls is False else None,
            _parameters={name: functions[name].parameters for name in names},
        )

    @property
    def parses(self) -> bool:
        """True if the answer may contain calls."""
        return self.for_template is not None

    @property
    def key(self) -> tuple[int | None, str]:
        """Cache key of the grammar for a fixed format.

        The key depends on the order of a schema's properties, because arguments are generated in this order.
        """
        return self.most_calls, json.dumps(self._parameters)

    def grammar(self, form: Format, left_out: list[str] | None = None) -> Grammar:
        """Return the grammar of the calls if calls are forced.

        If `most_calls` is 1, or the format allows only one call, its texts have exactly one call. Otherwise, they
        have one or more calls. `left_out` is as in `Format.grammar`.

        Raises:
            InputError: the parameters are not supported by the grammar, or are too large.
        """
        return form.grammar(self._parameters, self.most_calls, left_out)

    def parser(self, form: Format) -> CallParser:
        """Return a parser for the calls in an answer."""
        return CallParser(form, self._parameters, self.most_calls)


def _function(tool: Tool, where: str) -> Function:
    function, where = tool.function, f"{where}.function"
    if not _NAME.fullmatch(function.name):
        raise InputError(
            f"{where}.name must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -, got {shown(function.name)}"
        )
    if function.parameters and function.parameters.get("type", "object") != "object":
        raise InputError(f"{where}.parameters.type must be 'object', got {shown(function.parameters['type'])}")
    return function


def _for_template(function: Function) -> dict[str, Any]:
    """Return a tool for the template: the name, description and parameters (if set), in HF's order."""
    fields = {key: getattr(function, key) for key in ("name", "description", "parameters")}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def _choice(
    value: Literal["auto", "none", "required"] | NamedTool | ChosenTools | None, functions: Mapping[str, Any]
) -> tuple[str, tuple[str, ...]]:
    """Return the choice (auto, none, required or named), and the functions that may be called."""
    match value:
        case NamedTool():
            return "named", (_chosen(value, "tool_choice", functions),)
        case ChosenTools(allowed_tools=AllowedFunctions(mode=mode, tools=tools)):
            where = "tool_choice.allowed_tools.tools"
            allowed = {_chosen(tool, f"{where}[{i}]", functions) for i, tool in enumerate(tools)}
            return mode, tuple(name for name in functions if name in allowed)
    return value or "auto", () if value == "none" else tuple(functions)


def _chosen(tool: NamedTool, where: str, functions: Mapping[str, Any]) -> str:
    if tool.function.name not in functions:
        raise InputError(f"{where}.function.name is {shown(tool.function.name)}, which is not one of the tools")
    return tool.function.name
