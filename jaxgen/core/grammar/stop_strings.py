"""Stop strings on the device: detection of strings that end within the newest token.

The strings are compiled to an Aho-Corasick automaton, which reads the bytes of each new token. Token and character
boundaries therefore do not matter, and no table needs an entry for every pair of a state and a token. The tables that
depend on the tokenizer are built once, and the tables that depend on the strings are small. Several sets of strings,
each with its own automaton, share one table, so a row's state alone determines which strings end the row. All tables
are traced, and the number of states is rounded up, so different strings of similar size use the same program.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.buckets import power_of_two
from jaxgen.control import fori_loop
from jaxgen.core.config.kinds import Text
from jaxgen.core.text.tokenizer import Tokenizer, check_tokenizer
from jaxgen.errors import InputError, shown
from jaxgen.utf8_text import encoded

SMALLEST = 64  # minimum number of states
# The values of the option `stop_strings`.
Strings = str | Sequence[str] | Sequence[Sequence[str] | None]


@flax.struct.dataclass
class StopStrings:
    """Automata for sets of stop strings, one state per row: `StopStringCriteria` of transformers 5, applied to bytes.

    A string is found if it ends anywhere within the newest token: "stop" is found in "sto" + "pper". In "stop" + "at",
    "stop" is found after the first token, and not again after the second. A string may begin in the prompt. A token's
    text comes from `Tokenizer.token_bytes`, so a SentencePiece token keeps its space even where `decode` drops it. The
    text of a special token is its name, so "<|im_end|>" can be a stop string. Ids without a token have no text.

    Attributes:
        text: uint8[n], the bytes of all tokens, concatenated.
        offsets: int32[V + 1], the start of each token's bytes in `text`; the last is n.
        goto: int32[S, 256], the next state for each state and byte; 0 in the padding.
        found: bool[S], True if a stop string ends in this state.
        longest: int32[], the number of bytes in the longest stop string of all sets, always less than S.
        start: int32[] or int32[B], the initial state for all prompts, or for each prompt.
        spans_prompt: True if a string may begin in the prompt; static.
    """

    text: jax.Array
    offsets: jax.Array
    goto: jax.Array
    found: jax.Array
    longest: jax.Array
    start: jax.Array
    spans_prompt: bool = flax.struct.field(pytree_node=False, default=True)

    @classmethod
    def build(cls, strings: Strings, tokenizer: Tokenizer, vocab_size: int | None = None) -> StopStrings:
        """Build the tables for one set of stop strings that all prompts share, or for one set per prompt.

        Prompts with the same strings share states. `vocab_size` is the size of the model's vocabulary; the default
        is the size of the tokenizer's vocabulary. Ids that are not in the tokenizer have no text.

        Raises:
            ConfigError: there are no strings, or one is empty.
            InputError: the tokenizer's tokens cannot form one of the strings.
            TypeError: `strings` is not a valid value for the option `stop_strings`.
        """
        given = Text().parse("stop_strings", strings)
        sets = [tuple(sorted(set(own or ()))) for own in Text().sets(given)]
        first, parts, used = {}, {}, 0
        for own in dict.fromkeys(sets):
            automaton = StopAutomaton.of(own, tokenizer, vocab_size)
            first[own], parts[used], used = used, automaton, used + automaton.states
        table = cls.join(parts, tokenizer, vocab_size, capacity=power_of_two(used, SMALLEST))
        start = [first[own] for own in sets]
        start = start[0] if Text().prompt_count(given) is None else start
        return dataclasses.replace(table, start=jnp.asarray(start, jnp.int32))

    @classmethod
    def join(
        cls, parts: Mapping[int, StopAutomaton], tokenizer: Tokenizer, vocab_size: int | None, *, capacity: int
    ) -> StopStrings:
        """Combine automata into tables of `capacity` states; the keys of `parts` are the automata's first states.

        The result's `start` is 0.
        """
        text, offsets = _vocabulary(tokenizer, vocab_size)
        goto, found = np.zeros((capacity, 256), np.int32), np.zeros(capacity, bool)
        for first, part in parts.items():
            own = slice(first, first + part.states)
            goto[own], found[own] = part.tables[0] + first, part.tables[1]
        longest = max((part.longest for part in parts.values()), default=0)
        arrays = map(jnp.asarray, (text, offsets, goto, found, np.int32(longest), np.int32(0)))
        return cls(*arrays)  # pyright: ignore[reportArgumentType]

    def begin(self, start: jax.Array, ids: jax.Array, length: jax.Array) -> jax.Array:
        """Return each row's state after the prompt, as int32[rows].

        Each row begins in its `start` state and reads its first `length` tokens. `start` and `length` are int32[rows],
        and `ids` is int32[rows, W].
        """
        if not self.spans_prompt:
            return start
        last = self._last_bytes(ids, length)

        def step(back: jax.Array, state: jax.Array) -> jax.Array:
            column = last.shape[1] - self.longest + back
            return self._follow(state, lax.dynamic_index_in_dim(last, column, axis=1, keepdims=False))

        return fori_loop(0, self.longest, step, start)

    def push(self, state: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the states after one more token (int32[rows]), and whether a stop string was found (bool[rows])."""
        start, size = self._span(tokens)

        def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            state, ends = carry
            byte = jnp.where(i < size, self._bytes(start + i), -1)
            state = self._follow(state, byte)
            return state, ends | ((i < size) & self.found[state])

        return fori_loop(0, jnp.max(size), step, (state, jnp.zeros(state.shape, bool)))

    def _span(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return where each id's bytes begin in `text`, and how many bytes each id has."""
        vocab = self.offsets.shape[0] - 1
        known = (ids >= 0) & (ids < vocab)
        start, end = (self.offsets[jnp.clip(ids, 0, vocab - 1) + shift] for shift in (0, 1))
        return start, jnp.where(known, end - start, 0)

    def _bytes(self, at: jax.Array) -> jax.Array:
        return jnp.take(self.text, at, mode="clip").astype(jnp.int32)

    def _follow(self, state: jax.Array, byte: jax.Array) -> jax.Array:
        """Return the next state; a byte of -1 leaves the state unchanged."""
        return jnp.where(byte < 0, state, self.goto[state, jnp.maximum(byte, 0)])

    def _last_bytes(self, ids: jax.Array, length: jax.Array) -> jax.Array:
        """Return the last S bytes of each row, int32[rows, S], padded with -1 on the left; S > `longest`."""
        width, count = ids.shape[1], self.goto.shape[0]
        held = jnp.arange(width, dtype=jnp.int32)[None, :] < length[:, None]
        start, size = self._span(jnp.where(held, ids, -1))
        end = jnp.cumsum(size, axis=1)
        position = end[:, -1:] - count + jnp.arange(count, dtype=jnp.int32)[None, :]
        token = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(end, position)
        token = jnp.minimum(token, width - 1)
        at = position + jnp.take_along_axis(start + size - end, token, axis=1)
        return jnp.where(position < 0, -1, self._bytes(at))


@dataclasses.dataclass(frozen=True)
class StopAutomaton:
    """The automaton of one set of stop strings. Its tables, with 1,024 bytes per state, are built when first used.

    Attributes:
        patterns: the strings as bytes, sorted and without duplicates.
        states: the number of states.
        start: the initial state.
    """

    patterns: tuple[bytes, ...]
    states: int
    start: int = 0

    @property
    def longest(self) -> int:
        """The number of bytes in the longest string."""
        return max(map(len, self.patterns), default=0)

    @functools.cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """The tables `goto` and `found`; see `StopStrings`."""
        return _automaton(self.patterns, self.states)

    @classmethod
    def of(cls, strings: Sequence[str], tokenizer: Tokenizer, vocab_size: int | None) -> StopAutomaton:
        """Return the automaton; without strings, it finds nothing. Raises InputError as in `StopStrings.build`."""
        check_tokenizer(tokenizer)
        text, _ = _vocabulary(tokenizer, vocab_size)
        possible = set(text.tobytes())
        patterns = sorted({encoded("a string of stop_strings", string) for string in strings})
        for pattern in patterns:
            if not possible.issuperset(pattern):
                raise InputError(
                    f"stop_strings has {shown(pattern.decode())}, which this tokenizer's tokens cannot produce: "
                    "leave it out"
                )
        # A string has a state for each byte after the beginning that it shares with the string before it.
        pairs = itertools.pairwise([b"", *patterns])
        states = 1 + sum(len(pattern) - _shared(before, pattern) for before, pattern in pairs)
        return cls(tuple(patterns), states)


def _shared(one: bytes, other: bytes) -> int:
    """Return the number of equal bytes at the beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


_Vocabulary = tuple[np.ndarray, np.ndarray]  # `text` and `offsets` of `StopStrings`
_VOCABULARIES: weakref.WeakKeyDictionary[Tokenizer, dict[int | None, _Vocabulary]] = weakref.WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> _Vocabulary:
    """Concatenate the bytes of all tokens; the result is cached for each tokenizer and size."""
    made = _VOCABULARIES.setdefault(tokenizer, {})
    if vocab_size not in made:
        tokens = tokenizer.token_bytes()
        for index, token in tokenizer.backend.get_added_tokens_decoder().items():
            if tokens[index] is None:
                tokens[index] = token.content.encode()
        size = len(tokens) if vocab_size is None else vocab_size
        tokens = [token or b"" for token in tokens[:size]] + [b""] * (size - len(tokens))
        text = b"".join(tokens)
        made[vocab_size] = (
            np.frombuffer(text or b"\0", np.uint8),  # a gather needs at least one element
            np.concatenate([[0], np.cumsum([len(token) for token in tokens])]).astype(np.int32),
        )
    return made[vocab_size]


def _automaton(patterns: Sequence[bytes], states: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `goto` and `found` of the automaton for a set of strings (Aho and Corasick 1975); state 0 is the start.

    Without strings, the automaton never leaves its only state.
    """
    goto, found = np.zeros((states, 256), np.int32), np.zeros(states, bool)
    used = 1
    for pattern in patterns:
        state = 0
        for byte in pattern:
            if not goto[state, byte]:
                goto[state, byte] = used
                used += 1
            state = goto[state, byte]
        found[state] = True
    # A state inherits missing transitions from the state of its longest proper suffix, which is visited earlier.
    suffix = np.zeros(states, np.int32)
    queue = collections.deque(int(child) for child in goto[0] if child)
    while queue:
        state = queue.popleft()
        found[state] |= found[suffix[state]]
        own, inherited = goto[state].copy(), goto[suffix[state]]
        suffix[own[own > 0]] = inherited[own > 0]
        goto[state] = np.where(own > 0, own, inherited)
        queue.extend(int(child) for child in own if child)
    return goto, found
