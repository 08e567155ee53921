"""Griffe extension for the website: turn the examples in docstrings into code blocks."""

import re
from typing import Any

from griffe import Extension, Object

# Python-Markdown would render these as block quotes.
_DOCTEST = re.compile(r"^( *)>>> .*\n(?:\1\S.*\n|\1 +\S.*\n)*", re.MULTILINE)


class Doctests(Extension):
    """Fences the examples in every docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of an object that griffe has loaded."""
        if obj.docstring is not None:
            text = obj.docstring.value + "\n"
            fenced = _DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}{found[1]}```\n", text)
            obj.docstring.value = fenced.rstrip()
