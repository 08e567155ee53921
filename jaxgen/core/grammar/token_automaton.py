"""Token automata: tables on the device that say which tokens the grammar of a row allows next.

The state of a row is one number. `token_table.py` describes how the transitions are stored. The tables are traced, and
their sizes are rounded up to powers of two, so a different grammar of similar size uses the same program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxgen.buckets import power_of_two
from jaxgen.core.grammar.byte_automaton import compile_expression
from jaxgen.core.grammar.expression import Expression
from jaxgen.core.grammar.grammar import Grammar
from jaxgen.core.grammar.row_parts import row_parts
from jaxgen.core.grammar.token_table import COMPLETE, FAR, NEVER, TokenTable, prefix_table, token_table, tokens_of
from jaxgen.core.grammar.within import within
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError, shown
from jaxgen.shapes import short_repr
from jaxgen.utf8_text import encoded

OF_STATE = "part", "first", "count", "spans", "accepting", "free", "shortest"  # arrays with an entry for each state
OF_TRANSITION = "low", "high", "step", "longer", "span_low", "span_high"  # for each transition
OF_PART = "classes", "base"  # for each automaton in the table
_WIDTH = 64  # the smallest number of transitions in a state for which a table has space


class Capacity(NamedTuple):
    """The number of states, transitions, classes of tokens and automata for which a table has space.

    The classes are those of a single automaton. A transition is a range of classes with the same next state. In each
    state, an automaton may have as many transitions as `width`.
    """

    states: int
    transitions: int
    classes: int
    automata: int

    @property
    def width(self) -> int:
        """The number of transitions in a state."""
        return max(self.classes // 8, _WIDTH)

    def bytes(self, vocab_size: int) -> int:
        """Return the size of a table in bytes."""
        shapes = jax.eval_shape(lambda: TokenAutomaton.empty(self, vocab_size))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


_LEAST = Capacity(256, 256, 256, 1)  # the size of the smallest table


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
        classes: the class of each token, for each automaton in the table.
        base: the first state of each automaton.
        part: the automaton that a state belongs to.
        first, count: the first transition of each state, and the number of its transitions.
        accepting: True if the text so far is complete.
        free: True if any token may follow, as after a prefix.
        shortest: the minimum number of tokens needed to complete the text.
        low, high: the first and the last class of tokens of each transition.
        step, longer: the next state and its `shortest`, as in `TokenTable`.
        spans, span_low, span_high: the ranges of classes that are allowed in each state, as in `TokenTable`.
        start: the initial state, or one initial state per prompt (see `stack`).
        width: the maximum number of transitions in a state.
        kinds: the number of classes for which the table has space.
    """

    classes: jax.Array  # uint16[automata, V]
    base: jax.Array  # int32[automata]
    part: jax.Array  # int32[states]
    first: jax.Array  # int32[states]
    count: jax.Array  # int32[states]
    spans: jax.Array  # int32[states]
    accepting: jax.Array  # bool[states]
    free: jax.Array  # bool[states]
    shortest: jax.Array  # int32[states]
    low: jax.Array  # uint16[transitions]
    high: jax.Array  # uint16[transitions]
    step: jax.Array  # int32[transitions]
    longer: jax.Array  # int16[transitions]
    span_low: jax.Array  # uint16[transitions]
    span_high: jax.Array  # uint16[transitions]
    start: jax.Array  # int32[] or int32[B]
    width: int = flax.struct.field(pytree_node=False)
    kinds: int = flax.struct.field(pytree_node=False)

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
        return cls.from_expression(Grammar.regex(pattern), tokenizer, name="the pattern", vocab_size=vocab_size)

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
        grammar = Grammar.json_schema(
            schema, whitespace_pattern=whitespace_pattern, unsupported=unsupported, left_out=left_out
        )
        return cls.from_expression(grammar, tokenizer, name="the schema", vocab_size=vocab_size)

    @classmethod
    def from_expression(
        cls,
        expression: Grammar | Expression,
        tokenizer: Tokenizer,
        *,
        name: str = "the grammar",
        vocab_size: int | None = None,
    ) -> TokenAutomaton:
        """Build the automaton for a `Grammar`, such as a schema surrounded by fixed text, or for its expression.

            grammar = "Answer: " + Grammar.json_schema({"type": "integer"})
            automaton = TokenAutomaton.from_expression(grammar, tokenizer)

        `name` is the grammar's name in error messages. The other arguments and errors are as in `from_regex`.
        """
        tokens = tokens_of(tokenizer, vocab_size)
        tree = expression.expression if isinstance(expression, Grammar) else expression
        table = token_table(compile_expression(tree, name), tokens)
        if table is None:
            raise InputError(
                "the tokenizer's tokens cannot form any text of the grammar: change the grammar (many SentencePiece "
                "words have a leading space)"
            )
        return cls.of_table(table, np.zeros(len(table.first), bool))

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
        tokens = tokens_of(tokenizer, vocab_size)
        is_list = isinstance(prefixes, Sequence) and not isinstance(prefixes, str)
        if not is_list or not all(isinstance(prefix, str | bytes) for prefix in prefixes):
            raise TypeError(f"prefixes must be a list of texts, one per prompt, got {shown(prefixes)}")
        texts = [encoded("a prefix", prefix) if isinstance(prefix, str) else prefix for prefix in prefixes]
        table = prefix_table(texts, tokens)
        return cls.of_table(table, np.arange(len(table.first)) == COMPLETE)

    @classmethod
    def of_table(cls, table: TokenTable, free: np.ndarray) -> TokenAutomaton:
        """Return the automaton for a table on the host. `free` is as in the attributes."""
        states, row = len(table.first), int(table.count.max(initial=0))
        needed = Capacity(states, max(len(table.low), 1), int(table.classes.max()) + 1, 1)
        capacity = Capacity(*map(power_of_two, needed, _LEAST))
        result = cls.empty(capacity, len(table.classes), power_of_two(max(row, 1), _WIDTH))
        result.classes[0] = table.classes
        for name in (*OF_STATE, *OF_TRANSITION):
            if name != "part":
                values = free if name == "free" else getattr(table, name)
                getattr(result, name)[: len(values)] = values
        return jax.device_put(dataclasses.replace(result, start=table.start))

    @classmethod
    def empty(cls, capacity: Capacity, vocab_size: int, width: int | None = None) -> TokenAutomaton:
        """Return a table without automata, as numpy arrays. `width` is as in `join`."""
        states, transitions, classes, automata = capacity
        width = capacity.width if width is None else width
        of_state = {name: np.zeros(states, np.int32) for name in OF_STATE}
        of_state |= {name: np.zeros(states, bool) for name in ("accepting", "free")}
        of_state["shortest"][:] = NEVER
        dtypes: dict[str, Any] = dict.fromkeys(OF_TRANSITION, np.uint16) | {"step": np.int32, "longer": np.int16}
        # Unused entries after the last row of transitions allow it to be read like the others, as `width` entries.
        of_transition = {name: np.zeros(transitions + width, dtype) for name, dtype in dtypes.items()}
        of_part = {"classes": np.zeros((automata, vocab_size), np.uint16), "base": np.zeros(automata, np.int32)}
        arrays: dict[str, Any] = {**of_state, **of_transition, **of_part}
        return cls(**arrays, start=np.int32(0), width=width, kinds=classes)  # pyright: ignore[reportArgumentType]

    @classmethod
    def stack(cls, automata: Sequence[TokenAutomaton], *, capacity: Capacity | None = None) -> TokenAutomaton:
        """Join one automaton per prompt into one table, with one `start` state per prompt.

        Prompts that share an automaton (the same object) share its states. All automata must have the same vocabulary.
        `capacity` is the table's size, (states, transitions, token classes, automata); see `Capacity`. It may include
        space for automata that are added later.
        """
        if capacity is not None and not (isinstance(capacity, tuple) and len(capacity) == len(Capacity._fields)):
            raise TypeError(f"capacity must be (states, transitions, classes of tokens, automata), got {capacity!r}")
        return cls._stacked(automata, None if capacity is None else Capacity(*capacity))

    @classmethod
    def _stacked(
        cls, automata: Sequence[TokenAutomaton], capacity: Capacity | None, width: int | None = None
    ) -> TokenAutomaton:
        if not automata:
            raise InputError("there are no automata to stack: pass one per prompt")
        sizes = sorted({automaton.vocab_size for automaton in automata})
        if len(sizes) > 1:
            raise InputError(f"the automata have vocabularies of {sizes} tokens: build all with the same vocab_size")
        parts = {id(automaton): automaton for automaton in automata}
        offset, total = {}, 0
        for key, automaton in parts.items():
            offset[key], total = total, total + automaton.states
        joint = cls.join({offset[key]: automaton for key, automaton in parts.items()}, capacity, width)
        start = np.concatenate([np.atleast_1d(automaton.start) + offset[id(automaton)] for automaton in automata])
        return dataclasses.replace(joint, start=jnp.asarray(start, jnp.int32))

    @classmethod
    def join(
        cls, parts: Mapping[int, TokenAutomaton], capacity: Capacity | None = None, width: int | None = None
    ) -> TokenAutomaton:
        """Join automata with the same vocabulary into one table; the keys of `parts` are the automata's first states.

        Unused states have no transitions. `start` comes from the first automaton. `capacity` is as in `stack`, and
        `width` is the table's `width` if it is not that of the capacity.
        """
        needs = [automaton.needs for automaton in parts.values()]
        row = max(automaton.longest_row for automaton in parts.values())
        needed = Capacity(
            max(first + need.states for first, need in zip(parts, needs, strict=True)),
            sum(need.transitions for need in needs),
            max(need.classes for need in needs),
            sum(need.automata for need in needs),
        )
        if capacity is None:
            capacity, width = Capacity(*map(power_of_two, needed, _LEAST)), power_of_two(max(row, 1), _WIDTH)
        width = capacity.width if width is None else width
        if any(need > space for need, space in zip(needed, capacity, strict=True)) or row > width:
            raise InputError(
                f"the automata need {needed.states} states, {needed.transitions} transitions, {needed.classes} classes "
                f"of tokens, {needed.automata} automata and {row} transitions in a state, but the table's capacity is "
                f"{', '.join(map(str, capacity))} and {width}: stack with a larger capacity, or add fewer"
            )
        joint = cls.empty(capacity, next(iter(parts.values())).vocab_size, width)
        transition, part = 0, 0
        for (first, automaton), need in zip(parts.items(), needs, strict=True):
            arrays = automaton.moved(first, transition, part)
            for names, at in ((OF_STATE, first), (OF_TRANSITION, transition), (OF_PART, part)):
                for name in names:
                    getattr(joint, name)[at : at + len(arrays[name])] = arrays[name]
            transition, part = transition + need.transitions, part + need.automata
        first = min(parts)
        start = np.asarray(parts[first].start) + first
        return jax.device_put(dataclasses.replace(joint, start=start.astype(np.int32)))

    def moved(self, state: int, transition: int, part: int) -> dict[str, np.ndarray]:
        """Return the used entries of the arrays, for a table where the first ones have the given indices."""
        needs = self.needs
        size = dict.fromkeys(OF_STATE, needs.states) | dict.fromkeys(OF_TRANSITION, needs.transitions)
        size |= dict.fromkeys(OF_PART, needs.automata)
        arrays = {name: np.asarray(getattr(self, name))[:most] for name, most in size.items()}
        offset = {"part": part, "first": transition, "base": state}
        return arrays | {name: arrays[name] + more for name, more in offset.items()}

    @property
    def vocab_size(self) -> int:
        """The number of tokens, V."""
        return self.classes.shape[-1]

    @property
    def states(self) -> int:
        """The number of states up to the last state that accepts or has a transition; later states are padding."""
        used = np.asarray(self.accepting) | (np.asarray(self.count) > 0)
        return int(np.flatnonzero(used)[-1]) + 1

    @property
    def longest_row(self) -> int:
        """The number of transitions in the state that has the most."""
        return int(np.max(np.asarray(self.count)))

    @property
    def needs(self) -> Capacity:
        """The numbers of states, transitions, classes and automata, without padding."""
        states = self.states
        first, count = np.asarray(self.first)[:states], np.asarray(self.count)[:states]
        automata = int(np.max(np.asarray(self.part)[:states])) + 1
        classes = int(np.max(np.asarray(self.classes)[:automata])) + 1
        return Capacity(states, int(np.max(first + count)), classes, automata)

    def add(self, automaton: TokenAutomaton) -> tuple[TokenAutomaton, jax.Array]:
        """Add an automaton; return the new table, and the automaton's `start` in the table.

        All states keep their indices, and all arrays keep their shapes, so unfinished rows continue as before, in
        the same program. The table's `start` is unchanged. Adding the same automaton again uses more states.

        Raises:
            InputError: the vocabularies differ, or the capacity is too small.
        """
        joint = self._stacked([self, automaton], self.capacity, self.width)
        start = np.asarray(joint.start)[self.start.size :].reshape(automaton.start.shape)
        return dataclasses.replace(joint, start=self.start), jnp.asarray(start)

    @property
    def capacity(self) -> Capacity:
        """The table's size, including unused entries."""
        return Capacity(len(self.part), len(self.low) - self.width, self.kinds, len(self.base))

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
        here = jnp.maximum(state, 0)
        classes = self.classes if self.classes.shape[0] == 1 else self.classes[self.part[here]]
        allowed = within(classes, *self._allowed(state, remaining))
        if eos is None:
            return allowed
        complete = self.accepting[here] & (state >= 0)
        return jnp.where(self._per_row(eos, state), complete[:, None], allowed)

    def push(self, state: jax.Array, tokens: jax.Array, eos: jax.Array | None) -> jax.Array:
        """Return the states, int32[rows], after one more token in each row; `tokens` is int32[rows].

        An eos token does not change the state. Any other token that is not allowed sets the state to -1 permanently.
        """
        here = jnp.maximum(state, 0)
        may, low, high, step = self._row(state, None, "low", "high", "step")
        kind = self.classes[self.part[here], tokens].astype(jnp.int32)[:, None]
        found = may & (low <= kind) & (kind <= high)
        step = jnp.sum(jnp.where(found, step, 0), axis=1)  # at most one range has the class
        following = jnp.where(step >= FAR // 2, self.base[self.part[here]] + step - FAR, here + step)
        following = jnp.where(jnp.any(found, axis=1), following, -1)
        stays = state < 0
        if eos is not None:
            stays |= jnp.take_along_axis(self._per_row(eos, state), tokens[:, None], axis=1)[:, 0]
        return jnp.where(stays, state, following)

    def exhausted(self, state: jax.Array, remaining: jax.Array | None = None) -> jax.Array:
        """Return bool[rows], True for rows in which only eos can follow, and for rows in state -1.

        `remaining` is as in `allowed`.
        """
        return ~jnp.any(self._row(state, remaining)[0], axis=-1)

    def complete(self, state: jax.Array) -> jax.Array:
        """Return bool[rows], True for rows whose text is complete; False if any token may follow, as after a prefix."""
        here = jnp.maximum(state, 0)
        return self.accepting[here] & ~self.free[here] & (state >= 0)

    def _allowed(self, state: jax.Array, remaining: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the ranges of classes that are allowed in each row, as arrays [rows, width], and their number."""
        here = jnp.maximum(state, 0)
        may, low, high, *joint = self._row(state, remaining, "low", "high", "span_low", "span_high")
        # If all transitions are allowed, adjacent ones are joined, as in the table.
        joined = jnp.all(may | (jnp.arange(self.width)[None, :] >= self.count[here][:, None]), axis=1)
        low = jnp.where(joined[:, None], joint[0], jnp.where(may, low, 1))
        high = jnp.where(joined[:, None], joint[1], jnp.where(may, high, 0))
        used = jnp.max(jnp.where(may, jnp.arange(1, self.width + 1), 0), axis=1)  # 0 if nothing may follow
        return low, high, jnp.where(joined, self.spans[here], used)

    def _row(self, state: jax.Array, remaining: jax.Array | None, *names: str) -> list[jax.Array]:
        """Return whether each of a row's transitions may follow, and the row's part of the named arrays.

        All have the shape [rows, width].
        """
        here = jnp.maximum(state, 0)
        may = (jnp.arange(self.width)[None, :] < self.count[here][:, None]) & (state >= 0)[:, None]
        names = names if remaining is None else (*names, "longer")
        parts = row_parts(self.first[here], tuple(getattr(self, name) for name in names), self.width) if names else []
        if remaining is not None:
            shortest = self.shortest[here][:, None]
            in_time = shortest + parts.pop() < remaining[:, None]
            may &= in_time | (shortest > remaining[:, None])
        return [may, *parts]

    def _per_row(self, eos: jax.Array, state: jax.Array) -> jax.Array:
        if eos.shape[-1] != self.vocab_size:
            raise InputError(
                f"the automaton has {self.vocab_size} tokens, but the scores have {eos.shape[-1]}: "
                f"build it with vocab_size={eos.shape[-1]}"
            )
        return jnp.broadcast_to(eos if eos.ndim == 2 else eos[None, :], (state.shape[0], eos.shape[-1]))
