"""Answer the prompts from --input, in batches or in slots. When an answer ends, its slot takes the next prompt."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxgen.cli import terminal
from jaxgen.cli.answer_file import AnswerFile
from jaxgen.cli.input_file import Line
from jaxgen.cli.line_options import in_batches
from jaxgen.cli.options import in_flags
from jaxgen.cli.session import Session
from jaxgen.cli.timing import Stats
from jaxgen.core.decoding.logprobs import LogProbs
from jaxgen.core.decoding.stop_reasons import StopReason
from jaxgen.core.generation import generate
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.output import GenerateOutput
from jaxgen.core.request.known_prompts import KnownPrompts
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.engine.engine import Engine
from jaxgen.engine.many_prompts import by_prompt, ended, in_order
from jaxgen.engine.results import Completion
from jaxgen.errors import GenerationError, JaxgenWarning


def write_answers(
    lines: Sequence[Line],
    indices: Sequence[int],
    done: Sequence[int],
    session: Session,
    file: AnswerFile | None,
    *,
    slots: int | None,
    batch_size: int,
) -> None:
    """Answer the lines in `indices` that are not done, and write a JSON line for each answer as soon as it is ready.

    An answer depends on the line and its index, but not on other lines or on the number of lines answered at a time. If
    a row cannot continue, for example because all tokens are banned, the line's `error` gives the reason.

    Args:
        lines: the whole input, even if `indices` covers only part of it, because the engine's sizes depend on it.
        indices: the lines for this process, in order.
        done: for each line, 1 if it already has its answers, else 0.
        session: the model and its options.
        file: the file for the answers, in any order; None prints them to stdout, in order.
        slots: the number of answers generated at a time, or None to answer in batches.
        batch_size: the number of lines in a batch.
    """
    left = [index for index in indices if not done[index]]
    with session.stats.generating(), contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".* cannot be reached with", JaxgenWarning)  # `check_lines` warned of it
        engine = None
        terminal.show(f"{_count(len(left))}: compiling, and answering the first")
        if slots is None:
            answers = _in_batches(lines, indices, set(left), session, batch_size)
        else:
            engine = stack.enter_context(_engine(lines, session, slots))
            answers = _in_slots(lines, left, session, engine)
        progress = _Progress(len(indices), len(indices) - len(left), session.stats, engine, slots)
        for index, entries in answers if file is not None else in_order(answers):
            if file is not None:
                file.write(index, entries)
            else:
                terminal.erase()
                print(*map(_json, entries), sep="\n", flush=True)
            session.stats.failed += sum("error" in entry for entry in entries)
            session.stats.tokens += sum(entry["tokens"] for entry in entries)
            progress.add(entries, is_shown=file is not None or not (sys.stdout is not None and sys.stdout.isatty()))
        terminal.erase()
        if jax.process_index() == 0:
            terminal.report(progress.summary())


class _Progress:
    """The status line of a run: answered prompts, tokens per second, slots in use, and the time left."""

    def __init__(self, prompts: int, before: int, stats: Stats, engine: Engine | None, slots: int | None):
        self.prompts, self.before, self.stats, self.engine, self.slots = prompts, before, stats, engine, slots
        self.began, self.compiled = time.monotonic(), stats.compile
        self.answered = self.tokens = 0

    @property
    def seconds(self) -> float:
        """The number of elapsed seconds, excluding compilation."""
        return max(time.monotonic() - self.began - (self.stats.compile - self.compiled), 1e-9)

    def add(self, entries: Sequence[Mapping[str, Any]], *, is_shown: bool) -> None:
        """Add one more prompt and its tokens to the counts, and show the status line if `is_shown`."""
        self.answered += 1
        self.tokens += sum(entry["tokens"] for entry in entries)
        if is_shown:
            terminal.show(self.line)

    def summary(self) -> str:
        """Return the line that reports the end of the run."""
        seconds = self.seconds
        speed = f"{self.tokens / seconds:,.0f} tokens/s"
        answered = f"answered {_count(self.answered)}: {self.tokens:,} tokens in {_clock(seconds)}"
        return f"{answered}, {speed}, not counting compilation"

    def line(self) -> str:
        """Return the status line."""
        seconds, spent = self.seconds, self.seconds
        done, tokens, used = self.before + self.answered, self.tokens, ""
        if self.engine is not None and self.slots is not None:
            counts = self.engine.counts()
            tokens, used = counts.tokens, f", {min(counts.occupancy / self.slots, 1):.0%} of {self.slots} slots in use"
        else:  # later batches may also have to be compiled, because their lines set other options
            spent = time.monotonic() - self.began
        left = spent * (self.prompts - done) / self.answered
        return f"{done:,} of {_count(self.prompts)}, {tokens / seconds:,.0f} tokens/s{used}, {_clock(left)} left"


def _count(prompts: int) -> str:
    return "1 prompt" if prompts == 1 else f"{prompts:,} prompts"


def _clock(seconds: float) -> str:
    """Return a number of seconds as hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _engine(lines: Sequence[Line], session: Session, slots: int) -> Engine:
    """Return a compiled engine whose sizes depend on all lines of the input, even lines that already have answers."""
    cfg = session.cfg.reset(["slots"])
    prompts = KnownPrompts(lines, cfg, session.tokenizer, in_engine=True)
    sizes = {"sizes": prompts.sizes(_grammar(session), EngineSizes(slots=slots)), "prompt_options": prompts.options}
    engine = Engine(session.params, cfg, session.key, tokenizer=session.tokenizer, **sizes)
    engine.warmup()
    return engine


