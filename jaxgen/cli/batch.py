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

    Each line is a prompt; or, if the first line is a JSON object, a JSON object with `prompt` or `messages`. Empty
    lines are skipped.

    Raises:
        InputError: a line that is neither, by its number, or no line at all.
    """
    text = sys.stdin.read() if source == "-" else _read(Path(source))
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise InputError(f"--input {source} has no prompt: write one per line")
    as_json = _is_object(lines[0][1])
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


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"--input {path} is not UTF-8 text: {error}") from error


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _entry(line: str) -> dict[str, Any]:
    entry = json.loads(line)
    if not isinstance(entry, Mapping) or ("prompt" in entry) == ("messages" in entry):
        raise InputError('each line must be an object with "prompt" or "messages", because the first line is an object')
    if not isinstance(entry.get("prompt", ""), str):
        raise InputError(f'"prompt" must be a string, got {json.dumps(entry["prompt"])[:80]}')
    return dict(entry)


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
