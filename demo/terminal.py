"""Draw a terminal in which commands were run.

python -m demo.terminal jaxgen/demo/terminal.svg
"""

from __future__ import annotations

import contextlib
import html
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

COMMANDS = (
    'jaxgen "Tell me a story about a brave fox who lost a key"',
    r"printf 'What color is snow?\nWhat does a dog say?\nWhat color is coal?\n' | jaxgen --input -",
)
COLUMNS, FONT, LINE = 96, 14, 20  # characters, pixels, pixels


def main() -> None:
    """Run the commands, and write the picture."""
    _, target = sys.argv
    Path(target).write_text(draw([(command, run(command)) for command in COMMANDS]), "utf-8")


def run(command: str) -> str:
    """Return what a command prints on a terminal of COLUMNS columns."""
    own, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, COLUMNS))
    process = subprocess.Popen(command, shell=True, stdout=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
        while data := os.read(own, 65536):
            shown += data
    os.close(own)
    if status := process.wait():
        raise SystemExit(f"status {status}: {command}")
    return shown.decode().replace("\r\n", "\n")


def draw(commands: list[tuple[str, str]]) -> str:
    """Return an SVG of a dark window with commands and what they printed."""
    rows = [row for command, shown in commands for row in (("#8bd5a0", f"$ {command}"), *_rows(shown))]
    width, height = COLUMNS * FONT * 0.6 + 40, len(rows) * LINE + 60
    lines = "\n".join(
        f'<text x="20" y="{50 + number * LINE}" fill="{color}" xml:space="preserve">{html.escape(line)}</text>'
        for number, (color, line) in enumerate(rows)
    )
    dots = "".join(
        f'<circle cx="{20 + 18 * i}" cy="18" r="6" fill="{c}"/>' for i, c in enumerate(("#f66", "#fc5", "#6c6"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="{FONT}">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#1e1f26"/>{dots}\n{lines}\n</svg>\n'
    )


def _rows(text: str) -> list[tuple[str, str]]:
    """Return the rows of a terminal that shows the text, which breaks the lines that are longer."""
    return [
        ("#e6e6e6", line[start : start + COLUMNS])
        for line in text.rstrip().splitlines()
        for start in range(0, max(len(line), 1), COLUMNS)
    ]


if __name__ == "__main__":
    main()
