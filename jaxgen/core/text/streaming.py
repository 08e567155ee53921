"""Decode ids to text, in whole characters, while the ids are being generated."""

import asyncio
import functools
import queue
import re
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, TextIO

import numpy as np

from jaxgen.core.text.cleaning import clean_up
from jaxgen.core.text.ids import id_list
from jaxgen.core.text.token_bytes import FALLBACK
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A possible beginning of a string that `clean_up` replaces, such as " n't" or " 've"
UNDECIDED = re.compile(r" [ 'nvr]*$")
# An incomplete UTF-8 character has at most 3 bytes, so it begins in one of the last 3 tokens
CONTEXT = 4


class TextStream:
    """Decodes ids as they arrive. Together, `put` and `end` return what `tokenizer.decode` returns for all ids.

    Text is held back while later tokens can still change it. A U+FFFD at the end may be an incomplete character. Byte
    tokens (`<0x..>`) are held back until a regular token follows, because one invalid byte turns all of them into
    U+FFFD. With clean-up, a space and the characters after it are held back if clean-up might change them. `end`
    returns the text that is still held back. The cost of a token depends on the number of tokens held back, not on all
    earlier tokens.

    `kept` lists special tokens whose text is decoded even if special tokens are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
        kept: Collection[str] = (),
    ):
        self.tokenizer = tokenizer
        self.cleans_up = tokenizer.cleans_up(clean_up_tokenization_spaces)
        added = tokenizer.backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special and token.content not in kept}
        self._skipped = special if skip_special_tokens else set()
        decoder = tokenizer.backend.decoder
        self._byte_fallback = decoder is not None and decoder.decode(["<0x41>"]) == "A"
        self._restart()

    def put(self, ids: Any) -> str:
        """Append one or more ids and return the text that they complete."""
        return "".join(self._put(token_id) for token_id in id_list(ids))

    def end(self) -> str:
        """Return the text that was held back, and reset the stream."""
        text = self._undecided + self._decode()[self._given :]
        self._restart()
        return clean_up(text) if self.cleans_up else text

    def _restart(self) -> None:
        self._window: list[int] = []  # the last tokens, which are needed to decode the next one
        self._given = 0  # number of characters of the window's text that have already been returned
        self._undecided = ""  # text that clean-up might still change

    def _decode(self) -> str:
        return self.tokenizer.decode(self._window, False, False)  # the window has no token that is skipped

    def _put(self, token_id: int) -> str:
        token = self.tokenizer.backend.id_to_token(token_id)
        if not token or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        if self._byte_fallback and FALLBACK.fullmatch(token):
            return ""
        text = self._decode()
        held = text.endswith(REPLACEMENT)
        new = text[self._given : len(text) - held]
        self._window = self._window[-CONTEXT:]
        self._given = len(self._decode()) - held
        return self._cleaned(new) if self.cleans_up else new

    def _cleaned(self, new: str) -> str:
        text = self._undecided + new
        match = UNDECIDED.search(text)
        cut = match.start() if match else len(text)
        self._undecided = text[cut:]
        return clean_up(text[:cut])


class StopCut:
    """Cuts text at the first stop string; the beginning of a possible stop string is held back.

    Args:
        strings: the stop strings.
        keeps: if True, the stop string that ends the text is part of it.

    Attributes:
        found: the stop string that ended the text, or None.
    """

    def __init__(self, strings: Sequence[str], keeps: bool):
        self._strings, self._keeps = tuple(dict.fromkeys(strings)), keeps
        self._longest = max(map(len, self._strings), default=0)
        self._held = ""
        self.found: str | None = None

    def put(self, text: str) -> str:
        """Append text, and return the part that cannot belong to a stop string."""
        if self.found is not None:
            return ""
        text = self._held + text
        found = [(text.find(string), -len(string), string) for string in self._strings if string in text]
        if found:
            begin, _, self.found = min(found)
            self._held = ""
            return text[: begin + len(self.found) * self._keeps]
        held = self._length_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _length_held(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0

    def end(self) -> str:
        """Return the text that was held back; call this method after the last `put`."""
        held, self._held = self._held, ""
        return held


class TextStreamer:
    """Streamer that prints the text of one row as it is generated, like HF's `TextStreamer`.

    Pass the streamer to `generate(..., streamer=)`, which calls `put` with the prompt and with each new token, and
    finally calls `end`. Unlike in HF, each complete character is printed at once, without waiting for whole words, and
    special tokens are skipped by default, as in `Tokenizer.decode`. Override `on_finalized_text` to send the text
    elsewhere. `decode_kwargs` are passed to `TextStream`. If `file` is None, the text goes to standard output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_prompt: bool = False,
        *,
        file: TextIO | None = None,
        **decode_kwargs: Any,
    ):
        self.skip_prompt = skip_prompt
        self.file = file
        self._stream = TextStream(tokenizer, **decode_kwargs)
        self._expects_prompt = True

    def put(self, value: Any) -> None:
        """Receive the prompt (in the first call) or new tokens: a single id, or ids of shape [n] or [1, n]."""
        ids = np.asarray(value)
        if ids.ndim > 2 or (ids.ndim == 2 and ids.shape[0] != 1):
            raise InputError(
                f"a TextStreamer prints one row, got ids of shape {ids.shape}: generate one prompt, or pass a "
                "TextRowStreamer"
            )
        is_prompt, self._expects_prompt = self._expects_prompt, False
        if not (is_prompt and self.skip_prompt):
            self.on_finalized_text(self._stream.put(ids.reshape(-1)))

    def end(self) -> None:
        """Print the text that was held back and a newline; the next `put` must pass a prompt again."""
        self._expects_prompt = True
        self.on_finalized_text(self._stream.end(), stream_end=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print text that can no longer change."""
        print(text, end="\n" if stream_end else "", file=self.file or sys.stdout, flush=True)


class TextRowStreamer:
    """Streamer for several rows. Each complete line is printed, preceded by the row's index.

    >>> generate(params, ids, key, cfg, streamer=TextRowStreamer(tok))
    >>> on_text = lambda row, text, ended: print(f"{row}: {text!r}" + " (end)" * ended)
    >>> generate(params, ids, key, cfg, streamer=TextRowStreamer(tok, on_text))

    If `on_text` is given, nothing is printed. Instead, `on_text` is called whenever a row has new complete characters.
    `ended` is True in the last call for a row; the text may then be empty. Rows are counted from 0, as in
    `GenerateOutput`. Prompts are left out. `decode_kwargs` are passed to `TextStream`. `file` is as in `TextStreamer`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        on_text: Callable[[int, str, bool], object] | None = None,
        *,
        file: TextIO | None = None,
        **decode_kwargs: Any,
    ):
        self.on_text = on_text or self._print_lines
        self.file = file
        self._open = functools.partial(TextStream, tokenizer, **decode_kwargs)
        self._open()  # raises an error if decode_kwargs are invalid
        self._streams: dict[int, TextStream] = {}
        self._lines: dict[int, str] = {}  # the incomplete line of each row

    def put_row(self, row: int, ids: Any, ended: bool) -> None:
        """Receive the next tokens of a row."""
        if row not in self._streams:
            self._streams[row] = self._open()
        text = self._streams[row].put(ids)
        if ended:
            text += self._streams.pop(row).end()
        if text or ended:
            self.on_text(row, text, ended)

    def end(self) -> None:
        """End the rows that have not ended; the streamer can then be used for a new run."""
        for row in sorted(self._streams):
            self.put_row(row, [], ended=True)

    def _print_lines(self, row: int, text: str, ended: bool) -> None:
        *lines, rest = (self._lines.pop(row, "") + text).split("\n")
        if not ended:
            self._lines[row] = rest
        elif rest:
            lines.append(rest)
        for line in lines:
            print(f"{row}: {line}", file=self.file or sys.stdout, flush=True)


