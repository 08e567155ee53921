"""The text of a prompt, as the model read it, for answers that repeat the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxgen.core.text.streaming import TextStream
from jaxgen.core.text.tokenizer import Tokenizer


class Echo(NamedTuple):
    """The text of a prompt.

    Attributes:
        text: the text.
        offsets: for each token, the number of characters that were complete before the token.
    """

    text: str
    offsets: list[int]


def echo_of(tokenizer: Tokenizer, ids: Sequence[int], prompt: str | None) -> Echo:
    """Return the text of ids. `prompt` is the text from which they were made, or None if they were given as ids.

    Special tokens are part of the text, except those that the tokenizer itself adds to a text, such as BOS.
    """
    special = {index: token.content for index, token in tokenizer.backend.get_added_tokens_decoder().items()}
    begin, end = 0, len(ids)
    if prompt is not None:
        while begin < end and (name := special.get(ids[begin])) is not None and not prompt.lstrip().startswith(name):
            begin += 1
        while begin < end and (name := special.get(ids[end - 1])) is not None and not prompt.rstrip().endswith(name):
            end -= 1
    stream = TextStream(tokenizer, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    pieces, offsets, length = [], [0] * begin, 0
    for token in ids[begin:end]:
        offsets.append(length)
        pieces.append(stream.put(token))
        length += len(pieces[-1])
    text = "".join([*pieces, stream.end()])
    return Echo(text, offsets + [len(text)] * (len(ids) - end))
