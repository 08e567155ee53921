"""The format of Qwen3-Coder: the name and the arguments of a call in tags, with strings as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxgen.core.grammar.grammar import Grammar
from jaxgen.json_file import types_of
from jaxgen.serving.formats.coder_grammar import ENDS, parameters, properties, types
from jaxgen.serving.formats.format import Format, Functions
from jaxgen.serving.formats.reading import (
    Broken,
    Call,
    Parts,
    Reading,
    Unknown,
    after_space,
    literal,
    one_of,
    parsed,
    until,
)

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _END = "<parameter=", "</parameter>"


class Coder(Format):
    """Calls such as `<tool_call>\\n<function=f>\\n<parameter=x>\\n1\\n</parameter>\\n</function>\\n</tool_call>`.

    The schema determines the type of a value: a value whose type may be a string, or that its schema does not describe,
    is a string unless it is JSON of another type that the schema allows.
    """

    openings = (_OPENING, _FUNCTION)
    closing = _CLOSING
    marks = (_OPENING, _CLOSING)
    shows = (_OPENING, _FUNCTION, _PARAMETER)

    def read(self, functions: Functions) -> Reading[Parts]:
        """Read one call up to </function>.

        Models sometimes leave out <tool_call>, </parameter> or </function>, or write other text between the tags, and
        the format's own parser accepts that.
        """
        if (yield from one_of(*self.openings, first=(yield))) == _OPENING:
            yield from literal(_FUNCTION, (yield from after_space()))
        name, _ = yield from until(">")
        if name not in functions:
            raise Unknown
        schema, values, end = functions[name] or {}, {}, ""
        while end not in (_FUNCTION_END, _CLOSING):
            if end != _PARAMETER:
                _, end = yield from until(_PARAMETER, *ENDS[2:], *self.openings, cut=_FUNCTION_END)
                if end in self.openings:
                    raise Broken
                continue
            key, end = yield from until(*ENDS, ">")
            if end == ">":
                text, end = yield from until(*ENDS)
                values[key] = _value(text.removeprefix("\n").removesuffix("\n"), schema, key)
        return [Call(name, json.dumps(values, ensure_ascii=False))]

    def grammar(self, functions: Functions, limit: int | None, left_out: list[str] | None = None) -> Grammar:
        """Return the grammar of calls on lines of their own, with the parameters in the order of the schema."""
        calls = Grammar.choice(
            Grammar.sequence(f"{name}>\n", *parameters(name, schema or {}, left_out))
            for name, schema in functions.items()
        )
        call = f"{_OPENING}\n<function=" + calls + f"</function>\n{_CLOSING}"
        return call.repeat(1, limit, separator="\n")

    def write(self, calls: Sequence[Call]) -> str:
        """Return calls on lines of their own."""
        return "\n".join(f"{_OPENING}\n<function={call.name}>\n{_tags(call)}</function>\n{_CLOSING}" for call in calls)


def _tags(call: Call) -> str:
    values = json.loads(call.arguments).items()
    texts = {key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in values}
    return "".join(f"{_PARAMETER}{key}>\n{text}\n{_END}\n" for key, text in texts.items())


def _value(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """Return the value of a parameter, as its schema types it; the text itself if it is not of such a type."""
    allowed = types(properties(schema).get(key, {}), schema)
    if allowed <= {"string"}:
        return text
    word = text.strip().lower()
    if "null" in allowed and word in ("null", "none"):
        return None
    if "boolean" in allowed and word in ("true", "false"):  # chat templates write True and False, as Python does
        return word == "true"
    try:
        value = parsed(text)
    except Broken:
        return text
    if isinstance(value, float) and value.is_integer() and "number" not in allowed:
        value = int(value)
    return value if allowed & set(types_of(value)) else text
