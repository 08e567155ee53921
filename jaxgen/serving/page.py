"""The web page: a chat with the service, or recorded answers, with the log-probability of each token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PLACE = '<script type="application/json" id="settings">null</script>'
MARK = '<meta name="generator" content="jaxgen">'


def page(settings: dict[str, Any]) -> str:
    """Return the page as one self-contained HTML file; `page.html` defines the settings."""
    source = (Path(__file__).parent / "page.html").read_text("utf-8")
    # Escape "<", so that no text can close the script element.
    data = json.dumps(settings, ensure_ascii=False).replace("<", "\\u003c")
    return source.replace(_PLACE, _PLACE.replace("null", data))


def chat_page(model: str, *, is_chat: bool, alternatives: int, needs_key: bool) -> str:
    """Return the page for chatting with a service.

    Args:
        model: the model's name.
        is_chat: whether the model has a chat template; if not, the page continues text instead.
        alternatives: the number of most likely tokens to ask for.
        needs_key: whether to ask the user for an API key.
    """
    kind = "chat" if is_chat else "text"
    return page({"kind": kind, "model": model, "alternatives": alternatives, "needs_key": needs_key})


def recorded_page(model: str, prompt: str, answers: list[dict[str, Any]]) -> str:
    """Return a page that shows answers to a prompt.

    Args:
        model: the model's name.
        prompt: the text.
        answers: dicts with `text`, `tokens` (from `jaxgen.serving.scored.entries`) and `note`.
    """
    return page({"kind": "recorded", "model": model, "prompt": prompt, "answers": answers})
