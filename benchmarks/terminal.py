"""Draw a command and what it really prints as a picture of a terminal.

python -m benchmarks.terminal OUT.svg -- jaxgen "Tell me a story about a brave fox who lost a key"
"""

from __future__ import annotations

import html
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

COLUMNS, FONT, LINE = 88, 14, 20  # characters, pixels, pixels


def main() -> None:
    target, separator, *command = sys.argv[1:]
    if separator != "--":
        raise SystemExit("usage: python -m benchmarks.terminal OUT.svg -- COMMAND ...")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = ["$ " + " ".join(f'"{word}"' if " " in word else shlex.quote(word) for word in command)]
    for paragraph in done.stdout.rstrip().splitlines():
        lines += textwrap.wrap(paragraph, COLUMNS) or [""]
    Path(target).write_text(draw(lines), "utf-8")


def draw(lines: list[str]) -> str:
    """Return an SVG of light text on a dark window."""
    width, height = COLUMNS * FONT * 0.6 + 40, len(lines) * LINE + 60
    rows = "\n".join(
        f'<text x="20" y="{50 + number * LINE}" fill="{"#8bd5a0" if number == 0 else "#e6e6e6"}" '
        f'xml:space="preserve">{html.escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    dots = "".join(
        f'<circle cx="{20 + 18 * i}" cy="18" r="6" fill="{c}"/>' for i, c in enumerate(("#f66", "#fc5", "#6c6"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT}">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#1e1f26"/>{dots}\n{rows}\n</svg>\n'
    )


if __name__ == "__main__":
    main()
