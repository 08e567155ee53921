"""The reasons why a row ends.

`Rows.push` in rows.py determines most of the reasons. BAD_ID comes from `Rows.begin`, NO_TOKEN and NOT_A_NUMBER from
the modes, TIME from request/driver.py, and CANCELLED from chunks.py.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp


class StopReason(enum.IntEnum):
    """The reason why a row ended, as in `GenerateOutput.stop_reasons`.

    If several reasons apply, the one listed first wins, except that NO_TOKEN and NOT_A_NUMBER take precedence. These
    two reasons and BAD_ID are failures: an eager call to generate() raises an error. Inside the caller's own `jax.jit`,
    a failed row gets no more tokens, and only its stop reason shows the failure.
    """

    NONE = 0  # the row is not finished
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
