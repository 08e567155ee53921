"""Timings and counts for a run of the command."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import jax

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
    def generating(self) -> Iterator[None]:
        """Add the duration of the `with` block, except for compilation, to `rest`."""
        begin = self.now()
        yield
        self._generated(begin, self.now())

    def streamed(self, times: Sequence[tuple[float, float]]) -> None:
        """Count a streamed answer. `times` contains what `now` returned when the prompt and each token arrived."""
        if len(times) > 1:
            self.first.append(times[1][0] - times[0][0])
            self._generated(times[1], times[-1])
            self.tokens += len(times) - 2

    def now(self) -> tuple[float, float]:
        """Return the current time and the total compilation time so far, both in seconds."""
        return time.perf_counter(), self.compile

    def _generated(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        self.rest += (end[0] - begin[0]) - (end[1] - begin[1])

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
