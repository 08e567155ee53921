"""generate_many(): answer any number of prompts from an iterable, in slots."""

from __future__ import annotations

import collections
import functools
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

import jax
import numpy as np

from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.request.fields import known_fields
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.engine.engine import Engine
from jaxgen.engine.home import EngineClosed
from jaxgen.engine.results import Completion, Event, Handle
from jaxgen.errors import ConfigError, InputError, JaxgenError, shown
from jaxgen.progress import progress_bar

T = TypeVar("T")


def generate_many(
    params,
    prompts: Iterable[Any],
    key: jax.Array | None,
    cfg: GenerationConfig,
    *,
    tokenizer: Tokenizer | None = None,
    ordered: bool = False,
    progress: bool = False,
    **engine: Any,
) -> Iterator[Completion]:
    """Answer any number of prompts from an iterable, which may be endless. Yield each sequence as it ends.

    >>> for done in generate_many(params, prompts, key, cfg, slots=16, tokenizer=tok):
    ...     print(done.index, done.text)

    Prompts are read as needed. If a prompt is invalid, for example because an id is outside the vocabulary, its
    completion contains the error, and the other prompts are still answered. A field that prompts do not have, such as
    a misspelled option, raises an error.

    If the parameters are split across several processes, every process must call `generate_many` and iterate over its
    result. Process 0 reads the prompts and gets the completions. In the other processes, the iterator yields nothing,
    and ends when process 0's iterator ends.

    Args:
        params: the parameters.
        prompts: the prompts. Each prompt is a string, a list of ids, or a dict of fields, as for `Engine.submit`. By
            default, `index` is the prompt's position in the iterable. In an iterable with a length, two prompts
            with the same index are an error; in a list, before the first answer.
        key: the key from which each prompt's key is derived, by `fold_in(key, index)`; None if no prompt samples.
        cfg: the options, as for `Engine`.
        tokenizer: the tokenizer for prompts given as text, for the text of results, and for stop strings.
        ordered: if True, yield the completions in the order of the prompts.
        progress: if True, show a progress bar of tqdm on stderr, which counts answered prompts.
        **engine: more arguments for `Engine`: `sizes` or its fields, such as `slots` and `prompt_width`;
            `prompt_options`, `stop_in_prompt`, `logits_processor`, `stopping_criteria`, `hook`.

    Raises:
        InputError, ConfigError, TypeError: as for `Engine`; or a prompt has an unknown field or the index of another
            prompt, or `progress` is True and tqdm is not installed.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be an iterable of prompts, such as a list, got {shown(prompts)}")
    is_shown, total = progress and jax.process_index() == 0, len(prompts) if isinstance(prompts, Sized) else None
    if isinstance(prompts, Sequence):
        collections.deque(_distinct(prompts), maxlen=0)  # raises an error before the first answer
    elif total is not None:
        prompts = _distinct(prompts)
    with (
        progress_bar(is_shown, "answering", total, "prompts") as add,
        Engine(params, cfg, key, tokenizer=tokenizer, **engine) as made,
    ):
        completions = _counted(ended(made, prompts), made, add) if made.leads else iter(())
        if ordered:
            for _, group in in_order(by_prompt(completions)):
                yield from group
        else:
            yield from (completion for _, completion, _ in completions)


def _distinct(prompts: Iterable[Any]) -> Iterator[Any]:
    """Yield the prompts; raise an error at a prompt that has the index of an earlier prompt."""
    positions: dict[int, int] = {}
    for position, prompt in enumerate(prompts):
        index = prompt.get("index", position) if isinstance(prompt, Mapping) else position
        if isinstance(index, int | np.integer) and (first := positions.setdefault(int(index), position)) != position:
            raise InputError(f"prompt {position}: index {index} is also the index of prompt {first}: give each its own")
        yield prompt


def _counted(
    completions: Iterable[tuple[int, Completion, bool]], engine: Engine, add: Callable
) -> Iterator[tuple[int, Completion, bool]]:
    """Yield the items of `ended`, and add each answered prompt to a progress bar."""
    for position, completion, is_last in completions:
        if is_last:
            add(1, {"tokens": engine.counts().tokens})
        yield position, completion, is_last


def ended(engine: Engine, prompts: Iterable[Any]) -> Iterator[tuple[int, Completion, bool]]:
    """As each sequence ends, yield the prompt's position, the completion, and True if the prompt is now answered."""
    limit = 4 * engine.slots  # of unanswered prompts; greater than `slots`, so that no slot waits for a prompt
    ended_sequences: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    running: dict[int, tuple[Handle, set[int]]] = {}

    def follow(position: int, event: Event) -> None:
        if event.stop_reason or not event.tokens:
            ended_sequences.put((position, event.sequence))

    def next_one() -> tuple[int, Completion, bool]:
        engine.check_process()
        position, number = ended_sequences.get()
        handle, left = running[position]
        if handle.failure is not None:
            raise handle.failure
        left.discard(number)
        if not left:
            del running[position]
        return position, handle.completion(number), not left

    for position, prompt in enumerate(prompts):
        try:
            fields = {"index": position, **known_fields(prompt)}
        except ConfigError as error:
            raise ConfigError(f"prompt {position}: {error}") from error
        try:
            handle = engine.follow(engine.prompts.read(fields), functools.partial(follow, position), timeout=None)
        except EngineClosed:
            raise
        except (JaxgenError, TypeError) as error:
            yield position, _failed(fields, error), True
            continue
        running[position] = handle, set(range(handle.sequences))
        while len(running) >= limit or not ended_sequences.empty():
            yield next_one()
    while running:
        yield next_one()


def _failed(fields: Mapping[str, Any], error: Exception) -> Completion:
    """Return the result for a prompt that cannot be answered."""
    ids = fields.get("ids")
    ids = ids.tolist() if isinstance(ids, np.ndarray) else ids
    ids = list(ids) if isinstance(ids, list | tuple) and all(isinstance(token, int) for token in ids) else []
    metadata = fields.get("metadata")
    return Completion(fields["index"], 0, ids, [], None, StopReason.NONE, error=str(error), metadata=metadata)


def by_prompt(completions: Iterable[tuple[int, Completion, bool]]) -> Iterator[tuple[int, list[Completion]]]:
    """Yield each prompt's position and completions, once all of the prompt's sequences have ended."""
    begun: dict[int, list[Completion]] = {}
    for position, completion, is_last in completions:
        begun.setdefault(position, []).append(completion)
        if is_last:
            yield position, sorted(begun.pop(position), key=lambda completion: completion.sequence)


def in_order(groups: Iterable[tuple[int, T]]) -> Iterator[tuple[int, T]]:
    """Yield pairs in the order of their first items, which are 0, 1, 2, ..."""
    early: dict[int, T] = {}
    following = 0
    for position, group in groups:
        early[position] = group
        while following in early:
            yield following, early.pop(following)
            following += 1
