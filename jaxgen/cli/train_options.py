"""The options of `jaxgen train`. This module does not import jax."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxgen import arguments
from jaxgen.model.config import DTYPES

EPOCHS, WIDTH, WARMUP = 3, 1024, 0.03
FULL_RATE, LORA_RATE = 1e-5, 2e-4


def parser() -> arguments.Parser:
    """Return the command-line parser."""
    result = arguments.Parser(
        prog="jaxgen train",
        usage="jaxgen train --data FILE --model DIR --out DIR [options]",
        description="Fine-tune a checkpoint: all weights, or with --lora low-rank updates that are "
        "merged into them at the end. Progress goes to stderr.",
        epilog="To resume an interrupted run, repeat the command: it continues from the last saved state, in "
        "OUT.training.",
    )
    add = result.add_argument
    add("--data", type=arguments.file, metavar="FILE", help='JSONL: "messages", "prompt" with "completion", or "text"')
    add("--eval-data", type=arguments.file, metavar="FILE", help="held-out data; its loss is reported before and after")
    add("--model", metavar="DIR", help="the directory of a Hugging Face checkpoint, or its id on the hub")
    add("--out", type=arguments.path, metavar="DIR", help="the directory to create")
    add("--overwrite", action="store_true", help="replace the checkpoint --out")
    length = result.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=arguments.count, metavar="N", help=f"passes over the data (default: {EPOCHS})")
    length.add_argument("--steps", type=arguments.count, metavar="N", help="number of steps, instead of --epochs")
    add("--batch", type=arguments.count, default=8, metavar="N", help="rows per step (default: 8)")
    add("--width", type=arguments.count, metavar="N", help=f"tokens per row (default: {WIDTH} or the model's context)")
    rate = f"(default: {FULL_RATE}; with --lora {LORA_RATE})"
    add("--learning-rate", type=arguments.positive, metavar="X", help=rate)
    rising = f"share of steps with a rising rate (default: {WARMUP})"
    add("--warmup", type=arguments.share, default=WARMUP, metavar="X", help=rising)
    add("--weight-decay", type=arguments.share, default=0.0, metavar="X", help="(default: 0)")
    add("--clip", type=arguments.positive, default=1.0, metavar="X", help="maximum norm of the gradient (default: 1)")
    add("--accumulate", type=arguments.count, default=1, metavar="N", help="split each batch into N parts, run in turn")
    add("--remat", action="store_true", help="recompute layers instead of storing their results")
    add("--dtype", choices=DTYPES, help="for computing (default: bfloat16 for bfloat16 weights, else float32)")
    add("--lora", type=arguments.natural, default=0, metavar="RANK", help="rank of updates (default: 0, all weights)")
    add("--lora-alpha", type=arguments.positive, metavar="X", help="scale the updates by X / RANK (default: 2 * RANK)")
    kept = "write the updates to --out as an adapter in PEFT's format, instead of a checkpoint with the updates"
    add("--save-adapter", action="store_true", help=kept)
    saved = "steps between saved states (default: 100)"
    add("--save-every", type=arguments.count, default=100, metavar="N", help=saved)
    add("--report-every", type=arguments.count, default=10, metavar="N", help="steps between reports (default: 10)")
    device = "cpu, gpu or tpu, or one of several: gpu:1 (default: jax's)"
    add("--device", type=arguments.device, metavar="NAME", help=device)
    add("--debug", action="store_true", help="show tracebacks, and which programs are compiled and why")
    seed = "seed of row order, updates and dropout (default: 0)"
    add("--seed", type=arguments.natural, default=0, metavar="N", help=seed)
    return result


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after "train" into options; raise an `InputError` if one is unknown, missing or invalid."""
    command = parser()
    options, rest = command.read(words)
    if rest:
        command.error(f"{rest[0]!r} does not belong to an option")
    for name, what in (("data", "JSONL file"), ("model", "checkpoint to start from"), ("out", "directory to create")):
        if getattr(options, name) is None:
            command.error(f"--{name} is missing: name the {what}")
    if options.batch % options.accumulate:
        command.error(f"--batch {options.batch} cannot be divided into --accumulate {options.accumulate} parts")
    if options.lora_alpha is not None and not options.lora:
        command.error("--lora-alpha scales low-rank updates: set --lora RANK too")
    if options.save_adapter and not options.lora:
        command.error("--save-adapter writes low-rank updates: set --lora RANK too")
    return options
