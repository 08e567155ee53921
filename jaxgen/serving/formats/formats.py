"""The table of the formats in which models write tool calls, and the choice by chat template."""

from __future__ import annotations

from jaxgen.serving.formats.coder import Coder
from jaxgen.serving.formats.format import Format
from jaxgen.serving.formats.hermes import Hermes
from jaxgen.serving.formats.llama import Llama
from jaxgen.serving.formats.mistral import MistralIdentified, MistralList, MistralNamed

# A template is compared with the formats in this order, because it may show what two formats have in common.
FORMATS: tuple[Format, ...] = (Coder(), Hermes(), MistralIdentified(), MistralNamed(), MistralList(), Llama())


def format_of(template: str | None) -> Format:
    """Return the format of the calls that a chat template shows to the model; Hermes if it shows none."""
    shown = (form for form in FORMATS if all(text in (template or "") for text in form.shows))
    return next(shown, Hermes())
