"""When a row is finished, and why."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp


class StopReason(enum.IntEnum):
    """Why a row ended: the entries of `GenerateOutput.stop_reasons`. Of several that hold at once the lowest counts.

    NO_TOKEN, NOT_A_NUMBER and BAD_ID are failures: generate() raises for them when it is called eagerly. Under the
    caller's own jit the row ends there, without the token, and this is how to see it.
    """

    NONE = 0  # the row is not finished
    EOS = 1
    STOP_STRING = 2
    CRITERION = 3  # one of stopping_criteria
    COMPLETE = 4  # the token automaton's text is complete, nothing can follow, and there is no eos id to say so
    LENGTH = 5  # max_new_tokens or max_length
    TIME = 6  # max_time
    NO_TOKEN = 7  # all tokens are banned
    NOT_A_NUMBER = 8  # the scores have a NaN
    BAD_ID = 9  # the prompt has an id outside of the vocabulary, or no token


FAILURES = {
    StopReason.NO_TOKEN: "every token is banned: loosen the options that ban tokens, or set remove_invalid_values=True",
    StopReason.NOT_A_NUMBER: "the scores are not numbers: the parameters or a processor give NaN; "
    "remove_invalid_values=True takes NaN for 0",
    StopReason.BAD_ID: "the prompt has an id outside of the vocabulary, or no token",
}


def first_reason(**holds: jax.Array) -> jax.Array:
    """int32[rows]: the first reason, by name, whose bool[rows] holds; NONE where none does."""
    reason = jnp.zeros((), jnp.int32)
    for name in reversed([reason.name for reason in StopReason if reason.name in holds]):
        reason = jnp.where(holds[name], jnp.int32(StopReason[name]), reason)
    return reason


def is_eos(tokens: jax.Array, eos: jax.Array | None) -> jax.Array:
    """bool[rows]: is the row's token one of `eos`, int32[E] or int32[rows, E]? Entries of -1 match nothing."""
    if eos is None:
        return jnp.zeros(tokens.shape, bool)
    eos = jnp.atleast_1d(eos)
    return jnp.any(tokens[:, None] == (eos if eos.ndim == 2 else eos[None, :]), axis=-1)
