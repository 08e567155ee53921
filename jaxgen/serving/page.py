"""The web page. It shows a live chat or recorded answers, including the log-probability of each token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SCRIPT = "/* markdown.js */"
_PLACE = '<script type="application/json" id="settings">null</script>'
MARK = '<meta name="generator" content="jaxgen">'


def page(settings: dict[str, Any]) -> str:
    """Return the page as one self-contained HTML file; `page.html` describes the settings."""
    folder = Path(__file__).parent
    source = (folder / "page.html").read_text("utf-8")
    source = source.replace(_SCRIPT, (folder / "markdown.js").read_text("utf-8"))
    # Escape "<", so that no text can close the script element.
    data = json.dumps(settings, ensure_ascii=False).replace("<", "\\u003c")
    return source.replace(_PLACE, _PLACE.replace("null", data))
