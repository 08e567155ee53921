"""Core of the `jaxgen` command: load a checkpoint, and answer a prompt, a conversation or a file of prompts."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from convert import load_adapter, load_hf
from convert.adapter import read_updates
from convert.checkpoint import Checkpoint
from convert.hf import float_dtype, open_checkpoint
from convert.hub import local_directory
from jaxgen import demo
from jaxgen.buckets import power_of_two
from jaxgen.cli import terminal
from jaxgen.cli.answer_file import WHOLE, AnswerFile, Shard, recorded
from jaxgen.cli.chat import Chat, converse
from jaxgen.cli.device import mesh_of_devices
from jaxgen.cli.fingerprint import fingerprint
from jaxgen.cli.html import ALTERNATIVES, check_target, write_page
from jaxgen.cli.input_file import Line, prompt_ids, read_lines, stdin_bytes
from jaxgen.cli.line_options import check_lines, in_batches
from jaxgen.cli.many import write_answers
from jaxgen.cli.memory_check import check_memory
from jaxgen.cli.options import generation_fields, in_flags
from jaxgen.cli.printing import Printer, generate_and_print
from jaxgen.cli.remote_output import local_target, output_file
from jaxgen.cli.session import Session
from jaxgen.cli.timing import Stats
from jaxgen.core.config.ends import with_end_of_turn
from jaxgen.core.config.generation_config import GenerationConfig
from jaxgen.core.grammar.token_automaton import TokenAutomaton
from jaxgen.core.model.fused import fuse_projections
from jaxgen.core.request.early_checks import check_early, new_tokens
from jaxgen.core.request.known_prompts import KnownPrompts
from jaxgen.core.request.prompt_options import not_in_slots
from jaxgen.core.request.random_keys import seed_keys
from jaxgen.core.request.running.engine_sizes import EngineSizes
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import InputError
from jaxgen.json_file import read_file
from jaxgen.programs import default_device
from jaxgen.utf8_text import decoded

DEFAULT_NEW_TOKENS = 256
DEFAULT_BATCH_SIZE = 8
_LARGEST_SCHEMA = 4_000_000  # maximum number of bytes in the file of --json-schema
# Options that do not affect the answers to --input, or that `_run` records in a different form.
_NOT_IN_FINGERPRINT = set(
    "prompt prompt_file chat model input output html shard dtype slots batch_size stats device mesh distributed "
    "coordinator processes process compile_cache debug".split()
)


@dataclasses.dataclass(frozen=True)
class _AnswerJob:
    """A validated request, created before the weights are read.

    `lines` is empty if `chat` is set. `slots` is None unless the lines of --input are processed in slots.
    """

    source: Checkpoint
    assistant: Path | None
    cfg: GenerationConfig
    tokenizer: Tokenizer
    lines: list[Line]
    chat: Chat | None
    generate_kwargs: dict[str, Any]
    slots: int | None
    batch_size: int
    shard: Shard

    @property
    def indices(self) -> range:
        """The indices of the lines that this process answers."""
        return range(self.shard.number, len(self.lines), self.shard.count)

    @property
    def shape(self) -> tuple[int, int]:
        """The maximum number of prompts answered at a time, and the width of the longest prompt."""
        width = max((len(line.ids) for line in self.lines), default=1)
        return max(1, min(self.slots or self.batch_size, len(self.lines))), width

    @property
    def largest_batch(self) -> tuple[int, int]:
        """The number of prompts in the batch with the most answers, and the number of answers to each."""
        if self.slots is not None or not self.lines:
            return self.shape[0], 1
        batches = in_batches(self.lines, self.indices, self.batch_size)
        sizes = [(len(batch), self.lines[batch[0]].sequences(self.cfg)) for batch in batches]
        return max(sizes, key=math.prod, default=(1, 1))


def answer(options: argparse.Namespace) -> Stats:
    """Write the answers to stdout or to --output, and return the statistics.

    All input is checked before the weights are read, because reading them can take a long time.
    """
    stats, job = Stats(), _prepare(options)
    with _answer_file(job, options) as file:
        done = _done(job, file)
        if job.lines and all(done[index] for index in job.indices):
            return stats
        if options.mesh is None:
            (rows, answers), width = job.largest_batch, job.shape[1]
            rows *= 2 if job.cfg.on("guidance_scale") else 1  # negative prompts double the number of rows
            form = {"dtype": options.dtype, "quantize": options.quantize}
            cfg = job.cfg if job.slots is None else job.cfg.replace(slots=job.slots)
            check_memory(job.source.path, cfg, rows, width, **form, answers=answers, assistant=job.assistant)
        start = time.perf_counter()
        session = _load(job, options, stats)
        stats.load = time.perf_counter() - start
        if job.chat is not None:
            converse(job.chat, session, set(generation_fields(options)))
        elif options.input:
            write_answers(job.lines, job.indices, done, session, file, slots=job.slots, batch_size=job.batch_size)
        else:
            _note_no_streaming(job.cfg, options)
            ids, mask = job.tokenizer.pad([job.lines[0].ids])
            out = generate_and_print(session, ids, Printer(session), attention_mask=mask)
            if options.html is not None and jax.process_index() == 0:
                write_page(
                    options.html, session, options.model or "the bundled model", job.lines[0].asked["prompt"], out
                )
    return stats


def _note_no_streaming(cfg: GenerationConfig, options: argparse.Namespace) -> None:
    """Say that the answer appears only at the end, if this is due to the checkpoint rather than to an option."""
    names = ("num_return_sequences", "num_beams")
    given = [name for name in names if getattr(options, name) is None and getattr(cfg, name) > 1]
    if given:
        sets = " and ".join(f"{name}={getattr(cfg, name)}" for name in given)
        remedy = in_flags(" ".join(f"{name}=1" for name in given))
        text = f"the checkpoint sets {sets}, so the text appears only at the end; to stream one answer, add {remedy}"
        terminal.say("note", text)


def _prepare(options: argparse.Namespace) -> _AnswerJob:
    """Read and check all input except the weights."""
    text = prompt_text(options)
    if options.html is not None:
        check_target(options.html)
    source = open_model(options, [] if options.adapter is None else [options.adapter])
    tokenizer = Tokenizer.from_pretrained(source.path)
    cfg = _configured(source, options, tokenizer)
    if cfg.token_healing and tokenizer.chat_template is not None and not options.raw:
        raise InputError(
            "--token-healing continues the prompt's own text, but the chat template adds text after it: add --raw, or "
            "leave it out"
        )
    budget = functools.partial(_budget, cfg, options)
    if options.input:
        lines = read_lines(options.input, options.system, tokenizer, options.raw, cfg.model, budget)
    elif text is not None:
        ids = _encode(tokenizer, options, text)
        lines = [Line({"prompt": text}, ids, budget(ids, None))]
    else:
        lines = []
    chat = Chat(tokenizer, cfg.model.context_length, options.system) if options.chat else None
    cfg = cfg.replace(max_new_tokens=max((line.budget for line in lines), default=budget([], None)))
    assistant = None if options.assistant is None else local_directory(options.assistant)
    generate_kwargs = _further_arguments(cfg, options, tokenizer)
    slots = _slots(cfg, options, sum(line.sequences(cfg) for line in lines)) if options.input else None
    shard = WHOLE if options.shard is None else Shard(*options.shard)
    batch_size = options.batch_size or DEFAULT_BATCH_SIZE
    job = _AnswerJob(source, assistant, cfg, tokenizer, lines, chat, generate_kwargs, slots, batch_size, shard)
    check_early(
        cfg,
        tokenizer,
        [line.budget for line in lines] or [budget([], None)],
        prompts=job.shape[0],
        allowed=generate_kwargs.get("prefix_allowed_tokens_fn"),
        assistant=None if assistant is None else open_checkpoint(assistant).cfg,
    )
    if options.input:
        prompts = KnownPrompts(lines, cfg.reset(["slots"]), tokenizer, in_engine=slots is not None)
        check_lines(lines, prompts, options.input)
    return job


def open_model(options: argparse.Namespace, adapters: Sequence[Path]) -> Checkpoint:
    """Open --model or the bundled model without reading weights; raise an error if an adapter does not fit."""
    source = open_checkpoint(demo.PATH if options.model is None else local_directory(options.model))
    source = source.quantize(options.quantize)
    read_updates(adapters, source.cfg.model, source.weights)
    return source


def _slots(cfg: GenerationConfig, options: argparse.Namespace, sequences: int) -> int | None:
    """Return the number of slots to use for --input, or None if its prompts are answered in batches."""
    reason = not_in_slots(cfg.reset(["slots"]))
    if options.assistant is not None:
        reason = "--assistant"
    if reason is None and options.batch_size is not None:
        raise InputError(
            f"--batch-size is for runs in batches, but {cfg.mode} runs in slots, each of which takes the next prompt "
            "when an answer ends: use --slots"
        )
    if reason is not None and options.slots is not None:
        raise InputError(
            f"--slots works with greedy search, sampling and DoLa, not with {in_flags(reason)}: use --batch-size"
        )
    if reason is not None:
        return None
    return min(options.slots or cfg.slots or EngineSizes.slots, power_of_two(sequences, 1))


def _answer_file(
    job: _AnswerJob, options: argparse.Namespace
) -> contextlib.AbstractContextManager[AnswerFile] | contextlib.nullcontext[None]:
    """Open --output in process 0; other processes discard their output."""
    target = options.output if jax.process_index() == 0 else None
    if options.seed is None:
        before = (
            recorded(local_target(target)).get("--seed") if target is not None else None
        )  # the seed of an interrupted run
        options.seed = before if isinstance(before, int) else secrets.randbelow(2**31)
        terminal.say("seed", options.seed)
    if target is None:
        return contextlib.nullcontext()
    return output_file(target, _run(options, job), prompts=len(job.lines), shard=job.shard)


def _load(job: _AnswerJob, options: argparse.Namespace, stats: Stats) -> Session:
    mesh = mesh_of_devices(options.mesh)
    params, loaded = load_model(job.source, options.adapter, options, mesh)
    generate_kwargs = dict(job.generate_kwargs)
    if job.assistant is not None:
        generate_kwargs["assistant"] = load_hf(job.assistant, dtype=options.dtype, mesh=mesh)
    (key,) = seed_keys(options.seed)
    return Session(params, job.cfg.replace(model=loaded.model), key, job.tokenizer, stats, generate_kwargs)


def load_model(
    source: Checkpoint,
    adapters: Path | Sequence[Path] | None,
    options: argparse.Namespace,
    mesh: jax.sharding.Mesh | None,
) -> tuple[Any, GenerationConfig]:
    """Return the parameters, with the adapters attached as in `load_adapter`, and the checkpoint's config."""
    terminal.show(f"loading {options.model or 'the bundled model'}")
    params, loaded = load_hf(source.path, dtype=options.dtype, quantize=options.quantize, mesh=mesh)
    if adapters:
        params = load_adapter(adapters, params, loaded)
    if mesh is None and default_device().platform == "gpu":
        params = fuse_projections(params, donate=True)
    terminal.erase()
    return params, loaded


