"""The thread of an engine, which runs chunks on the device and delivers their results."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.request.running.plan import Plan
from jaxgen.core.request.running.schedule import Job
from jaxgen.engine.home import EngineClosed, Home
from jaxgen.engine.processes import Action, ChunkPlan, Processes

# While no chunk is running: seconds between messages to the other processes, and between checks of whether the engine
# still has references.
_PULSE = 1.0
_LISTENERS = 5.0  # maximum number of seconds to wait for listeners when the interpreter exits


class Runner:
    """A thread that runs chunks while prompts are unanswered, until the engine is closed.

    The thread refers to the runner, but not to the engine. If the program drops all references to the engine without
    closing it, the thread answers the prompts that were submitted, and ends.

    Args:
        engine: the engine, to which the runner keeps only a weak reference.
        plan: the loop.
        processes: the connection to the other processes; None if there are none.
        leads: True in the process that plans the chunks.
        params: the parameters.

    Attributes:
        changed: the condition that guards all other attributes. It is notified when one of them has changed.
        weights, version: the parameters by version, and the current version.
        is_open: True while prompts can be submitted.
        paused: True if no chunk may start.
        warming: True if a chunk must run even if there are no prompts.
        in_flight: True while a chunk is running.
        has_ended: True after the thread's last chunk.
        is_exiting: True once the interpreter exits.
        error: the exception that ended the thread, or None.
        home: the thread and its process.
    """

    def __init__(
        self,
        engine: Any,
        plan: Plan,
        processes: Processes | None,
        leads: bool,
        params: Any,
    ):
        self.schedule, self._device, self._pace = plan.schedule, plan.device, plan.pace
        self._processes, self._leads = processes, leads
        self.changed = threading.Condition()
        self.weights, self.version = {0: params}, 0
        self._delivering: list[Job] = []  # the prompts whose results are being delivered
        self.is_open, self.has_ended = True, False
        self.paused = self.in_flight = self.warming = self.is_exiting = False
        self.error: BaseException | None = None
        self._engine = weakref.ref(engine)
        self._thread = threading.Thread(target=self._run, name="jaxgen engine", daemon=True)
        self.home = Home(self._thread)
        self._thread.start()
        if processes is None:
            _RUNNING.add(self)

    def close(self, drain: bool) -> None:
        """Stop accepting prompts, and wait until the thread has ended, except in the thread itself.

        With `drain=False`, drop the prompts that have not been answered.
        """
        with self.changed:
            self.is_open = self.paused = self.schedule.holds = False
            dropped = [] if drain else self._unanswered()
            self.changed.notify_all()
        self._fail(dropped, EngineClosed("the engine was closed before this prompt was answered"))
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.raise_error()

    def exit(self) -> None:
        """End the thread after its current chunk, because the interpreter is about to exit."""
        if self.home.is_this_process:
            with self.changed:
                self.is_exiting = True
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.has_ended or self._delivering)
            self._thread.join(_LISTENERS)

    def canceller(self, job: Job) -> Callable[[], None]:
        """Return a function that cancels a prompt. The function does not keep the runner and its weights in memory."""
        runner = weakref.ref(self)

        def cancel() -> None:
            if (found := runner()) is not None:
                found._cancel(job)

        return cancel

    def _cancel(self, job: Job) -> None:
        """Cancel a prompt on behalf of its handle."""
        with self.changed:
            if job.results.done or self.error is not None:
                return
            self.schedule.cancel(job)
            self.changed.notify_all()
        job.results.end(StopReason.CANCELLED)

    def check_open(self) -> None:
        """Raise an error if the engine has failed or is closed."""
        self.raise_error()
        if not self.is_open:
            raise EngineClosed("the engine is closed: create a new one")

    def raise_error(self) -> None:
        """Raise the error that ended the thread, if there is one."""
        if self.error is not None:
            raise self.error

    def _unanswered(self) -> list[Job]:
        """Cancel all prompts, and return them."""
        jobs = [*self.schedule.waiting, *self.schedule.on_device.values(), *self._delivering]
        for job in jobs:
            self.schedule.cancel(job)
        return jobs

    def _fail(self, jobs: list[Job], error: BaseException) -> None:
        """Make the handles of prompts raise an error.

        No listener is called before all handles have failed, because it may wait for one of them.
        """
        for results in [job.results for job in jobs if job.results.fail(error)]:
            results.notify_failure()

    def _run(self) -> None:
        """Run until the engine is closed. An exception stops the engine, and all of its prompts fail."""
        dropped: list[Job] = []
        try:
            self._run_leader() if self._leads else self._run_follower()
        except BaseException as error:
            with self.changed:
                self.error, self.is_open = error, False
                dropped = self._unanswered()
        finally:
            with self.changed:
                self.in_flight, self.warming, self.has_ended = False, False, True
                self.changed.notify_all()
        if self.error is not None:
            self._fail(dropped, self.error)
            if self._processes is not None and self._leads:
                self._processes.send_nothing(Action.FAIL)

    def _run_leader(self) -> None:
        """Run chunks while there is something to do. Each chunk starts before the previous chunk's results are read."""
        running: tuple[jax.Array, int, float] | None = None
        while running is not None or ((self._can_start or self.is_open) and not self.is_exiting):
            plan = self._next_plan(running is not None)
            started = None
            if plan is not None:
                if self._processes is not None:
                    self._processes.send(plan[0])
                begun = time.monotonic()
                started = self._start(*plan), plan[0].version, begun
            elif self._processes is not None:
                self._processes.send_nothing(Action.WAIT)
            if running is not None:
                self._read(*running)
            plan, running = None, started
        if self._processes is not None:
            self._processes.send_nothing(Action.END)

    def _next_plan(self, is_running: bool) -> tuple[ChunkPlan, Any] | None:
        """Return the next chunk's plan and parameters. If there is nothing to do, wait for a moment and return None."""
        with self.changed:
            self.in_flight = is_running
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: is_running or self._can_start or not self.is_open or self.is_exiting, timeout=_PULSE
            )
            if self._engine() is None:  # nobody can close the engine, or resume it
                self.is_open = self.paused = self.schedule.holds = False
            plan = None
            if self._can_start and not self.is_exiting:
                plan = ChunkPlan(
                    Action.CHUNK, self.version, self._pace.steps, self.schedule.arrivals(), self.schedule.joint
                )
            self.in_flight = is_running or plan is not None
            self.warming = False
            return None if plan is None else (plan, self.weights[self.version])

    def _run_follower(self) -> None:
        """Run the same chunks as process 0."""
        assert self._processes is not None
        while (plan := self._processes.receive()).action != Action.END:
            if plan.action == Action.FAIL:
                raise EngineClosed("the engine failed in process 0, which reports the reason")
            if plan.action == Action.CHUNK:
                with self.changed:
                    self.changed.wait_for(lambda plan=plan: plan.version <= self.version)
                    self.weights = {n: params for n, params in self.weights.items() if n >= plan.version}
                    params = self.weights[plan.version]
                self._start(plan, params)
        with self.changed:
            self.is_open = False

    @property
    def _can_start(self) -> bool:
        return self.warming or not (self.paused or self.schedule.idle)

    def _start(self, plan: ChunkPlan, params: Any) -> jax.Array:
        """Start a chunk, and return its journal without waiting for it."""
        packed = self._device.step(params, plan.arrivals, plan.tables, plan.steps)
        packed.copy_to_host_async()
        return packed

    def _read(self, packed: jax.Array, version: int, begun: float) -> None:
        """Deliver the results of a chunk that was started at time `begun`."""
        happened = np.asarray(packed)
        with self.changed:
            self._pace.measure(int(happened[0, 2]), begun, time.monotonic())
            entries = list(self.schedule.read(happened))
            self._delivering = [entry.job for entry in entries]
            self.changed.notify_all()  # for callers that wait until all prompts are answered
        for job, number, tokens, reason, columns, sent_with in entries:
            results = job.results
            results.cached_tokens = job.cached
            results.add(number, tokens.tolist(), StopReason(reason), columns, (sent_with, version))
            if results.failure is not None:  # raised by the caller's on_event
                with self.changed:
                    self.schedule.cancel(job)
        self._delivering = []


_RUNNING: weakref.WeakSet[Runner] = weakref.WeakSet()


@atexit.register
def _exit() -> None:
    """End all threads, because the interpreter may crash if it exits while a thread compiles or runs a program."""
    for runner in list(_RUNNING):
        runner.exit()
