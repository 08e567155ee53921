"""Draw a command and its output as a picture of a terminal, which breaks lines at its width as terminals do.

python -m demo.terminal OUT.svg -- jaxgen "Tell me a story about a brave fox who lost a key"
"""

from __future__ import annotations

import html
import shlex
import subprocess
import sys
from pathlib import Path

COLUMNS, FONT, LINE = 88, 14, 20  # characters, pixels, pixels


def main() -> None:
    """Run the command, and write the picture."""
    target, separator, *command = sys.argv[1:]
    if separator != "--":
        raise SystemExit("usage: python -m demo.terminal OUT.svg -- COMMAND ...")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    typed = "$ " + " ".join(f'"{word}"' if " " in word else shlex.quote(word) for word in command)
    Path(target).write_text(draw(screen(f"{typed}\n{done.stdout}")), "utf-8")


def screen(text: str) -> list[str]:
    """Return the rows of a terminal that shows the text."""
    rows = []
    for line in text.rstrip().splitlines():
        rows += [line[start : start + COLUMNS] for start in range(0, max(len(line), 1), COLUMNS)]
    return rows


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
