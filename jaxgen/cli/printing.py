"""Print the answers to one prompt."""

from __future__ import annotations

import sys

import numpy as np

from jaxgen.cli import terminal
from jaxgen.cli.session import Session
from jaxgen.core.generation import generate
from jaxgen.core.output import GenerateOutput
from jaxgen.core.text.streaming import TextStreamer


class Printer(TextStreamer):
    """Streamer that prints an answer in place of the status line, and stores the text and the times of all `put` calls.

    After `stop`, the next token raises KeyboardInterrupt.
    """

    def __init__(self, session: Session):
        super().__init__(session.tokenizer, skip_prompt=True)
        self._stopped, self._stats = False, session.stats
        self.text = ""
        self.times: list[tuple[float, float]] = []  # the argument of `Stats.streamed`
        self._on_terminal = sys.stdout is not None and sys.stdout.isatty()

    def stop(self, *_: object) -> None:
        """End the answer; can be used as a signal handler."""
        self._stopped = True

    def put(self, value) -> None:
        """Receive the prompt or a token."""
        self.times.append(self._stats.now())
        if self._stopped:
            raise KeyboardInterrupt
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print and store text."""
        self.text += text
        if text or stream_end:
            terminal.erase()
        super().on_finalized_text(text, stream_end)
        if text and not stream_end:
            terminal.show("compiling, and generating the rest", self._room() if self._on_terminal else sys.maxsize)

    def _room(self) -> int:
        """Return the minimum number of columns after the text on the current line; negative if it may be too long."""
        line = self.text.rpartition("\n")[2]
        return terminal.columns() - sum(8 if char == "\t" else 1 if char.isascii() else 2 for char in line)


def generate_and_print(session: Session, ids, printer: Printer, **more) -> GenerateOutput:
    """Print the answers to one prompt, `ids int32[1, P]`. A single answer is streamed, except in beam search.

    `more` contains keyword arguments for `generate`, in addition to those of the session.
    """
    cfg = session.cfg
    arguments = {"tokenizer": session.tokenizer, **session.generate_kwargs, **more}
    terminal.show("compiling, and reading the prompt")
    try:
        if cfg.num_return_sequences == 1 and cfg.num_beams == 1:
            try:
                return generate(session.params, ids, session.key, cfg, streamer=printer, **arguments)
            except BaseException:  # on any error or Ctrl-C, print the text that is held back
                if printer.text:
                    printer.end()
                raise
            finally:
                session.stats.streamed(printer.times)
        with session.stats.generating():
            out = generate(session.params, ids, session.key, cfg, **arguments)
            session.stats.tokens += int(np.sum(np.asarray(out.lengths)))
        for number, text in enumerate(session.tokenizer.decode_batch(out)):
            printer.on_finalized_text("\n" * (number > 0) + text, stream_end=True)
        return out
    finally:
        terminal.erase()
