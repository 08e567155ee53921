"""Token automata: tables on the device that say which tokens the grammar of a row allows next.

The state of a row is one number. Tokens with equal transitions from every state share a class, so the table is [states,
classes] and not [states, V]. For a JSON schema, Qwen's 151,936 tokens fall into a few hundred classes. The tables are
traced, and their sizes are rounded up to powers of two, so a different grammar of similar size uses the same program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.buckets import power_of_two
from jaxgen.errors import InputError, shown
from jaxgen.grammar.byte_automaton import compile_expression, distances, distinct, edges, restricted, useful_states
from jaxgen.grammar.expression import Expression
from jaxgen.grammar.json_schema import read_schema
from jaxgen.grammar.regex import read_regex
from jaxgen.shapes import short_repr
from jaxgen.text.tokenizer import Tokenizer, check_tokenizer
from jaxgen.text.utf8_text import encoded

SMALLEST_TABLE = 64
LARGEST_TABLE = 2**25  # maximum number of transitions in a table, even during construction; this many take 128 MB
MOST_WORK = 2**28  # maximum number of transitions followed while building
LONGEST_PREFIXES = 30_000  # maximum total length of all distinct prefixes, in bytes
COMPLETE = 0  # the state after a prefix
_NEVER = 2**30  # the value of `shortest` if the text cannot be completed


@flax.struct.dataclass
class TokenAutomaton:
    """Table of the tokens that may follow in each state, and of the states that these tokens lead to.

    State -1 means that the text no longer matches the grammar.

    The text consists of the bytes that tokens add after the prompt, as in `Tokenizer.token_bytes`. If a
    SentencePiece token begins with a space, the space is part of the text, even in the first token. (Decoding only the
    new tokens would drop it.) A pattern for a SentencePiece tokenizer should therefore allow a space at its start,
    ` ?...`. Otherwise, only a token without a space can come first. Special tokens and ids without a token have no
    text, so a grammar never allows them. The text can be completed from every reachable state, so a row never reaches a
    dead end, unless an eos token is itself part of the text.

    Attributes:
        classes: the class of each token.
        transitions: the next state for each state and class; -1 if the class is not allowed or the entry is padding.
        accepting: True if the text so far is complete.
        shortest: the minimum number of tokens needed to complete the text.
        start: the initial state, or one initial state per prompt (see `stack`).
    """

    classes: jax.Array  # int32[V]
    transitions: jax.Array  # int32[states, classes]
    accepting: jax.Array  # bool[states]
    shortest: jax.Array  # int32[states]
    start: jax.Array  # int32[] or int32[B]

    __repr__ = short_repr

    @classmethod
    def from_regex(cls, pattern: str, tokenizer: Tokenizer, *, vocab_size: int | None = None) -> TokenAutomaton:
        r"""Build the automaton for the texts that a regular expression matches from start to end.

        The syntax is JavaScript's (ECMA 262), except for lookaround and backreferences; see docs/constrained.md for
        details. `vocab_size` is the size of the model's vocabulary; tokenizer ids beyond it are left out.

            automaton = TokenAutomaton.from_regex(r"(yes|no), because [^.\n]{1,80}\.", tokenizer)

        Raises:
            InputError: the pattern cannot be compiled or matches nothing, or the tokenizer's tokens cannot form any
                text that it matches.
            TypeError: `pattern` is not a str, or `tokenizer` is not a `jaxgen.Tokenizer`.
        """
        return cls.from_expression(read_regex(pattern), tokenizer, name="the pattern", vocab_size=vocab_size)

    @classmethod
    def from_json_schema(
        cls,
        schema: Any,
        tokenizer: Tokenizer,
        *,
        whitespace_pattern: str | None = None,
        vocab_size: int | None = None,
        unsupported: Literal["error", "warn"] = "error",
        left_out: list[str] | None = None,
    ) -> TokenAutomaton:
        """Build the automaton for the JSON texts that are valid against a JSON schema.

        The schema is a dict, JSON text, or a class with `model_json_schema()`, such as a pydantic model. Every
        generated text is valid. docs/constrained.md lists the supported keywords, and the kinds of valid text that are
        never generated.

        With `unsupported="warn"`, keywords that cannot be enforced are left out. A warning lists them; if `left_out` is
        given, they are added to that list instead. `whitespace_pattern` is a regular expression for the whitespace
        between JSON tokens; None means `[ ]?`. The other arguments and errors are as in `from_regex`.
        """
        expression = read_schema(schema, whitespace_pattern, unsupported=unsupported, left_out=left_out)
        return cls.from_expression(expression, tokenizer, name="the schema", vocab_size=vocab_size)

    @classmethod
    def from_expression(
        cls, expression: Expression, tokenizer: Tokenizer, *, name: str = "the grammar", vocab_size: int | None = None
    ) -> TokenAutomaton:
        """Build the automaton for an expression from `jaxgen.grammar`, such as a schema surrounded by fixed text.

        `name` is the grammar's name in error messages. The other arguments and errors are as in `from_regex`.
        """
        tokens = _tokens(tokenizer, vocab_size)
        automaton = compile_expression(expression, name)
        classes, transitions = _token_table(automaton.table, tokens)
        useful = useful_states(transitions, automaton.accepting, automaton.start)
        if not useful[automaton.start]:
            raise InputError(
                "the tokenizer's tokens cannot form any text of the grammar: change the grammar (many SentencePiece "
                "words have a leading space)"
            )
        return _padded(classes, *restricted(transitions, automaton.accepting, automaton.start, useful))

    @classmethod
    def from_prefixes(
        cls, prefixes: Sequence[str | bytes], tokenizer: Tokenizer, *, vocab_size: int | None = None
    ) -> TokenAutomaton:
        """Build the automaton for texts that begin with a prefix, one prefix per prompt.

        Tokens may spell the prefix in any way, and the last token may extend beyond the prefix. After the prefix,
        any token is allowed, including special tokens. `vocab_size` is as in `from_regex`.

            automaton = TokenAutomaton.from_prefixes(["Once upon", "The "], tokenizer)

        Raises:
            InputError: the tokenizer's tokens cannot form one of the prefixes, or the prefixes are too long.
            TypeError: `tokenizer` is not a `jaxgen.Tokenizer`, or `prefixes` is not a list of strings or bytes.
        """
        tokens = _tokens(tokenizer, vocab_size)
        is_list = isinstance(prefixes, Sequence) and not isinstance(prefixes, str)
        if not is_list or not all(isinstance(prefix, str | bytes) for prefix in prefixes):
            raise TypeError(f"prefixes must be a list of texts, one per prompt, got {shown(prefixes)}")
        texts = [encoded("a prefix", prefix) if isinstance(prefix, str) else prefix for prefix in prefixes]
        table, start = _prefix_table(texts)
        accepting = np.arange(len(table)) == COMPLETE
        classes, transitions = _token_table(table, tokens, ~accepting)
        transitions[COMPLETE] = COMPLETE
        useful = useful_states(transitions, accepting, start)
        for text, possible in zip(texts, useful[start], strict=True):
            if not possible:
                raise InputError(f"the prefix {text!r} cannot be written with the tokenizer's tokens: change it")
        return _padded(classes, *restricted(transitions, accepting, start, useful))

    @classmethod
    def stack(cls, automata: Sequence[TokenAutomaton], *, capacity: tuple[int, int] | None = None) -> TokenAutomaton:
        """Join one automaton per prompt into one table, with one `start` state per prompt.

        Prompts that share an automaton (the same object) share its states. All automata must have the same vocabulary.
        `capacity` is the table's size, (states, token classes); it may include space for automata that are added later.
        """
        if capacity is not None and not (isinstance(capacity, tuple) and len(capacity) == 2):
            raise TypeError(f"capacity must be a pair, (states, classes of tokens), got {capacity!r}")
        if not automata:
            raise InputError("there are no automata to stack: pass one per prompt")
        sizes = sorted({automaton.classes.shape[0] for automaton in automata})
        if len(sizes) > 1:
            raise InputError(f"the automata have vocabularies of {sizes} tokens: build all with the same vocab_size")
        parts = {id(automaton): automaton for automaton in automata}
        offset, total = {}, 0
        for key, automaton in parts.items():
            offset[key], total = total, total + automaton.states
        joint = cls.join({offset[key]: automaton for key, automaton in parts.items()}, capacity)
        start = np.concatenate([np.atleast_1d(automaton.start) + offset[id(automaton)] for automaton in automata])
        return dataclasses.replace(joint, start=jnp.asarray(start, jnp.int32))

    @classmethod
    def join(cls, parts: Mapping[int, TokenAutomaton], capacity: tuple[int, int] | None = None) -> TokenAutomaton:
        """Join automata with the same vocabulary into one table; the keys of `parts` are the automata's first states.

        Unused states have no transitions. `start` comes from the first automaton. `capacity` is as in `stack`.
        """
        total = max(first + automaton.states for first, automaton in parts.items())
        # For each token, `joint` has one number that represents the token's classes in all automata.
        joint = np.zeros(next(iter(parts.values())).classes.shape[0], np.int64)
        for automaton in parts.values():
            kinds = np.asarray(automaton.classes)
            joint = np.unique(joint * (kinds.max() + 1) + kinds, return_inverse=True)[1]
        example = np.unique(joint, return_index=True)[1]
        if (needed := total * len(example)) > LARGEST_TABLE:
            raise InputError(
                f"{len(parts)} automata have {needed} transitions together, but at most {LARGEST_TABLE} are supported: "
                "stack fewer"
            )
        table, accepting = np.full((total, len(example)), -1, np.int32), np.zeros(total, bool)
        for first, automaton in parts.items():
            part = slice(first, first + automaton.states)
            own = np.asarray(automaton.transitions)[: automaton.states, np.asarray(automaton.classes)[example]]
            table[part] = np.where(own < 0, -1, own + first)
            accepting[part] = np.asarray(automaton.accepting)[: automaton.states]
        first = min(parts)
        return _padded(joint, table, accepting, np.asarray(parts[first].start) + first, capacity)

    @property
    def states(self) -> int:
        """The number of states up to the last state that accepts or has a transition; later states are padding."""
        used = np.asarray(self.accepting) | np.any(np.asarray(self.transitions) >= 0, axis=1)
        return int(np.flatnonzero(used)[-1]) + 1

    def add(self, automaton: TokenAutomaton) -> tuple[TokenAutomaton, jax.Array]:
        """Add an automaton; return the new table, and the automaton's `start` in the table.

        All states keep their indices, and all arrays keep their shapes, so unfinished rows continue as before, in
        the same program. The table's `start` is unchanged. Adding the same automaton again uses more states.

        Raises:
            InputError: the vocabularies differ, or the capacity is too small.
        """
        states, classes = self.transitions.shape
        joint = self.stack([self, automaton], capacity=(states, classes))
        start = np.asarray(joint.start)[self.start.size :].reshape(automaton.start.shape)
        return dataclasses.replace(joint, start=self.start), jnp.asarray(start)

    def begin(self, rows: int) -> jax.Array:
        """Return each row's initial state, int32[rows]; a prompt's initial state is repeated for each of its rows."""
        prompts = self.start.size
        if rows % prompts:
            raise InputError(
                f"{rows} rows are not a multiple of the {prompts} prompts that the automaton is stacked for"
            )
        return jnp.repeat(self.start.reshape(-1), rows // prompts, total_repeat_length=rows)

    def allowed(self, state: jax.Array, eos: jax.Array | None, remaining: jax.Array | None = None) -> jax.Array:
        """Return bool[rows, V], True for the tokens that may follow in each row's state; `state` is int32[rows].

        `eos` (bool[V], bool[rows, V] or None) marks the tokens that end the text. Eos tokens are allowed if and
        only if the text is complete, even if the grammar would allow them elsewhere. In state -1, no token is allowed.

        `remaining` (int32[rows]) is the number of tokens that may still follow, not counting eos. A token is
        allowed only if the text can still be completed within `remaining` tokens. If even the shortest completion
        needs more than `remaining` tokens, this limit does not apply.
        """
        following = self._following(state, remaining)
        allowed = jnp.take(following, self.classes, axis=1)
        if eos is None:
            return allowed
        complete = self.accepting[jnp.maximum(state, 0)] & (state >= 0)
        return jnp.where(self._per_row(eos, state), complete[:, None], allowed)

    def push(self, state: jax.Array, tokens: jax.Array, eos: jax.Array | None) -> jax.Array:
        """Return the states, int32[rows], after one more token in each row; `tokens` is int32[rows].

        An eos token does not change the state. Any other token that is not allowed sets the state to -1 permanently.
        """
        following = self.transitions[jnp.maximum(state, 0), self.classes[tokens]]
        stays = state < 0
        if eos is not None:
            stays |= jnp.take_along_axis(self._per_row(eos, state), tokens[:, None], axis=1)[:, 0]
        return jnp.where(stays, state, following)

    def exhausted(self, state: jax.Array, remaining: jax.Array | None = None) -> jax.Array:
        """Return bool[rows], True for rows in which only eos can follow, and for rows in state -1.

        `remaining` is as in `allowed`.
        """
        return ~jnp.any(self._following(state, remaining), axis=-1)

    def _following(self, state: jax.Array, remaining: jax.Array | None) -> jax.Array:
        """Return the classes of tokens that may follow, as bool[rows, classes]."""
        row = jnp.maximum(state, 0)
        after = self.transitions[row]
        following = (after >= 0) & (state >= 0)[:, None]
        if remaining is None:
            return following
        in_time = self.shortest[jnp.maximum(after, 0)] < remaining[:, None]
        return following & (in_time | (self.shortest[row] > remaining)[:, None])

    def _per_row(self, eos: jax.Array, state: jax.Array) -> jax.Array:
        if eos.shape[-1] != self.classes.shape[0]:
            raise InputError(
                f"the automaton has {self.classes.shape[0]} tokens, but the scores have {eos.shape[-1]}: "
                f"build it with vocab_size={eos.shape[-1]}"
            )
        return jnp.broadcast_to(eos if eos.ndim == 2 else eos[None, :], (state.shape[0], eos.shape[-1]))


def _tokens(tokenizer: Tokenizer, vocab_size: int | None) -> list[bytes]:
    """Return the bytes that each token id adds to the text; b"" for special tokens and ids without a token."""
    check_tokenizer(tokenizer)
    tokens = [token or b"" for token in tokenizer.token_bytes()]
    return tokens if vocab_size is None else tokens[:vocab_size] + [b""] * (vocab_size - len(tokens))


def _prefix_table(prefixes: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the automaton for texts that begin with a prefix: its table int32[S, 256], and each prefix's first state.

    A prefix has one state per byte; its last byte leads to `COMPLETE`.
    """
    begin, states = {b"": COMPLETE}, COMPLETE + 1
    for prefix in prefixes:
        if prefix not in begin:
            begin[prefix], states = states, states + len(prefix)
    if states > LONGEST_PREFIXES:
        raise InputError(f"the prefixes have {states - 1:,} bytes, more than {LONGEST_PREFIXES:,}: shorten them")
    table = np.full((states, 256), -1, np.int32)
    table[COMPLETE] = COMPLETE
    for prefix, first in begin.items():
        for state, byte in enumerate(prefix, start=first):
            table[state, byte] = state + 1 if state + 1 < first + len(prefix) else COMPLETE
    return table, np.array([begin[prefix] for prefix in prefixes], np.int32)


