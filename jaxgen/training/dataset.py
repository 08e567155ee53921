"""Convert texts and conversations to rows of training data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError, one_line, warn
from jaxgen.json_file import parse_json
from jaxgen.training.examples import IGNORED, Example
from jaxgen.training.lines import line_examples
from jaxgen.training.loop import TrainBatch
from jaxgen.utf8_text import text_lines

_SHOWN = 10  # maximum number of unused keys in a warning


def read_examples(file: str | Path, tokenizer: Tokenizer) -> list[Example]:
    """Read a JSONL file of conversations, prompts with completions, and texts; docs/training.md has their forms.

    If the tokenizer has a chat template, a prompt and its completion form a conversation. Otherwise, they form a text
    in which only the completion has labels. A conversation can have several examples; see `chat_examples`. If lines
    have keys that are not used, one warning names these keys.

    Raises:
        InputError: a line is invalid; the message gives the line number.
    """
    examples: list[Example] = []
    unused: dict[str, None] = {}
    for number, line in text_lines(str(file), Path(file).read_bytes()):
        try:
            found, names = line_examples(tokenizer, parse_json(line))
            if any(len(example.ids) < 2 for example in found):
                raise InputError("fewer than two tokens, so there is nothing to predict")
        except (ValueError, TypeError) as error:
            raise InputError(f"{file}, line {number}: {error}") from error
        examples += found
        unused |= dict.fromkeys(names)
    if not examples:
        raise InputError(f"{file} has no line to train on")
    if unused:
        names, more = ", ".join(list(unused)[:_SHOWN]), f" and {len(unused) - _SHOWN} more" * (len(unused) > _SHOWN)
        warn(f"{file}: keys that are not used for training: {one_line(names, 300)}{more}")
    return examples


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
        indices = range(step * rows, (step + 1) * rows)
        chosen = np.array([order(index // count)[index % count] for index in indices])
        return TrainBatch(data.ids[chosen], data.labels[chosen], data.segments[chosen])

    return batches
