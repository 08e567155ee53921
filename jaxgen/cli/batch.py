"""Prompts from a file, answered in batches."""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgen.cli import terminal
from jaxgen.cli.answer_file import AnswerFile
from jaxgen.cli.options import in_flags
from jaxgen.cli.session import Session
from jaxgen.cli.timing import Stats
from jaxgen.decoding.keys import prompt_keys
from jaxgen.decoding.stopping import StopReason
from jaxgen.errors import GenerationError, InputError
from jaxgen.generation import generate
from jaxgen.model.config import ModelConfig
from jaxgen.output import GenerateOutput, failure_of
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
    lines: Sequence[Line], start: int, session: Session, batch_size: int, file: AnswerFile | None
) -> None:
    """Answer the lines from number `start` on: a JSON line for each answer, as soon as its batch is ready.

    The answer to a line depends on its place in the input, not on the other lines or on the batch size. One that cannot
    continue, because all tokens are banned for example, has the reason in `error`. `file`: None for stdout.
    """
    keys = prompt_keys(session.key, len(lines)) if session.cfg.on("do_sample") else None
    progress = _Progress(len(lines), session.stats)
    for first in range(start, len(lines), batch_size):
        part = lines[first : first + batch_size]
        with session.stats.generating() as generated:
            out = _generate(part, session, None if keys is None else keys[first : first + batch_size])
            generated(out.lengths)
        answers = list(_answers(part, out, session))
        if file is not None:
            file.write(answers)
        else:
            terminal.erase()
            print(*(_json(answer) for answer in answers), sep="\n", flush=True)
        if file is not None or not (sys.stdout is not None and sys.stdout.isatty()):
            progress.show(first - start + len(part), first + len(part))


def _generate(part: Sequence[Line], session: Session, keys: jax.Array | None) -> GenerateOutput:
    """Answer some lines; rows that cannot continue end there."""
    ids, mask = session.tokenizer.pad([line.ids for line in part])
    ids = ids * mask  # the tokenizer may pad with an id that the model lacks
    cfg = session.cfg.replace(max_new_tokens=[line.budget for line in part])
    more = {"attention_mask": mask, "tokenizer": session.tokenizer, **session.more}
    try:
        return generate(session.params, ids, keys, cfg, **more)
    except GenerationError as error:
        return error.output


def _json(answer: Mapping[str, Any]) -> str:
    """Return a line for stdout, in ASCII if its encoding is not UTF-8."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return json.dumps(answer, ensure_ascii=codecs.lookup(encoding).name != "utf-8")


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


def _answers(part: Sequence[Line], out: GenerateOutput, session: Session) -> Iterator[dict[str, Any]]:
    """Yield the output line of each row: the request with its answer."""
    lengths, reasons = np.asarray(out.lengths), np.asarray(out.stop_reasons)
    copies = session.cfg.num_return_sequences
    for row, text in enumerate(session.tokenizer.decode_batch(out)):
        answer = part[row // copies].asked | ({"sequence": row % copies} if copies > 1 else {})
        finish = StopReason(reasons[row]).name.lower()
        answer |= {"text": text, "tokens": int(lengths[row]), "finish": finish}
        if (failure := failure_of(out, row)) is not None:
            session.stats.failed += 1
            answer["error"] = in_flags(failure)
        if out.logprobs is not None:
            answer["logprobs"] = _logprobs(out, row, session.tokenizer)
        yield answer


def _logprobs(out: GenerateOutput, row: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the tokens that a row generated, with their log-probabilities."""
    count = int(np.asarray(out.lengths)[row])
    ids = np.asarray(out.sequences)[row, out.prompt_width :][:count].tolist()
    values = np.asarray(out.logprobs)[row, :count].tolist()
    return [
        {"id": token, "token": tokenizer.decode([token], skip_special_tokens=False), "logprob": round(value, 6)}
        for token, value in zip(ids, values, strict=True)
    ]


def check_vocabulary(ids: Iterable[int], model: ModelConfig) -> None:
    """Raise an error for an id that the model lacks: the tokenizer is another model's."""
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