def _grammar(session: Session) -> TokenAutomaton | None:
    return session.generate_kwargs.get("prefix_allowed_tokens_fn")


def _in_slots(
    lines: Sequence[Line], indices: Sequence[int], session: Session, engine: Engine
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Once all of a line's answers are finished, yield the line's index and output.

    Only process 0 submits lines and yields outputs. The engines of the other processes carry out process 0's plans.
    """
    if not engine.leads:
        return
    grammar, most = _grammar(session), session.cfg.max_new_tokens

    def prompt(index: int) -> dict[str, Any]:
        line = lines[index]
        budget = {} if line.budget == most else {"max_new_tokens": line.budget}
        fields = {"ids": line.ids, **budget, **line.fields}
        return fields if grammar is None or line.grammar else fields | {"allowed": grammar}

    answered = by_prompt(ended(engine, map(prompt, indices)))
    for number, completions in answered:
        index = indices[number]
        yield index, [_entry(lines[index], completion, session) for completion in completions]


def _in_batches(
    lines: Sequence[Line], indices: Sequence[int], left: Collection[int], session: Session, batch_size: int
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield each remaining line's index and output.

    Batches are always formed from all `indices`, so that rounding is the same in a resumed run as in the first run.
    """
    keys, prompts = None, KnownPrompts(lines, session.cfg, session.tokenizer, in_engine=False)
    for batch in in_batches(lines, indices, batch_size):
        if not any(index in left for index in batch):
            continue
        part = [lines[index] for index in batch]
        own = _of_batch(prompts, part[0], session)
        if own.cfg.on("do_sample") and keys is None:
            keys = prompts.keys(session.key)
        out = _generate(part, own, None if keys is None else keys[np.asarray(batch)])
        texts = session.tokenizer.decode_batch(out)
        copies = own.cfg.num_return_sequences
        for position, index in enumerate(batch):
            if index in left:
                rows = range(position * copies, (position + 1) * copies)
                yield index, [_of_row(lines[index], out, row, texts[row], own) for row in rows]


def _of_batch(prompts: KnownPrompts, line: Line, session: Session) -> Session:
    """Return the session with the options that all lines of a batch set."""
    own, kwargs = prompts.call(line), dict(session.generate_kwargs)
    if own.grammar is not None:
        kwargs["prefix_allowed_tokens_fn"] = own.grammar
    return dataclasses.replace(session, cfg=own.cfg, generate_kwargs=kwargs)


def _generate(part: Sequence[Line], session: Session, keys: jax.Array | None) -> GenerateOutput:
    """Generate answers to a batch of input lines; answers that cannot continue end early, and no error is raised."""
    ids, mask = session.tokenizer.pad([line.ids for line in part])
    ids = ids * mask  # the tokenizer may pad with an id outside the model's vocabulary
    cfg = session.cfg.replace(max_new_tokens=[line.budget for line in part])
    generate_kwargs = {"attention_mask": mask, "tokenizer": session.tokenizer, **session.generate_kwargs}
    try:
        return generate(session.params, ids, keys, cfg, **generate_kwargs)
    except GenerationError as error:
        return error.output


def _of_row(line: Line, out: GenerateOutput, row: int, text: str, session: Session) -> dict[str, Any]:
    count, reason = int(np.asarray(out.lengths)[row]), StopReason(int(np.asarray(out.stop_reasons)[row]))
    tokens = np.asarray(out.sequences)[row, out.prompt_width :][:count].tolist()
    logged = None
    if out.logprobs is not None:  # sliced in numpy, because jax would compile a program for each length
        logged = LogProbs(np.asarray(out.logprobs)[row, :count])  # pyright: ignore[reportArgumentType]
    sequence = row % session.cfg.num_return_sequences
    done = Completion(0, sequence, line.ids, tokens, text, reason, logged, error=reason.failure)
    return _entry(line, done, session)


def _entry(line: Line, done: Completion, session: Session) -> dict[str, Any]:
    """Return a line of the output: the request with its answer."""
    entry = line.asked | ({"sequence": done.sequence} if line.sequences(session.cfg) > 1 else {})
    entry |= {"text": done.text or "", "tokens": len(done.tokens), "finish": done.stop_reason.name.lower()}
    if done.error is not None:
        entry["error"] = in_flags(done.stop_reason.failure_after(len(done.tokens)) or done.error)
    if line.logged(session.cfg):
        logprobs = () if done.logprobs is None else np.asarray(done.logprobs.logprobs, np.float64).round(6).tolist()
        entry["logprobs"] = [
            {"id": token, "token": session.tokenizer.decode([token], skip_special_tokens=False), "logprob": value}
            for token, value in zip(done.tokens, logprobs, strict=True)
        ]
    return entry


def _json(answer: Mapping[str, Any]) -> str:
    """Return an answer as a line for stdout, in ASCII if the encoding of stdout is not UTF-8."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return json.dumps(answer, ensure_ascii=codecs.lookup(encoding).name != "utf-8")
