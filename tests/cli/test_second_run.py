"""A second process finds the compiled programs of the first one on disk, and loads each of them once."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.models import slow

# Runs the command, and then prints how many programs it asked jax for, and how many of these jax found on disk.
COUNTED = """
import json, sys, jax
from jaxgen.cli.main import main
asked, found = [], []
listen = jax.monitoring.register_event_listener
listen(lambda event, **_: event.endswith("/compile_requests_use_cache") and asked.append(event))
listen(lambda event, **_: event.endswith("/cache_hits") and found.append(event))
status = main(sys.argv[1:])
print("counts", json.dumps([len(asked), len(found)]), file=sys.stderr)
sys.exit(status)
"""
LINES = "".join(f'{{"prompt": "{letter}"}}\n' for letter in "ABCA")


def start(home: Path, *words: object) -> subprocess.Popen:
    """Start the command with a cache in `home`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(home)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", COUNTED, *map(str, words)], env=environment, text=True, **pipes)


def end(process: subprocess.Popen, stdin: str | None = None) -> tuple[str, list[int]]:
    """Wait for the command to end; return its output, and the numbers of programs asked for and found."""
    out, err = process.communicate(stdin, timeout=300)
    assert process.returncode == 0, err
    return out, json.loads(err.splitlines()[-1].removeprefix("counts "))


def answer(home: Path, checkpoint: Path, *words: object, stdin: str = "") -> tuple[str, list[int]]:
    return end(start(home, "--model", checkpoint, "--max-new-tokens", 12, *words), stdin)


def train(home: Path, checkpoint: Path) -> tuple[str, list[int]]:
    data = home / "data.jsonl"
    data.write_text('{"prompt": "A", "completion": "B"}\n' * 4)
    out = home / f"tuned{len(list(home.glob('tuned*')))}"
    words = ["--model", checkpoint, "--data", data, "--out", out, "--steps", 3]
    return end(start(home, "train", *words))


def serve(home: Path, checkpoint: Path) -> tuple[str, list[int]]:
    process = start(home, "serve", checkpoint, "--port", 0, "--slots", 2, "--prompt-width", 32)
    url = next(filter(None, (re.search(r"at (http://127\.0\.0\.1:\d+/v1)", line) for line in process.stderr)))
    asked = {"prompt": "A", "max_tokens": 12, "temperature": 0}
    text = httpx.post(f"{url[1]}/completions", json=asked, timeout=60).json()["choices"][0]["text"]
    process.send_signal(signal.SIGTERM)
    return text, end(process)[1]


USES = {
    "a file of prompts": lambda home, checkpoint: answer(home, checkpoint, "--input", "-", "--slots", 2, stdin=LINES),
    "a prompt": lambda home, checkpoint: answer(home, checkpoint, "A"),
    "a conversation": lambda home, checkpoint: end(start(home, "--chat", "--max-new-tokens", 12), "Hello\nWhy?\n"),
    "training": train,
    "a service": serve,
}


@pytest.mark.parametrize("use", ["a file of prompts", *slow(*list(USES)[1:])])
def test_each_program_is_loaded_once(tmp_path, checkpoint, use):
    """On jax 0.12, an array that a loaded program returns has a layout that equals no other layout."""
    (first, compiled), (second, loaded) = USES[use](tmp_path, checkpoint), USES[use](tmp_path, checkpoint)
    assert first == second
    stored = len(list(tmp_path.rglob("*.program")))
    assert compiled[0] >= stored > 0
    assert loaded == [compiled[0], compiled[0]]  # a program that is looked up at every step would be counted again


@pytest.mark.slow
def test_programs_are_compiled_again_without_the_cache(tmp_path, checkpoint):
    assert answer(tmp_path, checkpoint, "--no-compile-cache", "A") == ("BCDEFGHIJKLM\n", [3, 0])
    assert not list(tmp_path.iterdir())
