"""The table of the formats in which models write tool calls, and the choice by chat template."""

from __future__ import annotations

from jaxgen.errors import InputError
from jaxgen.serving.formats.coder import Coder
from jaxgen.serving.formats.format import Format
from jaxgen.serving.formats.hermes import Hermes
from jaxgen.serving.formats.llama import Llama
from jaxgen.serving.formats.mistral import MistralIdentified, MistralList, MistralNamed

# A template is compared with the formats in this order, because it may show what two formats have in common.
FORMATS: tuple[Format, ...] = (Coder(), Hermes(), MistralIdentified(), MistralNamed(), MistralList(), Llama())
# Tags of formats that are not implemented, such as Granite's
_OTHERS = ("<|tool_call|>",)


def format_of(template: str | None) -> Format:
    """Return the format of the calls that a chat template shows to the model; Hermes if it shows none."""
    shown = (form for form in FORMATS if all(text in (template or "") for text in form.shows))
    return next(shown, Hermes())


def check_format(template: str | None) -> None:
    """Raise an `InputError` if a chat template shows a format of calls that is not implemented."""
    if other := [tag for tag in _OTHERS if tag in (template or "")]:
        raise InputError(f"tools: this model writes calls after {other[0]}, a format that is not implemented")