def _token_table(
    table: np.ndarray, tokens: Sequence[bytes], followed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Follow the bytes of every token from all states at once.

    Return the class of each token, int[V], and the transitions, int32[S, classes].

    States where `followed bool[S]` is False get no outgoing transitions; None means True for all states.

    Every token defines a function from states to states: the composition of the functions of its bytes. Many tokens
    share a function, so each function is stored once, and tokens refer to it by its index. At each byte position,
    tokens with the same function and the same next byte share one composition.
    """
    lengths = np.array([len(token) for token in tokens])
    offsets = np.cumsum(lengths) - lengths
    buffer = np.frombuffer(b"".join(tokens), np.ubyte)
    bytes_of_kind, kind = distinct(np.ascontiguousarray(table.T))
    step = np.append(table.T[bytes_of_kind], np.full((len(bytes_of_kind), 1), -1, np.int32), axis=1)  # -1 maps to -1

    nowhere, unmoved = np.full(len(table), -1, np.int32), np.arange(len(table), dtype=np.int32)
    if followed is not None:
        unmoved = np.where(followed, unmoved, -1).astype(np.int32)
    number = {nowhere.tobytes(): 0}
    number.setdefault(unmoved.tobytes(), 1)
    functions = [np.frombuffer(function, np.int32) for function in number]
    work = 0
    current = (lengths > 0) * number[unmoved.tobytes()]  # a token without text is never allowed
    going = np.flatnonzero(current)
    for position in range(lengths.max(initial=0)):
        going = going[(lengths[going] > position) & (current[going] > 0)]
        pairs = current[going] * len(step) + kind[buffer[offsets[going] + position]]
        pairs, which = np.unique(pairs, return_inverse=True)
        work += len(pairs) * len(table)
        if work > MOST_WORK:
            _refuse_size(len(table))
        composed = np.empty(len(pairs), np.int64)
        for i, (before, byte) in enumerate(zip(*np.divmod(pairs, len(step)), strict=True)):
            function = step[byte][functions[before]].tobytes()
            composed[i] = number.setdefault(function, len(functions))
            if composed[i] == len(functions):
                functions.append(np.frombuffer(function, np.int32))
                if len(functions) * len(table) > LARGEST_TABLE:
                    _refuse_size(len(table))
        current[going] = composed[which]
    used, classes = np.unique(current, return_inverse=True)
    return classes, np.stack([functions[i] for i in used], axis=1)


def _refuse_size(states: int) -> NoReturn:
    raise InputError(
        f"the automaton has {states} states, with too many kinds of tokens: at most {LARGEST_TABLE} transitions are "
        "supported; lower the limits of long texts and arrays, shorten long prefixes, or split the grammar"
    )


def _padded(
    classes: np.ndarray, transitions: np.ndarray, accepting: np.ndarray, start: Any, capacity: Any = None
) -> TokenAutomaton:
    """Merge equal classes, and pad the tables to `capacity` or to powers of two."""
    columns, like = distinct(np.ascontiguousarray(transitions.T))
    classes, transitions = like[classes], transitions[:, columns]
    states, kinds = transitions.shape
    shape = capacity or tuple(power_of_two(size, SMALLEST_TABLE) for size in transitions.shape)
    if capacity is not None and math.prod(capacity) > LARGEST_TABLE:
        raise InputError(f"capacity={capacity} is more than {LARGEST_TABLE} transitions: pass a smaller one")
    if states > shape[0] or kinds > shape[1]:
        raise InputError(
            f"the automata need {states} states and {kinds} classes of tokens together, but the table's capacity is "
            f"{shape[0]} and {shape[1]}: stack with a larger capacity, or add fewer"
        )
    if math.prod(shape) > LARGEST_TABLE:
        _refuse_size(states)
    table = np.full(shape, -1, np.int32)
    table[:states, :kinds] = transitions
    complete = np.zeros(len(table), bool)
    complete[:states] = accepting
    source, target = edges(table)
    shortest = distances(complete, target, source)
    return TokenAutomaton(
        shortest=jnp.asarray(np.where(shortest < 0, _NEVER, shortest), jnp.int32),
        classes=jnp.asarray(classes, jnp.int32),
        transitions=jnp.asarray(table),
        accepting=jnp.asarray(complete),
        start=jnp.asarray(start, jnp.int32),
    )
