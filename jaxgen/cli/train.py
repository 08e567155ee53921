"""`jaxgen train`: fine-tune a checkpoint on a JSONL file and write a new checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import math
import shutil
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from convert import load_hf, save_adapter
from convert.atomic_directory import new_directory
from convert.checkpoint import Checkpoint
from convert.experts import by_file_name
from convert.hf import check_params, copy_tokenizer, open_checkpoint, write_arrays
from convert.hub import local_directory
from jaxgen.cli import terminal
from jaxgen.cli.fingerprint import fingerprint
from jaxgen.cli.train_options import EPOCHS, FULL_RATE, LORA_RATE, WIDTH
from jaxgen.core.config.tables import eos_list
from jaxgen.core.model.config import ModelConfig
from jaxgen.core.request.inputs import row_ids
from jaxgen.core.text.tokenizer import Tokenizer
from jaxgen.errors import ConfigError, InputError, warn
from jaxgen.memory import check_free, size_text
from jaxgen.programs import default_device
from jaxgen.training import lora
from jaxgen.training.checkpoint import alone_in
from jaxgen.training.dataset import pack, read_examples, shuffled
from jaxgen.training.examples import IGNORED, Example
from jaxgen.training.loop import TrainBatch, TrainConfig, can_resume, evaluate, train
from jaxgen.training.record import CURVE, ENTRIES, Evaluation


def train_and_save(options: argparse.Namespace) -> None:
    """Run the command. If the input is bad, raise a `JaxgenError` and leave --out unchanged."""
    # Check all input first, because reading the weights can take a long time.
    _check_out(options)
    job = _prepare(options)
    out = options.out.resolve()
    work = out.with_name(f"{out.name}.training")
    with alone_in(work):
        if not can_resume(work, model=job.model, cfg=job.cfg, run=job.run, replace=options.overwrite):
            terminal.write(f"the state is saved in {work} every {options.save_every} steps")
        params = _trained(job, work, options)
        terminal.show(f"writing {options.out}")
        with new_directory(out, overwrite=options.overwrite) as directory:
            if options.save_adapter:
                save_adapter(params, job.source.cfg, directory, base=_findable(options.model))
            else:
                _write(params, job, directory)
            for name in (ENTRIES, CURVE):
                shutil.copyfile(work / name, directory / name)
    terminal.write(f"{options.out} written, with {ENTRIES} and {CURVE}")
    if job.held_out is not None:
        terminal.write(f"held-out loss after: {_held_out_loss(job, job.held_out, params):.4f}")
    size = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
    terminal.write(f"{work} ({size_text(size)}) has the last states: keep it to continue with more steps, or delete it")


@dataclasses.dataclass(frozen=True)
class _TrainJob:
    """A validated training job, created before the weights are read.

    `config` and `generation` are the contents of the new checkpoint's JSON files, and `rows` is the data. `run`
    identifies everything that affects the result, apart from `model` and `cfg`.
    """

    source: Checkpoint
    model: ModelConfig
    config: dict[str, Any]
    generation: dict[str, Any] | None
    rows: TrainBatch
    held_out: TrainBatch | None
    cfg: TrainConfig
    batch: int
    rank: int
    targets: tuple[str, ...]
    run: str


class _NothingToWriteYet(Exception):
    pass


def _check_out(options: argparse.Namespace) -> None:
    """Raise an error early if --out cannot be written."""
    if Path(options.model).is_dir() and options.out.resolve() == Path(options.model).resolve():
        raise InputError(f"--model and --out are both {options.out}: choose another --out")
    with contextlib.suppress(_NothingToWriteYet), new_directory(options.out, overwrite=options.overwrite):
        raise _NothingToWriteYet


def _findable(model: str) -> str:
    """Return a name for the model that works in any working directory: a directory's full path, or a hub id."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _prepare(options: argparse.Namespace) -> _TrainJob:
    source = open_checkpoint(local_directory(options.model))
    if source.kind:
        raise ConfigError(
            f"{source.path} is quantized and cannot be trained: train the original checkpoint, or convert this one "
            "with python -m convert --quantize none"
        )
    model = source.cfg.model
    tokenizer = Tokenizer.from_pretrained(source.path)
    context = model.context_length
    if options.width is not None and options.width > context:
        raise InputError(f"--width {options.width} exceeds the model's context of {context} tokens: lower it")
    width = options.width or min(WIDTH, context)
    examples = read_examples(options.data, tokenizer)
    rows = _rows(options.data, examples, width, model)
    held_out = None
    if options.eval_data is not None:
        held_out = _rows(options.eval_data, read_examples(options.eval_data, tokenizer), width, model)
    if options.targets is not None:
        lora.check_targets(options.targets, lora.targets_of(model))
    cfg = _train_config(options, source, len(rows.ids))
    config, generation = _with_endings(source, tokenizer, examples)
    targets = options.targets or lora.targets_of(model)
    run = f"{_fingerprint(source, rows, held_out)} batch {options.batch} warmup {options.warmup} rank {options.lora}"
    run += f" targets {sorted(targets)}" if options.lora else ""
    job = _TrainJob(source, model, config, generation, rows, held_out, cfg, options.batch, options.lora, targets, run)
    _check_memory(job)
    terminal.write(
        f"{len(examples):,} examples in {len(rows.ids):,} rows of {width} tokens, {np.sum(rows.labels != IGNORED):,} "
        f"to learn from; {cfg.steps:,} steps of {options.batch} rows in {cfg.dtype}"
    )
    return job


