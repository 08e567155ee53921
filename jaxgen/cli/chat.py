"""A conversation in a terminal. The cache is reused from turn to turn."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgen.arguments import suggestion
from jaxgen.cli import terminal
from jaxgen.cli.options import in_settings, setting
from jaxgen.cli.printing import Printer, generate_and_print
from jaxgen.cli.session import Session
from jaxgen.core.config.generation_options import OPTIONS
from jaxgen.core.decoding.continuation import Continuation
from jaxgen.core.request.checks import can_continue
from jaxgen.core.request.early_checks import check_early
from jaxgen.core.request.fields import read_fields
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError, JaxgenError
from jaxgen.json_file import parse_json

HELP = """\
/reset           forget the conversation
/retry           answer the last message again
/save FILE       write the conversation to a file, in the form of --input
/load FILE       continue a conversation from such a file
/system TEXT     start over with this system message; without TEXT, with none
/set NAME VALUE  change an option of the command, such as temperature 0.5; without NAME, list those that are set
/help            show this help
/exit            quit, like the end of the input (Ctrl-D)
Ctrl-C ends an answer and keeps the conversation; Ctrl-\\ quits at once, even while a program is compiled.
End a line with \\ to continue it on the next, or put a line of \"\"\" before and after several lines."""


class Chat:
    """The conversation so far, and its cache.

    Attributes:
        context: the model's context length in tokens. If a conversation becomes too long for the context, its oldest
            turns are forgotten.
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

    def ask(self, text: str, session: Session) -> int:
        """Print the answer to `text`; return the number of old messages that were dropped to make room.

        If Ctrl-C interrupts an answer, the partial text is kept.

        Raises:
            InputError: the message alone exceeds the model's context.
            KeyboardInterrupt: Ctrl-C interrupted the answer.
        """
        most = int(np.max(np.asarray(session.cfg.max_new_tokens)))
        turns = [*self.turns, {"role": "user", "content": text}]
        dropped = self._too_many(turns, min(most, self.context // 2))
        turns = turns[dropped:]
        prompt = self._render(turns)
        # The cache is unusable if turns were dropped, earlier turns are rendered differently, or some options changed.
        usable = prompt.startswith(self._text)
        if self._cache is not None and not (usable and can_continue(self._cache, session.cfg)):
            self._forget_cache()
        ids = self.tokenizer.encode(prompt[len(self._text) :], add_special_tokens=False)
        cfg = session.cfg.replace(max_new_tokens=min(most, self._left(prompt)))
        session, mask = dataclasses.replace(session, cfg=cfg), [[1] * len(ids)]
        printer = Printer(session)
        with _on_interrupt(printer.stop), terminal.showing_interrupts():
            try:
                out = generate_and_print(session, [ids], printer, attention_mask=mask, cache=self._cache)
            except KeyboardInterrupt:
                if not printer.text.strip():
                    raise KeyboardInterrupt("Interrupted before the answer began: the message was dropped.") from None
                self.turns = [*turns, {"role": "assistant", "content": printer.text.strip()}]
                raise KeyboardInterrupt("The answer was interrupted.") from None
        generated = np.asarray(out.sequences)[0, out.prompt_width :][: int(out.lengths[0])]
        self._cache = out.cache
        self._text = prompt + self.tokenizer.decode(generated, skip_special_tokens=False)
        # With `slots`, no cache is returned, so the whole conversation has to be read again for the next answer.
        if self._cache is None:
            self._forget_cache()
        self.turns = [*turns, {"role": "assistant", "content": self.tokenizer.decode(generated).strip()}]
        return dropped

    def take_back(self) -> str:
        """Remove the last message and its answer, and return the message; raise an `InputError` if there is none."""
        if not self.turns:
            raise InputError("there is no message yet")
        *self.turns, message, _ = self.turns
        return message["content"]

    def save(self, path: Path) -> None:
        """Write the conversation to a file, as one line in the format of --input.

        If the file cannot be written, raise an `InputError` and leave an existing file unchanged.
        """
        data = json.dumps({"messages": self._messages(self.turns)}, ensure_ascii=False) + "\n"
        written = path.with_name(f"{path.name}.partial")
        try:
            written.write_text(data, encoding="utf-8")
            written.replace(path)
        except OSError as error:
            written.unlink(missing_ok=True)
            raise InputError(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Read a conversation written by `save`.

        If the file is not a conversation, raise an `InputError` and leave the current conversation unchanged.
        """
        try:
            fields = read_fields(parse_json(path.read_text("utf-8")), own_data=True)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise InputError(f"{path} is not a conversation: {error}") from error
        if fields.source != "messages":
            raise InputError(f'{path} is not a conversation: it must be {{"messages": [...]}}, as /save writes it')
        messages: Any = fields.content
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        turns = messages[system is not None :]
        roles = [message["role"] for message in turns]
        texts = all(isinstance(message.get("content"), str) for message in messages)
        if not texts or roles != ["user", "assistant"] * (len(turns) // 2):
            raise InputError(
                f"{path}: messages must be text and alternate between user and assistant, after at most one system "
                "message"
            )
        self.reset(system)
        self.turns = turns

    def _too_many(self, turns: list[dict[str, str]], room: int) -> int:
        """Return the number of old messages to drop so that `room` tokens are left for the answer."""
        for dropped in range(0, len(turns), 2):
            if self._left(self._render(turns[dropped:])) >= room:
                return dropped
        raise InputError(f"this message is too long: the model's context is {self.context} tokens, answer included")

    def _render(self, turns: list[dict[str, str]]) -> str:
        return self.tokenizer.render_chat(self._messages(turns))

    def _messages(self, turns: list[dict[str, str]]) -> list[dict[str, str]]:
        return turns if self.system is None else [{"role": "system", "content": self.system}, *turns]

    def _left(self, prompt: str) -> int:
        return self.context - len(self.tokenizer.encode(prompt, add_special_tokens=False))

    def _forget_cache(self) -> None:
        self._cache: Continuation | None = None
        self._text = ""  # the text of the cached tokens


def converse(chat: Chat, session: Session, given: set[str]) -> None:
    """Read and answer messages until stdin ends; the n-th answer is sampled with `fold_in(key, n)`.

    `given` contains the names of the options set on the command line; /set lists these options.
    """
    if sys.stdin is None:
        raise InputError("--chat reads stdin, which is closed")
    terminal.erase()
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (adds line editing and history to input())
        _note("Say something. /help lists the commands, Ctrl-D quits.")
    with _on_interrupt(signal.SIG_IGN), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: terminal.say("warning", in_settings(str(message)))
        _Conversation(chat, session, given).run()


@contextlib.contextmanager
def _on_interrupt(handler: Any) -> Iterator[None]:
    """Within the block, handle Ctrl-C with `handler` if stdin is a terminal; otherwise, Ctrl-C ends the process."""
    if not sys.stdin.isatty():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Conversation:
    """A conversation with the user. Each command has its own method."""

    def __init__(self, chat: Chat, session: Session, given: set[str]):
        self.chat, self.session, self.given = chat, session, given
        self.answers = 0
        self.own_files: set[Path] = set()  # files with earlier turns of this conversation; /save may replace them
        self.commands: dict[str, Callable[[str], None]] = {
            "/reset": self.reset,
            "/retry": self.retry,
            "/save": self.save,
            "/load": self.load,
            "/system": self.system,
            "/set": self.set,
            "/help": lambda _: _note(HELP),
        }

    def run(self) -> None:
        """Read and answer messages until the input ends or the user types /exit."""
        while True:
            try:
                with _on_interrupt(signal.default_int_handler):
                    message = _read_message()
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                _note("\nCtrl-D or /exit quits.")
                continue
            if message is None or message.strip() == "/exit":
                return
            try:
                self.react(message)
            except KeyboardInterrupt as interrupt:
                _note(str(interrupt))
            except JaxgenError as error:
                _note(in_settings(str(error)))

    def react(self, message: str) -> None:
        """Run a command, or answer a message."""
        word, _, rest = message.strip().partition(" ")
        if word in self.commands:
            self.commands[word](rest.strip())
        elif word.startswith("/") and word[1:].isalpha():
            hint = suggestion(word, [*self.commands, "/exit"], "; /help lists the commands")
            _note(f"{word} is not a command{hint}")
        elif message.strip():
            self.ask(message)

    def ask(self, message: str) -> None:
        """Answer a message."""
        session = self.session
        key = jax.random.fold_in(session.key, self.answers) if session.cfg.on("do_sample") else session.key
        dropped = self.chat.ask(message, dataclasses.replace(session, key=key))
        self.answers += 1
        if dropped:
            self.own_files.clear()  # these files may contain the only copy of the dropped messages
            _note(f"The oldest {dropped} messages were forgotten: the model's context is {self.chat.context} tokens.")

    def reset(self, _: str) -> None:
        """Forget the conversation."""
        self.chat.reset(self.chat.system)
        self.own_files.clear()
        _note("The conversation starts over.")

    def system(self, text: str) -> None:
        """Start over with a new system message."""
        self.chat.reset(text or None)
        self.own_files.clear()
        _note("The conversation starts over, " + ("with this system message." if text else "without a system message."))

    def retry(self, _: str) -> None:
        """Answer the last message again."""
        turns = self.chat.turns
        try:
            self.ask(self.chat.take_back())
        except BaseException:
            if len(self.chat.turns) < len(turns):  # no new answer was generated
                self.chat.turns = turns
            raise

    def save(self, name: str) -> None:
        """Write the conversation to a file; if the file exists, it must contain earlier turns of this conversation."""
        path = _path(name, "/save")
        exists = os.path.lexists(path)
        if exists and path not in self.own_files:
            raise InputError(f"{path} exists: choose another name, or remove it")
        self.chat.save(path)
        self.own_files.add(path)
        place = ", in place of its earlier turns" if exists else ""
        _note(f"{len(self.chat.turns)} messages were written to {path}{place}.")

    def load(self, name: str) -> None:
        """Continue a conversation from a file."""
        path = _path(name, "/load")
        self.chat.load(path)
        self.own_files = {path}
        _note(f"{len(self.chat.turns)} messages were read from {path}.")

    def set(self, text: str) -> None:
        """Change an option, or list the options that are set."""
        if not text:
            values = {name: getattr(self.session.cfg, name) for name in sorted(self.given)}
            shown = [
                f"{name}={value}" for name, value in values.items() if value is False or OPTIONS[name].is_given(value)
            ]
            _note(in_settings("\n".join(shown)) or "Nothing is set.")
            return
        fields = setting(text)
        try:
            cfg = self.session.cfg.replace(**fields)
            check_early(cfg, self.session.tokenizer)
        except TypeError as error:
            raise InputError(str(error)) from error
        self.session, self.given = dataclasses.replace(self.session, cfg=cfg), self.given | set(fields)
        (name, value), *_ = fields.items()
        if name == "temperature" and "do_sample" in fields:
            _note("temperature 0: greedy search")
            return
        unread = ""
        if name in [option.name for option in cfg.unread()]:
            unread = f", which {cfg.mode} does not read" + ("" if cfg.on("do_sample") else ": /set do_sample true")
        _note(in_settings(f"{name}={value}") + unread)


def _path(name: str, command: str) -> Path:
    if not name or "\0" in name:
        raise InputError(f"{command} needs the name of a file")
    return Path(name).expanduser().absolute()


def _read_message() -> str | None:
    """Read one message, which may span several lines; return None at the end of the input."""
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
    terminal.write(text if sys.stdin.isatty() else f"jaxgen: {text}")
