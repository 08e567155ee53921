"""The format of Hermes, Qwen2.5, Qwen3 and SmolLM3: the JSON of a call in tags."""

from __future__ import annotations

from collections.abc import Sequence

from jaxgen.core.grammar.grammar import Grammar
from jaxgen.serving.formats.format import Format, Functions, arguments
from jaxgen.serving.formats.reading import Call, Parts, Reading, after_space, call_of, json_text, literal, parsed

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes(Format):
    """Calls such as `<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>`."""

    openings = (OPENING,)
    marks = (OPENING, CLOSING)
    shows = (OPENING,)

    def read(self, functions: Functions) -> Reading[Parts]:
        """Read one call; its closing tag may be missing at the end of the text."""
        yield from literal(OPENING)
        text = yield from json_text((yield from after_space()))
        yield from literal(CLOSING, (yield from after_space()), may_end=True)
        return [call_of(parsed(text), functions)]

    def grammar(self, functions: Functions, most: int | None, left_out: list[str] | None = None) -> Grammar:
        """Return the grammar of calls on lines of their own."""
        calls = Grammar.choice(
            f'"{name}", "arguments": ' + grammar for name, grammar in arguments(functions, left_out).items()
        )
        call = f'{OPENING}\n{{"name": ' + calls + f"}}\n{CLOSING}"
        return call.repeat(1, most, separator="\n")

    def write(self, calls: Sequence[Call]) -> str:
        """Return calls on lines of their own."""
        return "\n".join(
            f'{OPENING}\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n{CLOSING}' for call in calls
        )
