"""The engine: a thread that feeds prompts to a running loop and delivers the results."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from jaxgen.config.generation_config import GenerationConfig
from jaxgen.decoding.hook import StepHook
from jaxgen.decoding.stop_reasons import StopReason
from jaxgen.engine.device import Device, Loop, committed
from jaxgen.engine.fields import LARGEST_INDEX, as_fields
from jaxgen.engine.forms import ENTRIES, Form, Prompt
from jaxgen.engine.prefixes import Prefixes
from jaxgen.engine.processes import Plan, Processes, Step
from jaxgen.engine.results import EngineClosed, Event, EventReader, Handle, QueueFull
from jaxgen.engine.schedule import Counts, Flight, Pace, Schedule
from jaxgen.engine.tables import CAPACITY, tables_of
from jaxgen.errors import InputError, check_whole
from jaxgen.generation import extensions_of
from jaxgen.grammar.stop_strings import StopAutomaton
from jaxgen.grammar.token_automaton import Capacity
from jaxgen.model.lowrank import adapter_count
from jaxgen.model.sharding import mesh_of
from jaxgen.progress import progress_bar
from jaxgen.request.checks import check_call, check_key, typed_key
from jaxgen.text.tokenizer import Tokenizer

_STEPS = 8  # maximum number of steps in a chunk
_PULSE = 1.0  # seconds between messages to the other processes while no chunk is running


class Engine:
    """An engine that answers prompts as they arrive, using the slots of a running loop. Any thread can submit prompts.

    >>> with Engine(params, cfg, jax.random.key(0), tokenizer=tok) as engine:
    ...     handle = engine.submit({"text": "Once upon a time", "do_sample": True, "temperature": 0.7})
    ...     for event in handle:
    ...         print(event.text, end="")

    The tokens generated for a prompt depend on the prompt, its options, its key and the engine's sizes, but not on
    other prompts or on when they arrive. docs/engine.md lists the exact guarantees.

    If the parameters are split across several processes, each process must create the engine, with the same arguments,
    and close it. Prompts are submitted in process 0, where `leads` is True. The other processes follow process 0.

    Args:
        params: the parameters, a tree with Hugging Face's names, as returned by `load_hf`.
        cfg: the config, whose options apply to prompts that do not set their own. `max_new_tokens` is also the maximum
            that a prompt may set. Steps are slower while any prompt uses an option that `cfg` does not turn on.
        key: the key from which each prompt's key is derived, by `fold_in(key, index)`; None if no prompt samples.
        slots: the number of sequences that are decoded at a time.
        prompt_width: the maximum number of tokens in a prompt.
        prompt_options: the options that a prompt may set; each must allow one value per prompt. None allows all. With
            fewer options, the program compiles faster. Options that `cfg` turns on are always included.
        tokenizer: the tokenizer for prompts given as text, for the text of results, and for stop strings.
        most_waiting: the maximum number of waiting prompts, beyond which `submit` raises `QueueFull`.
        grammar_states, grammar_transitions, grammar_classes, grammars: the size of the table of grammars, which all
            prompts in flight share: the numbers of states and transitions (one grammar may use half of them), of token
            classes in one grammar, and of different grammars. See docs/engine.md.
        stop_states: the number of states in the table of stop strings. A string needs about one state per byte.
        stop_in_prompt: if True, a stop string may start in the prompt, as in transformers. If False, a stop string
            must be entirely in the answer, as in OpenAI's API.
        id_entries: the maximum number of entries in an option that is a table of ids, such as `suppress_tokens`.
        prefix_cache_bytes: the size limit of the prefix store. A prompt that starts with the same tokens as an
            earlier prompt copies their keys and values from the store. The default is 256 MB, or less if the prompts of
            all slots need less. There is no store if `prefix_cache_bytes` is 0 or the engine has a hook.
        logits_processor, stopping_criteria, hook: as in `generate`, for all prompts.

    Attributes:
        cfg, tokenizer, slots, prompt_width, id_entries, most_waiting: the arguments with which the engine was created.

    Raises:
        InputError, ConfigError, TypeError: as for `generate`, or for an option that an engine does not support.
    """

    def __init__(
        self,
        params,
        cfg: GenerationConfig,
        key: jax.Array | None = None,
        *,
        slots: int = 32,
        prompt_width: int = 1024,
        prompt_options: Collection[str] | None = None,
        tokenizer: Tokenizer | None = None,
        most_waiting: int = 1024,
        grammar_states: int = CAPACITY.states,
        grammar_transitions: int = CAPACITY.transitions,
        grammar_classes: int = CAPACITY.classes,
        grammars: int = CAPACITY.automata,
        stop_states: int = 1024,
        stop_in_prompt: bool = True,
        id_entries: int = ENTRIES,
        prefix_cache_bytes: int | None = None,
        logits_processor: Sequence[Callable] | None = None,
        stopping_criteria: Sequence[Callable] | None = None,
        hook: StepHook | None = None,
    ):
        check_call(params, cfg)
        sizes = {"slots": slots, "prompt_width": prompt_width, "most_waiting": most_waiting, "id_entries": id_entries}
        capacity = Capacity(grammar_states, grammar_transitions, grammar_classes, grammars)
        sizes |= {f"grammar_{name}": size for name, size in capacity._asdict().items() if name != "automata"}
        sizes |= {"grammars": grammars, "stop_states": stop_states}
        for name, size in sizes.items():
            check_whole(name, size)
        self.cfg, self.tokenizer, self.slots = cfg, tokenizer, slots
        self.prompt_width, self.id_entries, self.most_waiting = prompt_width, id_entries, most_waiting
        key = typed_key(key)
        check_key(key, cfg, 1)
        self._has_key = key is not None
        key = jax.random.key(0) if key is None else key
        key_impl = str(jax.random.key_impl(key))
        self._form = Form(cfg, tokenizer, prompt_width, prompt_options, id_entries, key_impl, adapter_count(params))
        extensions = extensions_of(cfg.replace(stop_strings=None), logits_processor, stopping_criteria, None, hook)
        prefixes = Prefixes.of(self._form.full, prompt_width, slots, prefix_cache_bytes, hook is not None)
        loop = Loop.of(self._form, extensions, slots, steps=_STEPS, key_impl=key_impl, stored=prefixes.places)
        vocab = cfg.model.vocab_size
        self._device = Device(params, loop, prefixes.bytes(self._form.full), capacity.bytes(vocab))
        self._tables = tables_of(vocab, capacity, tokenizer, stop_states, stop_in_prompt)
        key_data = np.asarray(jax.random.key_data(key))
        self._schedule = Schedule(self._form, self._tables, loop.places, slots, key_data, prefixes)
        no_arrivals, tables = self._schedule.no_arrivals(), self._joint()
        mesh = mesh_of(params)
        self._processes = None
        params = params if mesh is not None else committed(params, params)
        if mesh is not None and mesh.is_multi_process:
            sizes = slots, prompt_width, *capacity, stop_states, id_entries, prefixes.places
            self._processes = Processes(no_arrivals, tables, repr((cfg, cfg.model, stop_in_prompt, *sizes)))
        self._device.open(params, no_arrivals, tables)
        self._changed = threading.Condition()
        self._weights = {0: params}
        self._pace = Pace(_STEPS)
        self._version, self._next_index = 0, 0
        self._told: list[Flight] = []  # the prompts whose results are being delivered
        self._is_open, self._has_ended = True, False
        self._paused = self._in_flight = self._warming = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxgen engine", daemon=True)
        self._thread.start()

    @property
    def leads(self) -> bool:
        """True in process 0, where prompts are submitted; False in other processes."""
        return self._processes is None or jax.process_index() == 0

    @property
    def is_open(self) -> bool:
        """True while prompts can be submitted."""
        return self._is_open

    def submit(
        self,
        prompt: Any,
        *,
        on_event: Callable[[Event], object] | None = None,
        timeout: float | None = 0,
        **options: Any,
    ) -> Handle:
        """Submit a prompt, and return its handle without waiting for the answer.

        Args:
            prompt: a string, a list of ids, or a dict of fields. The dict contains the prompt as `text` (or `prompt`),
                `messages` or `ids`. It may also contain options of `GenerationConfig` that allow one value per prompt
                and these fields: `max_new_tokens`, `stop_strings`, `output_logprobs`, `top_logprobs`, `n` (for
                `num_return_sequences`), `json_schema`, `regex` or `allowed` (a `TokenAutomaton`), `seed` or `key` (for
                only this prompt), `index`, and `metadata`, which the completions repeat. The index identifies the
                results and is folded into the engine's key. The default index is one more than the largest index so
                far. docs/engine.md describes the fields.
            on_event: called with each `Event` in the engine's thread, or in the thread that cancels the prompt. The
                function should return quickly. If it raises an exception, the engine cancels the prompt, and the
                handle raises the exception.
            timeout: the number of seconds to wait for space in the queue; None for no limit.
            **options: more fields of the prompt; none may also be in `prompt`.

        Raises:
            InputError, ConfigError, TypeError: the prompt or an option is invalid or not supported.
            QueueFull: too many prompts are waiting.
            EngineClosed: the engine is closed.
        """
        given = as_fields(prompt)
        if both := given.keys() & options.keys():
            raise InputError(f"{min(both)} is in the prompt and among the options: pass it once")
        return self.follow({**given, **options}, None if on_event is None else self._reading(on_event), timeout)

    def _reading(self, on_event: Callable[[Event], object]) -> Callable[[Event], object]:
        """Return a listener that adds text to events and passes them to `on_event`."""
        reader = EventReader(self.tokenizer)
        return lambda news: on_event(reader.read(news))

    def follow(self, prompt: dict[str, Any], listener: Callable[[Event], object] | None, timeout) -> Handle:
        """Submit a prompt. The listener is called like `on_event` in `submit`, but events have no text.

        If the prompt fails, the last event has no tokens and no stop reason, and the handle's `failure` is set.
        The other arguments and the errors are as in `submit`.
        """
        if not self.leads:
            raise InputError(f"prompts are submitted in process 0, and this is process {jax.process_index()}")
        read = self._form.read(prompt, 0)
        if read.options["do_sample"] and read.key is None and not self._has_key:
            raise InputError("the prompt needs random numbers and the engine has no key: pass Engine(..., key=)")
        automata = self._automata(read)
        with self._changed:
            self._check_open()
            waiting = self._schedule.waiting
            if not self._changed.wait_for(lambda: len(waiting) < self.most_waiting or not self._is_open, timeout):
                raise QueueFull(f"{self.most_waiting} prompts are waiting, the engine's maximum: submit it later")
            self._check_open()
            if "index" not in prompt:
                read = dataclasses.replace(read, index=self._next_index)
            self._next_index = max(self._next_index, read.index + 1) % (LARGEST_INDEX + 1)
            flight = Flight(read, None, automata)
            flight.owner = Handle(read, self.tokenizer, listener, lambda: self._give_up(flight), self._thread)
            waiting.append(flight)
            self._changed.notify_all()
        return flight.owner

    def _automata(self, prompt: Prompt) -> dict[str, tuple[Any, Any]]:
        """Return the automata of a prompt, each with a key; equal automata have the same key."""
        automata: dict[str, tuple[Any, Any]] = {}
        if prompt.grammar is not None:
            automata["allowed"] = id(prompt.grammar), prompt.grammar
        if prompt.stop_strings is not None and self.tokenizer is not None:
            stops = StopAutomaton.of(prompt.stop_strings, self.tokenizer, self.cfg.model.vocab_size)
            automata["stop_strings"] = frozenset(prompt.stop_strings), stops
        for name, (_, automaton) in automata.items():
            self._tables[name].fits(automaton)
        return automata

    def pause(self, finish: bool = False) -> None:
        """Pause after the current chunk, and return once the chunk has ended. Rows keep their state.

        Args:
            finish: if True, first answer the prompts that have been sent to the device; the other prompts wait. If you
                then call `update_params` during the pause, each answer depends on only one version of the weights.

        Raises:
            EngineClosed: the engine is closed.
            InputError: this method was called in `on_event`, which would cause a deadlock.
        """
        self._refuse_own_thread("pause")
        with self._changed:
            self._check_open()
            if finish:
                self._schedule.holds = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not (self._schedule.flying or self._paused) or self._has_ended)
                self._schedule.holds = False
            self._paused = self._is_open
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._in_flight)
        self._raise_error()

    def resume(self) -> None:
        """Resume after `pause`."""
        with self._changed:
            self._paused = self._schedule.holds = False
            self._changed.notify_all()

    def update_params(self, params) -> int:
        """Replace the weights at the start of the next chunk. The new weights also apply to rows in flight.

        The new weights must have the same structure, shapes and dtypes as the current weights. Nothing is compiled.
        Rows in flight keep the keys and values computed with earlier weights. Return the version of the new weights;
        the initial weights are version 0. With several processes, all must call this method.
        """
        check_call(params, self.cfg)
        with self._changed:
            present = self._weights[self._version]
        old, new = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (present, params))
        if old != new:
            raise InputError("params differ in form from those of the engine: create a new engine for them")
        # Shard the new weights in the same way as the current weights, so that nothing has to be compiled again.
        params = jax.device_put(params, jax.tree.map(lambda x: x.sharding, present))
        with self._changed:
            self._schedule.prefixes.clear()
            self._version += 1
            self._schedule.version = self._version
            self._weights = {**({} if self.leads else self._weights), self._version: params}
            self._changed.notify_all()
            return self._version

    def warmup(self, progress: bool = False) -> None:
        """Compile the program, so that no prompt has to wait for compilation. If `leads` is False, do nothing.

        Args:
            progress: if True, show a progress bar of tqdm on stderr, which counts the seconds.

        Raises:
            InputError: some prompts have not been answered yet (call this method before submitting prompts); or
                `progress` is True and tqdm is not installed.
        """
        self._refuse_own_thread("warmup")
        with progress_bar(progress and self.leads, "compiling the engine", 1, "programs") as add, self._changed:
            self._check_open()
            if not self._schedule.idle:
                raise InputError("warmup needs an engine without prompts: call it before the first")
            for _ in range(2):  # on a mesh, the first chunk has a program of its own
                self._warming = self.leads
                self._changed.notify_all()
                self._changed.wait_for(lambda: not (self._warming or self._in_flight))
                self._check_open()  # the chunk may have failed
            add(1)

    def counts(self) -> Counts:
        """Return the engine's statistics so far."""
        with self._changed:
            return self._schedule.counts

    def close(self, drain: bool = True) -> None:
        """Stop accepting prompts, and return once all submitted prompts have been answered.

        With `drain=False`, unanswered prompts are dropped, and their handles raise `EngineClosed`.
        """
        with self._changed:
            self._is_open = self._paused = self._schedule.holds = False
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
            raise EngineClosed("the engine is closed: create a new one")

    def _refuse_own_thread(self, name: str) -> None:
        if threading.current_thread() is self._thread:
            raise InputError(f"{name} waits for the engine, so on_event must not call it: call it from another thread")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _give_up(self, flight: Flight) -> None:
        """Cancel a prompt on behalf of its handle."""
        with self._changed:
            if flight.owner.done or self._error is not None:
                return
            self._schedule.cancel(flight)
            self._changed.notify_all()
        flight.owner._end(StopReason.CANCELLED)

    def _abandon(self, error: BaseException) -> None:
        """Drop all prompts, and make their handles raise the error."""
        for flight in [*self._schedule.waiting, *self._schedule.flying.values(), *self._told]:
            self._schedule.cancel(flight)
            flight.owner._fail(error)

    def _joint(self) -> dict[str, Any]:
        return {name: table.joint for name, table in self._tables.items()}

    def _run(self) -> None:
        """Run until the engine is closed. An exception stops the engine, and all of its prompts fail."""
        try:
            self._lead() if self.leads else self._obey()
        except BaseException as error:
            with self._changed:
                self._error, self._is_open = error, False
                self._abandon(error)
        finally:
            with self._changed:
                self._in_flight, self._warming, self._has_ended = False, False, True
                self._changed.notify_all()
        if self._error is not None and self._processes is not None and self.leads:
            self._processes.send_nothing(Step.FAIL)

    def _lead(self) -> None:
        """Run chunks while there is something to do. Each chunk starts before the previous chunk's results are read."""
        running: tuple[jax.Array, int, float] | None = None
        while running is not None or self._can_start or self._is_open:
            with self._changed:
                self._in_flight = running is not None
                self._changed.notify_all()
                timeout = None if self._processes is None else _PULSE
                self._changed.wait_for(lambda running=running: running or self._can_start or not self._is_open, timeout)
                plan = None
                if self._can_start:
                    plan = Plan(Step.CHUNK, self._version, self._pace.steps, self._schedule.arrivals(), self._joint())
                params = self._weights[self._version]
                self._in_flight = running is not None or plan is not None
                self._warming = False
            started = None
            if plan is not None:
                if self._processes is not None:
                    self._processes.send(plan)
                begun = time.monotonic()
                started = self._start(plan, params), plan.version, begun
            elif self._processes is not None:
                self._processes.send_nothing(Step.WAIT)
            if running is not None:
                self._read(*running)
            running = started
        if self._processes is not None:
            self._processes.send_nothing(Step.END)

    def _obey(self) -> None:
        """Run the same chunks as process 0."""
        assert self._processes is not None
        while (plan := self._processes.receive()).step != Step.END:
            if plan.step == Step.FAIL:
                raise EngineClosed("the engine failed in process 0, which reports the reason")
            if plan.step == Step.CHUNK:
                with self._changed:
                    self._changed.wait_for(lambda plan=plan: plan.version <= self._version)
                    self._weights = {n: params for n, params in self._weights.items() if n >= plan.version}
                    params = self._weights[plan.version]
                self._start(plan, params)
        with self._changed:
            self._is_open = False

    @property
    def _can_start(self) -> bool:
        return self._warming or not (self._paused or self._schedule.idle)

    def _start(self, plan: Plan, params: Any) -> jax.Array:
        """Start a chunk, and return its journal without waiting for it."""
        packed = self._device.step(params, plan.arrivals, plan.tables, plan.steps)
        packed.copy_to_host_async()
        return packed

    def _read(self, packed: jax.Array, version: int, begun: float) -> None:
        """Deliver the results of a chunk that was started at time `begun`."""
        happened = np.asarray(packed)
        with self._changed:
            self._pace.measure(int(happened[0, 2]), begun, time.monotonic())
            entries = list(self._schedule.read(happened))
            self._told = [entry.flight for entry in entries]
            self._changed.notify_all()  # for callers that wait until all prompts are answered
        for flight, number, tokens, reason, rest in entries:
            flight.owner.cached_tokens = flight.cached
            flight.owner._add(number, tokens.tolist(), StopReason(reason), rest, (flight.version, version))
            if flight.owner.failure is not None:  # raised by the caller's on_event
                with self._changed:
                    self._schedule.cancel(flight)
        self._told = []