def _rows(file: Path, examples: list[Example], width: int, model: ModelConfig) -> TrainBatch:
    row_ids([max(example.ids, default=0) for example in examples], model, str(file))  # checks the ids
    rows, cut = pack(examples, width)
    if not np.any(rows.labels != IGNORED):
        raise InputError(f"{file}: no line has tokens to learn from among its first {width}: raise --width")
    if cut:
        warn(
            f"{file}: {cut:,} of {len(examples):,} examples are longer than {width} tokens and were truncated: "
            "raise --width to keep their ends",
        )
    return rows


def _train_config(options: argparse.Namespace, source: Checkpoint, rows: int) -> TrainConfig:
    steps = options.steps or math.ceil((options.epochs or EPOCHS) * rows / options.batch)
    stored = source.dtype(None).name
    alpha = options.lora_alpha or 2 * options.lora
    return TrainConfig(
        steps=steps,
        learning_rate=options.learning_rate or (LORA_RATE if options.lora else FULL_RATE),
        warmup=int(options.warmup * steps),
        weight_decay=options.weight_decay,
        clip=options.clip,
        accumulate=options.accumulate,
        dtype=options.dtype or ("bfloat16" if stored == "bfloat16" else "float32"),
        remat=options.remat,
        router_loss=options.router_loss,
        lora_scale=alpha / options.lora if options.lora else 1.0,
        seed=options.seed,
    )


def _with_endings(source: Checkpoint, tokenizer: Tokenizer, examples: list[Example]):
    """Return the contents of config.json and generation_config.json, adding the examples' end tokens to the eos ids.

    A base model's chat template may end answers with a token that is missing from its generation_config.json.
    """
    config, generation = source.config, source.generation
    known = eos_list(source.cfg.eos_token_id)
    endings = {example.labels[-1] for example in examples} - set(known)
    special = {index for index, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    if endings <= special:
        for ending in sorted(endings):
            terminal.write(f"examples end with {tokenizer.backend.id_to_token(ending)}: it will end generation too")
        eos = {"eos_token_id": [*known, *sorted(endings)]} if endings else {}
        if generation is None:
            return config | eos, None
        return config, generation | eos
    warn(
        "not all examples end with a special token, so the model does not learn to stop there: check eos_token of the "
        "tokenizer or the end of its chat template",
    )
    return config, generation


def _fingerprint(source: Checkpoint, rows: TrainBatch, held_out: TrainBatch | None) -> str:
    """Return a digest of the data and of the checkpoint's tensors."""
    digest = hashlib.sha256()
    for data in filter(None, (rows, held_out)):
        for array in (data.ids, data.labels, data.segments):
            digest.update(np.ascontiguousarray(array).data)
    return f"{digest.hexdigest()} {fingerprint(source)}"


def _check_memory(job: _TrainJob) -> None:
    """Raise an error if the weights, the optimizer's moments and the logits need more memory than is free."""
    count = sum(math.prod(tensor.shape) for tensor in job.source.tensors.values())
    weights = sum(tensor.nbytes for tensor in job.source.tensors.values()) if job.rank else 16 * count
    rows, width = job.batch // job.cfg.accumulate, job.rows.ids.shape[1]
    logits = 2 * 4 * rows * width * job.model.vocab_size
    parts = f"{size_text(weights)} for weights, {size_text(logits)} for the logits of {rows} rows"
    remedy = f"{'' if job.rank else '--lora 16, '}a larger --accumulate or a smaller --width"
    check_free(f"training needs more than {{}} ({parts})", weights + logits, [default_device()], remedy)


def _trained(job: _TrainJob, work: Path, options: argparse.Namespace):
    """Train, and return the parameters in the checkpoint's dtypes; with --save-adapter, updates are not merged."""

    def report(line: str) -> None:
        terminal.erase()
        terminal.write(line)
        terminal.show("training")  # counts the seconds since this line

    terminal.show(f"loading {options.model}, compiling, and taking the first {options.report_every} steps")
    frozen = load_hf(job.source.path)[0] if job.rank else None
    key = jax.random.key(job.cfg.seed)
    trained = train(
        # The parameters are not assigned to a variable, so that `train` can free them after copying them.
        load_hf(job.source.path)[0] if frozen is None else lora.init(frozen, job.rank, key, job.targets),
        shuffled(job.rows, job.batch, job.cfg.seed),
        model=job.model,
        cfg=job.cfg,
        frozen=frozen,
        directory=work,
        run=job.run,
        save_every=options.save_every,
        report_every=options.report_every,
        report=report,
        evaluation=_evaluation(job, frozen, options),
    )
    if frozen is not None:
        combine = lora.attach if options.save_adapter else lora.merge
        return combine(frozen, trained, job.cfg.lora_scale)
    names = {name: job.source.dtype_of(name, None) for name in job.source.tensors}
    dtypes = flax.traverse_util.unflatten_dict(names, sep=".")
    return jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), trained, dtypes)


def _write(params, job: _TrainJob, directory: Path) -> None:
    arrays = check_params(params, job.model)
    if infinite := [name for name, array in arrays.items() if not jnp.all(jnp.isfinite(array))]:
        raise ConfigError(f"training made {infinite[0]} infinite or NaN: lower --learning-rate")
    copy_tokenizer(job.source.path, directory)
    write_arrays(directory, job.config, job.generation, by_file_name(arrays, job.model))


def _evaluation(job: _TrainJob, frozen: Any, options: argparse.Namespace) -> Evaluation | None:
    data = job.held_out
    if data is None:
        return None

    def loss(trained) -> float:
        params = trained if frozen is None else lora.attach(frozen, trained, job.cfg.lora_scale)
        return _held_out_loss(job, data, params)

    return Evaluation(loss, options.eval_every, keep_best=options.keep_best, patience=options.patience)


def _held_out_loss(job: _TrainJob, data: TrainBatch, params: Any) -> float:
    rows = job.batch // job.cfg.accumulate
    return evaluate(params, data, model=job.model, dtype=job.cfg.dtype, rows=rows)
