"""A conversation in a terminal; the cache is reused from turn to turn."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxgen.cli.printing import generate_and_print
from jaxgen.cli.timing import Stats
from jaxgen.config.generation_config import GenerationConfig
from jaxgen.config.options import CONTRASTIVE
from jaxgen.decoding.continuation import Continuation
from jaxgen.errors import InputError
from jaxgen.text.tokenizer import Tokenizer

HELP = """\
/reset         forget the conversation
/system TEXT   start over with this system message; without TEXT, with none
/help          show this help
/exit          quit, like the end of the input (Ctrl-D)
End a line with \\ to continue it on the next, or put a line of \"\"\" before and after several lines."""


class Chat:
    """The conversation so far, and its cache.

    Attributes:
        context: the model's context in tokens. If a conversation would be longer, the oldest turns are forgotten.
    """

    def __init__(self, tokenizer: Tokenizer, context: int, system: str | None = None):
        if tokenizer.chat_template is None:
            raise InputError("--chat needs a chat template, which this tokenizer lacks: use a prompt instead")
        self.tokenizer, self.context = tokenizer, context
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Forget the conversation and start over with a system message, or with none."""
        self.system = system
        self.turns: list[dict[str, str]] = []
        self._forget_cache()

    def ask(self, text: str, params, cfg: GenerationConfig, key, stats: Stats, more: Mapping[str, Any]) -> int:
        """Print the answer to `text`; return the number of oldest messages that were forgotten to make room.

        `more`: further keywords of `generate`.

        Raises:
            InputError: the message alone exceeds the model's context.
        """
        most = int(np.max(np.asarray(cfg.max_new_tokens)))
        turns = [*self.turns, {"role": "user", "content": text}]
        dropped = self._too_many(turns, min(most, self.context // 2))
        turns = turns[dropped:]
        prompt = self._render(turns)
        if not prompt.startswith(self._text):  # turns were dropped, or the template renders earlier ones differently
            self._forget_cache()
        ids = self.tokenizer.encode(prompt[len(self._text) :], add_special_tokens=False)
        cfg = cfg.replace(max_new_tokens=min(most, self._left(prompt)))
        given = {"attention_mask": [[1] * len(ids)], "cache": self._cache, **more}
        out = generate_and_print(params, [ids], key, cfg, stats, **given)
        generated = np.asarray(out.sequences)[0, out.prompt_width :][: int(out.lengths[0])]
        self._cache = out.cache
        self._text = prompt + self.tokenizer.decode(generated, skip_special_tokens=False)
        if cfg.mode == CONTRASTIVE:  # which does not continue from a cache
            self._forget_cache()
        self.turns = [*turns, {"role": "assistant", "content": self.tokenizer.decode(generated).strip()}]
        return dropped

    def _too_many(self, turns: list[dict[str, str]], room: int) -> int:
        """Return the number of oldest messages to drop so that `room` tokens are left for the answer."""
        for dropped in range(0, len(turns), 2):
            if self._left(self._render(turns[dropped:])) >= room:
                return dropped
        raise InputError(f"this message is too long: the model's context is {self.context} tokens, answer included")

    def _render(self, turns: list[dict[str, str]]) -> str:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.tokenizer.render_chat([*system, *turns])

    def _left(self, prompt: str) -> int:
        return self.context - len(self.tokenizer.encode(prompt, add_special_tokens=False))

    def _forget_cache(self) -> None:
        self._cache: Continuation | None = None
        self._text = ""  # the text of the cached tokens


def converse(
    chat: Chat, params, cfg: GenerationConfig, key: jax.Array | None, stats: Stats, more: Mapping[str, Any]
) -> None:
    """Read messages from stdin until its end, and answer each; the n-th answer is drawn with `fold_in(key, n)`."""
    if sys.stdin.isatty():
        _note("Say something. /help lists the commands.")
    number = 0
    while (message := _read_message()) is not None:
        word, _, rest = message.strip().partition(" ")
        if not message.strip():
            continue
        if word == "/exit":
            break
        if word == "/help":
            _note(HELP)
        elif word == "/reset":
            chat.reset(chat.system)
        elif word == "/system":
            chat.reset(rest.strip() or None)
        elif word.startswith("/") and word[1:].isalpha():
            _note(f"{word} is not a command; /help lists the commands")
        else:
            turn_key = None if key is None else jax.random.fold_in(key, number)
            try:
                dropped = chat.ask(message, params, cfg, turn_key, stats, more)
            except InputError as error:
                _note(str(error))
                continue
            number += 1
            if dropped:
                _note(f"The oldest {dropped} messages were forgotten: the model's context is {chat.context} tokens.")


def _read_message() -> str | None:
    """Read one message, which may span several lines; None at the end of the input."""
    line = _read_line("> ")
    if line is None:
        return None
    lines = []
    if line.strip() == '"""':
        while (line := _read_line("... ")) is not None and line.strip() != '"""':
            lines.append(line)
        return "\n".join(lines)
    while line is not None and line.endswith("\\"):
        lines.append(line[:-1])
        line = _read_line("... ")
    return "\n".join([*lines, line or ""])


def _read_line(prompt: str) -> str | None:
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return input(prompt)  # with the terminal's line editing
        if sys.stdin.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"the input is not UTF-8 text: {error}") from error


def _note(text: str) -> None:
    print(text if sys.stdin.isatty() else f"jaxgen: {text}", file=sys.stderr)
