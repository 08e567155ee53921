"""Convert texts and conversations to rows of training data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgen.errors import InputError
from jaxgen.text.json_file import parse_json
from jaxgen.text.tokenizer import Tokenizer
from jaxgen.text.utf8_text import text_lines
from jaxgen.training.loop import TrainBatch

IGNORED = -100  # the label of tokens that do not contribute to the loss


class Example(NamedTuple):
    """The ids and labels of a text. A label is the token's id or `IGNORED`. The first label is never used."""

    ids: list[int]
    labels: list[int]


def text_example(tokenizer: Tokenizer, text: str) -> Example:
    """Return the example for plain text: the text's ids and the eos token, each with a label."""
    ids = _ended(tokenizer, tokenizer.encode(text))
    return Example(ids, ids)


def chat_example(tokenizer: Tokenizer, conversation: Sequence[Mapping[str, Any]]) -> Example:
    """Return the example for a conversation. Only the assistant's answers, with their end tokens, have labels.

    The ids encode the whole conversation. No token spans the boundary between a question and its answer, because the
    question's tokens are already fixed when an answer is generated. Messages after the last answer are left out.

    Raises:
        InputError: the conversation has no answer or begins with an answer, or the template renders the same beginning
            differently when more messages follow.
        TypeError: `conversation` is not a list of messages.
    """
    if not isinstance(conversation, Sequence) or not all(isinstance(message, Mapping) for message in conversation):
        raise TypeError('a conversation must be a list of messages, {"role": "...", "content": "..."}')
    ids: list[int] = []
    labels: list[int] = []
    done = last = ""
    for index, message in enumerate(conversation):
        if message.get("role") != "assistant":
            continue
        if index == 0:
            raise InputError("the conversation begins with an answer: add the question before it")
        question = tokenizer.render_chat(conversation[:index])
        answered = tokenizer.render_chat(conversation[: index + 1], add_generation_prompt=False)
        if not question.startswith(done) or not answered.startswith(question):
            raise InputError(
                "the chat template changes the beginning of a conversation when more messages follow, so answers "
                'cannot be located: train on "text" instead'
            )
        asked, answer = question[len(done) :], answered[len(question) :].rstrip()
        before, learnt = _after(tokenizer, last, asked), _after(tokenizer, asked, answer)
        ids += before + learnt
        labels += [IGNORED] * len(before) + learnt
        done, last = question + answer, answer
    if not any(label != IGNORED for label in labels):
        raise InputError("the conversation has no answer: at least one message must have the role assistant")
    return Example(ids, labels)


def read_examples(file: str | Path, tokenizer: Tokenizer) -> list[Example]:
    """Read a JSONL file of `{"messages": [...]}`, `{"prompt": ..., "completion": ...}` or `{"text": ...}` lines.

    If the tokenizer has a chat template, a prompt and its completion form a conversation. Otherwise, they form a text
    in which only the completion has labels.

    Raises:
        InputError: a line is invalid; the message gives the line number.
    """
    examples = []
    for number, line in text_lines(str(file), Path(file).read_bytes()):
        try:
            example = _example(tokenizer, parse_json(line))
            if len(example.ids) < 2:
                raise InputError("fewer than two tokens, so there is nothing to predict")
            examples.append(example)
        except (ValueError, TypeError) as error:
            raise InputError(f"{file}, line {number}: {error}") from error
    if not examples:
        raise InputError(f"{file} has no line to train on")
    return examples


def _example(tokenizer: Tokenizer, entry: Any) -> Example:
    fields = set(entry) if isinstance(entry, dict) else None
    if fields == {"messages"}:
        return chat_example(tokenizer, entry["messages"])
    if fields == {"text"} and isinstance(entry["text"], str) and entry["text"]:
        return text_example(tokenizer, entry["text"])
    if fields == {"prompt", "completion"} and all(isinstance(value, str) for value in entry.values()):
        return _completion(tokenizer, entry["prompt"], entry["completion"])
    raise InputError(
        'each line must be {"messages": [...]}, {"prompt": "...", "completion": "..."} or {"text": "..."}, '
        f"got {json.dumps(entry)[:80]}"
    )


def _completion(tokenizer: Tokenizer, prompt: str, completion: str) -> Example:
    if tokenizer.chat_template is not None:
        question, answer = {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}
        return chat_example(tokenizer, [question, answer])
    before = tokenizer.encode(prompt)
    learnt = _ended(tokenizer, _after(tokenizer, prompt, completion))
    return Example(before + learnt, [IGNORED] * len(before) + learnt)


def _ended(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Return the ids that `text` adds after `before`. If a token would span both, `text` is encoded separately."""
    first = tokenizer.encode(before, add_special_tokens=False)
    both = tokenizer.encode(before + text, add_special_tokens=False)
    if both[: len(first)] == first:
        return both[len(first) :]
    return tokenizer.encode(text, add_special_tokens=False)


def pack(examples: Iterable[Example], width: int) -> tuple[TrainBatch, int]:
    """Pack examples into rows of `width` tokens.

    An example is added to the first row with enough space among the last 64 rows, or else to a new row. Return the rows
    as numpy arrays, and the number of examples that were truncated to the length of a row.

    Raises:
        InputError: `width` is less than 2.
    """
    if width < 2:
        raise InputError(f"a row must have at least 2 tokens, so that there is one to predict, got {width}")
    rows: list[list[Example]] = []
    room: list[int] = []
    cut = first_open = 0
    for example in examples:
        cut += len(example.ids) > width
        example = Example(example.ids[:width], example.labels[:width])
        size = len(example.ids)
        row = next((index for index in range(first_open, len(rows)) if room[index] >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(example)
        room[row] -= size
        first_open = max(first_open, len(rows) - 64)  # keeps the time linear in the number of examples
    return _rows(rows, width), cut


def _rows(rows: list[list[Example]], width: int) -> TrainBatch:
    ids = np.zeros((len(rows), width), np.int32)
    labels = np.full((len(rows), width), IGNORED, np.int32)
    segments = np.zeros((len(rows), width), np.int32)
    for row, examples in enumerate(rows):
        start = 0
        for number, example in enumerate(examples, start=1):
            end = start + len(example.ids)
            ids[row, start:end] = example.ids
            labels[row, start + 1 : end] = example.labels[1:]  # a text's first token is not predicted from another text
            segments[row, start:end] = number
            start = end
    return TrainBatch(ids, labels, segments)


def shuffled(data: TrainBatch, rows: int, seed: int) -> Callable[[int], TrainBatch]:
    """Return a function `batches(step)` that returns `rows` rows of the data, in a new order in each epoch.

    A batch depends only on `step` and the arguments. If an epoch's last batch is not full, the next epoch fills it.

    Raises:
        InputError: there is no data, or `rows` is less than 1.
    """
    count = data.ids.shape[0]
    if count == 0 or rows < 1:
        raise InputError(f"there must be at least one row of data and one row per batch, got {count} and {rows}")

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng((seed, epoch)).permutation(count)

    def batches(step: int) -> TrainBatch:
        places = range(step * rows, (step + 1) * rows)
        chosen = np.array([order(place // count)[place % count] for place in places])
        return TrainBatch(data.ids[chosen], data.labels[chosen], data.segments[chosen])

    return batches
