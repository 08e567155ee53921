"""The record of a training run: losses, evaluations and speeds by step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgen.errors import ConfigError
from jaxgen.training.curve import curve

Entry = dict[str, Any]
ENTRIES, CURVE = "training.jsonl", "training.svg"  # names of files


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluations during training.

    Attributes:
        loss: returns the held-out loss of the trained parameters, or of the trained low-rank updates.
        every: the number of steps between evaluations; None evaluates only before the first and after the last step.
        keep_best: return the parameters with the lowest held-out loss after a step, instead of the last ones.
        patience: stop after this many evaluations in a row without a new lowest loss; None never stops early.
    """

    loss: Callable[[Any], float]
    every: int | None = None
    keep_best: bool = False
    patience: int | None = None

    def __post_init__(self):
        for name in ("every", "patience"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    def is_due(self, step: int, steps: int) -> bool:
        """Return True if there is an evaluation after `step` of `steps` steps."""
        return step == steps or (self.every is not None and step % self.every == 0)


class Record:
    """The entries of a run, in order of their steps. With a directory, they are also written to files there.

    An entry contains `step` with `loss`, `grad_norm`, `learning_rate` and `tokens_per_second`, or with `eval_loss`.
    """

    def __init__(self, entries: Iterable[Entry], directory: Path | None):
        self.entries = list(entries)
        self._directory = directory if jax.process_index() == 0 else None
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / ENTRIES).write_text("".join(map(_line, self.entries)), "utf-8")
            self.draw()

    def add(self, step: int, **values: float) -> None:
        """Append an entry. Values are rounded to six digits."""
        entry = {"step": step} | {name: float(f"{value:.6g}") for name, value in values.items()}
        self.entries.append(entry)
        if self._directory is not None:
            with (self._directory / ENTRIES).open("a", encoding="utf-8") as file:
                file.write(_line(entry))

    def draw(self) -> None:
        """Draw the curve, if there is a directory."""
        if self._directory is not None:
            (self._directory / CURVE).write_text(curve(self.entries), "utf-8")

    def lowest(self, steps: Collection[int] | None = None) -> int | None:
        """Return the step with the lowest held-out loss, or None. Only consider `steps`, if given."""
        found = [entry for entry in self._evaluations() if steps is None or entry["step"] in steps]
        return min(found, key=lambda entry: entry["eval_loss"])["step"] if found else None

    def evaluations_since_lowest(self) -> int:
        """Return the number of evaluations after the one with the lowest loss."""
        losses = [entry["eval_loss"] for entry in self._evaluations()]
        return len(losses) - 1 - losses.index(min(losses)) if losses else 0

    def _evaluations(self) -> list[Entry]:
        return [entry for entry in self.entries if "eval_loss" in entry and entry["step"] > 0]


def _line(entry: Entry) -> str:
    return json.dumps(entry) + "\n"


class Meter:
    """Losses and speeds of the steps since the last report.

    Metrics are read only when a report is due, so that steps can queue up on the device. `pending` contains the losses
    and numbers of labels of steps that an earlier process did not report.
    """

    def __init__(self, steps: int, pending: Iterable[Sequence[float]]):
        self._steps = steps
        self._losses = list(pending)
        self._waiting: list[Any] = []
        self._tokens = 0
        self._since = time.perf_counter()
        self._first: tuple[int, float] | None = None  # the step and the time of the first report

    def count(self, metrics: Any, tokens: int) -> None:
        """Count a step that returned `metrics`."""
        self._waiting.append(metrics)
        self._tokens += tokens

    def pending(self) -> list[Sequence[float]]:
        """Return the loss and the number of labels of each step since the last report. This waits for the device."""
        self._losses += [(float(metrics.loss), float(metrics.tokens)) for metrics in self._waiting]
        self._waiting.clear()
        return self._losses

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the duration of the `with` block from the speed."""
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin

    def report(self, step: int, metrics: Any) -> tuple[dict[str, float], str]:
        """Return the values for the record, and a line that describes them. Begin to count again.

        Raises:
            ConfigError: the loss is infinite or NaN.
        """
        losses, labels = np.array(self.pending()).T
        loss = float(np.sum(losses * labels) / max(1.0, np.sum(labels)))
        check_finite(loss, step)
        gradient, rate = float(metrics.gradient_norm), float(metrics.learning_rate)
        now = time.perf_counter()
        speed = self._tokens / (now - self._since)
        line = f"step {step}/{self._steps}  loss {loss:.4f}  gradient {gradient:.2f}  rate {rate:.2e}  "
        line += f"{speed:,.0f} tokens/s{self._left(step, now)}"
        self._losses, self._tokens, self._since = [], 0, time.perf_counter()
        return {"loss": loss, "grad_norm": gradient, "learning_rate": rate, "tokens_per_second": speed}, line

    def _left(self, step: int, now: float) -> str:
        """Return the time that is left, from the second report on: the first step includes compiling."""
        if self._first is None:
            self._first = step, now
            return ""
        before, then = self._first
        return f"  {duration((self._steps - step) * (now - then) / (step - before))} left" if step < self._steps else ""


def check_finite(loss: float, step: int) -> None:
    """Raise a `ConfigError` if a loss is not finite: training has diverged or, at step 0, cannot begin."""
    if np.isfinite(loss):
        return
    if step > 0:
        raise diverged(f"the loss is {loss} at step {step}")
    raise ConfigError(
        f"the held-out loss is {loss} before the first step: check that the checkpoint's weights are finite, or choose "
        "a dtype with a larger range (float32)"
    )


def diverged(fault: str) -> ConfigError:
    """Return the error for training that has diverged."""
    return ConfigError(f"training diverged: {fault}; lower the learning rate or warm up for longer")


def duration(seconds: float) -> str:
    """Return a duration as text: in seconds below two minutes, in minutes below two hours, or else in hours."""
    for unit, name in ((1, "s"), (60, "min")):
        if seconds < 120 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 3600:.1f} h"
