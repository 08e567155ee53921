"""Texts that begin with given bytes, as a table over tokens: several tokens may spell them, then any token may follow.

A state is what is left to spell. In a list of all tokens, sorted by their text, those that begin with the same bytes
are neighbours, so a state's transitions are a few ranges of that list.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxgen.text.tokenizer import Tokenizer

COMPLETE = 0  # the state in which nothing is left


class SortedTokens(NamedTuple):
    """The tokens that have a text, sorted by it: `ids int[n]` and their `texts`."""

    ids: np.ndarray
    texts: list[bytes]


_SORTED: weakref.WeakKeyDictionary[Tokenizer, SortedTokens] = weakref.WeakKeyDictionary()


def sorted_tokens(tokenizer: Tokenizer) -> SortedTokens:
    """Sort the tokens, once per tokenizer."""
    if tokenizer not in _SORTED:
        entries = sorted((text, token) for token, text in enumerate(tokenizer.token_bytes()) if text)
        ids = np.array([token for _, token in entries], np.int64)
        _SORTED[tokenizer] = SortedTokens(ids, [text for text, _ in entries])
    return _SORTED[tokenizer]


def prefix_table(
    prefixes: Sequence[bytes], tokens: SortedTokens, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the class of each token int[V], the transitions int32[states, classes], and each prefix's state int32[n].

    In `COMPLETE`, which is the state of an empty prefix, every token may follow, special tokens too.
    """
    rests = {prefix[place:]: None for prefix in prefixes for place in range(len(prefix))}
    state = {b"": COMPLETE, **{rest: number for number, rest in enumerate(rests, start=1)}}
    ranges = []
    for rest in rests:
        ranges.append((*_span(tokens.texts, rest, beginning=True), state[rest], COMPLETE))
        for size in range(1, len(rest)):
            ranges.append((*_span(tokens.texts, rest[:size], beginning=False), state[rest], state[rest[size:]]))
    cuts = np.unique([0, *(end for first, last, *_ in ranges for end in (first, last))])
    # Class 0 has the tokens without text, class i those from the i-th cut to the next.
    transitions = np.full((len(state), len(cuts) + 1), -1, np.int32)
    transitions[COMPLETE] = COMPLETE
    for first, last, source, target in ranges:
        start, end = np.searchsorted(cuts, (first, last), side="right")
        transitions[source, start:end] = target
    known = tokens.ids < vocab_size
    classes = np.zeros(vocab_size, np.int64)
    classes[tokens.ids[known]] = np.searchsorted(cuts, np.flatnonzero(known), side="right")
    used, classes = np.unique(classes, return_inverse=True)
    return classes, transitions[:, used], np.array([state[prefix] for prefix in prefixes], np.int32)


def _span(texts: list[bytes], text: bytes, beginning: bool) -> tuple[int, int]:
    """Return the range of the texts equal to `text`, or with `beginning` of all that begin with it."""
    first = bisect.bisect_left(texts, text)
    return first, bisect.bisect_right(texts, text, first, key=lambda other: other[: len(text)] if beginning else other)