def prompt_text(options: argparse.Namespace) -> str | None:
    """Return the prompt: the argument, or the text of --prompt-file or stdin without its trailing newline.

    Raise an `InputError` if stdin is closed, or if the text is empty or not UTF-8.
    """
    if options.prompt_file is None and options.prompt != "-":
        return options.prompt
    name = "stdin" if options.prompt_file is None else f"--prompt-file {options.prompt_file}"
    data = stdin_bytes() if options.prompt_file is None else options.prompt_file.read_bytes()
    text = decoded(name, data.removeprefix(codecs.BOM_UTF8)).removesuffix("\n").removesuffix("\r")
    if not text:
        raise InputError(f"{name} is empty: write a prompt")
    return text


def _configured(source: Checkpoint, options: argparse.Namespace, tokenizer: Tokenizer) -> GenerationConfig:
    """Return the checkpoint's config, updated with the command line's options.

    With a chat template, the tokenizer's end of turn ends an answer too, unless --eos-token-id is set.
    """
    given = generation_fields(options)
    logged = "logits" if options.logprobs or options.html is not None else None
    alternatives = 0 if options.html is None else ALTERNATIVES
    try:
        cfg = source.cfg.replace(**given, output_logprobs=logged, top_logprobs=alternatives)
    except TypeError as error:  # a JSON value of the wrong type
        raise InputError(str(error)) from error
    if tokenizer.chat_template is not None and not options.raw and "eos_token_id" not in given:
        cfg = with_end_of_turn(cfg, tokenizer)
    if options.chat and cfg.num_return_sequences > 1:
        raise InputError(
            f"--chat gives one answer per message, but the checkpoint asks for {cfg.num_return_sequences}: add "
            "--num-return-sequences 1"
        )
    return cfg


