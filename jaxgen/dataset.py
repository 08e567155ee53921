"""Texts and conversations as rows to train on."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgen.errors import InputError
from jaxgen.tokenizer import Tokenizer
from jaxgen.train import TrainBatch

IGNORED = -100  # the label of a token that nothing is learnt from


class Example(NamedTuple):
    """One text: its ids, and the labels, which are the ids or `IGNORED`. The first label is never learnt."""

    ids: list[int]
    labels: list[int]


def text_example(tokenizer: Tokenizer, text: str) -> Example:
    """Return a plain text, all of which is learnt, with the eos token at its end."""
    ids = tokenizer.encode(text)
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    return Example(ids, ids)


def chat_example(tokenizer: Tokenizer, conversation: Sequence[Mapping[str, Any]]) -> Example:
    """Return a conversation of which only the assistant's answers are learnt, with the token that ends each.

    Each answer is encoded apart from what precedes it, as it is when it is generated.

    Raises:
        InputError: no answer, or a template that renders the same beginning differently when more follows.
    """
    ids: list[int] = []
    labels: list[int] = []
    done = ""
    for index, message in enumerate(conversation):
        if message.get("role") != "assistant":
            continue
        question = tokenizer.render_chat(conversation[:index]) if index else done
        answered = tokenizer.render_chat(conversation[: index + 1], add_generation_prompt=False)
        if not question.startswith(done) or not answered.startswith(question):
            raise InputError(
                "the chat template changes the beginning of a conversation when more follows, so its answers "
                'cannot be told apart: train on "text" instead'
            )
        answer = answered[len(question) :].rstrip()
        before = tokenizer.encode(question[len(done) :], add_special_tokens=False)
        learnt = tokenizer.encode(answer, add_special_tokens=False)
        ids += before + learnt
        labels += [IGNORED] * len(before) + learnt
        done = question + answer
    if not any(label != IGNORED for label in labels):
        raise InputError("the conversation has no answer: at least one message needs the role assistant")
    return Example(ids, labels)


def read_examples(file: Path, tokenizer: Tokenizer) -> list[Example]:
    """Read a JSONL file of `{"messages": [...]}`, `{"prompt": ..., "completion": ...}` or `{"text": ...}` lines.

    A completion is learnt as the answer to its prompt: a conversation where the tokenizer has a chat template, one
    text where it has none.

    Raises:
        InputError: a line that is none of these, by its number.
    """
    examples = []
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                examples.append(_example(tokenizer, json.loads(line)))
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
    learnt = tokenizer.encode(completion, add_special_tokens=False)
    learnt += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Example(before + learnt, [IGNORED] * len(before) + learnt)


def pack(examples: Iterable[Example], width: int) -> tuple[TrainBatch, int]:
    """Put examples into rows of `width` tokens, several in a row where they fit, each in the first row with room.

    Returns the rows, numpy arrays, and the number of examples that were longer than a row and lost their end.
    """
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
        # Only the last rows are looked through, so that a long list stays linear.
        first_open = max(first_open, len(rows) - 64)
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
            labels[row, start + 1 : end] = example.labels[1:]  # the token before a text does not predict its first
            segments[row, start:end] = number
            start = end
    return TrainBatch(ids, labels, segments)


def shuffled(data: TrainBatch, rows: int, seed: int) -> Callable[[int], TrainBatch]:
    """Return `batches(step)`: `rows` rows of the data, in a new order in each epoch.

    The batch of a step depends on the arguments alone. Where fewer rows are left at an epoch's end than a batch needs,
    the next epoch's come in.
    """
    count = data.ids.shape[0]

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng((seed, epoch)).permutation(count)

    def batches(step: int) -> TrainBatch:
        places = range(step * rows, (step + 1) * rows)
        chosen = np.array([order(place // count)[place % count] for place in places])
        return TrainBatch(data.ids[chosen], data.labels[chosen], data.segments[chosen])

    return batches
