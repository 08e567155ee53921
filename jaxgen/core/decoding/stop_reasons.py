"""The reasons why a row ends.

`ended` and `read_texts` determine most of the reasons, after each token. BAD_ID comes from `Rows.begin`, NO_TOKEN and
NOT_A_NUMBER from the modes, TIME from request/driver.py, and CANCELLED from continuous/chunks.py.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp

from jaxgen.core.decoding.continuous.lanes import Lanes
from jaxgen.core.decoding.run import Run
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.logits.history import History
from jaxgen.core.logits.pipeline import call
from jaxgen.core.logits.row_options import RowOptions
from jaxgen.errors import InputError


class StopReason(enum.IntEnum):
    """The reason why a row ended, as in `GenerateOutput.stop_reasons`.

    If several reasons apply, the one listed first wins, except that NO_TOKEN and NOT_A_NUMBER take precedence. These
    two reasons and BAD_ID are failures: an eager call to generate() raises an error. Inside the caller's own `jax.jit`,
    a failed row gets no more tokens, and only its stop reason shows the failure.
    """

    NONE = 0  # the row is not done
    EOS = 1
    STOP_STRING = 2
    CRITERION = 3  # one of stopping_criteria
    COMPLETE = 4  # the text is complete, and the budget has ended, or no token may follow and there is no eos id
    LENGTH = 5  # max_new_tokens or max_length
    TIME = 6  # max_time
    NO_TOKEN = 7  # all tokens are banned
    NOT_A_NUMBER = 8  # the scores contain NaN
    BAD_ID = 9  # the prompt is empty or contains an id outside the vocabulary
    CANCELLED = 10  # cancelled by the caller of an engine

    @property
    def failure(self) -> str | None:
        """The advice for a reason that is a failure; None for the other reasons."""
        return FAILURES.get(self)

    def failure_after(self, tokens: int) -> str | None:
        """Return why a row could not continue after `tokens` generated tokens, or None if it could."""
        return self.failure and f"cannot continue after {tokens} generated tokens: {self.failure}"


FAILURES = {
    StopReason.NO_TOKEN: "every token is banned: loosen the options that ban tokens, or set remove_invalid_values=True",
    StopReason.NOT_A_NUMBER: "the scores are not numbers: the parameters or a processor produce NaN; "
    "remove_invalid_values=True replaces NaN by 0",
    StopReason.BAD_ID: "the prompt is empty or has an id outside the vocabulary",
}


def first_reason(**conditions: jax.Array) -> jax.Array:
    """For each row, return the first `StopReason` whose condition (bool[rows]) is True, or NONE, as int32[rows]."""
    reason = jnp.zeros((), jnp.int32)
    for name in reversed([reason.name for reason in StopReason if reason.name in conditions]):
        reason = jnp.where(conditions[name], jnp.int32(StopReason[name]), reason)
    return reason


def failure(best: jax.Array) -> jax.Array:
    """Given each row's highest score, `best float32[rows]`, return the reason why no token can be chosen, or NONE."""
    return first_reason(NO_TOKEN=best == -jnp.inf, NOT_A_NUMBER=jnp.isnan(best))


def ended(
    run: Run, history: History, eos: jax.Array | None, tokens: jax.Array, scores: jax.Array
) -> dict[str, jax.Array]:
    """Return the rows that end with their newest token, bool[rows], by stop reason.

    Args:
        run: the constants of the run.
        history: the tokens, including the newest ones.
        eos: int32[rows, E], the ids that end a row, padded with -1, which matches no token; None if there are none.
        tokens: int32[rows], the newest tokens.
        scores: float32[rows, V], the scores from which the tokens were chosen.
    """
    ends = {"LENGTH": history.step >= history.budget}
    if eos is not None:
        ends["EOS"] = jnp.any(tokens[:, None] == eos, axis=-1)
    for criterion in run.extensions.criteria:
        met, rows = jnp.asarray(call("stopping_criteria", criterion, history, scores)), tokens.shape[0]
        if met.shape != (rows,) or met.dtype != bool:
            raise InputError(f"stopping_criteria must return bool[{rows}], one per row, got {met.dtype}{met.shape}")
        ends["CRITERION"] = ends.get("CRITERION", False) | met
    return ends


def read_texts(
    run: Run,
    history: History,
    states: tuple[Any, Any],
    options: RowOptions,
    tokens: jax.Array,
    added: jax.Array,
    lanes: Lanes | None,
) -> tuple[tuple[Any, Any], dict[str, jax.Array]]:
    """Advance the `states` of grammar and stop strings by `tokens int32[rows]`, where `added bool[rows]` is True.

    Return the new states, and the rows that end because of them, bool[rows], by stop reason. `history` does not
    include the tokens yet. A state is None if no prompt has a grammar or stop strings.
    """

    def read() -> tuple[tuple[Any, Any], dict[str, jax.Array]]:
        (grammar, stop_strings), ends = states, {}
        automaton, strings = run.extensions.allowed, run.extensions.stop_strings
        if isinstance(automaton, TokenAutomaton) and grammar is not None:
            eos = options.eos(tokens.shape[0])
            grammar = jnp.where(added, automaton.push(grammar, tokens, eos), grammar)
            endless = ~jnp.any(eos, axis=-1)  # rows without an eos id
            # `remaining` is at least 1. With 0, nothing could follow a prefix at the end of the budget, and the row
            # would get the stop reason COMPLETE instead of LENGTH.
            remaining = jnp.maximum(history.budget - history.step - added.astype(jnp.int32), 1)
            ends["COMPLETE"] = endless & automaton.exhausted(grammar, remaining)
        if strings is not None and stop_strings is not None:
            after, ends["STOP_STRING"] = strings.push(stop_strings, tokens)
            stop_strings = jnp.where(added, after, stop_strings)
        return (grammar, stop_strings), ends

    return read() if lanes is None else lanes.read_texts(added, states, read)


def with_complete(run: Run, history: History, reasons: jax.Array) -> jax.Array:
    """Return `reasons int32[rows]` with COMPLETE instead of LENGTH for rows whose text is complete."""
    automaton = run.extensions.allowed
    if not isinstance(automaton, TokenAutomaton) or history.grammar is None:
        return reasons
    complete = (reasons == StopReason.LENGTH) & automaton.complete(history.grammar)
    return jnp.where(complete, jnp.int32(StopReason.COMPLETE), reasons)
