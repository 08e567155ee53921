"""Printing of answers to one prompt."""

from __future__ import annotations

import threading

from jaxgen.cli import terminal
from jaxgen.cli.timing import Stats
from jaxgen.config.generation_config import GenerationConfig
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


def generate_and_print(
    params, ids, key, cfg: GenerationConfig, stats: Stats, *, tokenizer: Tokenizer, printer: Printer, **more
) -> GenerateOutput:
    """Print the answers to one prompt: a single one as it is generated, unless it comes from beams.

    Arguments are those of `generate`; `stats` is told how long it took, and `printer` prints what is generated.
    """
    terminal.show("compiling, and reading the prompt")
    if cfg.num_return_sequences == 1 and cfg.num_beams == 1:
        return generate(params, ids, key, cfg, tokenizer=tokenizer, streamer=stats.watch(printer), **more)
    with stats.generating() as generated:
        out = generate(params, ids, key, cfg, tokenizer=tokenizer, **more)
        generated(out.lengths)
    terminal.erase()
    print("\n\n".join(tokenizer.decode_batch(out)), flush=True)
    return out
