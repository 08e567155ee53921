"""The engine: a thread that keeps a running loop supplied with prompts, and passes on what it generates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.hook import StepHook
from jaxgen.decoding.stopping import StopReason
from jaxgen.engine.device import Device
from jaxgen.engine.forms import Form, Prompt
from jaxgen.engine.results import EngineClosed, Event, EventReader, Handle
from jaxgen.engine.schedule import Flight, Schedule
from jaxgen.engine.tables import Grammars, Stops, Table
from jaxgen.errors import InputError, JaxgenError
from jaxgen.generation import extensions_of
from jaxgen.grammar.stop_strings import StopAutomaton
from jaxgen.request.checks import check_call, check_key
from jaxgen.text.tokenizer import Tokenizer

_STEPS = 8  # of a chunk


class QueueFull(JaxgenError):
    """As many prompts wait as the engine takes: submit again later, or with a timeout."""


class Engine:
    """Answers prompts that come one by one, from any thread, in slots of a running loop.

    >>> with Engine(params, cfg, tokenizer=tok) as engine:                                      # doctest: +SKIP
    ...     handle = engine.submit({"text": "Once upon a time", "temperature": 0.7})
    ...     for event in handle:
    ...         print(event.text, end="")

    The tokens of a prompt depend on the prompt, its options, its key and the engine's sizes, not on the other prompts
    or on when they come: docs/engine.md says what is the same in which cases.

    Args:
        params: the parameters, a tree with Hugging Face's names, as `load_hf` returns.
        cfg: the options of all prompts, and the values for prompts that do not set them. `max_new_tokens` is also the
            most that a prompt may set. Steps are slower while a prompt is answered that turns on an option which `cfg`
            does not.
        key: from which a prompt's key is made, by `fold_in(key, index)`; None if nothing is drawn.
        slots: the number of sequences that are decoded at a time.
        prompt_width: the most tokens of a prompt.
        tokenizer: for prompts and results as text, and for stop strings.
        most_waiting: the most prompts that wait before `submit` raises `QueueFull`.
        grammar_states, grammar_classes: the size of the table that the grammars of all prompts in flight share:
            states, and classes of tokens.
        stop_states: the size of the table of stop strings, about one for each of their bytes.
        logits_processor, stopping_criteria, hook: as in `generate`, for all prompts.

    Raises:
        InputError, ConfigError, TypeError: as `generate`; an option that an engine cannot have.
    """

    def __init__(
        self,
        params,
        cfg: GenerationConfig,
        key: jax.Array | None = None,
        *,
        slots: int = 32,
        prompt_width: int = 1024,
        tokenizer: Tokenizer | None = None,
        most_waiting: int = 1024,
        grammar_states: int = 1024,
        grammar_classes: int = 256,
        stop_states: int = 1024,
        logits_processor: Sequence[Callable] | None = None,
        stopping_criteria: Sequence[Callable] | None = None,
        hook: StepHook | None = None,
    ):
        check_call(params, cfg)
        _check_sizes(slots=slots, prompt_width=prompt_width, most_waiting=most_waiting)
        _check_sizes(grammar_states=grammar_states, grammar_classes=grammar_classes, stop_states=stop_states)
        self._form, self._tokenizer, self._most_waiting = Form(cfg, tokenizer, prompt_width), tokenizer, most_waiting
        check_key(key, cfg, 1)
        self._has_key = key is not None
        key = jax.random.key(0) if key is None else key
        extensions = extensions_of(cfg.replace(stop_strings=None), logits_processor, stopping_criteria, None, hook)
        self._device = Device(params, self._form, extensions, slots, _STEPS, str(jax.random.key_impl(key)))
        vocab = cfg.model.vocab_size
        self._tables = {"allowed": Table(Grammars(vocab, (grammar_states, grammar_classes)), grammar_states)}
        if tokenizer is not None:
            self._tables["stop_strings"] = Table(Stops(tokenizer, vocab, stop_states), stop_states)
        places = max(2 * slots, 8)
        key_data = np.asarray(jax.random.key_data(key))
        self._schedule = Schedule(self._form, self._tables, places, slots, key_data)
        arrivals = self._schedule.arrivals()
        self._schedule.forget()
        self._device.open(arrivals, self._joint(), places)
        self._changed = threading.Condition()
        self._version, self._next_index = 0, 0
        self._is_open = True
        self._paused = self._in_flight = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="jaxgen engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Any,
        *,
        on_event: Callable[[Event], object] | None = None,
        timeout: float | None = 0,
        **options: Any,
    ) -> Handle:
        """Submit a prompt and return at once.

        Args:
            prompt: a list of ids; or a dict with `ids` or `text`, and options by name.
            on_event: called in the engine's thread with each `Event`; it should return quickly. An exception that it
                raises ends the prompt and is raised by the handle.
            timeout: the number of seconds to wait for a place in the queue; None for no limit.
            **options: further options: those of `GenerationConfig` that may have one value per prompt,
                `max_new_tokens`, `stop_strings`, `top_logprobs`, and `n` for `num_return_sequences`; `allowed`, a
                `TokenAutomaton`; `index`, a number that the key is made from and results carry, by default that of
                earlier prompts plus 1; `key`, the prompt's own key.

        Raises:
            InputError, ConfigError, TypeError: a prompt or an option that cannot be honoured.
            QueueFull: too many prompts wait.
            EngineClosed: the engine is closed.
        """
        given = prompt if isinstance(prompt, dict) else {"ids": prompt}
        if both := given.keys() & options.keys():
            raise InputError(f"{min(both)} is in the prompt and among the options: pass it once")
        return self.follow({**given, **options}, None if on_event is None else self._reading(on_event), timeout)

    def _reading(self, on_event: Callable[[Event], object]) -> Callable[[int, list[int], StopReason], object]:
        """Return a listener that passes on events."""
        reader = EventReader(self._tokenizer)
        return lambda number, tokens, reason: on_event(reader.read(number, tokens, reason))

    def follow(
        self, prompt: dict[str, Any], listener: Callable[[int, list[int], StopReason], object] | None, timeout
    ) -> Handle:
        """Submit a prompt whose listener gets the number of a sequence, its new tokens, and its `StopReason` or NONE.

        The other arguments and the errors are those of `submit`.
        """
        with self._changed:
            index = self._next_index
        read = self._form.read(prompt, index)
        if read.options["do_sample"] and read.key is None and not self._has_key:
            raise InputError("the prompt needs random numbers and the engine has no key: pass Engine(..., key=)")
        flight = Flight(read, None, self._automata(read))
        handle = flight.owner = Handle(read, self._tokenizer, listener, lambda: self._give_up(flight))
        with self._changed:
            self._check_open()
            if not self._changed.wait_for(lambda: not self._is_full or not self._is_open, timeout):
                raise QueueFull(f"{self._most_waiting} prompts wait, the most that this engine takes: submit it later")
            self._check_open()
            self._next_index = max(self._next_index, read.index + 1)
            self._schedule.waiting.append(flight)
            self._changed.notify_all()
        return handle

    @property
    def _is_full(self) -> bool:
        return len(self._schedule.waiting) >= self._most_waiting

    def _automata(self, prompt: Prompt) -> dict[str, tuple[Any, Any]]:
        """Return the automata of a prompt, each with a key that equal ones share."""
        automata: dict[str, tuple[Any, Any]] = {}
        if prompt.grammar is not None:
            automata["allowed"] = id(prompt.grammar), prompt.grammar
        if prompt.stop_strings is not None and self._tokenizer is not None:
            stops = StopAutomaton.of(prompt.stop_strings, self._tokenizer, self._form.cfg.model.vocab_size)
            automata["stop_strings"] = frozenset(prompt.stop_strings), stops
        for name, (_, automaton) in automata.items():
            self._tables[name].fits(automaton)
        return automata

    def pause(self) -> None:
        """Stop after the chunk that runs now, and return when it has ended; rows keep their state."""
        with self._changed:
            self._paused = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._in_flight)
        self._raise_error()

    def resume(self) -> None:
        """Continue after `pause`."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def update_params(self, params) -> int:
        """Use other weights of the same form from the next chunk on, also for rows in flight.

        Nothing is compiled. Keys and values that were computed with the earlier weights stay. Returns the version of
        the new weights; that of the first is 0.
        """
        check_call(params, self._form.cfg)
        old, new = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (self._device.params, params))
        if old != new:
            raise InputError("params have another form than those of the engine: make another engine for them")
        with self._changed:
            self._device.params = params
            self._version += 1
            return self._version

    def warmup(self) -> None:
        """Compile the program, so that no prompt waits for it.

        Raises:
            InputError: prompts are being answered: call it before the first.
        """
        self.pause()
        try:
            with self._changed:
                if not self._schedule.idle:
                    raise InputError("warmup needs an engine without prompts: call it before the first")
                jax.block_until_ready(self._dispatch())
                self._schedule.forget()
        finally:
            self.resume()

    def close(self, drain: bool = True) -> None:
        """Take no more prompts, and return when those that were submitted have been answered.

        With `drain=False` they are given up: their handles raise `EngineClosed`.
        """
        with self._changed:
            self._is_open, self._paused = False, False
            if not drain:
                self._abandon(EngineClosed("the engine was closed before this prompt was answered"))
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._raise_error()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close(drain=error is None)

    def _check_open(self) -> None:
        self._raise_error()
        if not self._is_open:
            raise EngineClosed("the engine is closed: make another one")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _give_up(self, flight: Flight) -> None:
        """Cancel a prompt for its handle."""
        with self._changed:
            if flight.owner.done or self._error is not None:
                return
            self._schedule.cancel(flight)
            self._changed.notify_all()
        flight.owner._end(StopReason.CANCELLED)

    def _abandon(self, error: BaseException) -> None:
        """Drop all prompts; their handles raise the error."""
        schedule = self._schedule
        flights = [*schedule.waiting, *schedule.flying.values()]
        for flight in flights:
            schedule.cancel(flight)
            flight.owner._fail(error)

    def _joint(self) -> dict[str, Any]:
        return {name: table.joint for name, table in self._tables.items()}

    def _dispatch(self) -> jax.Array:
        """Start a chunk."""
        packed = self._device.step(self._schedule.arrivals(), self._joint())
        packed.copy_to_host_async()
        return packed

    def _work(self) -> None:
        """Run chunks while there is something to do. Each is started before the one before it is read."""
        running: tuple[jax.Array, int] | None = None
        try:
            while True:
                with self._changed:
                    self._in_flight = running is not None
                    self._changed.notify_all()
                    self._changed.wait_for(lambda running=running: running or self._can_start or not self._is_open)
                    if running is None and not self._can_start:
                        return  # closed, and nothing is left
                    started = (self._dispatch(), self._version) if self._can_start else None
                    self._in_flight = True
                    self._changed.notify_all()
                if running is not None:
                    self._read(*running)
                running = started
        except BaseException as error:
            with self._changed:
                self._error, self._is_open, self._in_flight = error, False, False
                self._abandon(error)
                self._changed.notify_all()

    @property
    def _can_start(self) -> bool:
        return not self._paused and not self._schedule.idle

    def _read(self, packed: jax.Array, version: int) -> None:
        """Pass on what happened in a chunk."""
        happened = np.asarray(packed)
        with self._changed:
            entries = list(self._schedule.read(happened))
        for flight, number, tokens, reason, rest in entries:
            flight.owner._add(number, tokens.tolist(), StopReason(reason), rest, version)
            if flight.owner.failure is not None:  # raised by the caller's on_event
                with self._changed:
                    self._schedule.cancel(flight)


def _check_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be a whole number, got {size!r}")
        if size < 1:
            raise InputError(f"{name} must be at least 1, got {size}")
