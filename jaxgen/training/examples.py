"""Examples to train on: the ids of a text, and which of them the model learns to generate."""

from __future__ import annotations

from typing import NamedTuple

from jaxgen.core.text.tokenizer import Tokenizer

IGNORED = -100  # the label of tokens that do not contribute to the loss


class Example(NamedTuple):
    """The ids and labels of a text. A label is the token's id or `IGNORED`. The first label is never used."""

    ids: list[int]
    labels: list[int]


def text_example(tokenizer: Tokenizer, text: str) -> Example:
    """Return the example for plain text: the text's ids and the eos token, each with a label."""
    ids = _ended(tokenizer, tokenizer.encode(text))
    return Example(ids, ids)


def completion_example(tokenizer: Tokenizer, prompt: str, completion: str) -> Example:
    """Return the example for a text in which only the completion and the eos token have labels."""
    before = tokenizer.encode(prompt)
    learnt = _ended(tokenizer, ids_after(tokenizer, prompt, completion))
    return Example(before + learnt, [IGNORED] * len(before) + learnt)


def ids_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Return the ids that `text` adds after `before`. If a token would span both, `text` is encoded separately."""
    first = tokenizer.encode(before, add_special_tokens=False)
    both = tokenizer.encode(before + text, add_special_tokens=False)
    if both[: len(first)] == first:
        return both[len(first) :]
    return tokenizer.encode(text, add_special_tokens=False)


def _ended(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