class _QueueStreamer(TextStreamer):
    """Streamer that puts pieces of text into a queue. The last item of a run is None or an exception."""

    def __init__(
        self, tokenizer: Tokenizer, skip_prompt: bool = False, timeout: float | None = None, **decode_kwargs: Any
    ):
        super().__init__(tokenizer, skip_prompt, file=None, **decode_kwargs)
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, int | float):
                raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
            if not 0 <= timeout <= threading.TIMEOUT_MAX:
                raise InputError(
                    f"timeout must be 0 to {threading.TIMEOUT_MAX:.0f} seconds, or None to wait forever, got {timeout}"
                )
        self.timeout = timeout
        self._ended = False

    def send(self, item: str | BaseException | None) -> None:
        """Put an item into the queue."""
        raise NotImplementedError

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Send the text, followed by None if it is the last piece."""
        self.send(text)
        if stream_end:
            self.send(None)

    def error(self, exception: BaseException) -> None:
        """End the run with an exception. The iteration yields the remaining text, and then raises the exception."""
        if not isinstance(exception, BaseException):
            raise TypeError(f"error must be called with an exception, got {exception!r}")
        self._expects_prompt = True
        try:
            self.on_finalized_text(self._stream.end())
        finally:
            self.send(exception)

    def _read(self, item: str | BaseException | None) -> str:
        """Return the text of an item, or "" for None (the end of the run). If the item is an exception, raise it."""
        self._ended = not isinstance(item, str)
        if isinstance(item, BaseException):
            raise item
        return item or ""


class TextIteratorStreamer(_QueueStreamer):
    """Streamer that another thread iterates over to receive the text, like HF's `TextIteratorStreamer`.

    Run `generate` in a separate thread. An exception in `generate` ends only its thread, and the iteration keeps
    waiting. Pass the exception to `error`, so that the iteration raises it:

        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)

        def run():
            try:
                generate(params, batch.ids, None, cfg, streamer=streamer)
            except BaseException as error:
                streamer.error(error)

        threading.Thread(target=run).start()
        for text in streamer:
            print(text, end="", flush=True)

    `timeout` is the number of seconds to wait for the next token, or None for no limit; the wait for the first token
    includes compilation. On a timeout, the iteration raises `queue.Empty`. A streamer can be used for several runs in
    succession. A `for` loop ends when its run ends, and the next loop waits for the next run. Leaving a loop early does
    not stop the run.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_prompt: bool = False, timeout: float | None = None, **decode_kwargs: Any
    ):
        super().__init__(tokenizer, skip_prompt, timeout, **decode_kwargs)
        self.text_queue: queue.Queue[str | BaseException | None] = queue.Queue()

    def send(self, item: str | BaseException | None) -> None:
        """Put an item into the queue."""
        self.text_queue.put(item)

    def __iter__(self) -> "TextIteratorStreamer":
        self._ended = False
        return self

    def __next__(self) -> str:
        while not self._ended:
            try:
                item = self.text_queue.get(timeout=self.timeout)
            except queue.Empty:
                raise queue.Empty(_late(self.timeout)) from None
            if text := self._read(item):
                return text
        raise StopIteration


