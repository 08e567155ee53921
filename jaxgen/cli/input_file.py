"""The prompts of --input: one per line, as text or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgen.errors import InputError
from jaxgen.model.config import ModelConfig
from jaxgen.text.json_file import parse_json
from jaxgen.text.tokenizer import Tokenizer
from jaxgen.text.utf8_text import text_lines


class Line(NamedTuple):
    """One line of the input: the request (repeated in the output), its ids, and the maximum number of new tokens."""

    asked: dict[str, Any]
    ids: list[int]
    budget: int


def read_lines(
    source: str, system: str | None, tokenizer: Tokenizer, raw: bool, budget: Callable[[list[int]], int]
) -> list[Line]:
    """Read a file, or stdin if `source` is "-". `budget` maps a prompt's ids to its maximum number of new tokens.

    Each line is a prompt or, if the first line begins with a brace, a JSON object with `prompt` or `messages`. Empty
    lines are skipped. Raise an `InputError` if a line is invalid, or if there are no lines.
    """
    data = stdin_bytes() if source == "-" else Path(source).read_bytes()
    lines = text_lines(f"--input {source}", data)
    if not lines:
        raise InputError(f"--input {source} has no prompt: write one per line")
    as_json = lines[0][1].lstrip().startswith("{")
    read = []
    for number, line in lines:
        try:
            asked = _entry(line) if as_json else {"prompt": line}
            ids = prompt_ids(asked, system, tokenizer, raw)
            read.append(Line(asked, ids, budget(ids)))
        except (ValueError, TypeError) as error:
            raise InputError(f"--input {source}, line {number}: {error}") from error
    return read


def stdin_bytes() -> bytes:
    """Return all of stdin, or raise an `InputError` if it is closed."""
    if sys.stdin is None or sys.stdin.closed:
        raise InputError("- reads stdin, which is closed")
    return sys.stdin.buffer.read()


def check_vocabulary(ids: Iterable[int], model: ModelConfig) -> None:
    """Raise an error if an id is outside the model's vocabulary, a sign that the tokenizer is for another model."""
    largest = max(ids, default=0)
    if largest >= model.vocab_size:
        raise InputError(
            f"the tokenizer produced the id {largest}, but the model has {model.vocab_size} tokens: they do not match"
        )


def _entry(line: str) -> dict[str, Any]:
    entry = parse_json(line)
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise InputError(
            'each line must be an object with "prompt" or "messages", because the first line begins with a brace'
        )
    if not isinstance(entry.get("prompt", ""), str):
        raise InputError(f'"prompt" must be a string, got {json.dumps(entry["prompt"])[:80]}')
    if "messages" in entry and not is_conversation(entry["messages"]):
        raise InputError(
            '"messages" must be a list of at least one {"role": "...", "content": "..."}, got '
            f"{json.dumps(entry['messages'])[:80]}"
        )
    return entry


def is_conversation(messages: Any) -> bool:
    """Return True if `messages` is a non-empty list of dicts, each of which has a role."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    )


def prompt_ids(asked: Mapping[str, Any], system: str | None, tokenizer: Tokenizer, raw: bool) -> list[int]:
    """Return the ids of a request's `prompt` or `messages`; use the chat template if there is one and `raw` is False.

    Raise an `InputError` if there are messages or a system message but no template, or if the prompt has no tokens.
    """
    if tokenizer.chat_template is None or raw:
        if "messages" in asked or system is not None:
            raise InputError("messages and --system need a chat template: leave out --raw, or choose another model")
        if not (ids := tokenizer.encode(asked["prompt"])):
            raise InputError("the prompt is empty and this tokenizer adds no BOS token: write a prompt")
        return ids
    messages = asked.get("messages") or [{"role": "user", "content": asked["prompt"]}]
    if system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
