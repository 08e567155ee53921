"""Prompts from a file, answered in batches."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np

from jaxgen.cli.timing import Stats
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.keys import prompt_keys
from jaxgen.decoding.stopping import StopReason
from jaxgen.errors import InputError
from jaxgen.generation import generate
from jaxgen.output import GenerateOutput
from jaxgen.text.lines import json_line, text_lines
from jaxgen.text.tokenizer import Tokenizer


class Line(NamedTuple):
    """One line of the input: the request, which the output repeats, its ids, and the maximum number of new tokens."""

    asked: dict[str, Any]
    ids: list[int]
    budget: int


def read_lines(
    source: str, system: str | None, tokenizer: Tokenizer, raw: bool, budget: Callable[[int], int]
) -> list[Line]:
    """Read a file, or stdin if `source` is "-". `budget` maps a prompt's length to its maximum number of new tokens.

    Each line is a prompt; or, if the first line begins with a brace, a JSON object with `prompt` or `messages`. Empty
    lines are skipped.

    Raises:
        InputError: a line that is neither, by its number, or no line at all.
    """
    if source == "-" and sys.stdin is None:
        raise InputError("--input - reads stdin, which is closed")
    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    lines = text_lines(f"--input {source}", data)
    if not lines:
        raise InputError(f"--input {source} has no prompt: write one per line")
    as_json = lines[0][1].lstrip().startswith("{")
    read = []
    for number, line in lines:
        try:
            asked = _entry(line) if as_json else {"prompt": line}
            ids = prompt_ids(asked, system, tokenizer, raw)
            read.append(Line(asked, ids, budget(len(ids))))
        except (ValueError, TypeError) as error:
            raise InputError(f"--input {source}, line {number}: {error}") from error
    return read


def write_answers(
    lines: list[Line],
    params,
    cfg: GenerationConfig,
    key: jax.Array | None,
    tokenizer: Tokenizer,
    batch_size: int,
    target: str | None,
    stats: Stats,
    more: Mapping[str, Any],
) -> None:
    """Answer the lines, and write a JSON line for each answer as soon as its batch is ready, in the order of the input.

    The answer to a line depends on its place in the input, not on the other lines or on the batch size. `more`:
    further keywords of `generate`.

    Raises:
        InputError: the file exists.
    """
    keys = None if key is None else prompt_keys(key, len(lines))
    with _opened(target) as stream:
        for start in range(0, len(lines), batch_size):
            part = lines[start : start + batch_size]
            ids, mask = tokenizer.pad([line.ids for line in part])
            ids = ids * mask  # the tokenizer may pad with an id that the model lacks
            cfg = cfg.replace(max_new_tokens=[line.budget for line in part])
            own = None if keys is None else keys[start : start + batch_size]
            with stats.generating() as generated:
                out = generate(params, ids, own, cfg, attention_mask=mask, **more)
                generated(out.lengths)
            for answer in _answers(part, out, cfg, tokenizer):
                print(json.dumps(answer, ensure_ascii=False), file=stream, flush=True)


def _answers(part: list[Line], out: GenerateOutput, cfg: GenerationConfig, tokenizer: Tokenizer) -> Iterator[dict]:
    lengths, reasons = np.asarray(out.lengths), np.asarray(out.stop_reasons)
    copies = cfg.num_return_sequences
    for row, text in enumerate(tokenizer.decode_batch(out)):
        sequence = {"sequence": row % copies} if copies > 1 else {}
        finish = StopReason(reasons[row]).name.lower()
        yield part[row // copies].asked | sequence | {"text": text, "tokens": int(lengths[row]), "finish": finish}


def _entry(line: str) -> dict[str, Any]:
    entry = json_line(line)
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise InputError(
            'each line must be an object with "prompt" or "messages", because the first line begins with a brace'
        )
    if not isinstance(entry.get("prompt", ""), str):
        raise InputError(f'"prompt" must be a string, got {json.dumps(entry["prompt"])[:80]}')
    if "messages" in entry and not _is_conversation(entry["messages"]):
        raise InputError(
            '"messages" must be a list of at least one {"role": "...", "content": "..."}, got '
            f"{json.dumps(entry['messages'])[:80]}"
        )
    return entry


def _is_conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    )


def prompt_ids(asked: Mapping[str, Any], system: str | None, tokenizer: Tokenizer, raw: bool) -> list[int]:
    """Return the ids of `prompt` or `messages` of a request, with the chat template unless there is none or `raw`.

    Raises:
        InputError: messages or a system message without a template, or no token.
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


def check_target(target: str | None) -> None:
    """Raise an error if the file to write answers to exists."""
    if target is not None and Path(target).exists():
        raise InputError(f"--output {target} exists: choose another name, or remove it")


@contextlib.contextmanager
def _opened(target: str | None) -> Iterator[TextIO]:
    if target is None:
        yield sys.stdout
        return
    check_target(target)  # again: loading took time
    with open(target, "x", encoding="utf-8") as stream:
        yield stream
