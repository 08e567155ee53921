"""Progress of a training run: reports, the record, evaluations, and the states that are saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxgen.errors import ConfigError, warn
from jaxgen.training.checkpoint import intact_steps, read_notes, read_state, write_state
from jaxgen.training.record import Evaluation, Meter, Record, check_finite, diverged


class RunLog:
    """Everything about a run except its state. `settings` identifies the run; the other arguments are as in `train`."""

    def __init__(
        self,
        steps: int,
        directory: Path | None,
        settings: str,
        evaluation: Evaluation | None,
        report: Callable[[str], None] | None,
    ):
        self.steps, self.directory, self.settings, self.evaluation = steps, directory, settings, evaluation
        self.say = report or (lambda line: None)
        self.saved: list[int] = []  # the steps of the undamaged states
        self.keeps_best = evaluation is not None and evaluation.keep_best
        if self.keeps_best and directory is None:
            raise ConfigError("keep_best=True needs a directory, in which the best state is saved")

    def begin(self, state: Any) -> None:
        """Begin a record; evaluate the state before the first step."""
        self.record, self.meter = Record([], self.directory), Meter(self.steps, [])
        if self.evaluation is not None:
            self.say(f"held-out loss before: {self._evaluate(self.evaluation, state, 0):.4f}")

    def resume(self, directory: Path, like: Any) -> Any:
        """Continue a record. Return the newest undamaged state; `like` is as in `read_state`."""
        self.saved = intact_steps(directory)
        step = self.saved[-1]
        notes = read_notes(directory, step)
        self.record, self.meter = Record(notes["record"], directory), Meter(self.steps, notes["pending"])
        lowest = self.record.lowest()
        if self.keeps_best and lowest is not None and lowest not in self.saved:
            warn(
                f"the held-out loss was lowest at step {lowest}, but no undamaged state of that step is left: "
                "keep_best=True chooses among the other saved states and later steps"
            )
        self.say(f"resuming after step {step} from the state in {directory}")
        return read_state(directory, step, like)

    def count(self, step: int, state: Any, metrics: Any, tokens: int, *, report_every: int, save_every: int) -> None:
        """Count a step; then report, evaluate and save what is due."""
        self.meter.count(metrics, tokens)
        is_due = step % report_every == 0 or step == self.steps
        if is_due:
            self._report(step, metrics)
        must_save = step % save_every == 0
        if self.evaluation is not None and self.evaluation.is_due(step, self.steps):
            loss = self._evaluate(self.evaluation, state, step)
            is_lowest = self.record.lowest([*self.saved, step] if self.keeps_best else None) == step
            self.say(f"step {step}/{self.steps}  held-out loss {loss:.4f}{', the lowest so far' if is_lowest else ''}")
            must_save |= self.keeps_best and is_lowest
        finished = self.is_finished(step)
        if finished and step < self.steps:
            if not is_due:
                self._report(step, metrics)
            lowest = self.record.lowest()
            self.say(f"stopping after step {step}: the held-out loss has not been lower since step {lowest}")
        if self.directory is not None and (must_save or finished):
            self._save(self.directory, step, state, finished)

    def is_finished(self, step: int) -> bool:
        """Return True if no step is left, or if the held-out loss has not become lower for `patience` evaluations."""
        patience = None if self.evaluation is None else self.evaluation.patience
        return step >= self.steps or (patience is not None and self.record.evaluations_since_lowest() >= patience)

    def best(self) -> int | None:
        """Return the step of the saved state with the lowest held-out loss. It is None without `keep_best`."""
        return self.record.lowest(self.saved) if self.keeps_best else None

    def _report(self, step: int, metrics: Any) -> None:
        values, line = self.meter.report(step, metrics)
        self.record.add(step, **values)
        self.say(line)

    def _evaluate(self, evaluation: Evaluation, state: Any, step: int) -> float:
        jax.block_until_ready(state)  # on CPUs, two programs that communicate at the same time can deadlock
        with self.meter.paused():
            loss = evaluation.loss(state.params)
        check_finite(loss, step)
        self.record.add(step, eval_loss=loss)
        return loss

    def _save(self, directory: Path, step: int, state: Any, finished: bool) -> None:
        """Save a state, unless training has diverged: earlier states would be removed."""
        pending = self.meter.pending()
        for number, (loss, _) in enumerate(pending, step + 1 - len(pending)):
            check_finite(loss, number)
        if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state.params)):
            raise diverged(f"parameters are infinite or NaN after step {step}")
        self.saved.append(step)
        newest, best = self.saved[-2:], self.best()
        self.saved = [saved for saved in self.saved if saved in newest or saved == best]
        notes = {"settings": self.settings, "step": step, "finished": finished}
        notes |= {"record": self.record.entries, "pending": pending}
        write_state(directory, state, step, notes, keep=self.saved)
        self.record.draw()
