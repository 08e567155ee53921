"""The prompts of --input: one per line, as text or JSON."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.request.fields import SOURCES, read_fields
from jaxgen.core.request.inputs import row_ids
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError, JaxgenWarning, check_whole, warn
from jaxgen.json_file import parse_json
from jaxgen.remote import is_url, read
from jaxgen.utf8_text import text_lines

# Fields of the output that would be confused with fields of the same name in the input.
_RESERVED = ("tokens", "finish", "error", "logprobs", "sequence")
_OF_PYTHON = {"key": "use seed", "allowed": "use regex or json_schema"}


class Line(NamedTuple):
    """One line of the input.

    Attributes:
        asked: the fields that the output repeats: `index`, the prompt, `metadata`, options and unknown fields.
        ids: the prompt's tokens.
        budget: the maximum number of new tokens.
        fields: the line's own options, and its `index`, in the format of `Engine.submit`.
        number: the line's number in the file, counted from 1.
    """

    asked: dict[str, Any]
    ids: list[int]
    budget: int
    fields: Mapping[str, Any] = {}
    number: int = 1

    def sequences(self, cfg: GenerationConfig) -> int:
        """Return the number of answers to the line."""
        return self.fields.get("n", self.fields.get("num_return_sequences", cfg.num_return_sequences))

    @property
    def grammar(self) -> dict[str, Any]:
        """The fields of the line's own grammar; none if it has no grammar."""
        return {name: self.fields[name] for name in ("json_schema", "regex", "unsupported") if name in self.fields}

    def logged(self, cfg: GenerationConfig) -> bool:
        """Return True if the answers to the line include log-probabilities."""
        return cfg.output_logprobs is not None and self.fields.get("output_logprobs", "") is not None


def read_lines(
    source: str,
    system: str | None,
    tokenizer: Tokenizer,
    raw: bool,
    model: ModelConfig,
    budget: Callable[[list[int], int | None], int],
) -> list[Line]:
    """Read a file or a URL, or stdin if `source` is "-".

    Each line is a prompt or, if the first line is JSON, a prompt in the format of `generate_many`, as JSON.
    Empty lines are skipped. Raise an `InputError` if a line is invalid, or if there are no lines. `budget` maps a
    prompt's ids and its own `max_new_tokens` (None if it has none) to its maximum number of new tokens.
    """
    data = source_bytes(source)
    lines = text_lines(f"--input {source}", data)
    if not lines:
        raise InputError(f"--input {source} has no prompt: write one per line")
    as_json = _is_json(lines[0][1])
    read: list[Line] = []
    numbers: dict[int, int] = {}  # from a line's index to its number
    for number, line in lines:
        with line_errors(source, number):
            fields = read_fields(_entry(line) if as_json else _plain(line), own_data=True)
            others, index = fields.others, fields.others.get("index", len(read))
            if index in numbers:
                raise InputError(f"index {index} is also the index of line {numbers[index]}: give each its own")
            numbers[index] = number
            asked = {"prompt" if fields.source == "text" else fields.source: fields.content}
            if "ids" in asked and system is not None:
                raise InputError("--system needs text or messages, but the prompt is given as ids")
            ids = row_ids(asked["ids"], model).tolist() if "ids" in asked else prompt_ids(asked, system, tokenizer, raw)
            most = check_whole("max_new_tokens", others["max_new_tokens"]) if "max_new_tokens" in others else None
            asked |= {"metadata": others["metadata"]} if "metadata" in others else {}
            own = fields.own | {"index": index}
            read.append(Line({"index": index, **asked, **others}, ids, budget(ids, most), own, number))
    return read


@contextlib.contextmanager
def line_errors(source: str, number: int) -> Iterator[None]:
    """Add the file and the line to the errors that the block raises and to its warnings."""
    where = f"--input {source}, line {number}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", JaxgenWarning)
        try:
            yield
        except (ValueError, TypeError) as error:
            raise InputError(f"{where}: {error}") from error
    for each in caught:
        warn(f"{where}: {each.message}")


def source_bytes(source: str) -> bytes:
    """Return the content of a file or a URL, or of stdin if `source` is "-"."""
    if source == "-":
        return stdin_bytes()
    return read(source) if is_url(source) else Path(source).read_bytes()


def stdin_bytes() -> bytes:
    """Return all of stdin, or raise an `InputError` if it is closed."""
    if sys.stdin is None or sys.stdin.closed:
        raise InputError("- reads stdin, which is closed")
    return sys.stdin.buffer.read()


def _is_json(line: str) -> bool:
    """Return True if a file with this first line is JSON. A line that begins with a brace must be JSON."""
    return line.lstrip().startswith("{") or isinstance(_parsed(line), str | list)


def _parsed(line: str) -> Any:
    """Return the value of a line of JSON; None if it is not valid JSON, or not an object, a string or a list."""
    if line.lstrip()[:1] not in ("{", "[", '"'):
        return None
    with contextlib.suppress(InputError):
        return parse_json(line)


def _plain(line: str) -> str:
    """Return a line of text; raise an error if it is a prompt in JSON."""
    value = _parsed(line)
    if isinstance(value, dict) and (found := [name for name in SOURCES if name in value]):
        raise InputError(
            f"this line is JSON with the field {found[0]}, but the first line is text: write all lines in one form"
        )
    return line


def _entry(line: str) -> Any:
    """Return the value of a line of JSON; raise an error for a field that lines do not have."""
    value = parse_json(line)
    if not isinstance(value, dict | str | list):
        raise InputError(
            "each line must be an object, a string or a list of ids in JSON, because the first line is JSON"
        )
    for name in value if isinstance(value, dict) else ():
        if name in _RESERVED:
            raise InputError(f"{name} is a field of the answers: rename it, or put it in metadata")
        if name in _OF_PYTHON:
            raise InputError(f"{name} is an object in Python, which a file cannot contain: {_OF_PYTHON[name]}")
    return value


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
