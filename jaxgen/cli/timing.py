"""Timings and counts for a run of the command."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxgen.generation import Streamer

_COMPILING = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")
_COMPILING += ("/jax/core/compile/backend_compile_duration",)


class Stats:
    """Times for loading, compiling, the first token and the remaining tokens, and counts of tokens and failures.

    Attributes:
        load: seconds to load the weights from files to the device.
        compile: total seconds spent tracing and compiling.
        first: seconds from each request to its first token, including compilation.
        rest: total seconds spent generating, excluding compilation and the times in `first`.
        tokens: the number of generated tokens, excluding the first tokens that `first` covers.
        failed: the number of answers that could not be completed.
    """

    def __init__(self):
        self.load = self.compile = self.rest = 0.0
        self.first: list[float] = []
        self.tokens = self.failed = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in _COMPILING:
            self.compile += duration_secs

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Store the duration of the `with` block in `load`."""
        start = time.perf_counter()
        yield
        self.load = time.perf_counter() - start

    @contextlib.contextmanager
    def generating(self) -> Iterator[Callable[[jax.Array | list[int]], None]]:
        """Add the `with` block's duration to `rest`; the block calls the yielded function with each row's length."""
        start, compiled = time.perf_counter(), self.compile

        def generated(lengths: jax.Array | list[int]) -> None:
            self.tokens += int(np.sum(np.asarray(lengths)))

        yield generated
        self.rest += time.perf_counter() - start - (self.compile - compiled)

    def watch(self, streamer: Streamer) -> Streamer:
        """Return a streamer that times the calls and passes them on to `streamer`."""
        return _Watched(streamer, self)

    def lines(self) -> list[str]:
        """Return the lines to print."""
        lines = [f"load {self.load:.2f} s, compile {self.compile:.2f} s"]
        if self.first:
            lines.append(
                f"time to first token {', '.join(f'{seconds:.2f} s' for seconds in self.first)}, compiling included"
            )
        speed = f", {self.tokens / self.rest:.1f} tokens/s" if self.tokens and self.rest > 0 else ""
        lines.append(f"{self.tokens + len(self.first)} tokens{speed}")
        return lines


class _Watched:
    def __init__(self, streamer: Streamer, stats: Stats):
        self.streamer, self.stats = streamer, stats
        self.puts = 0
        self.start = self.last = 0.0

    def put(self, value: np.ndarray) -> None:
        """Pass on the prompt or a token."""
        now = time.perf_counter()
        if self.puts == 0:
            self.start = now
        elif self.puts == 1:
            self.stats.first.append(now - self.start)
        else:
            self.stats.rest += now - self.last
            self.stats.tokens += 1
        self.last, self.puts = now, self.puts + 1
        self.streamer.put(value)

    def end(self) -> None:
        """Pass on the end of the answer; the next `put` receives a prompt again."""
        self.puts = 0
        self.streamer.end()
