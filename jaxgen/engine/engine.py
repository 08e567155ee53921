"""The engine: a thread that feeds prompts to a running loop and delivers the results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import jax

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.hook import StepHook
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.request.prompt import Prompt
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.core.request.running.plan import plan_of
from jaxgen.core.request.running.schedule import Counts
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.engine.processes import Processes
from jaxgen.engine.results import Event, EventReader, Handle, PromptResults, QueueFull
from jaxgen.engine.runner import Runner
from jaxgen.errors import InputError
from jaxgen.progress import progress_bar


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
        sizes: the sizes; see `EngineSizes`.
        tokenizer: the tokenizer for prompts given as text, for the text of results, and for stop strings.
        prompt_options: the options that a prompt may set; each must allow one value per prompt. None allows all. With
            fewer options, the program compiles faster. Options that `cfg` turns on are always included.
        stop_in_prompt: if True, a stop string may start in the prompt, as in transformers. If False, a stop string
            must be entirely in the answer, as in OpenAI's API.
        logits_processor, stopping_criteria, hook: as in `generate`, for all prompts. With a hook, there is no prefix
            store.
        **own_sizes: fields of `EngineSizes`, such as `slots` and `prompt_width`, which replace those of `sizes`.

    Attributes:
        cfg, tokenizer, sizes: the arguments with which the engine was created.
        slots, prompt_width, id_entries, most_waiting: the sizes of these names.
        prompts: the reader of prompts, which checks them.

    Raises:
        InputError, ConfigError, TypeError: as for `generate`, or for an option that an engine does not support.
        EngineClosed: a method was called in a fork of the process that created the engine.
    """

    def __init__(
        self,
        params,
        cfg: GenerationConfig,
        key: jax.Array | None = None,
        *,
        sizes: EngineSizes | None = None,
        tokenizer: Tokenizer | None = None,
        prompt_options: Collection[str] | None = None,
        stop_in_prompt: bool = True,
        logits_processor: Sequence[Callable] | None = None,
        stopping_criteria: Sequence[Callable] | None = None,
        hook: StepHook | None = None,
        **own_sizes: int | None,
    ):
        self._plan = plan = plan_of(
            params,
            cfg,
            key,
            sizes=sizes,
            tokenizer=tokenizer,
            prompt_options=prompt_options,
            stop_in_prompt=stop_in_prompt,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            hook=hook,
            **own_sizes,
        )
        self.cfg, self.tokenizer, self.sizes = cfg, tokenizer, plan.sizes
        self.slots, self.prompt_width = self.sizes.slots, self.sizes.prompt_width
        self.id_entries, self.most_waiting = self.sizes.id_entries, self.sizes.most_waiting
        self.prompts, self._schedule = plan.prompts, plan.schedule
        processes = None
        if plan.mesh is not None and plan.mesh.is_multi_process:
            processes = Processes(self._schedule.no_arrivals(), self._schedule.joint, plan.identity)
        params = plan.open(params)
        self._leads = processes is None or jax.process_index() == 0
        self._runner = Runner(self, plan, processes, self._leads, params)
        self._home, self._changed = self._runner.home, self._runner.changed

    @property
    def leads(self) -> bool:
        """True in process 0, where prompts are submitted; False in other processes."""
        return self._leads

    @property
    def is_open(self) -> bool:
        """True while prompts can be submitted."""
        return self._runner.is_open and self._home.is_this_process

    @property
    def is_busy(self) -> bool:
        """True while prompts are being answered."""
        return not self._schedule.idle

    @property
    def free_places(self) -> int:
        """The number of prompts that can still be submitted before `submit` raises `QueueFull`."""
        self._home.check()
        with self._changed:
            return max(self.most_waiting - len(self._schedule.waiting), 0)

    def check_process(self) -> None:
        """Raise `EngineClosed` in a fork of the process that created the engine."""
        self._home.check()

    def submit(
        self,
        prompt: Any,
        *,
        on_event: Callable[[Event], object] | None = None,
        timeout: float | None = 0,
        group: Hashable = None,
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
            group: the group of the prompt, such as the name of a user. Groups of waiting prompts take turns, and a
                prompt with n sequences counts as n turns. Within a group, the order is that of arrival.
            **options: more fields of the prompt; none may also be in `prompt`.

        Raises:
            InputError, ConfigError, TypeError: the prompt or an option is invalid or not supported; or this method was
                called in `on_event` with a timeout and would have to wait, which would cause a deadlock.
            QueueFull: too many prompts are waiting.
            EngineClosed: the engine is closed.
        """
        read = self.prompts.read(prompt, **options)
        reader = EventReader(self.tokenizer)
        listener = None if on_event is None else lambda event: on_event(reader.read(event))
        return self.follow(read, listener, timeout, group)

    def follow(
        self,
        prompt: Prompt,
        listener: Callable[[Event], object] | None,
        timeout: float | None,
        group: Hashable = None,
    ) -> Handle:
        """Submit a prompt that `prompts` has read. The listener is called like `on_event`, but events have no text.

        If the prompt fails, the last event has no tokens and no stop reason, and the handle's `failure` is set.
        The other arguments and the errors are as in `submit`.
        """
        self._home.check()
        if not self.leads:
            raise InputError(f"prompts are submitted in process 0, and this is process {jax.process_index()}")
        job = self._plan.job(prompt, group)
        with self._changed:
            self._wait_for_space(timeout)
            self._schedule.add(job)
            job.results = PromptResults(job.prompt, listener)
            self._changed.notify_all()
        return Handle(job.results, self.tokenizer, self._runner.canceller(job), self._home)

    def _wait_for_space(self, timeout: float | None) -> None:
        """Wait until another prompt may be submitted."""
        self._runner.check_open()
        if timeout != 0 and not self.free_places:
            self._home.check_wait("submit with a timeout")
        if not self._changed.wait_for(lambda: self.free_places or not self.is_open, timeout):
            raise QueueFull(f"{self.most_waiting} prompts are waiting, the engine's maximum: submit it later")
        self._runner.check_open()

    def check_grammar(self, automaton: TokenAutomaton) -> None:
        """Raise an `InputError` if an automaton is larger than the engine's table of grammars allows."""
        self._schedule.tables["allowed"].fits(automaton)

    def pause(self, finish: bool = False) -> None:
        """Pause after the current chunk, and return once the chunk has ended. Rows keep their state.

        Args:
            finish: if True, first answer the prompts that have been sent to the device, even if only a part of their
                sequences has been sent; the other prompts wait. If you then call `update_params` during the pause, each
                answer depends on only one version of the weights.

        Raises:
            EngineClosed: the engine is closed.
            InputError: this method was called in `on_event`, which would cause a deadlock.
        """
        self._home.check_wait("pause")
        runner = self._runner
        with self._changed:
            runner.check_open()
            if finish:
                self._schedule.holds = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not (self._schedule.on_device or runner.paused) or runner.has_ended)
                self._schedule.holds = False
            runner.paused = self.is_open
            self._changed.notify_all()
            self._changed.wait_for(lambda: not runner.in_flight)
        runner.raise_error()

    def resume(self) -> None:
        """Resume after `pause`."""
        self._home.check()
        with self._changed:
            self._runner.paused = self._schedule.holds = False
            self._changed.notify_all()

    def update_params(self, params) -> int:
        """Replace the weights at the start of the next chunk. The new weights also apply to rows in flight.

        The new weights must have the same structure, shapes and dtypes as the current weights. Nothing is compiled.
        Rows in flight keep the keys and values computed with earlier weights. Return the version of the new weights;
        the initial weights are version 0. With several processes, all must call this method.
        """
        self._home.check()
        runner = self._runner
        with self._changed:
            present = runner.weights[runner.version]
        params = self._plan.replacement(present, params)
        with self._changed:
            self._schedule.prefixes.clear()
            runner.version += 1
            self._schedule.version = runner.version
            runner.weights = {**({} if self.leads else runner.weights), runner.version: params}
            self._changed.notify_all()
            return runner.version

    def warmup(self, progress: bool = False) -> None:
        """Compile the program, so that no prompt has to wait for compilation. If `leads` is False, do nothing.

        Args:
            progress: if True, show a progress bar of tqdm on stderr, which counts the seconds.

        Raises:
            InputError: some prompts have not been answered yet (call this method before submitting prompts); or
                `progress` is True and tqdm is not installed.
        """
        self._home.check_wait("warmup")
        runner = self._runner
        with progress_bar(progress and self.leads, "compiling the engine", 1, "programs") as add, self._changed:
            runner.check_open()
            if not self._schedule.idle:
                raise InputError("warmup needs an engine without prompts: call it before the first")
            for _ in range(2):  # on a mesh, the first chunk has a program of its own
                runner.warming = self.leads
                self._changed.notify_all()
                self._changed.wait_for(lambda: not (runner.warming or runner.in_flight))
                runner.check_open()  # the chunk may have failed
            add(1)

    def counts(self) -> Counts:
        """Return the engine's statistics so far."""
        self._home.check()
        with self._changed:
            return self._schedule.counts

    def close(self, drain: bool = True) -> None:
        """Stop accepting prompts, and return once all submitted prompts have been answered.

        With `drain=False`, unanswered prompts are dropped, and their handles raise `EngineClosed`. Only then may
        `on_event` call this method, which returns without waiting for the engine's thread.
        """
        self._home.check_wait("close") if drain else self._home.check()
        self._runner.close(drain)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # A fork leaves the block without an error and without closing the engine. When the interpreter exits, the
        # thread has ended before blocks in generators are left.
        if not self._runner.is_exiting and self._home.is_this_process:
            self.close(drain=error is None)