def _run(options: argparse.Namespace, job: _AnswerJob) -> dict[str, Any]:
    """Return everything that the answers to --input depend on, keyed by the names used in error messages."""
    values = {
        name: value for name, value in vars(options).items() if name not in _NOT_IN_FINGERPRINT and value is not None
    }
    if options.json_schema is not None:
        values["json_schema"] = options.json_schema.read_text("utf-8")
    adapters = [] if options.adapter is None else [options.adapter]
    model = hashlib.sha256(f"{job.source.cfg!r} {job.source.cfg.model!r} {fingerprint(job.source, adapters)}".encode())
    asked = hashlib.sha256(json.dumps([(line.asked, line.ids) for line in job.lines]).encode())
    flags = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    flags["--dtype"] = job.source.dtype(float_dtype(options.dtype)).name
    return {"--input": asked.hexdigest(), "--model": model.hexdigest(), **flags}


def _done(job: _AnswerJob, file: AnswerFile | None) -> Sequence[int]:
    """Return 1 for each line that already has its answers, else 0; all processes get the same result."""
    done = bytearray(len(job.lines)) if file is None else file.done
    if before := sum(done[index] for index in job.indices):
        terminal.say("note", f"{before:,} {'prompt was' if before == 1 else 'prompts were'} answered before")
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(done, np.uint8))))


