"""The format of Hermes, Qwen2.5, Qwen3 and SmolLM3: the JSON of a call in tags."""

from __future__ import annotations

from jaxgen.serving.formats.format import Format, Functions
from jaxgen.serving.formats.reading import Parts, Reading, after_space, call_of, json_text, literal, parsed

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes(Format):
    """Calls such as `<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>`."""

    openings = (OPENING,)
    marks = (OPENING, CLOSING)
    shows = (OPENING,)
    before = f'{OPENING}\n{{"name": "'
    between = '", "arguments": '
    after = f"}}\n{CLOSING}"
    separator = "\n"

    def read(self, functions: Functions) -> Reading[Parts]:
        """Read one call; its closing tag may be missing at the end of the text."""
        yield from literal(OPENING)
        text = yield from json_text((yield from after_space()))
        yield from literal(CLOSING, (yield from after_space()), may_end=True)
        return [call_of(parsed(text), functions)]
