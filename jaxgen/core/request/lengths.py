"""Limits on the lengths of prompts and answers."""

from __future__ import annotations

import dataclasses

from jaxgen.errors import ConfigError, InputError


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Limits on numbers of tokens; None for no limit.

    Attributes:
        prompt: the maximum for a prompt.
        answer: the maximum for an answer.
        context: the maximum for a prompt and its answer together.
        total: the same maximum for answers for which no number is asked, as the option `max_length`.
    """

    prompt: int | None = None
    answer: int | None = None
    context: int | None = None
    total: int | None = None

    def budget(self, length: int, asked: int | None) -> int:
        """Return the maximum number of new tokens after a prompt of `length` tokens: `asked`, or as many as fit.

        Raises:
            InputError: the prompt is too long, alone or together with `asked` new tokens.
            ConfigError: `asked` is more than an answer may have.
        """
        if asked is None and self.total is not None:
            asked = beyond(length, self.total)
        if self.prompt is not None and length > self.prompt:
            raise InputError(
                f"the prompt has {token_count(length)}, but at most {self.prompt} are accepted: shorten the prompt"
            )
        space = None if self.context is None else self.context - length
        if space is not None and space < (1 if asked is None else min(asked, 1)):
            raise InputError(
                f"the prompt has {token_count(length)}, so it fills the context of {self.context}: shorten the prompt"
            )
        if space is not None and asked is not None and asked > space:
            raise InputError(
                f"the prompt has {token_count(length)} and max_new_tokens is {asked}, together more than the context "
                f"of {self.context}: shorten the prompt, or set max_new_tokens to at most {space}"
            )
        if self.answer is not None and asked is not None and asked > self.answer:
            raise ConfigError(
                f"max_new_tokens={asked} is more than {self.answer}, for which memory is reserved: lower it"
            )
        return min(size for size in (asked, self.answer, space) if size is not None)


def beyond(length: int, max_length: int, found: str | None = None) -> int:
    """Return the number of new tokens after `length` tokens that `max_length` allows.

    Raise an `InputError` if it allows none. `found` is the beginning of its message.
    """
    if length >= max_length:
        found = found or f"the prompt has {token_count(length)}"
        raise InputError(f"{found}, and max_length={max_length} includes the prompt: raise it, or set max_new_tokens")
    return max_length - length


def token_count(count: int) -> str:
    """Return a number of tokens as text."""
    return "1 token" if count == 1 else f"{count} tokens"