class AsyncTextIteratorStreamer(_QueueStreamer):
    """Streamer that a coroutine iterates over, like `AsyncTextIteratorStreamer` in later transformers releases.

    Create the streamer in the event loop that will read it, and run `generate` in a thread:

        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True)

        def run():
            try:
                generate(params, batch.ids, None, cfg, streamer=streamer)
            except BaseException as error:
                streamer.error(error)

        task = asyncio.create_task(asyncio.to_thread(run))
        async for text in streamer:
            print(text, end="", flush=True)

    Everything else is as in `TextIteratorStreamer`, except that on a timeout the iteration raises `TimeoutError`.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_prompt: bool = False, timeout: float | None = None, **decode_kwargs: Any
    ):
        super().__init__(tokenizer, skip_prompt, timeout, **decode_kwargs)
        self.text_queue: asyncio.Queue[str | BaseException | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def send(self, item: str | BaseException | None) -> None:
        """Put an item into the queue, from any thread."""
        self._loop.call_soon_threadsafe(self.text_queue.put_nowait, item)

    def __aiter__(self) -> "AsyncTextIteratorStreamer":
        self._ended = False
        return self

    async def __anext__(self) -> str:
        while not self._ended:
            try:
                item = await asyncio.wait_for(self.text_queue.get(), self.timeout)
            except TimeoutError:
                raise TimeoutError(_late(self.timeout)) from None
            if text := self._read(item):
                return text
        raise StopAsyncIteration


def _late(seconds: float | None) -> str:
    return f"no token arrived for {seconds} seconds: set a longer timeout, or check if generate failed"
