"""Stop strings on the device: does one end within the newest token?

The strings become an Aho-Corasick automaton over bytes, which runs over the bytes of each new token. So it does not
matter where tokens or characters are cut, and there is no table of states times vocabulary: what depends on the
tokenizer is made once for it, what depends on the strings is small. All tables are traced, the automaton's size is
rounded up: other strings of about the size are the same program.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxgen.buckets import power_of_two
from jaxgen.errors import InputError
from jaxgen.text.tokenizer import Tokenizer

SMALLEST = 64  # states


@flax.struct.dataclass
class StopStrings:
    """Follow the text of each row, one number a row; HF's `StopStringCriteria` on bytes, as from 5.0.

    A string counts if it ends anywhere within the newest token: "stop" in "sto" + "pper", not in "stop" + "at". It may
    begin in the prompt. Text is that of `Tokenizer.token_bytes`: a SentencePiece token keeps its space also where
    `decode` leaves it out. A special token has its name for text, so that "<|im_end|>" can be a stop string; ids
    without a token have none.

    Attributes:
        text: uint8[n], the bytes of all tokens one after the other.
        offsets: int32[V + 1], where those of each token begin; the last is n.
        goto: int32[S, 256], the state that each byte leads to; state 0 is the beginning.
        found: bool[S], a stop string ends here.
        longest: int32[], bytes of the longest stop string, less than S.
    """

    text: jax.Array
    offsets: jax.Array
    goto: jax.Array
    found: jax.Array
    longest: jax.Array

    @classmethod
    def build(cls, strings: str | Sequence[str], tokenizer: Tokenizer, vocab_size: int | None = None) -> StopStrings:
        """Build the tables of one or several stop strings.

        `vocab_size` is the model's, as many as the tokenizer has if None; ids beyond it have no text.

        Raises InputError for no string, an empty one, and one that no tokens can make; TypeError for what is no str.
        """
        if not isinstance(tokenizer, Tokenizer):
            raise TypeError(f"stop_strings need a jaxgen.Tokenizer, got {type(tokenizer).__name__}")
        patterns = _patterns(strings)
        vocabulary = _vocabulary(tokenizer, vocab_size)
        for pattern in patterns:
            if not vocabulary.has.issuperset(pattern):
                raise InputError(
                    f"stop_strings has {pattern.decode()!r}, which this tokenizer's tokens cannot make: leave it out"
                )
        goto, found = _automaton(patterns)
        return cls(
            text=jnp.asarray(vocabulary.text),
            offsets=jnp.asarray(vocabulary.offsets),
            goto=jnp.asarray(goto),
            found=jnp.asarray(found),
            longest=jnp.asarray(max(map(len, patterns)), jnp.int32),
        )

    def begin(self, ids: jax.Array, length: jax.Array) -> jax.Array:
        """Return the state int32[rows] behind the prompts, the first `length int32[rows]` of `ids int32[rows, W]`."""
        last = self._last_bytes(ids, length)

        def step(back: jax.Array, state: jax.Array) -> jax.Array:
            column = last.shape[1] - self.longest + back
            return self._follow(state, lax.dynamic_index_in_dim(last, column, axis=1, keepdims=False))

        return lax.fori_loop(0, self.longest, step, jnp.zeros_like(length))

    def push(self, state: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the state behind one more token per row, int32[rows], and whether a stop string ends in it."""
        start, size = self._span(tokens)

        def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            state, ends = carry
            byte = jnp.where(i < size, self._bytes(start + i), -1)
            state = self._follow(state, byte)
            return state, ends | ((i < size) & self.found[state])

        return lax.fori_loop(0, jnp.max(size), step, (state, jnp.zeros(state.shape, bool)))

    def _span(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where the bytes of each id begin and how many they are."""
        vocab = self.offsets.shape[0] - 1
        known = (ids >= 0) & (ids < vocab)
        start, end = (self.offsets[jnp.clip(ids, 0, vocab - 1) + shift] for shift in (0, 1))
        return start, jnp.where(known, end - start, 0)

    def _bytes(self, at: jax.Array) -> jax.Array:
        return jnp.take(self.text, at, mode="clip").astype(jnp.int32)

    def _follow(self, state: jax.Array, byte: jax.Array) -> jax.Array:
        """Return the next state; -1 is no byte and leaves it as it is."""
        return jnp.where(byte < 0, state, self.goto[state, jnp.maximum(byte, 0)])

    def _last_bytes(self, ids: jax.Array, length: jax.Array) -> jax.Array:
        """int32[rows, S]: the last bytes of each row, which are enough as S > longest; -1 in front of a shorter one."""
        width, count = ids.shape[1], self.goto.shape[0]
        held = jnp.arange(width, dtype=jnp.int32)[None, :] < length[:, None]
        start, size = self._span(jnp.where(held, ids, -1))
        end = jnp.cumsum(size, axis=1)
        position = end[:, -1:] - count + jnp.arange(count, dtype=jnp.int32)[None, :]
        token = jax.vmap(partial(jnp.searchsorted, side="right"))(end, position)
        token = jnp.minimum(token, width - 1)
        at = position + jnp.take_along_axis(start + size - end, token, axis=1)
        return jnp.where(position < 0, -1, self._bytes(at))


class _Vocabulary(NamedTuple):
    text: np.ndarray
    offsets: np.ndarray
    has: frozenset[int]  # the bytes that there are


_VOCABULARIES: weakref.WeakKeyDictionary[Tokenizer, dict[int | None, _Vocabulary]] = weakref.WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer, vocab_size: int | None) -> _Vocabulary:
    """Join the bytes of all tokens, once per tokenizer and size."""
    made = _VOCABULARIES.setdefault(tokenizer, {})
    if vocab_size not in made:
        tokens = tokenizer.token_bytes()
        for index, token in tokenizer.backend.get_added_tokens_decoder().items():
            if tokens[index] is None:
                tokens[index] = token.content.encode()
        size = len(tokens) if vocab_size is None else vocab_size
        tokens = [token or b"" for token in tokens[:size]] + [b""] * (size - len(tokens))
        text = b"".join(tokens)
        made[vocab_size] = _Vocabulary(
            np.frombuffer(text or b"\0", np.uint8),  # a gather needs something to read
            np.concatenate([[0], np.cumsum([len(token) for token in tokens])]).astype(np.int32),
            frozenset(text),
        )
    return made[vocab_size]


def _patterns(strings: str | Sequence[str]) -> list[bytes]:
    strings = [strings] if isinstance(strings, str) else strings
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
        raise TypeError(f"stop_strings must be a str or a list of them, got {strings!r}")
    if not strings or "" in strings:
        raise InputError(f"stop_strings must not be empty, got {strings!r}: leave it out to stop at none")
    try:
        return [string.encode() for string in strings]
    except UnicodeEncodeError as error:
        raise InputError(f"stop_strings has a string that is not valid Unicode: {error}") from error


def _automaton(patterns: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return `goto` and `found` of Aho and Corasick's automaton (1975), their size rounded up to a power of two."""
    states = power_of_two(1 + sum(map(len, patterns)), SMALLEST)
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
    # Where a state has no way on, that of its longest proper suffix goes on; shorter states are complete first.
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
