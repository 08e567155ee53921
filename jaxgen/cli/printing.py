"""Printing of answers to one prompt."""

from __future__ import annotations

import threading

from jaxgen.cli import terminal
from jaxgen.cli.session import Session
from jaxgen.generation import generate
from jaxgen.output import GenerateOutput
from jaxgen.text.streaming import TextStreamer
from jaxgen.text.tokenizer import Tokenizer


class Printer(TextStreamer):
    """Streamer that prints an answer, in the place of the status line, and remembers its text.

    When `stop` is set, the next token raises KeyboardInterrupt.
    """

    def __init__(self, tokenizer: Tokenizer, stop: threading.Event | None = None):
        super().__init__(tokenizer, skip_prompt=True)
        self.stop = stop
        self.text = ""

    def put(self, value) -> None:
        """Receive the prompt or a token."""
        if self.stop is not None and self.stop.is_set():
            raise KeyboardInterrupt
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print text, and remember it."""
        if text or stream_end:
            terminal.erase()
        self.text += text
        super().on_finalized_text(text, stream_end)


def generate_and_print(session: Session, ids, printer: Printer, **more) -> GenerateOutput:
    """Print the answers to one prompt: a single one as it is generated, unless it comes from beams.

    Args:
        session: the model, the options and the key.
        ids: int32[1, P], the prompt.
        printer: prints what is generated.
        **more: keywords of `generate`, in addition to the session's.
    """
    terminal.show("compiling, and reading the prompt")
    cfg = session.cfg
    arguments = {"tokenizer": session.tokenizer, **session.more, **more}
    if cfg.num_return_sequences == 1 and cfg.num_beams == 1:
        streamer = session.stats.watch(printer)
        return generate(session.params, ids, session.key, cfg, streamer=streamer, **arguments)
    with session.stats.generating() as generated:
        out = generate(session.params, ids, session.key, cfg, **arguments)
        generated(out.lengths)
    terminal.erase()
    print("\n\n".join(session.tokenizer.decode_batch(out)), flush=True)
    return out
