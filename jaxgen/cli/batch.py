"""Prompts from a file, answered in batches."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgen.cli import terminal
from jaxgen.cli.answer_file import AnswerFile
from jaxgen.cli.timing import Stats
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.keys import prompt_keys
from jaxgen.decoding.stopping import StopReason
from jaxgen.errors import GenerationError, InputError
from jaxgen.generation import generate
from jaxgen.output import GenerateOutput
from jaxgen.text.json_file import parse_json
from jaxgen.text.lines import text_lines
from jaxgen.text.tokenizer import Tokenizer


class Line(NamedTuple):
    """One line of the input: the request, which the output repeats, its ids, and the maximum number of new tokens."""

    asked: dict[str, Any]
    ids: list[int]
    budget: int


def read_lines(
    source: str, system: str | None, tokenizer: Tokenizer, raw: bool, budget: Callable[[list[int]], int]
) -> list[Line]:
    """Read a file, or stdin if `source` is "-". `budget` maps a prompt's ids to its maximum number of new tokens.

    Each line is a prompt; or, if the first line begins with a brace, a JSON object with `prompt` or `messages`. Empty
    lines are skipped.

    Raises:
        InputError: a line that is neither, by its number, or no line at all.
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
    """Return all of stdin.

    Raises:
        InputError: it is closed.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise InputError("- reads stdin, which is closed")
    return sys.stdin.buffer.read()


def digest(lines: Sequence[Line]) -> str:
    """Return a digest of requests and ids."""
    return hashlib.sha256(json.dumps([(line.asked, line.ids) for line in lines]).encode()).hexdigest()


def write_answers(
    lines: Sequence[Line],
    start: int,
    params,
    cfg: GenerationConfig,
    key: jax.Array | None,
    tokenizer: Tokenizer,
    batch_size: int,
    file: AnswerFile | None,
    stats: Stats,
    more: Mapping[str, Any],
) -> None:
    """Answer the lines from number `start` on: a JSON line for each answer, as soon as its batch is ready.

    The answer to a line depends on its place in the input, not on the other lines or on the batch size. `file`: None
    for stdout. `more`: further keywords of `generate`.
    """
    keys = None if key is None else prompt_keys(key, len(lines))
    progress = _Progress(len(lines), stats)
    for first in range(start, len(lines), batch_size):
        part = lines[first : first + batch_size]
        ids, mask = tokenizer.pad([line.ids for line in part])
        ids = ids * mask  # the tokenizer may pad with an id that the model lacks
        cfg = cfg.replace(max_new_tokens=[line.budget for line in part])
        own = None if keys is None else keys[first : first + batch_size]
        with stats.generating() as generated:
            try:
                out = generate(params, ids, own, cfg, attention_mask=mask, **more)
            except GenerationError as error:
                raise GenerationError(f"prompts {first + 1} to {first + len(part)} of --input: {error}") from error
            generated(out.lengths)
        answers = list(_answers(part, out, cfg, tokenizer))
        if file is not None:
            file.write(answers)
        else:
            terminal.erase()
            print(*(json.dumps(answer, ensure_ascii=False) for answer in answers), sep="\n", flush=True)
        if file is not None or not (sys.stdout is not None and sys.stdout.isatty()):
            progress.show(first - start + len(part), first + len(part))


class _Progress:
    """The status line of a run: prompts that are answered, their rate and the time left."""

    def __init__(self, prompts: int, stats: Stats):
        self.prompts, self.stats = prompts, stats
        self.began, self.compiled = time.monotonic(), stats.compile
        terminal.show(f"{prompts:,} prompts: compiling, and answering the first")

    def show(self, answered: int, done: int) -> None:
        """Show that this run answered `answered` prompts, and that `done` are answered in all."""
        seconds = max(time.monotonic() - self.began - (self.stats.compile - self.compiled), 1e-9)
        left = round(seconds * (self.prompts - done) / answered)
        terminal.show(
            f"{done:,} of {self.prompts:,} prompts, {answered / seconds:.2g} per second, "
            f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        )


def _answers(part: Sequence[Line], out: GenerateOutput, cfg: GenerationConfig, tokenizer: Tokenizer) -> Iterator[dict]:
    lengths, reasons = np.asarray(out.lengths), np.asarray(out.stop_reasons)
    copies = cfg.num_return_sequences
    for row, text in enumerate(tokenizer.decode_batch(out)):
        sequence = {"sequence": row % copies} if copies > 1 else {}
        finish = StopReason(reasons[row]).name.lower()
        answer = part[row // copies].asked | sequence | {"text": text, "tokens": int(lengths[row]), "finish": finish}
        yield answer | ({} if out.logprobs is None else {"logprobs": _logprobs(out, row, tokenizer)})


def _logprobs(out: GenerateOutput, row: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the tokens that a row generated, with their log-probabilities."""
    count = int(np.asarray(out.lengths)[row])
    ids = np.asarray(out.sequences)[row, out.prompt_width :][:count].tolist()
    values = np.asarray(out.logprobs)[row, :count].tolist()
    return [
        {"id": token, "token": tokenizer.decode([token], skip_special_tokens=False), "logprob": round(value, 6)}
        for token, value in zip(ids, values, strict=True)
    ]


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
    """Return True for a list of at least one message, a dict with a role."""
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
