"""Texts that begin with given bytes, as a table over tokens: several tokens may spell them, then any token may follow.

A state is a place in a prefix. In a list of all tokens, sorted by their text, those that begin with the same bytes
are neighbours, so a state's transitions are a few ranges of that list.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxgen.errors import InputError
from jaxgen.text.tokenizer import Tokenizer

COMPLETE = 0  # the state in which nothing is left
LONGEST = 100_000  # bytes of all prefixes


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
    prefixes: Sequence[bytes], tokens: SortedTokens, vocab_size: int, largest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the class of each token int[V], the transitions int32[states, classes], and each prefix's state int32[n].

    In `COMPLETE`, which is the state of an empty prefix, every token may follow, special tokens too.

    Raises:
        InputError: more than `largest` transitions.
    """
    begin, states = {b"": COMPLETE}, COMPLETE + 1  # a prefix has a state for each place in it
    for prefix in prefixes:
        if prefix not in begin:
            begin[prefix], states = states, states + len(prefix)
    too_long = InputError(f"the prefixes have {states - 1:,} bytes, which is too long: shorten them")
    if states > LONGEST:
        raise too_long
    ranges = [
        (first, end, number + place, number + place + size if place + size < len(prefix) else COMPLETE)
        for prefix, number in begin.items()
        for place in range(len(prefix))
        for first, end, size in _spelling(tokens.texts, prefix, place)
    ]
    cuts = np.unique([0, *(cut for first, end, *_ in ranges for cut in (first, end))])
    if states * (len(cuts) + 1) > largest:
        raise too_long
    # Class 0 has the tokens without text, class i those from the i-th cut to the next.
    transitions = np.full((states, len(cuts) + 1), -1, np.int32)
    transitions[COMPLETE] = COMPLETE
    for first, last, source, target in ranges:
        start, end = np.searchsorted(cuts, (first, last), side="right")
        transitions[source, start:end] = target
    known = tokens.ids < vocab_size
    classes = np.zeros(vocab_size, np.int64)
    classes[tokens.ids[known]] = np.searchsorted(cuts, np.flatnonzero(known), side="right")
    used, classes = np.unique(classes, return_inverse=True)
    return classes, transitions[:, used], np.array([begin[prefix] for prefix in prefixes], np.int32)


def _spelling(texts: list[bytes], prefix: bytes, place: int) -> Iterator[tuple[int, int, int]]:
    """Yield the ranges of the texts that spell `size` bytes of a prefix from a place on, and these sizes.

    All bytes that are left may also be spelled by a longer text.
    """
    for size in range(1, len(prefix) - place + 1):
        text = prefix[place : place + size]
        first = bisect.bisect_left(texts, text)
        end = bisect.bisect_right(texts, text, first, key=lambda other: other[:size])
        if first == end:
            return
        yield first, end if place + size == len(prefix) else bisect.bisect_right(texts, text, first, end), size