def _further_arguments(cfg: GenerationConfig, options: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the additional keyword arguments for generate()."""
    keywords: dict[str, Any] = {}
    vocab = cfg.model.vocab_size
    if options.negative_prompt is not None:
        if not cfg.on("guidance_scale"):
            raise InputError("--negative-prompt needs --guidance-scale: set that too")
        keywords["negative_prompt_ids"] = [_encode(tokenizer, options, options.negative_prompt)]
    if options.regex is not None:
        keywords["prefix_allowed_tokens_fn"] = TokenAutomaton.from_regex(options.regex, tokenizer, vocab_size=vocab)
    if options.json_schema is not None:
        keywords["prefix_allowed_tokens_fn"] = _automaton(options, tokenizer, vocab)
    return keywords


def _automaton(options: argparse.Namespace, tokenizer: Tokenizer, vocab: int) -> TokenAutomaton:
    """Read and compile the JSON schema; error messages include the file's name."""
    schema, unsupported = options.json_schema, options.json_schema_unsupported or "error"
    data = read_file(schema, _LARGEST_SCHEMA) or b""
    text = decoded(str(schema), data.removeprefix(codecs.BOM_UTF8))
    try:
        return TokenAutomaton.from_json_schema(text, tokenizer, vocab_size=vocab, unsupported=unsupported)
    except InputError as error:
        raise InputError(f"{schema}: {error}") from error


def _encode(tokenizer: Tokenizer, options: argparse.Namespace, text: str) -> list[int]:
    # Without a chat template, an empty prompt is valid, because the BOS token alone can be a prompt.
    if not text and tokenizer.chat_template is not None and not options.raw:
        raise InputError("the prompt is empty: write a prompt")
    return prompt_ids({"prompt": text}, options.system, tokenizer, options.raw)


def _budget(cfg: GenerationConfig, options: argparse.Namespace, ids: Sequence[int], own: int | None) -> int:
    """Return the maximum number of new tokens after a prompt; `own` is the prompt's own `max_new_tokens`."""
    wanted = options.max_new_tokens if own is None else own
    budget = new_tokens(cfg, ids, wanted, options.max_length)
    if wanted is not None or options.max_length is not None:
        return budget
    return min(budget, _default_new_tokens(cfg, len(ids)))


def _default_new_tokens(cfg: GenerationConfig, prompt: int) -> int:
    if cfg.on("max_new_tokens"):
        return int(np.max(np.asarray(cfg.max_new_tokens)))
    if cfg.max_length > prompt and cfg.max_length != GenerationConfig.max_length:
        return cfg.max_length - prompt
    return DEFAULT_NEW_TOKENS
