"""Metrics of the service, in Prometheus's text format. The names are vLLM's, with the prefix `jaxgen:`."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Sequence

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_SEQUENCES = (1, 2, 5, 10, 20, 50, 100)
_GAUGES = {
    "num_requests_running": "Prompts that have their first token.",
    "num_requests_waiting": "Prompts that do not have their first token yet.",
    "kv_cache_usage_perc": "Fraction of slots in use, from 0 to 1.",
}
_COUNTERS = {
    "prompt_tokens_total": "Tokens of prompts.",
    "generation_tokens_total": "Generated tokens.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix store.",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix store.",
    "request_success_total": "Sequences that ended, by finished_reason.",
    "request_error_total": "Requests that were rejected or failed, by status.",
    "request_cancelled_total": "Requests whose client disconnected, or that ran out of time.",
}
_HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (_SECONDS, "From the request to the first token of a prompt."),
    "inter_token_latency_seconds": (_SECONDS, "Between two tokens of a sequence, averaged over each chunk."),
    "e2e_request_latency_seconds": (_SECONDS, "From the request to the last token."),
    "request_prompt_tokens": (_TOKENS, "Tokens of a prompt."),
    "request_generation_tokens": (_TOKENS, "Tokens of a sequence."),
    "request_params_n": (_SEQUENCES, "Sequences per request."),
    "request_params_max_tokens": (_TOKENS, "The maximum number of tokens that a request allows."),
}


class _Histogram:
    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> list[str]:
        lines, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*lines, f"{name}_count{{{labels}}} {total}", f"{name}_sum{{{labels}}} {self.sum}"]


class Metrics:
    """The counters and histograms of one model; `gauges` returns the current values of the gauges by name."""

    def __init__(self, model: str, gauges: Callable[[], dict[str, float]]):
        escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._labels, self._gauges = f'model_name="{escaped}",engine="0"', gauges
        self._counters: dict[tuple[str, str], int] = {(name, ""): 0 for name in _COUNTERS if name[:7] != "request"}
        self._histograms = {name: _Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
        self._lock = threading.Lock()

    def count(self, name: str, number: int = 1, **label: str) -> None:
        """Add `number` to a counter; `label` is an additional label, such as `finished_reason="stop"`."""
        key = name, "".join(f',{label_name}="{value}"' for label_name, value in label.items())
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + number

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Add `times` observations of the same value to a histogram."""
        with self._lock:
            self._histograms[name].add(value, times)

    def text(self) -> str:
        """Return all values in Prometheus's text format."""
        lines: list[str] = []

        def head(name: str, kind: str, about: str) -> str:
            full = f"jaxgen:{name}"
            lines.extend((f"# HELP {full} {about}", f"# TYPE {full} {kind}"))
            return full

        for name, value in self._gauges().items():
            lines.append(f"{head(name, 'gauge', _GAUGES[name])}{{{self._labels}}} {value}")
        with self._lock:
            for name, about in _COUNTERS.items():
                full = head(name, "counter", about)
                for (counter, label), value in sorted(self._counters.items()):
                    if counter == name:
                        lines.append(f"{full}{{{self._labels}{label}}} {value}")
            for name, (_, about) in _HISTOGRAMS.items():
                lines += self._histograms[name].lines(head(name, "histogram", about), self._labels)
        return "\n".join([*lines, ""])
