"""Progress of rows through the constraints of beam search, as in transformers' `ConstraintListState`.

A constraint has one or more alternatives, and no alternative is a prefix of another. A row's tokens, including its
prompt, satisfy one constraint after another, so at most one constraint is in progress. A pending constraint becomes
the constraint in progress when a token begins one of its alternatives. If the next token does not continue any of the
constraint's alternatives, the constraint goes back to the end of the queue of pending constraints. A token that
interrupts one constraint cannot begin another.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxgen.control import fori_loop, while_loop
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.shapes import where


@flax.struct.dataclass
class ConstraintState:
    """Progress of each row through the constraints.

    Attributes:
        queue: int32[rows, C], each constraint's rank in the queue, lowest first; -1 if the constraint is not pending.
        current: int32[rows], the constraint in progress, or -1.
        alternative: int32[rows], the first alternative of the current constraint that starts with the matched tokens.
        matched: int32[rows], the number of matched tokens.
        met: int32[rows], the number of constraints met.
    """

    queue: jax.Array
    current: jax.Array
    alternative: jax.Array
    matched: jax.Array
    met: jax.Array

    @property
    def all_met(self) -> jax.Array:
        """bool[rows], True if all constraints are met."""
        return (self.current < 0) & jnp.all(self.queue < 0, axis=-1)


@flax.struct.dataclass
class ConstraintAutomaton:
    """The constraints of a run.

    Attributes:
        ids: int32[C, A, W], the alternatives of each constraint; -1 in unused entries.
    """

    ids: jax.Array

    @classmethod
    def from_config(cls, cfg: GenerationConfig) -> ConstraintAutomaton:
        """Return the constraints of a config that stores them as arrays. There must be at least one constraint."""
        tables = [jnp.asarray(ids) for ids in (cfg.constraints, cfg.force_words_ids) if ids is not None]
        _, alternatives, width = (max(sizes) for sizes in zip(*(ids.shape for ids in tables), strict=True))

        def resize(ids: jax.Array) -> jax.Array:
            padding = [(0, 0), (0, alternatives - ids.shape[1]), (0, width - ids.shape[2])]
            return jnp.pad(ids, padding, constant_values=-1)

        return cls(jnp.concatenate([resize(ids) for ids in tables]))

    @property
    def lengths(self) -> jax.Array:
        """int32[C, A], the number of tokens of each alternative."""
        return jnp.sum(self.ids >= 0, axis=-1, dtype=jnp.int32)

    def begin(self, ids: jax.Array, length: jax.Array) -> ConstraintState:
        """Return the state after the first `length int32[rows]` tokens of `ids int32[rows, W]`."""
        rows, width = ids.shape
        used, none = jnp.any(self.lengths > 0, axis=-1), jnp.zeros(rows, jnp.int32)
        queue = jnp.where(used, jnp.arange(used.shape[0], dtype=jnp.int32), -1)
        state = ConstraintState(jnp.broadcast_to(queue[None, :], (rows, queue.size)), none - 1, none, none, none)
        # While no constraint is in progress, skip columns in which no row can begin a constraint.
        column = jnp.arange(width, dtype=jnp.int32)
        within = column[None, :] < length[:, None]
        begins = jnp.any(within & jnp.isin(ids, self.ids[:, :, 0]), axis=0)
        following = lax.cummin(jnp.where(begins, column, width), reverse=True)
        following = jnp.append(following, jnp.int32(width))

        def push(carry: tuple[jax.Array, ConstraintState]) -> tuple[jax.Array, ConstraintState]:
            column, state = carry
            state = self.push(state, ids[:, column], within[:, column])
            busy = jnp.any((state.current >= 0) & (column + 1 < length))
            return jnp.where(busy, column + 1, following[column + 1]), state

        return while_loop(lambda carry: carry[0] < width, push, (following[0], state))[1]

    def push(self, state: ConstraintState, tokens: jax.Array, live: jax.Array) -> ConstraintState:
        """Append `tokens int32[rows]` to the rows where `live bool[rows]` is True; leave the other rows unchanged."""
        busy = state.current >= 0
        continues = self._following(state, state.alternative, state.matched) == tokens[:, None]  # [rows, A]
        begins = (self.ids[None, :, :, 0] == tokens[:, None, None]) & (state.queue >= 0)[:, :, None]  # [rows, C, A]
        last = jnp.iinfo(jnp.int32).max
        first = jnp.argmin(jnp.where(jnp.any(begins, axis=-1), state.queue, last), axis=-1).astype(jnp.int32)
        begun = jnp.take_along_axis(begins, first[:, None, None], axis=1)[:, 0]
        matches = jnp.where(busy[:, None], continues, begun)  # bool[rows, A]
        advanced, alternative = jnp.any(matches, axis=-1), jnp.argmax(matches, axis=-1).astype(jnp.int32)

        current = jnp.where(busy, state.current, first)
        matched = jnp.where(busy, state.matched, 0) + 1
        ends = advanced & (matched == self.lengths[current, alternative])
        rank = jnp.where(advanced, -1, jnp.max(state.queue, axis=-1) + 1)
        changed = (jnp.arange(state.queue.shape[1])[None, :] == current[:, None]) & (busy | advanced)[:, None]
        pushed = ConstraintState(
            queue=jnp.where(changed, rank[:, None], state.queue),
            current=jnp.where(advanced & ~ends, current, -1),
            alternative=alternative,
            matched=matched,
            met=state.met + ends.astype(jnp.int32),
        )
        return where(live, pushed, state)

    def banks(self, state: ConstraintState) -> jax.Array:
        """Return the rows' banks, int32[rows], as if each row were matching its constraint's longest alternative."""
        return self._banks(state.met, jnp.where(state.current >= 0, self._progress(state.current, state.matched), 0))

    def proposals(self, state: ConstraintState) -> jax.Array:
        """Return the tokens that make progress, int32[rows, C, A], with -1 where there is none.

        The tokens continue the constraint in progress or, if there is none, begin a pending constraint.
        """
        busy = (state.current >= 0)[:, None, None]
        current = (jnp.arange(self.ids.shape[0])[None, :] == state.current[:, None])[:, :, None]
        continues = self._following(state, state.alternative, state.matched)[:, None, :]
        begins = jnp.where((state.queue >= 0)[:, :, None], self.ids[None, :, :, 0], -1)
        return jnp.where(busy, jnp.where(current, continues, -1), begins)

    def proposed_banks(self, state: ConstraintState, banks: jax.Array) -> jax.Array:
        """Return the banks, int32[rows, C, A], by which proposals are sorted.

        In transformers, all copies of the constraint that is in progress share one list of matched tokens. A row's
        proposals are therefore added to the shared list one after another. If a proposed token does not continue the
        matched tokens, the proposal makes no progress.

        Args:
            state: the state of the rows before the proposals.
            banks: int32[rows, C, A], the bank that each row would have after each proposal.
        """
        (rows, _, most), width = banks.shape, self.ids.shape[2]
        if most == 1:
            return banks
        tokens = self._following(state, state.alternative, state.matched)
        number = jnp.arange(most, dtype=jnp.int32)[None, :]
        earlier = (number < number.T)[None]
        repeated = jnp.any((tokens[:, :, None] == tokens[:, None, :]) & earlier, axis=-1)
        valid = (tokens >= 0) & ~repeated

        def add(_, carry):
            alternative, matched, newest, added = carry
            following = self._following(state, alternative, matched)
            continues = jnp.any((tokens[:, :, None] == following[:, None, :]) & (following >= 0)[:, None, :], axis=-1)
            continues &= valid & (number > newest[:, None])
            found, index = jnp.any(continues, axis=-1), jnp.argmax(continues, axis=-1).astype(jnp.int32)
            token = jnp.take_along_axis(tokens, index[:, None], axis=1)
            return (
                jnp.where(found, jnp.argmax(following == token, axis=-1).astype(jnp.int32), alternative),
                matched + found.astype(jnp.int32),
                jnp.where(found, index, newest),
                added | (found[:, None] & (number == index[:, None])),
            )

        begin = state.alternative, state.matched, jnp.full(rows, -1, jnp.int32), jnp.zeros((rows, most), bool)
        alternative, matched, newest, added = fori_loop(0, width, add, begin)
        met = (number == newest[:, None]) & (matched == self.lengths[state.current, alternative])[:, None]
        progress = jnp.where(added & ~met, self._progress(state.current, matched)[:, None], 0)
        shared = self._banks(state.met[:, None] + met.astype(jnp.int32), progress)
        return jnp.where((state.current >= 0)[:, None, None], shared[:, None, :], banks)

    def _following(self, state: ConstraintState, alternative: jax.Array, matched: jax.Array) -> jax.Array:
        """For the constraint in progress, return each alternative's next token, int32[rows, A]; -1 for none.

        The matched tokens are the first `matched` tokens of the alternative with the index `alternative`; both are
        int32[rows]. An alternative that does not start with the matched tokens has no next token.
        """
        alternatives = self.ids[state.current]  # [rows, A, W]
        width = alternatives.shape[-1]
        own = jnp.take_along_axis(alternatives, alternative[:, None, None], axis=1)
        agree = jnp.all((alternatives == own) | (jnp.arange(width)[None, None, :] >= matched[:, None, None]), axis=-1)
        token = jnp.take_along_axis(alternatives, jnp.minimum(matched, width - 1)[:, None, None], axis=2)[..., 0]
        return jnp.where(agree & (matched < width)[:, None], token, -1)

    def _progress(self, constraint: jax.Array, matched: jax.Array) -> jax.Array:
        """Return int32[rows]: the maximum of `lengths`, minus the maximum for `constraint`, plus `matched`."""
        longest = jnp.max(self.lengths, axis=-1)
        return jnp.max(longest) - longest[constraint] + matched

    def _banks(self, met: jax.Array, progress: jax.Array) -> jax.Array:
        return met * jnp.max(self.lengths) + progress
