"""The format of Llama 3.1, 3.2 and 3.3: the bare JSON of a call."""

from __future__ import annotations

from jaxgen.serving.formats.format import Format, Functions
from jaxgen.serving.formats.reading import Parts, Reading, after_space, call_of, json_text, literal, parsed

_TAG = "<|python_tag|>"


class Llama(Format):
    """A call such as `{"name": "f", "parameters": {...}}`.

    A call begins the answer, or follows `<|python_tag|>` or another call. Between calls there may be a semicolon. The
    chat template accepts only one call in a message, so forced answers have one.
    """

    openings = (_TAG,)
    bare = "{;"
    marks = (_TAG,)
    is_single = True
    shows = ('"parameters"', "ipython")
    before = '{"name": "'
    between = '", "parameters": '
    after = "}"
    separator = "; "

    def read(self, functions: Functions) -> Reading[Parts]:
        """Read one call."""
        char = yield
        if char == ";":
            char = yield from after_space()
        if char == _TAG[0]:
            yield from literal(_TAG, char)
            char = yield from after_space()
        if char != "{":
            char = ""  # a list is not a call
        text = yield from json_text(char)
        return [call_of(parsed(text), functions, "parameters")]
