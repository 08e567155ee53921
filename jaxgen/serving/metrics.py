"""Metrics of the service, in Prometheus's text format. The names are vLLM's, with the prefix `jaxgen:`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_SEQUENCES = (1, 2, 5, 10, 20, 50, 100)
_GAUGES = {
    "num_requests_running": "Prompts that have their first token.",
    "num_requests_waiting": "Prompts that do not have their first token yet.",
    "kv_cache_usage_perc": "Fraction of slots in use, from 0 to 1.",
}
# Each counter has a description, and perhaps the name of a label.
_COUNTERS = {
    "prompt_tokens_total": ("Tokens of prompts.",),
    "generation_tokens_total": ("Generated tokens.",),
    "prefix_cache_queries_total": ("Prompt tokens looked up in the prefix store.",),
    "prefix_cache_hits_total": ("Prompt tokens found in the prefix store.",),
    "request_success_total": ("Sequences that ended, by finished_reason.", "finished_reason"),
    "request_error_total": ("Requests that were rejected or failed, by status.", "status"),
    "request_cancelled_total": ("Requests whose client disconnected, or that ran out of time.",),
}
_HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (_SECONDS, "From the request to the first token of a prompt."),
    "inter_token_latency_seconds": (_SECONDS, "Between two tokens of a sequence, averaged over a chunk."),
    "e2e_request_latency_seconds": (_SECONDS, "From the request to the last token."),
    "request_prompt_tokens": (_TOKENS, "Tokens of a prompt."),
    "request_generation_tokens": (_TOKENS, "Tokens of a sequence."),
    "request_params_n": (_SEQUENCES, "Sequences per request."),
    "request_params_max_tokens": (_TOKENS, "The maximum number of tokens that a request allows."),
}


class Metrics:
    """The metrics of one model; `gauges` returns the current values of the gauges by name."""

    def __init__(self, model: str, gauges: Callable[[], dict[str, float]]):
        self._registry, self._labels = CollectorRegistry(), {"model_name": model, "engine": "0"}
        for name, about in _GAUGES.items():
            self._add(Gauge, name, about).set_function(lambda name=name: gauges()[name])
        self._counters = {name: self._add(Counter, name, *about) for name, about in _COUNTERS.items()}
        self._histograms = {
            name: self._add(Histogram, name, about, buckets=bounds) for name, (bounds, about) in _HISTOGRAMS.items()
        }

    def _add(self, kind: type[Any], name: str, about: str, label: str | None = None, **more: Any) -> Any:
        """Add a metric. It has the labels of all metrics, and perhaps one more."""
        labels = [*self._labels, *([] if label is None else [label])]
        metric = kind(f"jaxgen:{name}", about, labels, registry=self._registry, **more)
        return metric.labels(**self._labels) if label is None else metric

    def count(self, name: str, number: int = 1, **label: str) -> None:
        """Add `number` to a counter; `label` is its own label, such as `finished_reason="stop"`."""
        counter = self._counters[name]
        (counter.labels(**self._labels, **label) if label else counter).inc(number)

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a histogram."""
        self._histograms[name].observe(value)

    def text(self) -> str:
        """Return all values in Prometheus's text format."""
        return generate_latest(self._registry).decode()
